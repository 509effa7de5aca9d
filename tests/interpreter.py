"""Makes Triton's interpreter cheaper, for the tests that run kernels without a GPU.

Nearly all of an interpreted kernel's time goes into Triton's own bookkeeping around numpy's calls.
What is replaced here computes the same again and again, or what nobody reads; kernels compute the
same bits, and Triton's own checks of types, shapes and masks stay.
"""

from __future__ import annotations

from typing import Any


def interpret_faster() -> None:
    """Replace, in this process, what costs Triton's interpreter the most."""
    _prepare_the_language_once()
    _skip_sums_that_nobody_reads()
    _remember_types()
    _pass_equal_types()


def _prepare_the_language_once() -> None:
    """Prepare ``triton.language`` at a launch alone, not at every call inside a kernel.

    A launch replaces what ``triton.language`` holds, and puts it back at its end.  Triton does the
    same for each function that a kernel calls, which changes something only once: at the first call
    of a function of Triton's own, which sees ``tl.core``.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    prepared = False

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal prepared
        if not prepared and any(value is tl.core for value in self.fn.__globals__.values()):
            interpreter._patch_lang(self.fn)
            prepared = True
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def _skip_sums_that_nobody_reads() -> None:
    """Leave out the 64-bit sums with which Triton looks for overflow.

    It computes them for every integer sum, and drops the result unless kernels are debugged.
    """
    from triton.runtime import interpreter

    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def _remember_types() -> None:
    """Check and name a block's type once for each element and shape, not at every operation."""
    from triton import language as tl
    from triton.runtime import interpreter

    core = tl.core
    make_block, np_dtype = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {(): (core.tuple([]), core.constexpr(1))}
    dtypes: dict[Any, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *sizes)
        known = blocks.get(key)
        if known is None:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape.values) if type.is_block() else ()
        known = shapes.get(key)
        if known is None:
            size = core.constexpr(core.math.prod(key))
            known = shapes[key] = (core.tuple([core.constexpr(s) for s in key]), size)
        self.shape, self.numel = known

    def remembered_np_dtype(tt_dtype: Any) -> Any:
        known = dtypes.get(tt_dtype.name)
        if known is None:
            known = dtypes[tt_dtype.name] = np_dtype(tt_dtype)
        return known

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = remembered_np_dtype


def _pass_equal_types() -> None:
    """Operands of one type and shape need neither a common type nor a common shape, and a number
    beside a block needs no type of its own."""
    import numpy as np
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    check = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    tensor = tl.core.tensor
    plain = {t.name: (float, t) for t in (tl.float16, tl.float32, tl.float64)}
    plain |= {t.name: (int, t) for t in (tl.int32, tl.uint32, tl.int64, tl.uint64)}

    def check_types(self: Any, lhs: Any, rhs: Any, *args: bool) -> Any:
        # Four flags: a division, for which half precision has another common type.
        if len(args) < 4:
            lhs, rhs = block_of(lhs, rhs), block_of(rhs, lhs)
            alike = type(lhs) is type(rhs) is tensor and lhs.type.name == rhs.type.name
            if alike and not lhs.dtype.is_ptr():
                return lhs, rhs
        return check(self, lhs, rhs, *args)

    def block_of(value: Any, other: Any) -> Any:
        """A Python number as a block like ``other``, where Triton would make it one."""
        if type(value) not in (int, float) or type(other) is not tensor:
            return value
        kind, dtype = plain.get(other.dtype.name, (None, None))
        if kind is None or not other.type.is_block() or (kind is int and type(value) is float):
            return value
        if kind is int and not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
            return value
        sizes = tuple(other.type.shape.values)
        data = np.full(sizes, value, dtype=interpreter._get_np_dtype(dtype))
        return tensor(interpreter.TensorHandle(data, dtype), other.type)

    def common_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = check_types
    TritonSemantic.broadcast_impl_value = common_shape
