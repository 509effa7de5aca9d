"""A stage that is no part of the package joins chains: a class and a reader, no op and no pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor, fx

from fusewright import ops
from fusewright.ops.chain import stages as chain_stages
from fusewright.ops.chain.stages import Operands, Stage, State, Visit, parse
from fusewright.ops.linear.linear import OP as LINEAR
from fusewright.passes import chain_readers
from fusewright.passes.chain_readers import Read, Reading
from tests.passes.test_fuse_chain import SIZE, L, N, chains, dense, fused, norm


@dataclass(frozen=True, kw_only=True)
class Delta(Stage):
    """A linear layer with an adapter beside it: ``linear(x, weight) + (x @ a.T) @ b.T``."""

    tensors: tuple[str, ...] = ("weight", "a", "b")
    kind: ClassVar[str] = "delta"

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        w, a, b = operands.values()
        rest = (None,) * 6
        low = visit(LINEAR, state.x, a, *rest)
        return state._replace(x=visit(LINEAR, state.x, w, *rest) + visit(LINEAR, low, b, *rest))


def read_delta(chain: Reading, node: fx.Node) -> Read | None:
    layers = [user for user in chain.value.users if user.target == LINEAR.overload()]
    lows = [user for user in layers if any(u.target == LINEAR.overload() for u in user.users)]
    if len(layers) != 2 or len(lows) != 1:
        return None
    (low,), (whole,) = lows, (user for user in layers if user is not lows[0])
    (high,), (total,) = low.users, whole.users
    tensors = {"weight": whole.args[1], "a": low.args[1], "b": high.args[1]}
    return Read(lambda names: Delta(), tensors, [whole, low, high, total], total)


@pytest.fixture
def stage_from_outside() -> Iterator[None]:
    chain_stages.register(Delta)
    chain_readers.READERS.insert(0, read_delta)
    fused.cache_clear()
    yield
    chain_readers.READERS.remove(read_delta)
    del chain_stages.STAGES["delta"]
    parse.cache_clear()
    fused.cache_clear()


@pytest.mark.usefixtures("stage_from_outside")
def test_a_stage_from_outside_joins_chains() -> None:
    """An adapter beside a layer is a stage and its reader, no op and no pass."""

    def model(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
        total = r + dense(x, w)
        y = dense(norm(total, nw), w)
        down = w.view(SIZE, SIZE)[:4].contiguous()
        z = dense(y, w) + ops.linear(ops.linear(y, down), down.t().contiguous())
        total = total + dense(z, w)
        return dense(norm(total, nw), w), total

    gm, report = fused(model)
    assert (report.matched, report.missed) == (2, [])
    assert chains(gm) == [f"{L} > {N} > {L} > delta(weight, a, b) > {L} > {N} > {L}"]
    with pytest.raises(ValueError, match="a stage is called 'delta' already"):
        chain_stages.register(type("Other", (Stage,), {"kind": "delta"}))
