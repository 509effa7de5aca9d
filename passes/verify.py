"""Proof of rewrites: the graph stays well formed, and both sides of each rewrite agree on data.

Inputs are drawn from the placeholders' fake values with dynamic sizes made small; a few entries
are outliers, because rounding differences hide among standard normals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .rule import Rewrite
from .subgraph import compute_fake, digest, fake_value

_DYNAMIC_SIZE = 5
_SEED = 20_240_229


class VerificationError(RuntimeError):
    """A pass broke the graph, or a rewrite changed values beyond its tier."""


def check_graph(gm: fx.GraphModule, *, after: str) -> None:
    """Lint ``gm`` and recompute every fake value: shapes, strides and dtypes must not have moved.

    Raises:
        VerificationError: names the pass, the node and both values.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise VerificationError(f"pass {after} left a malformed graph: {error}") from error
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        expected, actual = fake_value(node), _recompute(node, after)
        if _summary(expected) != _summary(actual):
            raise VerificationError(
                f"pass {after} changed {node.format_node()}: {_summary(expected)} became "
                f"{_summary(actual)}"
            )


def _recompute(node: fx.Node, after: str) -> Any:
    try:
        return compute_fake(node)
    except Exception as error:
        raise VerificationError(
            f"pass {after} left {node.format_node()}, which does not run: {error}"
        ) from error


def _summary(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), [str(d) for d in value.shape], [str(d) for d in value.stride()])
    if isinstance(value, (list, tuple)):
        return [_summary(v) for v in value]
    return str(value)


def check_rewrite(rewrite: Rewrite, *, proven: set[tuple[str, str]], seed: int = _SEED) -> None:
    """Run both sides on the same random inputs; ``proven`` holds the pairs already compared.

    Raises:
        VerificationError: names the rule, site, seed and the two values that differ most.
    """
    key = (digest(rewrite.before.module), digest(rewrite.after.module))
    if key in proven:
        return
    placeholders = [n for n in rewrite.before.module.graph.nodes if n.op == "placeholder"]
    before = _run(rewrite.before.module, placeholders, seed)
    after = _run(rewrite.after.module, placeholders, seed)
    for index, (want, got) in enumerate(zip(before, after, strict=True)):
        _compare(rewrite, index, want, got, seed)
    proven.add(key)


def _run(module: fx.GraphModule, placeholders: list[fx.Node], seed: int) -> list[Tensor]:
    values = {n: _input(fake_value(n), seed=seed + i) for i, n in enumerate(placeholders)}
    inputs = dict(zip(module.graph.find_nodes(op="placeholder"), placeholders, strict=True))
    target = torch.ops.fw.paged_attention.default
    for attention in module.graph.find_nodes(op="call_function", target=target):
        nodes = [inputs[n] for n in attention.args[1:5]]
        values.update(zip(nodes, _attention_inputs(*(values[n] for n in nodes)), strict=True))
    with torch.no_grad():
        outputs: list[Tensor] = module(*values.values())
    mutated = [v for n, v in values.items() if isinstance(v, Tensor)]
    return [*outputs, *mutated]


def _input(value: Any, *, seed: int) -> Any:
    """Like ``random_value``, but that vectors of integers are fit to index memory that is written
    to: in random order, distinct and from -1 up, which is the slot of a padding row."""
    made = random_value(value, seed=seed)
    if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 1:
        order = torch.randperm(len(made), generator=torch.Generator().manual_seed(seed))
        return (order - 1).to(made)
    return made


def _attention_inputs(cache: Tensor, table: Tensor, seq_lens: Tensor, starts: Tensor) -> Any:
    """The arguments that must agree: one query a sequence, of every length that the table holds."""
    num_seqs, capacity = table.shape[0], table.shape[1] * cache.shape[2]
    lengths = 1 + torch.arange(num_seqs) * (capacity - 1) // max(num_seqs - 1, 1)
    return cache, table, lengths.to(seq_lens), torch.arange(num_seqs + 1).to(starts)


def random_value(value: Any, *, seed: int, size: int = _DYNAMIC_SIZE) -> Any:
    """Data of a fake value's shape and dtype, dynamic sizes made ``size``: floats are standard
    normals with a few outliers, integers 0 or 1; anything but tensors and sizes is kept."""
    if not isinstance(value, Tensor):
        return size if isinstance(value, torch.SymInt) else value
    shape = [d if isinstance(d, int) else size for d in value.shape]
    gen = torch.Generator(device=value.device).manual_seed(seed)
    if not value.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=gen, device=value.device).to(value.dtype)
    data = torch.randn(shape, generator=gen, device=value.device, dtype=torch.float32)
    outliers = torch.rand(shape, generator=gen, device=value.device) < 0.01
    return torch.where(outliers, data * 50, data).to(value.dtype)


def _compare(rewrite: Rewrite, index: int, want: Tensor, got: Tensor, seed: int) -> None:
    tier = rewrite.tier
    name = f"rewrite {rewrite.rule} at {rewrite.site}, output {index}"
    if want.shape != got.shape or want.dtype != got.dtype:
        raise VerificationError(
            f"{name}: {want.dtype}{list(want.shape)} became {got.dtype}{list(got.shape)}"
        )
    if want.dtype.itemsize == 1 and want.dtype.is_floating_point:
        want, got = want.float(), got.float()  # FP8 tensors know no comparison
    if not want.dtype.is_floating_point or tier.exact:
        bad = ~((want == got) | (want.isnan() & got.isnan()))
    else:
        bad = ~torch.isclose(got, want, atol=tier.atol, rtol=tier.rtol, equal_nan=True)
    if bool(bad.any()):
        error = (want.double() - got.double()).abs()
        worst = int(torch.where(bad, error, -torch.ones_like(error)).argmax())
        raise VerificationError(
            f"{name}: {want.flatten()[worst].item()} became {got.flatten()[worst].item()} at flat "
            f"index {worst} ({int(bad.sum())} of {bad.numel()} values beyond atol={tier.atol}, "
            f"rtol={tier.rtol}; inputs from seed {seed})"
        )
