"""Small captured graphs for the pass tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.compiler.capture.dispatch import trace_by_dispatch
from fusewright.compiler.capture.trace import trace


def capture(fn: Callable[..., Any], **inputs: Tensor) -> fx.GraphModule:
    """The graph of ``fn(**inputs)``; dimension 0 is dynamic but in one-dimensional weights."""

    class Positional(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return fn(**dict(zip(inputs, args, strict=True)))

    dynamic = {name: {0: "num_tokens"} for name, value in inputs.items() if not is_weight(value)}
    return trace(Positional(), tuple(inputs.values()), inputs, dynamic).gm


def dispatched(fn: Callable[..., Any], *weights: str, **inputs: Tensor) -> fx.GraphModule:
    """The graph of ``fn(**inputs)`` as of a captured model; dimension 0 is dynamic but in
    ``weights``.  ``run_dispatched`` runs it."""

    class Positional(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return fn(**dict(zip(inputs, args, strict=True)))

    dynamic = {name: {0: "num_tokens"} for name in inputs if name not in weights}
    return trace_by_dispatch(Positional(), tuple(inputs.values()), inputs, dynamic, str).gm


def run_dispatched(gm: fx.GraphModule, num_tokens: int, **inputs: Tensor) -> Tensor:
    """The result of a graph of ``dispatched``."""
    result: Tensor = gm(num_tokens, *inputs.values())[0]
    return result


def aten(fn: Callable[..., Any], **inputs: Tensor) -> fx.GraphModule:
    """The graph of ``fn(**inputs)`` in functional ATen ops, as AOTAutograd has it."""
    called = torch.func.functionalize(lambda *args: fn(**dict(zip(inputs, args, strict=True))))
    made: fx.GraphModule = make_fx(called, tracing_mode="fake")(*inputs.values())
    for node in made.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    made.graph.eliminate_dead_code()
    return made


def in_turn(
    cases: Sequence[Any], dtypes: Sequence[torch.dtype], others: Sequence[Any]
) -> list[Any]:
    """Each case with every dtype and with every one of the ``others``, of which neighbours among
    the dtypes have different ones: a case that narrow types treat alike has all pairs of theirs."""
    return [
        (case, dtype, others[(i + j) % len(others)])
        for i, case in enumerate(cases)
        for j, dtype in enumerate(dtypes)
    ]


def is_weight(value: Tensor) -> bool:
    return value.dim() == 1 and value.is_floating_point()


def hidden(*, dtype: torch.dtype = torch.float32, size: int = 32, tokens: int = 7) -> Tensor:
    return torch.randn(tokens, size).to(dtype)


def targets(gm: fx.GraphModule) -> list[str]:
    """Names of the called functions and methods, in order."""
    return [
        str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method")
    ]
