"""The plan says which piece or op runs with which values, by name: data, no tensors, no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """A reference to a named value inside an op's arguments."""

    name: str


@dataclass(frozen=True)
class Dtype:
    """A dtype inside an op's arguments, by its name in ``torch``."""

    dtype: str


@dataclass(frozen=True)
class PieceStep:
    """Run compiled piece ``piece`` on the named values."""

    piece: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    per_token: bool


@dataclass(frozen=True)
class OpStep:
    """Call one op; ``op`` is its dispatcher name once lowered: fw_triton::paged_attention."""

    op: str
    args: tuple[Any, ...]
    outputs: tuple[str, ...]
    per_token: bool


def reads(step: PieceStep | OpStep) -> list[str]:
    """Names of the values that a step reads."""
    if isinstance(step, PieceStep):
        return list(step.inputs)
    return [arg.name for arg in step.args if isinstance(arg, Value)]


@dataclass(frozen=True)
class TensorInput:
    """The requirements of a program for a tensor.  A dimension is a size, or the name of what it
    counts; tensors that count the same have the same size there.  It is contiguous, or its
    transpose is, if it is ``transposed``."""

    dtype: str
    shape: tuple[int | str, ...]
    device: str
    transposed: bool = False


@dataclass(frozen=True)
class Plan:
    """Steps in order.

    Attributes:
        steps: a step is ``per_token`` when no shape in it counts sequences: it can then be captured
            for a padded number of tokens, whatever the sequences are.
        inputs: the tensors that come from outside, by name.
        sizes: size value -> (name, dimension) of the input that carries it.
        ranges: what a dynamic dimension counts -> least and largest size that the code is for.
        output: name of the result.
        constants: steps that make some of the inputs of others, once these are there.
    """

    steps: tuple[PieceStep | OpStep, ...]
    inputs: Mapping[str, TensorInput]
    sizes: Mapping[str, tuple[str, int]]
    ranges: Mapping[str, tuple[int, int]]
    output: str
    constants: tuple[PieceStep, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; a step has either ``piece`` or ``op``, a named value is ``{"name": …}``, a
        dtype ``{"dtype": …}``."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        return Plan(
            steps=tuple(_step(step) for step in data["steps"]),
            inputs={
                name: TensorInput(**{**spec, "shape": tuple(spec["shape"])})
                for name, spec in data["inputs"].items()
            },
            sizes={name: (source, dim) for name, (source, dim) in data["sizes"].items()},
            ranges={name: (low, high) for name, (low, high) in data["ranges"].items()},
            output=data["output"],
            constants=tuple(map(_piece_step, data["constants"])),
        )


def _step(data: Mapping[str, Any]) -> PieceStep | OpStep:
    if "op" in data:
        return _op_step(data)
    return _piece_step(data)


def _piece_step(data: Mapping[str, Any]) -> PieceStep:
    inputs, outputs = tuple(data["inputs"]), tuple(data["outputs"])
    return PieceStep(data["piece"], inputs, outputs, data["per_token"])


def _op_step(data: Mapping[str, Any]) -> OpStep:
    args = tuple(map(_arg, data["args"]))
    return OpStep(data["op"], args, tuple(data["outputs"]), data["per_token"])


def _arg(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return Value(data["name"]) if "name" in data else Dtype(data["dtype"])
