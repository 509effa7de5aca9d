"""Proves rewrites: the graph stays well formed, both sides of each rewrite agree on data, and
nothing else changes.

Inputs are drawn by ``verify_inputs``, again where one of them has not shown in any result.  Where
plain math became an op, both sides run on another draw too, with rows that overflow any narrower
dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ..config import VerificationError
from ..ops import NAMESPACE
from .canonicalize import kind
from .check_effects import Snapshot, why_not_the_same
from .ranks import RankInterpreter, group_names, num_ranks, run_ranks
from .report import Check
from .rule import Rewrite, Tier
from .subgraph import compute_fake, digest, fake_value, is_alike
from .verify_inputs import MOST_AT_ONCE, draw_inputs, here

_DRAWS_OF_FP8 = 4
_MORE_DRAWS = 3
_SEED = 20_240_229
_SEEDS_A_RANK = 1000
_WIDE_SEEDS, _OTHER_SEEDS = 500, 700
_RTOL = {torch.float64: 2.0**-40, torch.complex128: 2.0**-40}
"""Most that a rewrite may move these dtypes: more would show that it computed in float32."""

_UNSEEN: dict[Any, list[int]] = {}
"""Results of ``_unseen``, by the digest of the original graph, its tier, a seed and inputs."""


@dataclass(frozen=True, eq=False)
class State:
    """A node's fake value, and everything that it depends on."""

    call: tuple[Any, ...]
    values: tuple[Any, ...]

    @staticmethod
    def of(node: fx.Node) -> State:
        call = (node.target, node.args, node.kwargs)
        return State(call, tuple(fake_value(n) for n in (node, *node.all_input_nodes)))

    def is_of(self, node: fx.Node) -> bool:
        """Whether ``node`` is unchanged: the same call on the same values."""
        now = State.of(node)
        pairs = zip(self.values, now.values, strict=True)
        return self.call == now.call and all(old is new for old, new in pairs)


