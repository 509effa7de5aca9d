"""Captures a model as one FX graph with Dynamo; a graph break or a specialized size is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from .source import WEIGHTS


class TraceError(RuntimeError):
    """The model could not be captured as one graph that serves every batch."""


@dataclass(frozen=True)
class GraphInput:
    """The source of a graph input: ``weights/<parameter>``, a step input's name, or, for a size,
    the step input and dimension that carry it."""

    name: str
    dim: int | None = None


@dataclass(frozen=True)
class Traced:
    """One captured graph.  ``inputs`` are the sources of its placeholders, in order; ``dims`` maps
    a size symbol (as text) to the name that the caller gave that dynamic dimension."""

    gm: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    dims: Mapping[str, str]


class _Captured(Exception):
    """Stops Dynamo's first call after guards are built, before anything runs."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    named: Mapping[str, Tensor],
    dynamic: Mapping[str, Mapping[int, str]],
) -> Traced:
    """Capture ``model(*args)``.

    Args:
        model: its parameters and buffers become inputs ``weights/<qualified name>``.
        args: example arguments, tensors or pytrees of tensors; nothing is executed on them.
        named: name of every tensor in ``args``.
        dynamic: for a named tensor, its dynamic dimensions and what each counts; dimensions with
            equal example sizes are taken to be equal always.

    Raises:
        TraceError: a graph break, a value that is not an input, or a dynamic size that the model
            made static.
    """
    captured: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        captured.append((gm, example_inputs))

        def stop(*args: Any) -> Any:
            raise _Captured

        return stop

    # Mark everything else static, so that equal sizes share a symbol; mark_dynamic prevents that.
    for tensor in model.buffers():
        torch._dynamo.mark_static(tensor)
    for name, tensor in named.items():
        for dim in set(range(tensor.dim())) - set(dynamic.get(name, ())):
            torch._dynamo.mark_static(tensor, dim)
    torch._dynamo.reset_code(type(model).forward.__code__)  # type: ignore[attr-defined]
    # Turn off automatic_dynamic_shapes: what Dynamo remembers of earlier compilations of this code
    # would give equal sizes different symbols.  A collection of garbage would find none.
    options = {
        "specialize_float": True,
        "automatic_dynamic_shapes": False,
        "run_gc_after_compile": False,
    }
    try:
        with torch.inference_mode(), torch._dynamo.config.patch(options):
            torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(*args)
    except _Captured:
        pass
    except OSError:  # of the folder that Inductor writes to, and not of the model
        raise
    except Exception as error:
        first_line = str(error).strip().splitlines()[0]
        raise TraceError(
            f"{type(model).__name__} cannot be captured as one graph: {first_line}"
        ) from error
    gm, example_inputs = captured[0]
    return _name_inputs(gm, example_inputs, model, named, dynamic)


def _name_inputs(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    model: nn.Module,
    named: Mapping[str, Tensor],
    dynamic: Mapping[str, Mapping[int, str]],
) -> Traced:
    names = {id(t): WEIGHTS + n for n, t in model.named_parameters()}
    names |= {id(t): WEIGHTS + n for n, t in model.named_buffers()}
    names |= {id(tensor): name for name, tensor in named.items()}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sizes: dict[str, GraphInput] = {}
    dims: dict[str, str] = {}
    graph_inputs: list[GraphInput | None] = []
    for node, example in zip(placeholders, example_inputs, strict=True):
        if not isinstance(example, Tensor):
            graph_inputs.append(None)
            continue
        if id(example) not in names:
            raise TraceError(f"graph input {node.name} is neither a weight nor a named step input")
        name = names[id(example)]
        for dim, what in dynamic.get(name, {}).items():
            size = node.meta["example_value"].shape[dim]
            _check_dynamic(size, f"{what} (dimension {dim} of {name})")
            sizes.setdefault(str(size), GraphInput(name, dim))
            dims.setdefault(str(size), what)
        graph_inputs.append(GraphInput(name))
    inputs: list[GraphInput] = []
    for node, source in zip(placeholders, graph_inputs, strict=True):
        if source is None:
            symbol = str(node.meta["example_value"])
            if symbol not in sizes:
                raise TraceError(f"graph input {node.name} = {symbol} is no known size")
            source = sizes[symbol]
        inputs.append(source)
    return Traced(gm, tuple(inputs), dims)


def check_sizes(traced: Traced) -> None:
    """Refuse a graph of which a size has become a number since it was captured: its code would run
    for that one alone.

    Raises:
        TraceError: names the size.
    """
    for node, source in zip(
        traced.gm.graph.find_nodes(op="placeholder"), traced.inputs, strict=True
    ):
        size = node.meta["example_value"]
        if isinstance(size, torch.SymInt):
            number = size.node.shape_env.replace(size.node.expr)
            if number.is_number:
                # Its own symbol: ``expr`` is the number by now.
                what = traced.dims.get(str(size.node._expr), source.name)
                raise TraceError(f"a pass made {what} static: {number}")


def _check_dynamic(size: Any, what: str) -> None:
    """Refuse a size that is fixed, or on which the captured code depends: the program has no guards
    and runs the same code for every size.  What torch asks of sequences, one less than their
    boundaries, is whether they are just one; that code serves one too."""
    if not isinstance(size, torch.SymInt):
        raise TraceError(f"the model made {what} static: {size}")
    env, symbol = size.node.shape_env, size.node.expr
    if env.replace(symbol).is_number:
        raise TraceError(f"the model made {what} static: {env.replace(symbol)}")
    for guard in env.guards:
        just_one = guard.expr == sympy.Ne(symbol - 1, 1)
        if symbol in guard.expr.free_symbols and not just_one:
            raise TraceError(f"the model takes another path unless {what} satisfies {guard.expr}")
