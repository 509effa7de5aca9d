"""``SemanticOp`` declares an op once, and its implementations as ops under other names.

``fw::name`` is what models call and passes rewrite; it runs the reference.  Lowering replaces it by
``fw_native::name`` (inlined by Inductor when ``inline``), ``fw_triton::name`` or ``fw_cuda::name``.
The names differ because Inductor's caches do not see that a decomposition changed under one name.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._pytree import tree_leaves

from .choice import Choice, KernelName
from .desc import TOLERANCES, Case, Cases, Cost, OpDesc, TensorDesc, Tolerance
from .launch import Launches, run_launches

NAMESPACE = "fw"
_LIBRARIES: dict[str, Library] = {}
_P = ParamSpec("_P")
_R = TypeVar("_R")


def dispatched(reference: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turn the definition of an op into the function that models call.

    The function calls ``fw::<name of the definition>``, which a trace records as one node, whatever
    runs it later.  ``SemanticOp`` and ``Implementation`` take it for its definition.
    """
    name = reference.__name__

    @functools.wraps(reference)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return getattr(torch.ops.fw, name).default(*args, **kwargs)  # type: ignore[no-any-return]

    return call


def definition(public: Callable[_P, _R]) -> Callable[_P, _R]:
    """The definition behind a ``dispatched`` function, which runs as plain torch."""
    return inspect.unwrap(public)  # type: ignore[no-any-return]


def parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    where = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, where, annotation=kind, default=default)


def parameters_of(call: type[tuple[Any, ...]]) -> list[inspect.Parameter]:
    """The fields of a NamedTuple, which holds arguments of a call, as parameters."""
    kinds = get_type_hints(call)
    fields = inspect.signature(call).parameters.values()
    return [parameter(field.name, kinds[field.name], field.default) for field in fields]


def signed(fn: Any, parameters: Iterable[inspect.Parameter], results: int) -> Any:
    """``fn``, which takes ``*args``, with the signature that the schema of its op is made of."""
    returned = Tensor if results == 1 else tuple[(Tensor,) * results]  # type: ignore[misc]
    fn.__signature__ = inspect.Signature(list(parameters), return_annotation=returned)
    return fn


def always(desc: OpDesc) -> str:
    return ""


def nothing(*args: Any) -> None:
    """The fake of an op that only mutates its arguments."""


@dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    Attributes:
        supports: ``supports(desc)`` returns "", or the reason why it cannot run that call.
        inline: Inductor sees through it and fuses it.
        launches: Triton only; ``launches(*args)`` returns ``(launch list, result)`` without running
            anything.
        opt_in: only ``--kernels`` chooses it, until it is faster inside whole models at all sizes.
        selects: ``selects(*args)`` returns the choice of each kernel that a call launches, where
            the number of rows decides.
        runs: ``runs(*args)`` returns their names; with ``selects``, each a ``KernelName``.
        on_host: it reads values of its tensors on the host, which no CUDA graph can capture.
    """

    name: str
    fn: Callable[..., Any]
    supports: Callable[[OpDesc], str] = always
    inline: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    launches: Callable[..., Launches[Any]] | None = None
    opt_in: bool = False
    runs: Callable[..., tuple[str, ...]] | None = None
    on_host: bool = False
    selects: Callable[..., tuple[Choice, ...]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fn", definition(self.fn))
        if selects := self.selects:

            def runs(*args: Any) -> tuple[str, ...]:
                return tuple(map(KernelName, selects(*args)))

            object.__setattr__(self, "runs", runs)


on_gpu = functools.partial(Implementation, devices=("cuda",))
on_cpu = functools.partial(Implementation, devices=("cpu",))


def with_defaults(
    args_of: Callable[..., tuple[Any, ...]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make functions of all arguments take calls that leave some out: ``args_of`` fills them in."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return fn(*args_of(*args))

        return run

    return decorate


def triton(
    launches: Callable[..., Launches[Any]],
    supports: Callable[[OpDesc], str] = always,
    *,
    name: str = "triton",
    **more: Any,
) -> Implementation:
    """The implementation that runs the Triton kernels which ``launches(*args)`` describes."""
    return on_gpu(name, run_launches(launches), supports, launches=launches, **more)


@dataclass(frozen=True, eq=False)
class SemanticOp:
    """One op of the IR; construct it at module level and list it in ``ops.ALL_OPS``.

    ``reference`` carries the signature (its annotations give the schema) and defines the meaning;
    the op has its name unless it is given another.  ``implementations`` are in order of preference
    for ``-O2`` on a device that supports them.
    """

    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cases: Cases
    cost: Callable[[OpDesc], Cost]
    implementations: tuple[Implementation, ...]
    name: str = ""
    mutates: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=lambda: TOLERANCES)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", definition(self.reference))
        object.__setattr__(self, "name", self.name or self.reference.__name__)
        schema = torch.library.infer_schema(self.reference, mutates_args=self.mutates)
        self._define(NAMESPACE, schema, self.reference, inline=False)
        for impl in self.implementations:
            namespace = f"{NAMESPACE}_{impl.name}"
            self._define(namespace, schema, impl.fn, inline=impl.inline)

    def _define(self, namespace: str, schema: str, fn: Callable[..., Any], *, inline: bool) -> None:
        library = _LIBRARIES.setdefault(namespace, Library(namespace, "FRAGMENT"))
        library.define(f"{self.name}{schema}")
        key = "CompositeImplicitAutograd" if inline else "CompositeExplicitAutograd"
        library.impl(self.name, fn, key)
        if not inline:
            torch.library.register_fake(f"{namespace}::{self.name}", self.fake, lib=library)

    @property
    def collective(self) -> bool:
        """Whether the ranks of a process group, its argument ``group_name``, call it together."""
        return any(a.name == "group_name" for a in self.overload()._schema.arguments)

    def tolerance(self, case: Case, dtype: torch.dtype) -> Tolerance:
        """How far a result of a case may be from the reference; integers must be equal."""
        if not dtype.is_floating_point:
            return Tolerance(0.0, 0.0)
        found = self.tolerances if case.tolerances is None else case.tolerances
        return found[dtype]

    def implementation(self, name: str) -> Implementation:
        for impl in self.implementations:
            if impl.name == name:
                return impl
        known = ", ".join(i.name for i in self.implementations)
        raise ValueError(f"op {self.name!r} has no implementation {name!r}; it has: {known}")

    def overload(self, implementation: str = "") -> Any:
        """The dispatcher op: ``fw::name``, or ``fw_<implementation>::name``."""
        namespace = f"{NAMESPACE}_{implementation}" if implementation else NAMESPACE
        return getattr(getattr(torch.ops, namespace), self.name).default

    def describe(self, args: Iterable[Any], *, sm: int = 0, csrc: bool | None = None) -> OpDesc:
        """Describe one call from its positional arguments, real, fake or symbolic."""
        arguments, given = self.overload()._schema.arguments, list(args)
        # The dispatcher drops trailing arguments that equal their defaults from a call's node.
        given += [a.default_value for a in arguments[len(given) :] if a.has_default_value()]
        named = zip([a.name for a in arguments], given, strict=False)
        described = tuple((name, _described(value)) for name, value in named)
        return OpDesc(self.name, described, _device_of(given), sm, csrc)


def _described(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if not isinstance(value, Tensor):
        return value
    shape = tuple(getattr(getattr(d, "node", None), "expr", d) for d in value.shape)
    return TensorDesc(value.dtype, shape)


def _device_of(args: Iterable[Any]) -> str:
    """The type of the last device of tensors that is not the CPU."""
    tensors = [t for t in tree_leaves(list(args)) if isinstance(t, Tensor)]
    return next((t.device.type for t in reversed(tensors) if t.device.type != "cpu"), "cpu")


class NoImplementationError(ValueError):
    """No implementation, or none of those asked for, fits a call.

    Attributes:
        rejected: each implementation that was tried, and the reason why it does not fit.
        fitting: the implementations that could be asked for instead.
    """

    def __init__(
        self, desc: OpDesc, rejected: Sequence[tuple[str, str]], fitting: Sequence[str]
    ) -> None:
        self.rejected, self.fitting = tuple(rejected), tuple(fitting)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        super().__init__(f"no implementation of {desc.op} fits {desc}: {reasons}")


def runs_on(impl: Implementation, device: str) -> bool:
    """Whether ``impl`` can run on ``device`` at all; Triton's interpreter runs on any."""
    interpreted = impl.launches is not None and os.environ.get("TRITON_INTERPRET") == "1"
    return device in impl.devices or interpreted


def choose(
    op: SemanticOp,
    desc: OpDesc,
    *,
    inline_first: bool,
    override: str = "",
    order: Sequence[Implementation] = (),
) -> Choice:
    """Choose an implementation for one call: a pure function of its arguments.

    Args:
        inline_first: prefer implementations that Inductor can fuse (``-O1``).
        override: the implementation that must be used, or several separated by "/": then the
            first of them that fits is used.
        order: replaces the op's own order of preference.

    Raises:
        NoImplementationError: none fits; names op, call and reasons.
    """
    candidates = tuple(order) or op.implementations
    if override:
        candidates = tuple(map(op.implementation, override.split("/")))
    elif inline_first:
        candidates = tuple(sorted(candidates, key=lambda impl: not impl.inline))
    rejected: list[tuple[str, str]] = []
    for impl in candidates:
        reason = impl.supports(desc)
        usable = runs_on(impl, desc.device) if override else desc.device in impl.devices
        if not reason and not usable:
            reason = f"not for {desc.device}"
        if not reason and impl.opt_in and not override:
            reason = "only by --kernels: not known to be faster in whole models"
        if not reason:
            return Choice(op.name, impl, tuple(rejected))
        rejected.append((impl.name, reason))
    fitting = [
        impl.name
        for impl in op.implementations
        if not impl.supports(desc) and desc.device in impl.devices
    ]
    raise NoImplementationError(desc, rejected, fitting)
