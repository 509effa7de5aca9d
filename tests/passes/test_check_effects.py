"""Writes to memory that others may read are neither fused away nor passed by, and a pass that does
so, or that mistakes what memory it reads, is caught."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusewright import ops
from fusewright.passes import (
    PassReport,
    VerificationError,
    build_passes,
    fuse_add_norm,
    run_passes,
)
from fusewright.passes.rule import EXACT, Context
from tests.passes.graphs import capture, hidden, targets

PASSES = ["cleanup", "fuse_add_norm", "fuse_act"]


def added_in_place(x: Tensor, r: Tensor, w: Tensor) -> Any:
    mine = r.clone()
    total = mine.view(-1, 32)
    total += x
    return ops.rms_norm(total, w, 1e-5), mine


def overwritten_between(x: Tensor, r: Tensor, w: Tensor) -> Any:
    total = r + x
    r.mul_(2)
    return ops.rms_norm(total, w, 1e-5), total


def gated_in_place(x: Tensor) -> Any:
    gate, up = x.chunk(2, -1)
    gate = F.silu(gate)
    kept = gate.view(-1)
    kept *= up.reshape(-1)
    return gate + 1


def given(model: Callable[..., Any]) -> dict[str, Tensor]:
    inputs = {"x": hidden(), "r": hidden(), "w": torch.randn(32)}
    return inputs if model is not gated_in_place else {"x": inputs["x"]}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (added_in_place, "which others may read"),
        (overwritten_between, "mul_ writes to memory between total and rms_norm"),
        (gated_in_place, "the activation has 2 users"),
    ],
)
def test_a_write_that_others_may_read_is_left(model: Callable[..., Any], reason: str) -> None:
    gm = capture(model, **given(model))
    reports = run_passes(gm, build_passes(PASSES), verify=True)
    missed = [site for report in reports[1:] for site in report.missed]
    assert len(missed) == 1
    assert not any(t.startswith(("add_rms_norm", "silu_mul")) for t in targets(gm))
    assert reason in missed[0].reason


def test_overwriting_what_nobody_else_reads_fuses() -> None:
    def model(x: Tensor) -> Any:
        gate, up = x.chunk(2, -1)
        product = F.silu(gate)
        product *= up
        return product

    gm = capture(model, x=hidden())
    run_passes(gm, build_passes(PASSES), verify=True)
    assert targets(gm) == ["silu_mul.default"]


# A pass that is wrong in one way each: in what it shares, overwrites or passes by.


def two_attentions(q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, starts: Tensor) -> Any:
    first, second = torch.empty_like(q), torch.empty_like(q)
    ops.paged_attention(q, kv, table, lens, starts, first, 0.25, 0, 0.0)
    ops.paged_attention(q, kv, table, lens, starts, second, 0.5, 0, 0.0)
    return first + 1, second


def one_buffer(graph: fx.Graph) -> None:
    """Both attentions write to the buffer that the first consumes."""
    first, second = (n for n in graph.nodes if n.target is torch.empty_like)
    second.replace_all_uses_with(first)
    graph.erase_node(second)


def copied(x: Tensor, r: Tensor, w: Tensor) -> Any:
    kept = x.clone()
    x.mul_(2)
    return kept + r, w


def no_copy(graph: fx.Graph) -> None:
    clone = next(n for n in graph.nodes if n.target == "clone")
    clone.replace_all_uses_with(clone.args[0])
    graph.erase_node(clone)


def copied_and_written(x: Tensor, r: Tensor, w: Tensor) -> Any:
    mine = x.to(torch.float32, copy=True)
    mine.mul_(2)
    return mine, x + r, w


def no_cast(graph: fx.Graph) -> None:
    copy = next(n for n in graph.nodes if n.target == "to")
    copy.replace_all_uses_with(copy.args[0])
    graph.erase_node(copy)


def read_twice(x: Tensor, r: Tensor, w: Tensor) -> Any:
    before = x + r
    x.mul_(2)
    return before, x + r, w


def first_again(graph: fx.Graph) -> None:
    """The second of two equal expressions, between which memory is written to, is dropped."""
    first, second = (n for n in graph.nodes if n.target is operator.add)
    second.replace_all_uses_with(first)
    graph.erase_node(second)


def viewed(x: Tensor, r: Tensor, w: Tensor) -> Any:
    flat = x.view(-1)
    x.mul_(2)
    return flat.sum() * w, r


def copy_in_place_of_view(graph: fx.Graph) -> None:
    view = next(n for n in graph.nodes if n.target == "view")
    with graph.inserting_after(view):
        copy = graph.call_method("clone", (view,))
    copy.meta = {"example_value": view.meta["example_value"].clone()}
    view.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


class Wrong:
    """A pass that changes the graph by ``change`` and reports nothing."""

    name, tier = "wrong", EXACT

    def __init__(self, change: Callable[[fx.Graph], None]) -> None:
        self.change = change

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        self.change(gm.graph)
        return PassReport(self.name)


def attention_inputs() -> dict[str, Tensor]:
    return {
        "q": torch.randn(3, 4, 16),
        "kv": torch.randn(4, 2, 8, 2, 16),
        "table": torch.zeros(3, 2, dtype=torch.int32),
        "lens": torch.ones(3, dtype=torch.int32),
        "starts": torch.arange(4, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("model", "change", "reason"),
    [
        (two_attentions, one_buffer, "reads memory in another state"),
        (copied, no_copy, "reads memory in another state"),
        (copied_and_written, no_cast, "reads memory in another state"),
        (read_twice, first_again, "result 1 is returned in another state"),
        (viewed, copy_in_place_of_view, "reads memory in another state"),
    ],
)
def test_a_pass_that_mistakes_memory_is_caught(
    model: Callable[..., Any], change: Callable[[fx.Graph], None], reason: str
) -> None:
    inputs = attention_inputs() if model is two_attentions else given(model)
    gm = capture(model, **inputs)
    run_passes(gm, [Wrong(lambda graph: None)], verify=True)
    with pytest.raises(VerificationError, match=f"pass wrong changed more.*{reason}"):
        run_passes(gm, [Wrong(change)], verify=True)


def test_a_rewrite_that_reads_past_a_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``fuse_add_norm`` refuses, done all the same."""
    monkeypatch.setattr(fuse_add_norm, "_why_not", lambda norm, add: "")
    gm = capture(overwritten_between, **given(overwritten_between))
    with pytest.raises(VerificationError, match=r"the rewrite at rms_norm.* in another state"):
        run_passes(gm, build_passes(["fuse_add_norm"]), verify=True)


