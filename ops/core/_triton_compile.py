"""Compiles variants to machine code by Triton.

It is the only host module that imports Triton, and only to compile or to interpret.  Triton's
driver, which would call a C compiler, is never started.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections.abc import Mapping
from typing import Any, get_type_hints

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...config.arch import arch
from .variant import DIVISOR, Binary, Variant

_WAIT = "griddepcontrol.wait;"
# Instructions that must not come before the wait: accesses to memory that other kernels see, and
# ways around the wait.  A prefetch may come before: it ends in L2, where all kernels' writes meet.
_TOO_EARLY = re.compile(
    r"\b(?:(?:ld|st|atom|red|cp|prefetch(?!\.global\.L2)|multimem|ldu)\b(?!\.(?:param|shared))[.\w:]*|bra|ret|exit)\b"
)

_FRONT_END = threading.RLock()


class _Source(ASTSource):  # type: ignore[misc]  # Triton has no types
    """A kernel's source, which Triton reads in one thread at a time.

    Triton's front end parses the kernel and all that it calls by ``ast.parse``.  Python 3.11
    counts how deep that function is for all threads together, so when two take turns inside it,
    one raises SystemError: "AST constructor recursion depth mismatch".  The front end holds the GIL
    in any case; the passes that follow release it and stay parallel.
    """

    def hash(self) -> str:
        with _FRONT_END:
            return str(super().hash())

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        with _FRONT_END:
            return super().make_ir(*args, **kwargs)


@functools.cache
def jit_function(kernel: str) -> Any:
    """The ``@triton.jit`` function in ``ops/triton_kernels`` that ``module:function`` names."""
    module, _, function = kernel.partition(":")
    return getattr(importlib.import_module(f"..triton_kernels.{module}", __package__), function)


@functools.cache
def _parameters(kernel: str) -> dict[str, tuple[type[Any] | None, list[str]]]:
    """The parameters of a kernel: the group (``triton_kernels/groups.py``) that one is, if it is,
    and the names under which a launch has what it holds."""
    function = jit_function(kernel)
    hints = get_type_hints(function.fn)
    found: dict[str, tuple[type[Any] | None, list[str]]] = {}
    for name in function.arg_names:
        fields = getattr(hints.get(name), "_fields", None)
        group = hints[name] if fields else None
        found[name] = group, [f"{name}_{field}" for field in fields] if fields else [name]
    return found


def _grouped(kernel: str, values: Mapping[str, Any], default: Any = None) -> dict[str, Any]:
    """``values`` by a launch's names, by parameter."""
    return {
        name: group(*(values.get(n, default) for n in flat)) if group else values.get(name, default)
        for name, (group, flat) in _parameters(kernel).items()
    }


def interpret(kernel: str, grid: tuple[int, ...], args: Mapping[str, Any], **options: int) -> None:
    """Run a kernel by Triton's interpreter, with ``args`` by a launch's names."""
    function = jit_function(kernel)
    wanted = {name for _, flat in _parameters(kernel).values() for name in flat}
    given = {**args, **({"PROGRAMMATIC": False} if "PROGRAMMATIC" in wanted else {})}
    if given.keys() != wanted:
        raise ValueError(f"{kernel} has parameters {sorted(wanted)}, expected {sorted(given)}")
    function[grid](**_grouped(kernel, given), **options)


def compile_variant(variant: Variant, sm: int) -> Binary:
    """Compile a variant for compute capability ``sm``, such as 90; no GPU is needed.

    Raises:
        ValueError: the variant's parameters are not the function's, in its order.
        RuntimeError: Triton interprets in this process, the kernel needs scratch memory, or it is
            to be launched programmatically and does not wait first.
        Exception: whatever Triton's compiler raises; its notes name the variant.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(f"TRITON_INTERPRET is set: {variant.name} cannot be compiled here")
    function = jit_function(variant.kernel)
    types, constexprs = dict(variant.signature), dict(variant.constexprs)
    parameters = _parameters(variant.kernel)
    # Where each name of a launch stands: (parameter,) or (parameter, field).
    paths = {
        name: (index, field) if group else (index,)
        for index, (group, flat) in enumerate(parameters.values())
        for field, name in enumerate(flat)
    }
    names = [*paths]
    programmatic = variant.programmatic and arch(sm).programmatic
    if "PROGRAMMATIC" in names:
        constexprs["PROGRAMMATIC"] = programmatic
    if [*types] != [n for n in names if n in types] or {*types, *constexprs} != {*names}:
        raise ValueError(
            f"{variant.kernel} has parameters {names}, expected {[*types]} in this order and, "
            f"fixed, {[*constexprs]}: the launch must name them as the kernel does"
        )
    signature = _grouped(variant.kernel, types, "constexpr")
    fixed = {paths[name]: value for name, value in constexprs.items()}
    attributes = {paths[name]: [["tt.divisibility", DIVISOR]] for name in variant.divisible}
    source = _Source(function, signature, fixed, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers:
        options["maxnreg"] = variant.max_registers
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    except Exception as error:
        error.add_note(f"while compiling {variant.name} for sm_{sm}: {variant.to_json()}")
        raise
    metadata = compiled.metadata
    if programmatic:
        _check_wait(variant, compiled.asm["ptx"])
    scratch = metadata.global_scratch_size + metadata.profile_scratch_size
    if scratch:
        raise RuntimeError(f"{variant.name} needs {scratch} bytes of scratch memory, expected none")
    return Binary(
        function=metadata.name,
        sm=sm,
        shared_bytes=metadata.shared,
        num_threads=32 * metadata.num_warps,
        cubin=compiled.asm["cubin"],
    )


def _check_wait(variant: Variant, ptx: str) -> None:
    """Refuse code that does not begin with the wait for the kernel ahead.

    Kernels of a chain of programmatic launches start before those ahead have finished.  Each waits
    for the one right before it alone; that this one has waited in its turn is why everything older
    has finished too.  So every thread of every block must wait, also where it has nothing to do,
    and before it reads, writes or leaves.
    """
    body = re.sub("//.*", "", ptx.partition(".entry")[2])
    before, found, _ = body.partition(_WAIT)
    early = _TOO_EARLY.search(before)
    if not found or early:
        what = f"{early.group()} comes first" if found and early else "there is none"
        raise RuntimeError(
            f"{variant.kernel} is launched programmatically, expected {_WAIT} at its begin, but "
            f"{what}: begin it as ops/triton_kernels/dependent.py says"
        )
