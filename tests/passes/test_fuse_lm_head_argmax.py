"""The head's product gets a second result beside it: the likeliest token, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusewright import ops
from fusewright.passes import VerificationError, build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets

HIDDEN, VOCAB = 32, 48
Model = Callable[[Tensor, Tensor, Tensor], Any]


def head(x: Tensor, starts: Tensor, weight: Tensor) -> Tensor:
    return ops.linear(ops.gather_last_token(x, starts), weight, None)


def with_bias(x: Tensor, starts: Tensor, weight: Tensor) -> Tensor:
    return ops.linear(ops.gather_last_token(x, starts), weight, weight[:, 0].contiguous())


def capped(x: Tensor, starts: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(head(x, starts, weight))


def of_every_token(x: Tensor, starts: Tensor, weight: Tensor) -> Tensor:
    return ops.linear(x, weight, None)


def scaled(x: Tensor, starts: Tensor, weight: Tensor) -> Tensor:
    last = ops.gather_last_token(x, starts)
    return ops.linear(last, weight * 2, None)


def two_results(x: Tensor, starts: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, head(x, starts, weight)


def captured(model: Model) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """The weight comes flat: of two dimensions its first would be captured as dynamic."""
    inputs = {
        "x": hidden(dtype=torch.bfloat16, size=HIDDEN),
        "starts": torch.tensor([0, 3, 4, 7], dtype=torch.int32),
        "weight": torch.randn(VOCAB * HIDDEN).bfloat16(),
    }

    def shaped(x: Tensor, starts: Tensor, weight: Tensor) -> Any:
        flat = weight.view(VOCAB, HIDDEN)
        return model(x, starts, flat)

    return capture(shaped, **inputs), inputs


def run(gm: fx.GraphModule, inputs: dict[str, Tensor]) -> list[Tensor]:
    left = list(inputs.values())
    values: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = node.meta["example_value"]
        if isinstance(fake, torch.SymInt):
            values.append(fake.node.hint)
            continue
        index = next(
            i for i, v in enumerate(left) if (v.dtype, v.dim()) == (fake.dtype, fake.dim())
        )
        values.append(left.pop(index))
    results: list[Tensor] = list(gm(*values))
    return results


def test_the_tokens_are_a_second_result_and_the_logits_stay() -> None:
    gm, inputs = captured(head)
    (before,) = run(gm, inputs)
    (report,) = run_passes(gm, build_passes(["fuse_lm_head_argmax"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert [t.removesuffix(".default") for t in targets(gm)][-3:] == [
        "gather_last_token",
        "linear",
        "lm_head_argmax",
    ]
    logits, tokens = run(gm, inputs)
    assert torch.equal(logits, before) and tokens.dtype == torch.int32
    assert torch.equal(tokens, before.argmax(-1).int())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (with_bias, "the head has a bias"),
        (capped, "the last step is not a linear layer"),
        (of_every_token, "not the last token of each sequence"),
        (scaled, "other calls run between the gather"),
        (two_results, "the graph returns 2 values"),
    ],
)
def test_a_miss_says_why_and_changes_nothing(model: Model, reason: str) -> None:
    gm, _ = captured(model)
    before = targets(gm)
    (report,) = run_passes(gm, build_passes(["fuse_lm_head_argmax"]), verify=True)
    (site,) = report.missed
    assert reason in site.reason and report.matched == 0 and targets(gm) == before


def test_another_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification runs the product and its argmax against the fused op."""
    gm, _ = captured(head)
    call = fx.Graph.call_function

    def negated(graph: fx.Graph, target: Any, args: tuple[Any, ...] = ()) -> fx.Node:
        if target is torch.ops.fw.lm_head_argmax.default:
            args = (args[0], call(graph, torch.neg, (args[1],)))
        return call(graph, target, args)

    monkeypatch.setattr(fx.Graph, "call_function", negated)
    with pytest.raises(VerificationError, match="rewrite fuse_lm_head_argmax at argmax"):
        run_passes(gm, build_passes(["fuse_lm_head_argmax"]), verify=True)
