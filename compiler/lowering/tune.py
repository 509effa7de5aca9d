"""At ``-O3``, chooses an op's implementation by measurement on the calls of the graph at hand.

Each distinct call is timed in isolation at several numbers of rows.  One program serves all of
them, so another implementation takes the place of the preferred one only where it is faster at some
and slower at none.  This decides between kernels; it does not see what Inductor would gain by
fusing a native implementation with its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ... import ops
from ...passes import random_value
from .search import CALLS, Times, graph_us, search

NUM_TOKENS = (2, 16, 64, 256)
"""Numbers of tokens at which an implementation is timed: decodes of few and many sequences, which
are small prefills too.  Not 1: the last-token gather makes no row of one sequence boundary."""
NOISE = 0.03
"""Relative difference below which two times of a kernel in isolation count as equal."""
_L2_BYTES = 100 * 2**20
"""More than any GPU's L2 cache, so that inputs come from memory, as in a model."""

Timer: TypeAlias = Callable[[Sequence[Callable[[], Any]]], float]


class Tuner:
    """Chooses implementations by measured time, and remembers each distinct call.

    Calls are timed in a CUDA graph, so an implementation that reads values on the host is not.

    Args:
        timer: microseconds of a call, one of ``fns`` each; on the GPU unless a test gives another.
        known: ``measured`` of an earlier tuner, as an artifact's report has it: then nothing is
            timed, and calls that are not in it keep their order.

    Attributes:
        measured: call -> implementation -> tokens -> microseconds.
    """

    def __init__(
        self,
        timer: Timer | None = None,
        known: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    ) -> None:
        self._timer, self._known = timer or graph_us, known
        self._orders: dict[ops.OpDesc, tuple[ops.Implementation, ...]] = {}
        self.measured: dict[str, dict[str, dict[int, float]]] = {}

    def order(
        self, op: ops.SemanticOp, desc: ops.OpDesc, args: Sequence[Any]
    ) -> tuple[ops.Implementation, ...]:
        """``op.implementations``, beginning with the one to choose for this call.

        Ops that mutate keep their order: their index arguments cannot be made up.

        Args:
            args: the call's fake values.
        """
        if op.mutates:
            return op.implementations
        if desc not in self._orders:
            self._orders[desc] = self._measure(op, desc, args)
        return self._orders[desc]

    def _measure(
        self, op: ops.SemanticOp, desc: ops.OpDesc, args: Sequence[Any]
    ) -> tuple[ops.Implementation, ...]:
        fits = [
            i
            for i in op.implementations
            if desc.device in i.devices and not (i.opt_in or i.on_host or i.supports(desc))
        ]
        if len(fits) < 2:
            return op.implementations
        times = self._times(op, f"{op.name}({', '.join(map(_text, args))})", fits, args)
        if not times:
            return op.implementations
        best = fits[0]
        for impl in fits[1:]:
            if _is_better(times[impl.name], times[best.name]):
                best = impl
        return (best, *(impl for impl in op.implementations if impl is not best))

    def _times(
        self, op: ops.SemanticOp, call: str, fits: Sequence[ops.Implementation], args: Sequence[Any]
    ) -> dict[str, dict[int, float]]:
        if self._known is not None:
            known = self._known.get(call, {})
            return {name: {int(n): us for n, us in row.items()} for name, row in known.items()}

        def at(num_tokens: int) -> Times[str]:
            inputs = _rotated(
                [random_value(a, seed=i, size=num_tokens) for i, a in enumerate(args)]
            )
            calls = {i.name: [partial(op.overload(i.name), *v) for v in inputs] for i in fits}
            return {name: self._timer(fns) for name, fns in calls.items()}

        timed = search(NUM_TOKENS, [at], seconds=math.inf).times
        times = {i.name: {n: measured[i.name] for n, measured in timed.items()} for i in fits}
        self.measured[call] = times
        return times


def _text(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_text, arg))}]"
    if not isinstance(arg, Tensor):
        return repr(arg)
    return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"


def _is_better(new: Mapping[int, float], old: Mapping[int, float]) -> bool:
    """Whether ``new`` is faster at some number of tokens and slower at none, beyond noise."""
    ratios = [new[num_tokens] / old[num_tokens] for num_tokens in old]
    return min(ratios) < 1 - NOISE and max(ratios) <= 1 + NOISE


def _rotated(values: list[Any]) -> list[list[Any]]:
    """At most ``CALLS`` copies of a call's arguments, enough to exceed the L2 cache together."""
    nbytes = sum(v.nbytes for v in tree_leaves(values) if isinstance(v, Tensor))
    copies = min(CALLS, 1 + _L2_BYTES // max(nbytes, 1))
    clones = [tree_map_only(Tensor, Tensor.clone, values) for _ in range(copies - 1)]
    return [values, *clones]