def check_graph(
    gm: fx.GraphModule, *, after: str, known: Mapping[fx.Node, State] | None = None
) -> dict[fx.Node, State]:
    """Lint ``gm`` and recompute fake values: shapes, strides and dtypes must not have changed.

    Returns the state of every node, to be passed as ``known`` to the next check, which skips nodes
    that are still the same.

    Raises:
        VerificationError: names the pass, the node and both values.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise VerificationError(f"pass {after} left a malformed graph: {error}") from error
    known, states = known or {}, {}
    for node in gm.graph.nodes:
        if node not in known or not known[node].is_of(node):
            _check_fake(node, after)
        states[node] = State.of(node)
    return states


def _check_fake(node: fx.Node, after: str) -> None:
    if node.op in ("call_function", "call_method"):
        expected, actual = fake_value(node), _recompute(node, after)
        if not is_alike(expected, actual):
            raise VerificationError(
                f"pass {after} changed {node.format_node()}: {_summary(expected)} became "
                f"{_summary(actual)}"
            )
        if "example_value" in node.meta:
            node.meta["example_value"] = actual  # in the memory in which it lies now


def _recompute(node: fx.Node, after: str) -> Any:
    try:
        return compute_fake(node)
    except Exception as error:
        raise VerificationError(
            f"pass {after} left {node.format_node()}, which does not run: {error}"
        ) from error


def _summary(value: Any) -> Any:
    if isinstance(value, Tensor):
        shape = [str(d) for d in value.shape]
        strides = zip(shape, value.stride(), strict=True)  # those of one element mean nothing
        return (str(value.dtype), shape, [str(s) for size, s in strides if size != "1"])
    if isinstance(value, (list, tuple)):
        return [_summary(v) for v in value]
    return str(value)


def check_nothing_else(
    before: Snapshot, gm: fx.GraphModule, rewrites: Iterable[Rewrite], *, after: str
) -> None:
    """Check that pass ``after`` made its ``rewrites`` as declared, and did nothing else that shows
    in results or memory.

    Raises:
        VerificationError: names the pass and the first difference.
    """
    if reason := why_not_the_same(before, gm, rewrites):
        raise VerificationError(f"pass {after} changed more than its rewrites: {reason}")


def check_rewrite(
    rewrite: Rewrite, *, proven: set[tuple[str, str]], seed: int = _SEED
) -> Check | None:
    """Run both sides on the same random inputs and compare them.  Pairs in ``proven`` are skipped,
    and compared pairs are added to it.  Sides that reduce over ranks run as several ranks, each
    with inputs of its own.

    An input counts as tested once another value of it moves a result by more than the rule may.
    Where one does not, both sides run on more draws; those that never do are named in the check.

    Raises:
        VerificationError: names the rule, site, seed and the two values that differ most.
    """
    key = (digest(rewrite.before.module), digest(rewrite.after.module))
    if key in proven:
        return None
    draws = _DRAWS_OF_FP8 if _makes_fp8(rewrite) else 1
    errors = [e for draw in range(draws) for e in _run_both(rewrite, seed + 100 * draw, wide=False)]
    unseen = _unseen(rewrite, seed, [*range(len(rewrite.before.inputs))])
    for draw in range(draws, draws + _MORE_DRAWS) if unseen else ():
        errors += _run_both(rewrite, seed + 100 * draw, wide=False)
        unseen = _unseen(rewrite, seed + 100 * draw, unseen)
    if _raises_plain_math(rewrite):
        errors += _run_both(rewrite, seed + _WIDE_SEEDS, wide=True)
    proven.add(key)
    max_abs, max_rel = map(max, zip(*errors, strict=True))
    tier, names = rewrite.tier, [rewrite.before.inputs[i].name for i in unseen]
    return Check(rewrite.site, max_abs, max_rel, tier.atol, tier.rtol, seed, names)


def _unseen(rewrite: Rewrite, seed: int, candidates: list[int]) -> list[int]:
    """The candidate inputs that do not matter: another value of one, on every rank, changes neither
    a result of the original graph nor what it writes to memory."""
    key = (digest(rewrite.before.module), rewrite.tier, seed, tuple(candidates))
    if key not in _UNSEEN:
        _UNSEEN[key] = [index for index in candidates if not _shows(rewrite, seed, index)]
    return _UNSEEN[key]


def _shows(rewrite: Rewrite, seed: int, index: int) -> bool:
    module = rewrite.before.module
    groups = group_names([module.graph])
    inputs, others = (
        [draw_inputs(module, first + _SEEDS_A_RANK * rank) for rank in range(num_ranks(groups))]
        for first in (seed, seed + _OTHER_SEEDS)
    )
    if not isinstance(inputs[0][index], Tensor) or _same(inputs[0][index], others[0][index]):
        return True  # a size, or nothing to compare
    wanted = run_ranks(groups, lambda rank, names: _run(module, inputs[rank], names))
    for given, other in zip(inputs, others, strict=True):
        given[index] = other[index]
    changed = run_ranks(groups, lambda rank, names: _run(module, inputs[rank], names))
    at = len(rewrite.before.outputs) + sum(isinstance(v, Tensor) for v in inputs[0][:index])
    for before, after in zip(wanted, changed, strict=True):
        for place, (want, got) in enumerate(zip(before, after, strict=True)):
            if place != at and bool(_beyond(rewrite.tier, want, got).any()):
                return True
    return not _same(changed[0][at], inputs[0][index])


def _same(a: Tensor, b: Tensor) -> bool:
    a, b = (v.contiguous().view(-1).view(torch.uint8) for v in (a, b))
    return torch.equal(a, b)


def _makes_fp8(rewrite: Rewrite) -> bool:
    """Whether an output is FP8, whose rounding hides most differences before it."""
    outputs = tree_leaves([fake_value(node) for node in rewrite.before.outputs])
    return any(isinstance(v, Tensor) and v.dtype == torch.float8_e4m3fn for v in outputs)


def _raises_plain_math(rewrite: Rewrite) -> bool:
    """Whether a rewrite raises plain math, whose dtypes no op has checked yet.  Cosines do not
    count: those of large angles differ between a vector's lanes and its tail."""
    nodes = rewrite.before.module.graph.nodes
    semantic = any(getattr(node.target, "namespace", "") == NAMESPACE for node in nodes)
    return not semantic and not any(kind(node) in ("cos", "sin", "polar") for node in nodes)


def _run_both(rewrite: Rewrite, seed: int, *, wide: bool) -> list[tuple[float, float]]:
    """Run both sides; returns the errors of each output, see ``check_rewrite``."""
    before, after = rewrite.before.module, rewrite.after.module
    groups = group_names([before.graph, after.graph])
    seeds = [seed + _SEEDS_A_RANK * rank for rank in range(num_ranks(groups))]
    inputs = [draw_inputs(before, of_rank, wide=wide) for of_rank in seeds]
    wanted = run_ranks(groups, lambda rank, names: _run(before, inputs[rank], names))
    try:
        found = run_ranks(groups, lambda rank, names: _run(after, inputs[rank], names))
    except Exception as error:
        name = f"rewrite {rewrite.rule} at {rewrite.site}"
        raise VerificationError(f"{name} does not run: {error}") from error
    errors = [(0.0, 0.0)]
    for of_rank, want_all, got_all in zip(seeds, wanted, found, strict=True):
        for index, (want, got) in enumerate(zip(want_all, got_all, strict=True)):
            errors.append(_compare(rewrite, index, want, got, of_rank))
        for index in range(len(rewrite.before.outputs)):
            _compare_memory(rewrite, index, want_all, got_all)
    return errors


