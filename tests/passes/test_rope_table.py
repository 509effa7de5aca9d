"""Angles of this step's positions become a table of all, where each token has its own alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusewright.passes import run_passes
from fusewright.passes.canonicalize_rope import CanonicalizeRope
from fusewright.passes.cleanup import Cleanup
from fusewright.passes.raising.rope_table import RopeTable
from tests.passes.graphs import dispatched, run_dispatched

TOKENS, HEADS, DIM, COUNT = 7, 4, 16, 50


def rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = torch.cat((-q[..., DIM // 2 :], q[..., : DIM // 2]), dim=-1)
    return q * cos.unsqueeze(0) + half * sin.unsqueeze(0)


def bounded(positions: Tensor, q: Tensor, inv_freq: Tensor) -> Tensor:
    limited = positions.clamp(0, COUNT - 1)
    freqs = limited[:, None].float() * inv_freq
    angles = torch.cat((freqs, freqs), dim=-1)
    return rotated(q, angles.cos(), angles.sin())


def unbounded(positions: Tensor, q: Tensor, inv_freq: Tensor) -> Tensor:
    freqs = positions[:, None].float() * inv_freq
    angles = torch.cat((freqs, freqs), dim=-1)
    return rotated(q, angles.cos(), angles.sin())


def accumulated(positions: Tensor, q: Tensor, inv_freq: Tensor) -> Tensor:
    limited = positions.clamp(0, COUNT - 1).float().cumsum(0)
    freqs = limited[:, None] * inv_freq
    angles = torch.cat((freqs, freqs), dim=-1)
    return rotated(q, angles.cos(), angles.sin())


@pytest.mark.parametrize(
    ("fn", "missed"),
    [
        (bounded, ""),
        (unbounded, "its angles depend on 0 vectors of positions with known bounds"),
        (accumulated, "cumsum is not known to compute each token's angles alone"),
    ],
)
def test_angles_become_a_table(fn: Callable[..., Tensor], missed: str) -> None:
    positions = torch.randint(0, COUNT, (TOKENS,)).int()
    q = torch.randn(TOKENS, HEADS, DIM)
    inv_freq = torch.rand(DIM // 2)

    def model(positions: Tensor, q: Tensor, inv_freq: Tensor) -> Tensor:
        return fn(positions, q.transpose(0, 1), inv_freq).transpose(0, 1)

    given = {"positions": positions, "q": q, "inv_freq": inv_freq}
    gm = dispatched(model, "inv_freq", **given)
    *_, report = run_passes(gm, [CanonicalizeRope(), Cleanup(), RopeTable()], verify=True)
    assert [site.reason for site in report.missed] == ([missed] if missed else [])
    (rotary,) = gm.graph.find_nodes(
        op="call_function", target=torch.ops.fw.rotary_embedding.default
    )
    rows = rotary.args[3].meta["example_value"].shape[0]
    assert (rows == COUNT) if not missed else isinstance(rows, torch.SymInt)
    torch.testing.assert_close(run_dispatched(gm, TOKENS, **given), model(**given))
