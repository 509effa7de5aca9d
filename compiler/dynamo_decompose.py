"""Decomposes the rewritten graph of the Dynamo backend into the ops that Inductor lowers.

Results keep the strides of eager mode, as views of the model were legal for those.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from ..passes.canonicalize import is_dense


class _InStridesOfEager(fx.Interpreter):
    """Runs a graph whose ops are decomposed, and lays out results as eager mode does.

    A decomposition may choose other strides than its op: that of ``cat`` with one operand that is
    not empty keeps those of the operand.  A view that was legal for eager's strides would fail on
    them, and ``as_strided`` would read other elements.
    """

    def run_node(self, n: fx.Node) -> Any:
        result, expected = super().run_node(n), n.meta.get("example_value")
        if n.op != "call_function" or not isinstance(result, Tensor):
            return result
        if not isinstance(expected, Tensor) or _strides(result) == _strides(expected):
            return result
        order = sorted(range(expected.dim()), key=lambda d: -_hint(expected.stride()[d]))
        if not is_dense(expected.permute(order)):
            return result  # a view, of a tensor that has been laid out
        dense = result.permute(order).clone(memory_format=torch.contiguous_format)
        return dense.permute([order.index(d) for d in range(len(order))])


def _strides(value: Tensor) -> list[str]:
    """Strides as text, which makes no guards, of dimensions that have more than one element."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return [str(stride) for size, stride in pairs if str(size) != "1"]


def _hint(size: int | torch.SymInt) -> int:
    """The number that a size has in the inputs that are traced; makes no guards."""
    return size if isinstance(size, int) else int(size.node.hint)


def decompose(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph in the ops that Inductor lowers, native implementations opened.

    Inductor replaces random ops by its own before it calls us, but finds only decomposed ones.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    run = _InStridesOfEager(gm).run
    trace = make_fx(run, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)
    with torch.no_grad(), enable_python_dispatcher(), detect_fake_mode(inputs) or nullcontext():
        traced: fx.GraphModule = trace(*inputs)
    (old,), (new,) = (graph.find_nodes(op="output") for graph in (gm.graph, traced.graph))
    # Which results the caller sees, in which strides.
    new.meta.update(old.meta)
    traced.graph.eliminate_dead_code()  # items of higher-order ops that Inductor does not give
    replace_random_passes(traced)
    traced.recompile()
    return traced
