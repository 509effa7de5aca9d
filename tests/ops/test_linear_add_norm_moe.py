"""Experts between dense layers, in FP8: few tokens are not rounded to FP8; scales come together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import load_cuda_library
from fusewright.ops.experts import linear_add_norm_moe
from fusewright.ops.experts._moe_chain import Call, in_turn
from fusewright.ops.experts.linear_add_norm_moe import OP

FEW = {"token": 2, "block": 8}
"""The most tokens whose activations stay bfloat16, by the scheme of scales."""
_SCALES = ("weight_scale", "gate_up_scale", "down_scale", "next_scale")


def fp8_cases(device: str) -> dict[str, tuple[Any, ...]]:
    gen = torch.Generator(device=device).manual_seed(5)
    made = OP.cases(torch.bfloat16, torch.device(device), gen)
    return {case.label: case.args for case in made if "FP8" in case.label}


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    for dim in (-2, -1):
        if 1 < scale.shape[dim] < weight.shape[dim]:
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float() * scale


def unrounded(call: Call) -> tuple[Tensor, Tensor]:
    """The call in float32, of activations that are rounded nowhere."""

    def plain(given: Any) -> Any:
        """The float tensors of arguments, in float32."""
        floats = {torch.bfloat16: Tensor.float}
        return given._make(floats.get(getattr(t, "dtype", None), lambda t: t)(t) for t in given)

    def weight(of: Any, name: str, scale: str) -> dict[str, Any]:
        held = getattr(of, name)
        made = None if held is None else dequantized(held, getattr(of, scale))
        return {name: made, scale: None}

    call = plain(call)
    scale = call.weight_scale
    assert scale is not None
    head, experts = plain(call.head), plain(call.experts)
    head = head._replace(weight=dequantized(head.weight, scale))
    first, second = (weight(experts, n, f"{n}_scale") for n in ("gate_up", "down"))
    experts = experts._replace(**first, **second, group_size=0)
    behind = weight(call, "next_weight", "next_scale")
    call = call._replace(head=head, experts=experts, weight_scale=None, **behind)
    return in_turn(call, lambda op, *args: op.reference(*args))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.gpu
def test_a_few_tokens_of_fp8_are_rounded_to_bfloat16_alone() -> None:
    """They are less than 1.5 % off; with FP8 activations more."""
    if not load_cuda_library():
        pytest.skip("csrc is not built here")
    run, names = OP.implementation("cuda").fn, OP.implementation("cuda").runs
    assert names is not None
    seen = 0
    for label, args in fp8_cases("cuda").items():
        call = Call.of(args)
        tokens, scheme = call.head.x.shape[0], "block" if call.experts.group_size else "token"
        if call.head.weight.numel() < 8 << 20:
            continue
        seen += 1
        got = run(*args)
        errors = [error(g, w) for g, w in zip(got, unrounded(call), strict=True)]
        streamed = not any("quant" in name for name in names(*args))
        assert streamed is (tokens <= FEW[scheme]), label
        assert not streamed or len(names(*args)) == (4 if call.is_last else 5), label
        assert (errors[0] < 0.015) is streamed, f"{label}: {errors}"
        assert all(map(torch.equal, got, run(*args))), label
    assert seen == 9


def test_what_is_unrounded_is_near_the_reference() -> None:
    for label, args in fp8_cases("cpu").items():
        errors = [
            error(*pair) for pair in zip(OP.reference(*args), unrounded(Call.of(args)), strict=True)
        ]
        assert 1e-4 < errors[0] < 0.06, f"{label}: {errors}"


def test_dense_layers_may_be_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are on a GPU whose library refuses their shapes."""
    monkeypatch.setattr(linear_add_norm_moe, "_dense_part", lambda *layers: "triton")
    for label, args in fp8_cases("cpu").items():
        pairs = zip(OP.implementation("triton").fn(*args), unrounded(Call.of(args)), strict=True)
        assert all(error(*pair) < 0.06 for pair in pairs), label
        assert OP.implementation("triton").runs(*args).count("_linear_fp8_kernel") == (  # type: ignore[misc]
            1 if Call.of(args).is_last else 2
        )


@pytest.mark.parametrize("name", _SCALES)
def test_a_scale_alone_is_refused(name: str) -> None:
    args = fp8_cases("cpu")["FP8 token"]
    at = [a.name for a in OP.overload()._schema.arguments].index(name)
    with pytest.raises(ValueError, match=r"some of weight_scale, .* expected all or none"):
        OP.overload()(*args[:at], None, *args[at + 1 :])
