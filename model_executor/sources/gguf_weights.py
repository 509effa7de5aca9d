"""The weights of a GGUF file that keep their integers in the folder that it becomes.

``transformers`` gives names and the order of rows; what it dequantizes shows which row of the file
each row of a weight is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import STORED_FORMATS
from .gguf_blocks import Stored, stored_blocks, widened

_PLAIN = ("F64", "F32", "F16", "BF16")
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are one matrix here, and so of one format."""


@dataclass
class KeptWeights:
    """Weights in their formats.

    Attributes:
        stored: by the names of their modules.
        rounded: of types that no format fits, how many weights, and the largest relative error.
    """

    stored: dict[str, Stored] = field(default_factory=dict)
    rounded: dict[str, tuple[int, float]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """By the names that a checkpoint has for them."""
        named = {}
        for module, (name, tensors) in self.stored.items():
            for kind, tensor in tensors.items():
                suffix = STORED_FORMATS[name].tensors[kind].suffixes[0]
                named[f"{module}.{suffix}"] = tensor.contiguous()
        return named

    def config(self, linears: Iterable[str]) -> dict[str, Any]:
        """``quantization_config`` of a model with these layers."""
        kinds = {module: name for module, (name, _) in self.stored.items()}
        main = Counter(kinds.values()).most_common(1)[0][0]
        return {
            "quant_method": "stored",
            "format": main,
            "modules": {module: kind for module, kind in kinds.items() if kind != main},
            "ignore": [name for name in linears if name not in kinds],
            "notes": [
                f"{count} weights of GGUF's {kind} are rounded anew to int8 in groups of 32, off "
                f"by up to {error:.2%} more"
                for kind, (count, error) in sorted(self.rounded.items())
            ],
        }


def kept_weights(
    file: Path, names: Mapping[str, str], linears: Iterable[str], loaded: Mapping[str, Tensor]
) -> KeptWeights:
    """The weights of linear layers that stay quantized.

    Args:
        names: the model's name of each of the file's tensors.
        linears: names of the model's linear layers that may be quantized.
        loaded: the model's weights, dequantized, bfloat16.
    """
    gguf: Any = import_module("gguf")
    kept, wanted = KeptWeights(), set(linears)
    for tensor in gguf.GGUFReader(str(file)).tensors:
        name, kind = names.get(tensor.name, ""), tensor.tensor_type.name
        module = name.removesuffix(".weight")
        if kind in _PLAIN or module not in wanted:
            continue
        numbers = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        order = _order(numbers.bfloat16(), loaded[name])
        if order is None:  # its numbers were changed, or it was transposed
            continue
        stored, error = stored_blocks(kind, tensor.data)
        if error:
            count, largest = kept.rounded.get(kind, (0, 0.0))
            kept.rounded[kind] = count + 1, max(largest, error)
        kept.stored[module] = stored[0], {k: t[order] for k, t in stored[1].items()}
    for module in [*kept.stored]:
        _make_alike(kept.stored, module)
    return kept


def _order(rows: Tensor, loaded: Tensor) -> Tensor | None:
    """The row of the file that each row of a weight is; None: it has others."""
    if rows.shape != loaded.shape:
        return None
    if torch.equal(rows, loaded):
        return torch.arange(len(rows))
    numbers = {row.numpy().tobytes(): i for i, row in enumerate(rows.view(torch.int16))}
    found = [numbers.get(row.numpy().tobytes()) for row in loaded.view(torch.int16)]
    places = [place for place in found if place is not None]
    return torch.tensor(places) if len(places) == len(found) else None


def _make_alike(stored: dict[str, Stored], module: str) -> None:
    """Bring the layers that are merged with a module to one format, which fits all of them."""
    parent, _, last = module.rpartition(".")
    for merged in _MERGED:
        together = [f"{parent}.{name}" for name in merged]
        if last not in merged:
            continue
        if not all(name in stored for name in together):
            stored.pop(module)  # the others are in 16 bits
        elif len({stored[name][0] for name in together}) > 1:
            stored.update((name, widened(stored[name])) for name in together)