class _Filled(RankInterpreter):
    """Runs a graph with new buffers filled: memory that the other side has freed could hold the
    right values."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if isinstance(kwargs.get("device"), torch.device):
            kwargs = {**kwargs, "device": here(kwargs["device"])}
        return args, kwargs

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        if "empty" in name and isinstance(value, Tensor) and value.dtype.is_floating_point:
            value.fill_(torch.nan)
        return value


def _run(module: fx.GraphModule, inputs: list[Any], groups: Mapping[str, str]) -> list[Tensor]:
    """Run the module as the rank that knows its process groups as ``groups``.  Returns its results,
    then its inputs, which it may have written to."""
    values = [v.clone() if isinstance(v, Tensor) else v for v in inputs]
    with torch.no_grad():
        outputs: list[Tensor] = _Filled(module.graph, groups).run(*values)
    return [*outputs, *(v for v in values if isinstance(v, Tensor))]


def _compare_memory(
    rewrite: Rewrite, index: int, before: list[Tensor], after: list[Tensor]
) -> None:
    """Check that an output shares memory with the same outputs and inputs on both sides, since a
    write to one is a write to the other."""

    def sharing(values: list[Tensor]) -> list[int]:
        storages = [value.untyped_storage()._cdata for value in values]
        return [i for i, storage in enumerate(storages) if storage == storages[index]]

    if sharing(before) != sharing(after):
        raise VerificationError(
            f"rewrite {rewrite.rule} at {rewrite.site}: of outputs, then inputs, numbers "
            f"{sharing(after)} share the memory of output {index}, before {sharing(before)}"
        )


def _compare(
    rewrite: Rewrite, index: int, want: Tensor, got: Tensor, seed: int
) -> tuple[float, float]:
    """The largest absolute and relative differences between finite values."""
    tier = rewrite.tier
    name = f"rewrite {rewrite.rule} at {rewrite.site}, output {index}"
    if want.shape != got.shape or want.dtype != got.dtype:
        raise VerificationError(
            f"{name}: {want.dtype}{list(want.shape)} became {got.dtype}{list(got.shape)}"
        )
    large = want.numel() > MOST_AT_ONCE and want.is_contiguous() and got.is_contiguous()
    if large and torch.equal(want.view(torch.uint8), got.view(torch.uint8)):
        return 0.0, 0.0  # as of weights, which may have GB
    bad = _beyond(tier, want, got)
    want, got = _comparable(want), _comparable(got)
    rtol = min(tier.rtol, _RTOL.get(want.dtype, tier.rtol))
    if bool(bad.any()):
        error = (want.double() - got.double()).abs()
        worst = int(torch.where(bad, error, -torch.ones_like(error)).argmax())
        raise VerificationError(
            f"{name}: {want.flatten()[worst].item()} became {got.flatten()[worst].item()} at flat "
            f"index {worst} ({int(bad.sum())} of {bad.numel()} values beyond atol={tier.atol}, "
            f"rtol={rtol}; inputs from seed {seed})"
        )
    return largest_errors(want, got)


def _comparable(value: Tensor) -> Tensor:
    """FP8 tensors know no comparison, nor complex numbers an order."""
    if value.dtype.itemsize == 1 and value.dtype.is_floating_point:
        return value.float()
    return torch.view_as_real(value) if value.is_complex() else value


def _beyond(tier: Tier, want: Tensor, got: Tensor) -> Tensor:
    """Where two values of the same shape and dtype differ by more than a tier allows."""
    want, got = _comparable(want), _comparable(got)
    if not want.dtype.is_floating_point or tier.exact:
        return ~((want == got) | (want.isnan() & got.isnan()))
    atol, rtol = (min(most, _RTOL.get(want.dtype, most)) for most in (tier.atol, tier.rtol))
    left, right = _finite(got), _finite(want)
    bad = ~torch.isclose(left, right, atol=atol, rtol=rtol, equal_nan=True)
    if tier.of_row and want.numel():
        largest = want.abs().amax(-1, keepdim=True).double()
        bad &= (want.double() - got.double()).abs() > tier.of_row * largest
    return bad


def _finite(value: Tensor) -> Tensor:
    """Replace infinities by the largest number: the other side may round less and be finite."""
    most = torch.finfo(value.dtype).max
    return value.double().clamp(-most, most)


def largest_errors(want: Tensor, got: Tensor) -> tuple[float, float]:
    """The largest absolute and relative differences of values that are finite and not zero."""
    left, right = want.double().flatten(), got.double().flatten()
    finite = left.isfinite() & right.isfinite()
    error = torch.where(finite, (left - right).abs(), 0.0)
    size = torch.where(finite & (left != 0), left.abs(), 1.0)
    relative = torch.where(left != 0, error / size, 0.0)
    return (float(error.max()), float(relative.max())) if error.numel() else (0.0, 0.0)
