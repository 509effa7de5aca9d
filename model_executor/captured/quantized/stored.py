"""Gathers the tensors that a checkpoint has for one quantized weight.

Renamings and conversions of the library know names of weights alone.  They see one tensor for each
weight, of the shape of its numbers; its scales and zero points go where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ....config.errors import UserError
from ....config.weight_format import StoredFormat, StoredTensor
from ...checkpoint import F8_E4M3, FLOATS, TensorInfo
from ...quant.convert import LaidOut, laid_out, names_beside
from ...quant.layouts import Layout
from ...quant.scales import INPUT_SCALES, WEIGHT_SCALES
from .laid_experts import ExpertsLaidOut, experts_laid_out

_KINDS = {"weight_scale": WEIGHT_SCALES, "input_scale": INPUT_SCALES}


@dataclass(frozen=True)
class Gathered:
    """A checkpoint with one tensor for each weight.

    Attributes:
        tensors: by name; that of a weight in an admitted format has the format's name as its type.
        parts: of each quantized weight, by its name, the tensors by their kind in a layer.
        laid: those that the checkpoint has in a layout of its own, by the same names.
        experts: weights of all experts in such a layout, by the same names.
    """

    tensors: dict[str, TensorInfo]
    parts: dict[str, dict[str, TensorInfo]]
    laid: dict[str, LaidOut] = field(default_factory=dict)
    experts: dict[str, ExpertsLaidOut] = field(default_factory=dict)


def one_tensor_a_weight(
    found: Mapping[str, TensorInfo], stored_as: Callable[[str], Layout | StoredFormat | None]
) -> Gathered:
    """Gather the tensors of FP8 weights, known by their types and names, and of weights in stored
    formats and in layouts, known by their modules.

    Raises:
        UserError: the tensors of a weight are not those of its layout.
    """
    tensors, parts = dict(found), dict[str, dict[str, TensorInfo]]()
    laid: dict[str, LaidOut] = {}
    experts = experts_laid_out(found, lambda module: _layout(stored_as(module)))
    for name, of_experts in experts.items():
        for part in of_experts.tensors.values():
            del tensors[part.name]
        tensors[name] = of_experts.logical
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in found.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = info
    for module, of_module in modules.items():
        name, weight = f"{module}.weight", of_module.get("weight")
        layout = stored_as(module)
        if isinstance(layout, Layout) and _has_weight(of_module, layout):
            laid[name] = source = laid_out(module, layout, found)
            there, first = dict(source.tensors), source.tensors["weight"]
            if layout.form.static:
                there |= _named(of_module, {"input_scale": INPUT_SCALES})
            logical = replace(first, name=name, shape=source.shape, dtype=layout.target)
            for beside in names_beside(module, layout):
                tensors.pop(beside, None)
        elif weight is not None and weight.dtype == F8_E4M3:
            there = {"weight": weight, **dict(_named(of_module, _KINDS))}
            logical = weight
        elif isinstance(form := layout, StoredFormat) and _is_stored(of_module, form):
            kinds = {k: t.suffixes for k, t in form.tensors.items()}
            kinds |= {"input_scale": INPUT_SCALES} if form.static else {}
            there = dict(_named(of_module, kinds))
            logical = _numbers(name, form, there["weight"])
            for suffix in form.ignored:
                tensors.pop(f"{module}.{suffix}", None)
        else:
            continue
        for part in there.values():
            tensors.pop(part.name, None)
        tensors[name], parts[name] = logical, there
    return Gathered(tensors, parts, laid, experts)


def _layout(stored: Layout | StoredFormat | None) -> Layout | None:
    return stored if isinstance(stored, Layout) else None


def _has_weight(of_module: Mapping[str, TensorInfo], layout: Layout) -> bool:
    """Whether a module has the integers of a layout: norms have a weight too."""
    types = [of_module[name].dtype for name in layout.weight.suffixes if name in of_module]
    return any(dtype not in FLOATS for dtype in types)


def _named(
    there: Mapping[str, TensorInfo], kinds: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, TensorInfo]]:
    for kind, suffixes in kinds.items():
        if suffix := next(filter(there.__contains__, suffixes), ""):
            yield kind, there[suffix]


def _is_stored(there: Mapping[str, TensorInfo], form: StoredFormat) -> bool:
    """Whether a module has all tensors of a format."""
    named = dict(_named(there, {kind: t.suffixes for kind, t in form.tensors.items()}))
    return named.keys() == form.tensors.keys() and all(
        info.dtype == type_of(form.tensors[kind]) for kind, info in named.items()
    )


def type_of(tensor: StoredTensor) -> str:
    """The name that safetensors gives the type of a format's tensor."""
    return _TYPES[tensor.dtype]


_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": F8_E4M3,
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}


def _numbers(name: str, form: StoredFormat, weight: TensorInfo) -> TensorInfo:
    """The tensor of a stored weight's numbers.

    Raises:
        UserError: the weight is no matrix.
    """
    if len(weight.shape) != 2:
        raise UserError(
            f"tensor {weight.name} in {weight.file} has shape {list(weight.shape)}, expected a "
            f"matrix in the format {form.name!r}"
        )
    rows, columns = (
        weight.shape[form.weight.dim(axis)] * form.weight.steps[axis] for axis in (0, 1)
    )
    return replace(weight, name=name, shape=(rows, columns), dtype=form.name)
