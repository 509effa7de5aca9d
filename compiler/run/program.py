"""``Program`` runs a plan: ``link`` gives each value an index in a flat list, the environment, and
makes each step a closure over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .plan import Dtype, OpStep, PieceStep, Plan, TensorInput, Value, reads

Environment = list[Any]
"""One value for each slot; a temporary is dropped after its last use."""


class InputError(RuntimeError):
    """A tensor given to a program is not what its code was compiled for."""


@dataclass(frozen=True)
class Step:
    """One unit of execution.  ``call`` computes the values of ``outputs`` from the environment;
    ``release`` are the slots that no later step reads."""

    name: str
    call: Callable[[Environment], Sequence[Any]]
    outputs: tuple[int, ...]
    release: tuple[int, ...]
    per_token: bool

    def run(self, env: Environment) -> None:
        for slot, value in zip(self.outputs, self.call(env), strict=True):
            env[slot] = value
        for slot in self.release:
            env[slot] = None


@dataclass(frozen=True)
class Constant:
    """A step that computes constants, and the names of those that it reads."""

    step: Step
    reads: tuple[str, ...]


class Program:
    """Steps over an environment.  Constants (weights, KV caches) are bound once; step inputs are
    given to ``environment()`` for every step.

    Args:
        slots: name of each value -> its index in the environment.
        inputs: name of each tensor that comes from outside -> what is required of it; None if
            nothing is.
        sizes: name of each size -> (name, dimension) of the tensor that carries it.
        ranges: what a dynamic dimension counts -> its least and largest size.
        output: slot of the result.
        constants: steps that compute inputs of others, whenever what they read is bound.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        slots: Mapping[str, int],
        inputs: Mapping[str, TensorInput | None],
        output: int,
        sizes: Mapping[str, tuple[str, int]] | None = None,
        ranges: Mapping[str, tuple[int, int]] | None = None,
        constants: Sequence[Constant] = (),
    ) -> None:
        self.steps = tuple(steps)
        self._constants = tuple(constants)
        self.output = output
        self._slots = dict(slots)
        self._inputs = dict(inputs)
        self._sizes = dict(sizes or {})
        self._ranges = dict(ranges or {})
        self._template: Environment = [None] * (max(slots.values(), default=-1) + 1)

    def bind(self, constants: Mapping[str, Tensor]) -> None:
        """Fix tensors for every later step; names that the program does not read are ignored.

        Raises:
            InputError: a tensor is not what the compiled code was made for.
        """
        self._check(constants)
        for name, value in constants.items():
            if name in self._slots:
                self._template[self._slots[name]] = value
        for name, (source, dim) in self._sizes.items():
            if source in constants:
                self._template[self._slots[name]] = constants[source].shape[dim]
        for constant in self._constants:
            if set(constant.reads) <= set(constants):
                with torch.inference_mode():
                    constant.step.run(self._template)

    def bound(self, name: str) -> Tensor:
        """The tensor that is bound to a name."""
        tensor: Tensor = self._template[self._slots[name]]
        return tensor

    def check_bound(self, prefix: str) -> None:
        """Check that all inputs whose names begin with ``prefix`` are bound.

        Raises:
            InputError: names those that are not.
        """
        names = [name for name in self._inputs if name.startswith(prefix)]
        if missing := [name for name in names if self._template[self._slots[name]] is None]:
            raise InputError(f"program inputs without a value: {', '.join(missing)}")

    def environment(self, inputs: Mapping[str, Tensor]) -> Environment:
        """A fresh environment for one step.

        Raises:
            InputError: a value that the program reads was neither bound nor given, or is not what
                the compiled code was made for.
        """
        self._check(inputs)
        env = self._template.copy()
        self.rebind(env, inputs)
        missing = [name for name in self._inputs if env[self._slots[name]] is None]
        if missing:
            raise InputError(f"program inputs without a value: {', '.join(missing)}")
        return env

    def _check(self, values: Mapping[str, Tensor]) -> None:
        """Check what compiled code assumes of its inputs, since it has no guards itself."""
        counted: dict[str, tuple[int, str]] = {}
        for name, value in values.items():
            if spec := self._inputs.get(name):
                _check_tensor(name, value, spec)
                for size, count in zip(value.shape, spec.shape, strict=True):
                    if isinstance(count, str):
                        self._check_size(name, size, count, counted)

    def _check_size(
        self, name: str, size: int, count: str, counted: dict[str, tuple[int, str]]
    ) -> None:
        low, high = self._ranges.get(count, (0, size))
        if not low <= size <= high:
            raise InputError(f"{name}: {count} is {size}, compiled for {low} to {high}")
        known, first = counted.setdefault(count, (size, name))
        if size != known:
            raise InputError(f"{name} has {count} {size}, but {first} has {known}")

    def rebind(self, env: Environment, inputs: Mapping[str, Tensor]) -> None:
        """Replace the step inputs in an environment, such as the one that a captured graph keeps.
        The inputs are not checked."""
        for name, value in inputs.items():
            if name in self._slots:
                env[self._slots[name]] = value
        for name, (source, dim) in self._sizes.items():
            if source in inputs:
                env[self._slots[name]] = inputs[source].shape[dim]

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run every step, without graphs, and return the output."""
        env = self.environment(inputs)
        for step in self.steps:
            step.run(env)
        result: Tensor = env[self.output]
        return result


def eager_program(
    model: nn.Module,
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]],
    names: Sequence[str],
) -> Program:
    """A program of one step: the module itself, for ``-O0``.

    Args:
        arguments: makes the module's arguments from the named values.
        names: every constant and step input that ``arguments`` reads.
    """
    slots = {name: index for index, name in enumerate([*names, "logits"])}

    def call(env: Environment) -> Sequence[Any]:
        return [model(*arguments({name: env[slots[name]] for name in names}))]

    step = Step("model", call, (slots["logits"],), (), per_token=False)
    return Program([step], slots, dict.fromkeys(names), slots["logits"])


def link(plan: Plan, pieces: Mapping[str, Callable[..., Any]]) -> Program:
    """Turn a plan and its compiled pieces into a program."""
    slots = {name: index for index, name in enumerate([*plan.inputs, *plan.sizes])}
    for planned in plan.steps:
        for name in planned.outputs:
            slots[name] = len(slots)
    last_use = _last_uses(plan)

    def step(index: int, planned: PieceStep | OpStep) -> Step:
        release = tuple(slots[name] for name, last in last_use.items() if last == index)
        outputs = tuple(slots[name] for name in planned.outputs)
        if isinstance(planned, PieceStep):
            name, call = planned.piece, _piece_call(planned, pieces[planned.piece], slots)
        else:
            name, call = planned.op, _op_call(planned, slots)
        return Step(name, call, outputs, release, planned.per_token)

    def constant(planned: PieceStep) -> Constant:
        call = _piece_call(planned, pieces[planned.piece], slots)
        outputs = tuple(slots[name] for name in planned.outputs)
        return Constant(Step(planned.piece, call, outputs, (), False), planned.inputs)

    steps = list(map(step, range(len(plan.steps)), plan.steps))
    inputs: dict[str, TensorInput | None] = {**plan.inputs}
    output = slots[plan.output]
    constants = list(map(constant, plan.constants))
    return Program(steps, slots, inputs, output, plan.sizes, plan.ranges, constants)


def _check_tensor(name: str, value: Tensor, spec: TensorInput) -> None:
    dtype = str(value.dtype).removeprefix("torch.")
    fixed = all(
        isinstance(want, str) or have == want
        for have, want in zip(value.shape, spec.shape, strict=False)
    )
    if (
        not fixed
        or value.dim() != len(spec.shape)
        or dtype != spec.dtype
        or value.device.type != spec.device
    ):
        wanted = ", ".join(map(str, spec.shape))
        raise InputError(
            f"{name} is {dtype}{list(value.shape)} on {value.device.type}, compiled for "
            f"{spec.dtype}[{wanted}] on {spec.device}"
        )
    rows = value.transpose(-1, -2) if spec.transposed else value
    if not rows.is_contiguous():
        wanted = "one whose transpose is contiguous" if spec.transposed else "a contiguous tensor"
        raise InputError(f"{name} has strides {value.stride()}, compiled for {wanted}")


def _last_uses(plan: Plan) -> dict[str, int]:
    last: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        for name in (*reads(step), *step.outputs):
            last[name] = index
    keep = {plan.output, *plan.inputs, *plan.sizes}
    return {name: index for name, index in last.items() if name not in keep}


def _piece_call(
    step: PieceStep, fn: Callable[..., Any], slots: Mapping[str, int]
) -> Callable[[Environment], Sequence[Any]]:
    indices = [slots[name] for name in step.inputs]

    def call(env: Environment) -> Sequence[Any]:
        outputs: Sequence[Any] = fn(*[env[i] for i in indices])
        return outputs

    return call


def _op_call(step: OpStep, slots: Mapping[str, int]) -> Callable[[Environment], Sequence[Any]]:
    namespace, _, qualified = step.op.partition("::")
    name, _, overload = qualified.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    indices = [slots[arg.name] if isinstance(arg, Value) else None for arg in step.args]
    args = [getattr(torch, arg.dtype) if isinstance(arg, Dtype) else arg for arg in step.args]
    num_outputs = len(step.outputs)

    def call(env: Environment) -> Sequence[Any]:
        result = op(*[arg if i is None else env[i] for i, arg in zip(indices, args, strict=True)])
        return [result] if num_outputs else []

    return call
