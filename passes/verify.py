"""Proves rewrites: the graph stays well formed, both sides of each rewrite agree on data, and
nothing else changes.

Inputs are drawn from the placeholders' fake values with dynamic sizes made small; a few entries
are outliers, some rows small and some large, because differences of rounding, of a norm's eps and
of attention's soft cap hide among standard normals.  Where plain math became an op, both sides run
on a second draw too, with rows that overflow any narrower dtype.
"""

from __future__ import annotations

import math
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
from .rule import Rewrite
from .subgraph import compute_fake, digest, fake_value, is_alike

_DYNAMIC_SIZE = 5
_DRAWS_OF_FP8 = 4
_SEED = 20_240_229
_SEEDS_A_RANK = 1000
_MOST_AT_ONCE = 1 << 24
_WIDE_SEEDS = 500
_OF_ROWS = (1.0, 2.0**-20, 2.0**-10, 2.0**4)
_LARGE = {torch.float16: 2.0**8, torch.float64: 2.0**130, torch.complex128: 2.0**130}
"""Scales of large rows: float16 goes beyond FP8, doubles beyond float32, others (2^17) beyond
float16."""
_RTOL = {torch.float64: 2.0**-40, torch.complex128: 2.0**-40}
"""Most that a rewrite may move these dtypes: more would show that it computed in float32."""


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

    Raises:
        VerificationError: names the rule, site, seed and the two values that differ most.
    """
    key = (digest(rewrite.before.module), digest(rewrite.after.module))
    if key in proven:
        return None
    draws = _DRAWS_OF_FP8 if _makes_fp8(rewrite) else 1
    errors = [e for draw in range(draws) for e in _run_both(rewrite, seed + 100 * draw, wide=False)]
    if _raises_plain_math(rewrite):
        errors += _run_both(rewrite, seed + _WIDE_SEEDS, wide=True)
    proven.add(key)
    max_abs, max_rel = map(max, zip(*errors, strict=True))
    tier = rewrite.tier
    return Check(rewrite.site, max_abs, max_rel, tier.atol, tier.rtol, seed)


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
    inputs = [_inputs(before, of_rank, wide=wide) for of_rank in seeds]
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


def _inputs(module: fx.GraphModule, seed: int, *, wide: bool) -> list[Any]:
    """Data for the placeholders of ``module``, the side before; the side after runs on it too."""
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    values = {}
    for i, node in enumerate(placeholders):
        values[node] = _input(fake_value(node), seed=seed + i)
        if wide:
            values[node] = _spread(values[node], i)
    target = torch.ops.fw.paged_attention.default
    for attention in module.graph.find_nodes(op="call_function", target=target):
        nodes = attention.args[1:5]
        if all(node in values for node in nodes):
            values.update(zip(nodes, _attention_inputs(*(values[n] for n in nodes)), strict=True))
    return list(values.values())


def here(device: torch.device) -> torch.device:
    """The device to compute on in place of ``device``: the CPU if that is a GPU that is missing."""
    absent = device.type == "cuda" and not torch.cuda.is_available()
    return torch.device("cpu") if absent else device


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


def _input(value: Any, *, seed: int) -> Any:
    """Like ``random_value``, but vectors of integers can index memory that is written to: they are
    distinct, in random order, and start at -1, the slot of a padding row."""
    made = random_value(value, seed=seed)
    if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 1:
        order = torch.randperm(len(made), generator=torch.Generator().manual_seed(seed))
        return (order - 1).to(made)
    return made


def _attention_inputs(cache: Tensor, table: Tensor, seq_lens: Tensor, starts: Tensor) -> Any:
    """The arguments that must agree: one query a sequence, lengths from 1 to what a table holds."""
    num_seqs, capacity = table.shape[0], table.shape[1] * cache.shape[2]
    lengths = 1 + torch.arange(num_seqs) * (capacity - 1) // max(num_seqs - 1, 1)
    return cache, table, lengths.to(seq_lens), torch.arange(num_seqs + 1).to(starts)


def _spread(value: Any, first: int) -> Any:
    """Scale the rows of a tensor, or the elements of a vector, by turns, starting with scale
    ``first``.  Large values overflow the next narrower dtype."""
    floats = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    if not floats or value.dtype.itemsize == 1:
        return value
    scales = [*_OF_ROWS, _LARGE.get(value.dtype, 2.0**17)]
    shape = value.shape[:-1] if value.dim() > 1 else value.shape
    turns = torch.arange(first, first + math.prod(shape), device=value.device) % len(scales)
    wide = torch.complex128 if value.is_complex() else torch.float64
    row_scales = torch.tensor(scales, dtype=wide, device=value.device)[turns].view(shape)
    scaled = value * (row_scales[..., None] if value.dim() > 1 else row_scales)
    if value.dtype == torch.float16:
        scaled = scaled.clamp(-512, 512)
    return scaled.to(value.dtype)


def random_value(value: Any, *, seed: int, size: int = _DYNAMIC_SIZE) -> Any:
    """Data of a fake value's shape and dtype, in which dynamic sizes are ``size``.  Floats are
    standard normals with a few outliers, in all bits of their dtype, and tokens also have small and
    large rows; complex numbers have two such parts; integers are 0 or 1.  Anything but tensors and
    sizes is kept."""
    if not isinstance(value, Tensor):
        return _size(value, size) if isinstance(value, torch.SymInt) else value
    shape = [d if isinstance(d, int) else _size(d, size) for d in value.shape]
    device = here(value.device)
    gen = torch.Generator(device=device).manual_seed(seed)
    if value.dtype.is_complex:
        part = torch.empty_like(value, dtype=value.dtype.to_real())
        parts = [random_value(part, seed=one, size=size) for one in (seed, seed + _SEED)]
        return torch.complex(parts[0].double(), parts[1].double()).to(value.dtype)
    if not value.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=gen, device=device).to(value.dtype)
    if math.prod(shape) > _MOST_AT_ONCE:
        return _large(shape, value.dtype, gen)
    drawn = torch.float64 if value.dtype == torch.float64 else torch.float32
    data = torch.randn(shape, generator=gen, device=device, dtype=drawn)
    outliers = torch.rand(shape, generator=gen, device=device) < 0.01
    if 1 < len(shape) < 4 and isinstance(value.shape[0], torch.SymInt):
        data[1::4] *= 2.0**-10  # tokens so small that a norm's eps decides
        data[2::4] *= 2.0**-20  # or, of their products, does
        data[3::4] *= 2.0**4  # and so large that attention's soft cap does
    return torch.where(outliers, data * 50, data).to(value.dtype)


def _size(value: torch.SymInt, size: int) -> int:
    """The value of an expression of sizes when each of them is ``size``."""
    expression = value.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, size)))


def _large(shape: list[int], dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """Draw a weight in parts: a whole embedding in float32, with its outliers, takes many GB."""
    made = torch.empty(shape, dtype=dtype, device=gen.device)
    for part in made.view(-1).split(_MOST_AT_ONCE):
        data = torch.randn(part.shape, generator=gen, device=gen.device)
        few = torch.randint(0, len(part), (len(part) // 100,), generator=gen, device=gen.device)
        data[few] *= 50
        part.copy_(data)
    return made


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
    large = want.numel() > _MOST_AT_ONCE and want.is_contiguous() and got.is_contiguous()
    if large and torch.equal(want.view(torch.uint8), got.view(torch.uint8)):
        return 0.0, 0.0  # as of weights, which may have GB
    rtol = min(tier.rtol, _RTOL.get(want.dtype, tier.rtol))
    if want.dtype.itemsize == 1 and want.dtype.is_floating_point:
        want, got = want.float(), got.float()  # FP8 tensors know no comparison
    if want.is_complex():
        want, got = torch.view_as_real(want), torch.view_as_real(got)
    if not want.dtype.is_floating_point or tier.exact:
        bad = ~((want == got) | (want.isnan() & got.isnan()))
    else:
        atol = min(tier.atol, _RTOL.get(want.dtype, tier.atol))
        left, right = _finite(got), _finite(want)
        bad = ~torch.isclose(left, right, atol=atol, rtol=rtol, equal_nan=True)
        if tier.of_row and want.numel():
            largest = want.abs().amax(-1, keepdim=True).double()
            bad &= (want.double() - got.double()).abs() > tier.of_row * largest
    if bool(bad.any()):
        error = (want.double() - got.double()).abs()
        worst = int(torch.where(bad, error, -torch.ones_like(error)).argmax())
        raise VerificationError(
            f"{name}: {want.flatten()[worst].item()} became {got.flatten()[worst].item()} at flat "
            f"index {worst} ({int(bad.sum())} of {bad.numel()} values beyond atol={tier.atol}, "
            f"rtol={rtol}; inputs from seed {seed})"
        )
    return largest_errors(want, got)


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
