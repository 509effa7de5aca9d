"""Two weight formats from outside of the package, and checkpoints of them written by plain torch.

``admit()`` is what a script does; tests take them back with ``admitted()``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusewright.config.weight_format import STORED_FORMATS, Packing, StoredFormat, StoredTensor
from fusewright.ops import LinearKernel, admit_weight_format
from fusewright.ops.core.target import Target
from fusewright.ops.linear.desc import LinearDesc
from fusewright.ops.linear.formats import WEIGHT_FORMATS
from fusewright.ops.linear.kernels import ADMITTED
from tests.model_executor.low_bit_checkpoints import put
from tests.model_executor.tiny_models import TinyModel

GROUP, SMALL_GROUP = 64, 32
TINY = TinyModel("stored", "Llama", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32})


def multiply_int8(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The kernel: sums of each group of columns, times the group's scale."""
    groups = weight.unflatten(1, (-1, GROUP)).to(x.dtype)
    sums = torch.einsum("...gk,ngk->...ng", x.unflatten(-1, (-1, GROUP)), groups)
    y = (sums * rest[1].to(x.dtype)).sum(-1)
    return y if bias is None else y + bias


INT8 = StoredFormat(
    name="int8 of 64",
    weight=StoredTensor(("weight",), "int8"),
    scale=StoredTensor(("weight_scale",), "float32", unit=(1, GROUP)),
)

# For reference alone: as compressed-tensors packs asymmetric int4, eight columns an int32, and zero
# points of eight rows.
INT4 = StoredFormat(
    name="int4 of 32, zero points",
    weight=StoredTensor(("weight_packed",), "int32", packing=Packing(4)),
    scale=StoredTensor(("weight_scale",), "bfloat16", unit=(1, SMALL_GROUP)),
    zero=StoredTensor(
        ("weight_zero_point",), "int32", unit=(1, SMALL_GROUP), packing=Packing(4, "rows")
    ),
    ignored=("weight_shape",),
)


def few_rows(desc: LinearDesc, rows: int, target: Target) -> str:
    return "" if rows <= 16 else f"{rows} rows > 16"


def admit() -> None:
    admit_weight_format(INT8, LinearKernel("multiply_int8", few_rows, multiply_int8))
    admit_weight_format(INT4)


@contextmanager
def admitted() -> Iterator[None]:
    """Both formats are known within."""
    admit()
    try:
        yield
    finally:
        for table in (STORED_FORMATS, WEIGHT_FORMATS, ADMITTED):
            for name in STORE:
                del table[name]  # type: ignore[attr-defined]


def store_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors by suffix, the weight that they stand for)."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 127
    q = (groups / scale[..., None]).round()
    numbers = (q * scale[..., None]).flatten(1)
    return {"weight": q.flatten(1).to(torch.int8), "weight_scale": scale}, numbers


def store_int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors by suffix, the weight that they stand for)."""
    groups = weight.unflatten(1, (-1, SMALL_GROUP))
    least, most = groups.amin(-1), groups.amax(-1)
    scale = ((most - least) / 15).bfloat16().float()
    zero = (-least / scale).round().clamp(0, 15)
    q = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    numbers = ((q - zero[..., None]) * scale[..., None]).flatten(1)
    tensors = {
        "weight_packed": nibbles(q.flatten(1)),
        "weight_scale": scale.bfloat16(),
        "weight_zero_point": nibbles(zero.t()).t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, numbers


def nibbles(values: Tensor) -> Tensor:
    """Eight columns in an int32, the first in the lowest bits."""
    packed = sum(values.long()[:, i::8] << 4 * i for i in range(8))
    return packed.to(torch.int32)  # type: ignore[union-attr]


STORE: dict[str, Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]] = {
    INT8.name: store_int8,
    INT4.name: store_int4,
}


def save(name: str, folder: Path, *, ignore: tuple[str, ...] = (), tiny: TinyModel = TINY) -> Any:
    """Write a model in a format; returns the transformers model of the numbers that are stored."""
    model: Any = tiny.save(folder)
    tensors: dict[str, Tensor] = {}
    numbers = model.state_dict()
    for tensor, weight in load_file(folder / "model.safetensors").items():
        module = tensor.removesuffix(".weight")
        if not module.endswith("_proj") or any(part in module for part in ignore):
            tensors[tensor] = weight
            continue
        stored, exact = STORE[name](weight.float())
        put(numbers, module, exact)
        tensors |= {f"{module}.{suffix}": t for suffix, t in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "stored", "format": name, "ignore": [*ignore]}
    (folder / "config.json").write_text(json.dumps(config))
    model.load_state_dict(numbers)
    return model


def logits_of(model: Any, ids: list[int]) -> Tensor:
    """[len(ids), vocab] of the transformers model."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits
