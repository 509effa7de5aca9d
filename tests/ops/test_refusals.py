"""Shapes that disagree are refused by name, where a kernel would otherwise read past an end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusewright.ops import BY_NAME

SLOTS = torch.zeros(2, dtype=torch.int32)
KEYS = torch.zeros(2, 1, 8)
TABLE = torch.zeros(2, 8)
# op, what is wrong, arguments, what the message must contain
REFUSED: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("silu_mul", "odd width", (torch.zeros(2, 5),), "last dimension 5"),
    ("gelu_tanh_mul", "odd width", (torch.zeros(2, 5),), "last dimension 5"),
    ("linear", "features", (torch.zeros(2, 5), torch.zeros(3, 4), None), "in_features 4"),
    ("linear", "dtypes", (KEYS[0], KEYS[0].half(), None), "float32 by torch.float16"),
    ("linear", "integers", (SLOTS[None], SLOTS[None], None), "int32 by torch.int32"),
    ("rotary_embedding", "layout", (SLOTS, KEYS, KEYS, TABLE, "gptj"), "layout is 'gptj'"),
    ("kv_store", "heads", (KEYS, KEYS, torch.zeros(3, 2, 4, 2, 8), SLOTS), "disagree"),
    ("kv_store", "slots", (KEYS, KEYS, torch.zeros(3, 2, 4, 1, 8), SLOTS[:1]), "disagree"),
    ("kv_store", "values", (KEYS, KEYS[:1], torch.zeros(3, 2, 4, 1, 8), SLOTS), "disagree"),
]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [pytest.param(op, args, text, id=f"{op}, {wrong}") for op, wrong, args, text in REFUSED],
)
def test_disagreeing_shapes_are_refused_by_every_implementation(
    name: str, args: tuple[Any, ...], message: str, device: torch.device
) -> None:
    op = BY_NAME[name]
    placed = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    for impl in op.implementations:
        with pytest.raises((ValueError, RuntimeError), match=message):
            op.overload(impl.name)(*placed)


@pytest.mark.parametrize(
    "name", [name for name in BY_NAME if name.startswith(("rms_norm", "add_rms_norm"))]
)
def test_norms_refuse_what_would_broadcast(name: str, device: torch.device) -> None:
    x = torch.zeros(2, 128, device=device)
    weight, adds = torch.zeros(128, device=device), name.startswith("add")
    scheme = {"static": torch.ones(1, 1, device=device), "dynamic": 0}.get(name.rpartition("_")[2])
    rest = (1e-5,) if scheme is None else (1e-5, scheme)
    wrong = [((x, x) if adds else (x,), weight[:1], r"expected weight \[128\], found \[1\]")]
    wrong.append(((x.int(), x) if adds else (x.int(),), weight, "a norm of torch.int32"))
    if adds:
        wrong.append(((x, x[:1]), weight, r"a residual like x, found \[1, 128\]"))
    for tensors, scales, message in wrong:
        for implementation in ("", "native", "triton"):
            with pytest.raises(ValueError, match=message):
                BY_NAME[name].overload(implementation)(*tensors, scales, *rest)


@pytest.mark.parametrize(
    ("shape", "refused"),
    [
        ((2, 16384), ""),
        ((2, 16385), "hidden 16385"),
        ((2, 16385, 64), ""),
        ((2, 8, 16385), "hidden"),
    ],
)
def test_a_norms_width_is_that_of_its_last_dimension(shape: tuple[int, ...], refused: str) -> None:
    """Also of heads, of which there may be many."""
    op, x = BY_NAME["rms_norm"], torch.empty(shape, device="meta")
    desc = replace(op.describe((x, torch.empty(shape[-1:], device="meta"), 1e-5)), device="cuda")
    (triton,) = (impl for impl in op.implementations if impl.name == "triton")
    assert triton.supports(desc).startswith(refused)
    assert bool(triton.supports(desc)) is bool(refused)
