"""Which layers of a library's model can be quantized, and how a checkpoint has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ....config.weight_format import StoredFormat
from ...checkpoint import TensorInfo
from ...hf_json import HfConfig
from ...quant.hf_quant import read_captured_quantization
from ...quant.layouts import Layout
from ...quant.scheme import FORMATS, QuantKind, QuantScheme
from ...spec import ModelSpec
from ..facts import LinearFacts
from ..text_decoder import Stored
from .stored import one_tensor_a_weight

OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""The names that the library's experts interface gives the weights of all experts."""
_NUM_EXPERTS = re.compile(r"experts$")


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, and nothing that is derived from one."""
    return type(module) is nn.Linear


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is the library's linear layer with a weight [in_features, out_features]."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def linears_of(model: Any) -> tuple[LinearFacts, ...]:
    """The layers of a ``PreTrainedModel`` that can be quantized: linear ones but for the head and
    routers, and experts."""
    head = model.get_output_embeddings()
    routed = set(_expert_counts(model.config))
    beside = tuple(
        f"{name.rpartition('.')[0]}." for name, m in model.named_modules() if is_experts(m)
    )
    found = []
    for name, module in model.named_modules():
        if is_linear(module):
            # Beside experts: k of an attention may have as many features as there are experts.
            routes = module.out_features in routed and name.startswith(beside or "")
            if module is not head and module.out_features != 1 and not routes:
                found.append(LinearFacts(name, module.out_features, module.in_features))
        elif is_experts(module):
            for kind in filter(module._parameters.__contains__, OF_EXPERTS):
                count, *sizes = getattr(module, kind).shape
                rows, columns = reversed(sizes) if module.is_transposed else sizes
                found.append(LinearFacts(f"{name}.{kind}", rows, columns, count))
    return tuple(found)


def is_experts(module: nn.Module) -> bool:
    """Whether a module goes through the library's experts interface."""
    return all(hasattr(module, flag) for flag in ("is_transposed", "has_gate", "has_bias"))


def _expert_counts(config: Any) -> Iterator[int]:
    for inner in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        for name, value in vars(inner).items():
            if _NUM_EXPERTS.search(name) and isinstance(value, int):
                yield value


def parameter_of(linear: LinearFacts) -> str:
    """The name of a layer's weight in the library's model."""
    return linear.name if linear.experts else f"{linear.name}.weight"


def formats_of(spec: ModelSpec) -> dict[str, QuantKind]:
    """The kind of every layer that is quantized, by its name."""
    kinds = {linear: spec.quant_of(0, linear) for linear in spec.linears}
    return {linear: kind for linear, kind in kinds.items() if kind}


def mergeable(
    model: nn.Module, siblings: Sequence[str], formats: Mapping[str, QuantKind]
) -> list[list[str]]:
    """Siblings as groups that can be one layer each: those of one format, if every one begins at a
    whole unit of it."""
    groups: dict[str | None, list[str]] = {}
    for name in siblings:
        groups.setdefault(formats.get(name), []).append(name)
    merged = []
    for kind, names in groups.items():
        form = FORMATS[kind] if kind else None
        unit = form.step(0) if isinstance(form, StoredFormat) else form.rows if form else 1
        rows = [int(model.get_submodule(name).out_features) for name in names]  # type: ignore[arg-type]
        if len(names) > 1 and not any(size % max(1, unit) for size in rows[:-1]):
            merged.append(names)
    return merged


def checkpoint_scheme(
    config: HfConfig,
    spec: ModelSpec,
    found: Mapping[str, TensorInfo],
    stored_model: Callable[[], Stored],
    there: Callable[[str], str] = str,
) -> QuantScheme | None:
    """How a folder's checkpoint is quantized; None: not at all.

    Args:
        found: the checkpoint's tensors, whose names the config's lists use.
        stored_model: makes the model as the checkpoint has it.
        there: the name that a parameter of the library's model has in the config's lists, where
            there are no tensors.

    Raises:
        UserError: as ``read_quantization``, or the sizes of a layer do not fit.
    """

    def names(
        stored_as: Callable[[str], Layout | StoredFormat | None],
    ) -> Iterator[tuple[str, str]]:
        assert spec.captured is not None
        stored = stored_model() if found else None
        sources = stored.sources(one_tensor_a_weight(found, stored_as).tensors) if stored else {}
        for linear in spec.captured.linears:
            parameter = parameter_of(linear)
            for name in sources.get(parameter, (there(parameter),)):
                yield name.removesuffix(".weight"), linear.name

    linears = spec.captured.linears if spec.captured else ()
    experts = {linear.name for linear in linears if linear.experts}
    return read_captured_quantization(config, names, spec.num_layers, experts)