def test_a_rewrite_may_not_return_its_input_for_a_copy() -> None:
    class Aliases:
        name, tier = "aliases", EXACT

        def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
            (clone,) = (n for n in gm.graph.nodes if n.target == "clone")

            def build(graph: fx.Graph) -> list[fx.Node]:
                return [graph.call_method("view", (clone.args[0], -1, 32))]

            context.replace(self, clone, old=[clone], outputs=[clone], build=build)
            return PassReport(self.name)

    gm = capture(lambda x, r: (x.clone(), r), x=hidden(), r=hidden())
    with pytest.raises(VerificationError, match=r"numbers \[0, 1\] share the memory of output 0"):
        run_passes(gm, [Aliases()], verify=True)


@pytest.mark.parametrize("function", [F.silu, F.relu])
def test_an_activation_in_place_is_a_write(function: Callable[..., Tensor]) -> None:
    def model(x: Tensor, r: Tensor) -> Any:
        mine = x.clone()
        function(mine.view(-1), inplace=True)
        return mine, r

    gm = capture(model, x=hidden(), r=hidden())
    before = targets(gm)
    run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert targets(gm) == before


def rounded(x: Tensor, r: Tensor, w: Tensor) -> Any:
    return x.to(torch.bfloat16).float() + r, w


def widened(x: Tensor, r: Tensor, w: Tensor) -> Any:
    return x.double().float() + r, w


def no_casts(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in ("to", "float", "double"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def test_only_a_cast_that_rounds_is_missed() -> None:
    gm = capture(rounded, **given(rounded))
    with pytest.raises(VerificationError, match="computed in another way"):
        run_passes(gm, [Wrong(no_casts)], verify=True)
    run_passes(capture(widened, **given(widened)), [Wrong(no_casts)], verify=True)
