"""Checkpoints of 4 and 8 bits in the layouts of the projects that write them, made by plain torch;
and the numbers that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusewright.config.weight_format import STORED_FORMATS, why_not_experts
from tests.model_executor.low_bit_models import TINY as TINY
from tests.model_executor.tiny_models import TinyModel

_EXPERT = re.compile(r"(.*layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)$")
_PLACES = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0)),
}
"""Where the library has each of an expert's weights: in the tensor of all experts, and from which
of its halves on."""
WIDE = replace(TINY, options={**TINY.options, "num_attention_heads": 8, "num_key_value_heads": 4})
"""Each layer that ranks cut by columns has 256: two ranks have whole groups of 128."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Stored = tuple[dict[str, Tensor], Tensor]
"""(tensors by suffix, the numbers that they stand for)."""


def words(fields: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """int32 [n, m / (32 / bits)] of integers [n, m], of which neighbours share an element."""
    count = 32 // bits
    order = order or range(count)
    groups = fields.long().unflatten(1, (-1, count))
    packed = sum(groups[..., neighbour] << bits * i for i, neighbour in enumerate(order))
    return packed.to(torch.int64).to(torch.int32)  # type: ignore[union-attr]


def asymmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(integers, scales, zero points, numbers); zero points from 1 on, as of GPTQ v1."""
    units = weight.unflatten(1, (-1, group or weight.shape[1]))
    least, most = units.amin(-1), units.amax(-1)
    top = 2**bits - 1
    scale = ((most - least) / top).half().float()
    zero = (-least / scale).round().clamp(1, top)
    q = ((units / scale[..., None]).round() + zero[..., None]).clamp(0, top)
    return q.flatten(1), scale, zero, ((q - zero[..., None]) * scale[..., None]).flatten(1)


def symmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(integers from -2**(bits - 1) on, scales, numbers)."""
    units = weight.unflatten(1, (-1, group or weight.shape[1]))
    half = 2 ** (bits - 1)
    scale = (units.abs().amax(-1) / (half - 0.5)).half().float()
    q = (units / scale[..., None]).round().clamp(-half, half - 1)
    return q.flatten(1), scale, (q * scale[..., None]).flatten(1)


def awq(weight: Tensor, group: int) -> Stored:
    q, scale, zero, numbers = asymmetric(weight, 4, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(q.t(), 4, order),
        "qzeros": words(zero.t(), 4, order),
        "scales": scale.t().half().contiguous(),
    }
    return tensors, numbers


def gptq(
    weight: Tensor, bits: int, group: int, *, sym: bool, version: int, act_order: Any = None
) -> Stored:
    columns = weight.shape[1]
    order = torch.arange(columns) if act_order is None else act_order
    sorted_weight = weight[:, order]
    if sym:
        q, scale, numbers = symmetric(sorted_weight, bits, group)
        q, zero = q + 2 ** (bits - 1), torch.full_like(scale, 2 ** (bits - 1))
    else:
        q, scale, zero, numbers = asymmetric(sorted_weight, bits, group)
    back = order.argsort()
    tensors = {
        "qweight": words(q[:, back], bits).t().contiguous(),
        "qzeros": words(zero.t() - int(version == 1), bits),
        "scales": scale.t().half().contiguous(),
        "g_idx": (back // (group or columns)).int(),
    }
    return tensors, numbers[:, back]


def compressed(weight: Tensor, bits: int, group: int, *, sym: bool, packed: bool) -> Stored:
    half = 2 ** (bits - 1)
    zeros: dict[str, Tensor] = {}
    if sym:
        q, scale, numbers = symmetric(weight, bits, group)
    else:
        q, scale, zero, numbers = asymmetric(weight, bits, group)
        q = q - half
        zeros["weight_zero_point"] = (
            words(zero.t(), bits).t().contiguous() if packed else (zero - half).to(torch.int8)
        )
    if packed:
        held = {"weight_packed": words(q + half, bits), "weight_shape": torch.tensor(weight.shape)}
    else:
        held = {"weight": q.to(torch.int8)}
    return {**held, "weight_scale": scale.half(), **zeros}, numbers


def by_tensor(weight: Tensor) -> Stored:
    scale = weight.abs().max() / 127
    q = (weight / scale).round()
    return {"weight": q.to(torch.int8), "weight_scale": scale.reshape(1)}, q * scale


def modelopt_int4(weight: Tensor, group: int) -> Stored:
    q, scale, _ = symmetric(weight, 4, group)
    pairs = q.long().unflatten(0, (-1, 2)) & 15
    packed = (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": scale.bfloat16()}, _times(q, scale.bfloat16())


def _times(q: Tensor, scale: Tensor) -> Tensor:
    return (q.unflatten(1, (scale.shape[1], -1)) * scale.float()[..., None]).flatten(1)


def e2m1(units: Tensor) -> tuple[Tensor, Tensor]:
    """(codes in pairs, values) of [rows, groups, columns] that are scaled already."""
    code = (units.abs()[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[code] * units.sign()
    codes = (code + 8 * (units < 0)).flatten(1).unflatten(1, (-1, 2))
    return (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8), values


def mxfp4(weight: Tensor, *, gpt_oss: bool) -> Stored:
    units = weight.unflatten(1, (-1, 32))
    exponent = (units.abs().amax(-1) / 6).log2().ceil()
    scale = torch.exp2(exponent)
    packed, values = e2m1(units / scale[..., None])
    bits = (exponent + 127).to(torch.uint8)
    numbers = (values * scale[..., None]).flatten(1)
    if gpt_oss:
        return {"weight_blocks": packed.unflatten(1, (-1, 16)), "weight_scales": bits}, numbers
    return {"weight_packed": packed, "weight_scale": bits}, numbers


def nvfp4(weight: Tensor, *, modelopt: bool) -> Stored:
    units = weight.unflatten(1, (-1, 16))
    of_all = weight.abs().max() / (6 * 448)
    scale = (units.abs().amax(-1) / 6 / of_all).to(torch.float8_e4m3fn)
    whole = scale.float() * of_all
    packed, values = e2m1(units / whole[..., None])
    numbers = (values * whole[..., None]).flatten(1)
    if modelopt:
        more = {"weight": packed, "weight_scale_2": of_all, "input_scale": torch.tensor(0.1)}
    else:
        more = {"weight_packed": packed, "weight_global_scale": (1 / of_all).reshape(1)}
    return {"weight_scale": scale, **more}, numbers


@dataclass(frozen=True)
class Dialect:
    """One way to write a checkpoint.

    Attributes:
        kind: the format in which layers hold it.
        section: ``quantization_config``.
        store: of a weight [rows, columns] in float32, and the name of its module.
    """

    name: str
    kind: str
    section: dict[str, Any]
    store: Callable[[Tensor, str], Stored]


def _awq(group: int) -> Dialect:
    section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Dialect(
        f"AutoAWQ {group}",
        f"int4_zero_g{group}",
        {**section, "version": "gemm", "modules_to_not_convert": None},
        lambda weight, name: awq(weight, group),
    )


def act_order(name: str, columns: int) -> Tensor:
    """An order of columns, alike for the modules that are merged."""
    block, _, module = name.rpartition(".")
    kind = {"o_proj": 1, "down_proj": 2}.get(module, 0)
    layer = int(block.split(".")[2])
    generator = torch.Generator().manual_seed(10 * layer + kind + 5 * block.endswith("mlp"))
    return torch.randperm(columns, generator=generator)


def _gptq(bits: int, group: int, *, sym: bool, version: int, desc_act: bool = False) -> Dialect:
    section = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": sym}
    form = "gptq" if version == 1 else "gptq_v2"
    unit = f"g{group}" if group else "channel"

    def store(weight: Tensor, name: str) -> Stored:
        order = act_order(name, weight.shape[1]) if desc_act else None
        return gptq(weight, bits, group, sym=sym, version=version, act_order=order)

    return Dialect(
        f"GPTQ v{version} int{bits} {unit}{'' if sym else ' zero'}{' act-order' * desc_act}",
        f"int{bits}_{unit}" if sym else f"int{bits}_zero_{unit}",
        {**section, "desc_act": desc_act, "lm_head": False, "checkpoint_format": form},
        store,
    )


def _group(weights: dict[str, Any], activations: Any = None, targets: Any = None) -> dict[str, Any]:
    return {
        "targets": targets or ["Linear"],
        "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights},
        "input_activations": activations,
    }


def _section(form: str, *groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ["lm_head"],
    }


def _compressed(form: str, bits: int, group: int, *, sym: bool) -> Dialect:
    how = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    unit = f"g{group}" if group else "channel"
    packed = form == "pack-quantized"
    return Dialect(
        f"{form} int{bits} {unit}{'' if sym else ' zero'}",
        f"int{bits}_{unit}" if sym else f"int{bits}_zero_{unit}",
        _section(form, _group({"num_bits": bits, "symmetric": sym, **how})),
        lambda weight, name: compressed(weight, bits, group, sym=sym, packed=packed),
    )


INPUT_SCALE = 0.0625


def _w8a8(target: str, **activations: Any) -> Dialect:
    """SmoothQuant as llm-compressor writes it: int8 weights a channel, and int8 activations."""
    static = activations.get("dynamic") is False

    def tensors(weight: Tensor, name: str) -> Stored:
        stored, numbers = compressed(weight, 8, 0, sym=True, packed=False)
        scale = {"input_scale": torch.tensor([INPUT_SCALE])} if static else {}
        return stored | scale, numbers

    how = {"num_bits": 8, "type": "int", "symmetric": True, **activations}
    zero = "" if how["symmetric"] else " zero"
    return Dialect(
        f"int-quantized W8A8 {'static' if static else 'dynamic'}{zero}",
        target,
        _section("int-quantized", _group({"num_bits": 8, "strategy": "channel"}, how)),
        tensors,
    )


def _mixed() -> Dialect:
    """int4 but for ``down_proj``, Mixtral's ``w2``, which is int8."""
    group = {"strategy": "group", "group_size": 64}
    return Dialect(
        "mixed precision",
        "int4_g64",
        _section(
            "pack-quantized",
            _group({"num_bits": 8, "strategy": "channel"}, targets=["re:.*(down_proj|w2)$"]),
            _group({"num_bits": 4, **group}),
        ),
        lambda weight, name: (
            compressed(weight, 8, 0, sym=True, packed=True)
            if name.endswith(("down_proj", "w2"))
            else compressed(weight, 4, 64, sym=True, packed=True)
        ),
    )


_FLOATS = {"num_bits": 4, "type": "float", "strategy": "group"}
_BY_TENSOR = {"num_bits": 8, "strategy": "tensor"}
DIALECTS = [
    _awq(32),
    _awq(64),
    _awq(128),
    _gptq(4, 128, sym=True, version=1),
    _gptq(4, 32, sym=False, version=1),
    _gptq(4, 64, sym=False, version=2),
    _gptq(4, 0, sym=True, version=2),
    _gptq(8, 32, sym=True, version=1),
    _gptq(8, 128, sym=False, version=2),
    _gptq(4, 32, sym=True, version=1, desc_act=True),
    _gptq(4, 64, sym=False, version=2, desc_act=True),
    _compressed("pack-quantized", 4, 128, sym=True),
    _compressed("pack-quantized", 4, 32, sym=False),
    _compressed("pack-quantized", 8, 0, sym=True),
    _compressed("naive-quantized", 4, 64, sym=True),
    _compressed("naive-quantized", 4, 64, sym=False),
    _compressed("int-quantized", 8, 0, sym=True),
    _w8a8("w8a8_int8", strategy="token", dynamic=True),
    _w8a8("w8a8_int8_static", strategy="tensor", dynamic=False),
    _w8a8("int8_channel", strategy="token", dynamic=True, symmetric=False),
    _compressed("int-quantized", 8, 128, sym=False),
    _mixed(),
    Dialect(
        "int-quantized by tensor",
        "int8_channel",
        _section("int-quantized", _group(_BY_TENSOR)),
        lambda weight, name: by_tensor(weight),
    ),
    Dialect(
        "nvfp4-pack-quantized",
        "nvfp4",
        _section("nvfp4-pack-quantized", _group({**_FLOATS, "group_size": 16})),
        lambda weight, name: nvfp4(weight, modelopt=False),
    ),
    Dialect(
        "mxfp4-pack-quantized",
        "mxfp4",
        _section("mxfp4-pack-quantized", _group({**_FLOATS, "group_size": 32})),
        lambda weight, name: mxfp4(weight, gpt_oss=False),
    ),
    Dialect(
        "ModelOpt int4",
        "int4_g128",
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ["lm_head"]},
        lambda weight, name: modelopt_int4(weight, 128),
    ),
    Dialect(
        "ModelOpt NVFP4",
        "nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda weight, name: nvfp4(weight, modelopt=True),
    ),
    Dialect(
        "gpt-oss MXFP4",
        "mxfp4",
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        lambda weight, name: mxfp4(weight, gpt_oss=True),
    ),
]
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
OF_EXPERTS = [
    dialect
    for dialect in DIALECTS
    if "act-order" not in dialect.name and not why_not_experts(STORED_FORMATS[dialect.kind])
]
"""Those in which experts are read."""


def put(numbers: dict[str, Tensor], module: str, exact: Tensor) -> None:
    """Put the numbers of a checkpoint's module where the library's model has them."""
    if not (expert := _EXPERT.match(module)):
        numbers[f"{module}.weight"] = exact
        return
    block, number, part = expert.groups()
    of_all, half = _PLACES[part]
    held = numbers[f"{block}.mlp.experts.{of_all}"][int(number)]
    held[half * len(exact) :][: len(exact)] = exact


def save(dialect: Dialect, folder: Path, tiny: TinyModel = TINY, **section: Any) -> Any:
    """Write a model in a dialect; returns the transformers model of the numbers that are stored.

    Args:
        section: changes of its ``quantization_config``.
    """
    model: Any = tiny.save(folder)
    tensors: dict[str, Tensor] = {}
    numbers = model.state_dict()
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "_with_mqa", *_PLACES)):
            tensors[name] = weight
            continue
        stored, exact = dialect.store(weight.float(), module)
        put(numbers, module, exact)
        tensors |= {f"{module}.{suffix}": t.contiguous() for suffix, t in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**dialect.section, **section}
    (folder / "config.json").write_text(json.dumps(config))
    model.load_state_dict(numbers)
    return model
