"""Finds every Triton kernel variant that a program may launch, without running it.

Launches are pure functions of shapes, so the calls of a lowered graph are described on meta
tensors at representative sizes and their variants collected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx

from ... import ops
from ...config import CompileConfig
from ...passes import fake_value
from ..capture.source import OutsideCalls
from ..capture.trace import Traced

Sizes: TypeAlias = Mapping[str, int]


def step_sizes(num_tokens: int, num_seqs: int) -> dict[str, int]:
    """A size for each thing that a dynamic dimension counts."""
    return {
        "num_tokens": num_tokens,
        "num_seqs": num_seqs,
        "num_seqs_plus_1": num_seqs + 1,
        "num_blocks": 3,
        "max_blocks": 5,
        "num_slots": 7,
    }


def program_variants(traced: Traced) -> set[ops.Variant]:
    seen: set[Any] = set()
    variants: set[ops.Variant] = set()
    for num_tokens, num_seqs in ops.representative_sizes():
        sizes = step_sizes(num_tokens, num_seqs)
        for node in traced.gm.graph.nodes:
            if (launches := launches_of(node)) is None:
                continue
            fakes: Any = fx.node.map_arg(node.args, fake_value)
            args = tuple(on_meta(arg, traced.dims, sizes) for arg in fakes)
            call = (str(node.target), tuple(_facts(arg) for arg in args))
            if call not in seen:
                seen.add(call)
                variants |= ops.variants_of(launches(*args)[0])
    return variants


def outside_variants(
    calls: OutsideCalls, config: CompileConfig, *, device: str, sm: int
) -> set[ops.Variant]:
    """The variants of ops that run outside of the program (sampling, feeding tokens)."""
    variants: set[ops.Variant] = set()
    for num_tokens, num_seqs in ops.representative_sizes():
        for name, args in calls(num_tokens, num_seqs):
            op = ops.BY_NAME[name]
            desc = replace(op.describe(args, sm=sm), device=device)
            choice = ops.choose(
                op,
                desc,
                inline_first=not config.hand_kernels,
                override=dict(config.kernels).get(name, ""),
            )
            launches = choice.kernel.launches
            if launches is not None:
                variants |= ops.variants_of(launches(*args)[0])
    return variants


def launches_of(node: fx.Node) -> Callable[..., tuple[list[ops.Launch], Any]] | None:
    """The function that describes the launches of a lowered node that calls a Triton kernel."""
    namespace, _, name = getattr(node.target, "_name", "").partition("::")
    prefix = f"{ops.NAMESPACE}_"
    if not namespace.startswith(prefix) or name not in ops.BY_NAME:
        return None
    return ops.BY_NAME[name].implementation(namespace.removeprefix(prefix)).launches


def on_meta(value: Any, dims: Mapping[str, str], sizes: Sizes) -> Any:
    """A fake value with every symbol replaced: tensors without data, integers."""
    if isinstance(value, Tensor):
        shape = [_size(dim, dims, sizes) for dim in value.shape]
        stride = [_size(step, dims, sizes) for step in value.stride()]
        offset = _size(value.storage_offset(), dims, sizes)
        span = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        storage = torch.empty(max(span, 1), dtype=value.dtype, device="meta")
        return storage.as_strided(shape, stride, offset)
    if isinstance(value, torch.SymInt):
        return _size(value, dims, sizes)
    if isinstance(value, (list, tuple)):
        return [on_meta(each, dims, sizes) for each in value]
    return value


def _size(value: Any, dims: Mapping[str, str], sizes: Sizes) -> int:
    if not isinstance(value, torch.SymInt):
        return int(value)
    expression = value.node.expr
    if expression.is_Symbol:  # most sizes are, and a lookup is far cheaper than a substitution
        return sizes[dims[str(expression)]]
    known: dict[sympy.Symbol, int] = {s: sizes[dims[str(s)]] for s in expression.free_symbols}
    return int(expression.subs(known))


def _facts(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.dtype, tuple(arg.shape), arg.stride(), arg.storage_offset()
    return tuple(map(_facts, arg)) if isinstance(arg, list) else arg
