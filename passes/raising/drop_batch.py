"""``drop_batch`` carries a batch of one as no batch: [1, tokens, ...] becomes [tokens, ...].

Models of ``transformers`` compute on batches; ours run all tokens in one row.  Before:
``op(x)``.  After: ``op(x.squeeze(0)).unsqueeze(0)``, and so on from op to op, with dimensions
counted anew, until a view or a selection takes the batch away; ``fold_views`` drops the pairs of
both.  What an op that is not known here reads keeps its batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..canonicalize import argument, in_order, is_pointwise, kind
from ..report import PassReport
from ..rule import EXACT, KNOWN, Context, is_call, memory, writes
from ..sites import NotASite
from ..subgraph import fake_value
from .layer_mark import MARK

_ATEN = torch.ops.aten
_OF_LAST = (
    *(torch.ops.fw.linear.default, torch.ops.fw.rms_norm.default, F.linear, F.layer_norm),
    *(_ATEN.view_as_complex.default, _ATEN.view_as_real.default, MARK),
)
"""Ops over the last dimension of their first argument, the only one that has a batch."""
_REDUCTIONS = (_ATEN.amax.default, _ATEN.amin.default, _ATEN._softmax.default)

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""(target, arguments, keywords) of a call; or the node itself, which needs none."""
Inner = Callable[[Any], Any]
"""Gives the value without its batch of a node that has one."""


class DropBatch:
    """Expected sites: what makes a value without a batch of one with a batch, and every op that
    reads one and is not known to keep the batch apart."""

    name = "drop_batch"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        made, bare = set[fx.Node](), set[fx.Node]()
        for node in list(gm.graph.nodes):
            if _views(node, made):
                made.add(node)
            given = [arg for arg in node.all_input_nodes if arg not in bare]
            reads = node.op.startswith("call_") and any(map(_has_batch, given))
            if not reads and not _views_with_batch(node):
                continue
            name, ends, takes = node.name, not _batched_results(node), _takes_batch(node)
            try:
                new = self._replace(node, context)
                made.update(new)
                bare.update(new if takes else ())
            except NotASite:
                if any(arg in made for arg in node.all_input_nodes):
                    report.miss(name, "it is not known to keep a batch apart")
                continue
            if ends:
                report.match(name)
        return report

    def _replace(self, node: fx.Node, context: Context) -> list[fx.Node]:
        """Replace a node, and return the nodes that take its place.

        Raises:
            NotASite: it is not known what it computes without a batch, or no argument gains by it.
        """
        gains = _views_with_batch(node) or any(map(_adds_batch, node.all_input_nodes))
        if writes(node) or not gains:
            raise NotASite(f"{node.name} reads no value that was given a batch")
        results, new = _batched_results(node), list[fx.Node]()
        outputs = results or [node]
        _call(node, lambda arg: arg)  # raises before anything changes

        def build(graph: fx.Graph) -> list[fx.Node]:
            def inner(arg: fx.Node) -> fx.Node:
                return graph.call_method("squeeze", (arg, 0))

            target, args, kwargs = _call(node, inner)
            how = graph.call_method if isinstance(target, str) else graph.call_function
            made = [how(target, args, kwargs)]
            _know(made[0], _without_batch(fake_value(node)) if results else fake_value(node))
            if outputs[0] is not node:
                made = [
                    graph.call_function(operator.getitem, (made[0], r.args[1])) for r in outputs
                ]
            if results:
                made = [graph.call_method("unsqueeze", (one, 0)) for one in made]
                for one, output in zip(made, outputs, strict=True):
                    _know(one, fake_value(output))
            new.extend(made)
            return made

        context.replace(self, node, in_order([node, *outputs]), outputs, build)
        return new


def _has_batch(node: Any) -> bool:
    value = fake_value(node) if isinstance(node, fx.Node) else None
    return (
        isinstance(value, Tensor)
        and value.dim() > 1
        and isinstance(value.shape[0], int)
        and (value.shape[0] == 1)
    )


def _batched_results(node: fx.Node) -> list[fx.Node]:
    """The node, or its items where it makes several tensors, if they have a batch.  What takes the
    batch away has none, whatever its first size is."""
    if _takes_batch(node):
        return []
    if isinstance(fake_value(node), Tensor):
        return [node] if _has_batch(node) else []
    return [user for user in node.users if is_call(user, operator.getitem)]


def _adds_batch(node: fx.Node) -> bool:
    return kind(node) == "unsqueeze" and argument(node, 1, "dim") == 0


def _takes_batch(node: fx.Node) -> bool:
    if is_call(node, "select"):
        return node.args[1:] == (0, 0)
    if not is_call(node, "squeeze"):
        return False
    source: Any
    source, *dims = node.args
    return dims in ([0], [-fake_value(source).dim()])


def _views_with_batch(node: fx.Node) -> bool:
    """Whether a node is a view with a batch of a tensor without one."""
    if kind(node) != "view" or len(node.args) != 2 or not _has_batch(node):
        return False
    source, sizes = node.args
    return not _has_batch(source) and isinstance(sizes, (list, tuple)) and sizes[0] in (1, -1)


def _views(node: fx.Node, made: set[fx.Node]) -> bool:
    """Whether a node is a view of one of those."""
    sources = [arg for arg in node.all_input_nodes if arg in made]
    held = memory(node)
    return bool(sources and held) and held <= memory(*sources)


def _know(node: fx.Node, value: Any) -> None:
    """Give a node the value that it stands for.  It lies in the memory of the one that it replaces,
    so that views of that are views of it."""
    node.meta[KNOWN] = value


def _without_batch(value: Any) -> Any:
    tensors = [one for one in tree_leaves(value) if isinstance(one, FakeTensor)]
    with tensors[0].fake_mode, torch.inference_mode(tensors[0].is_inference()):
        return tree_map(lambda one: one.squeeze(0), value)


def _call(node: fx.Node, inner: Inner) -> Call:
    """The call that computes a node without its batch.

    Raises:
        NotASite: none is known.
    """
    for rule in (_pointwise, _of_last, _over_dims, _view, _moved, _index, _split, _join):
        if (found := rule(node, inner)) is not None:
            return found
    raise NotASite(f"{node.name} is not known to keep a batch apart")


def _pointwise(node: fx.Node, inner: Inner) -> Call | None:
    """Tensors of as many dimensions as the result have its batch; others are spread over it."""
    if not is_pointwise(node) or not _has_batch(node):
        return None
    num_dims = fake_value(node).dim()

    def taken(arg: Any) -> Any:
        value = fake_value(arg)
        spread = not isinstance(value, Tensor) or value.dim() < num_dims
        return arg if spread else inner(arg)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), taken)
    return node.target, args, kwargs


def _of_last(node: fx.Node, inner: Inner) -> Call | None:
    if not is_call(node, *_OF_LAST):
        return None
    first: Any
    first, *rest = node.args
    if not _has_batch(first) or not _has_batch(node) or any(map(_has_batch_among, rest)):
        return None
    return node.target, (inner(first), *rest), dict(node.kwargs)


def _has_batch_among(arg: Any) -> bool:
    """Whether a tensor of three dimensions or more has a batch: a weight of one row has none."""
    return _has_batch(arg) and fake_value(arg).dim() > 2


def _over_dims(node: fx.Node, inner: Inner) -> Call | None:
    if kind(node) not in ("mean", "sum") and node.target not in _REDUCTIONS:
        return None
    dims = argument(node, 1, "dim")
    if dims is None or "dim" in node.kwargs or not _has_batch(node):
        return None
    many = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    moved: Any = [_shifted(dim, node.args[0]) for dim in many]
    first, _, *rest = node.args
    given = moved if isinstance(dims, (list, tuple)) else moved[0]
    return node.target, (inner(first), given, *rest), dict(node.kwargs)


def _shifted(dim: Any, of: Any) -> int:
    """A dimension, counted without the batch."""
    num_dims = fake_value(of).dim()
    if not isinstance(dim, int) or dim in (0, -num_dims):
        raise NotASite("it works on the batch")
    return dim - 1 if dim > 0 else dim


def _view(node: fx.Node, inner: Inner) -> Call | None:
    """A view or an expansion, to or from a batch or neither."""
    if kind(node) not in ("view", "expand") or len(node.args) != 2:
        return None
    source: Any
    sizes: Any
    source, sizes = node.args
    if _views_with_batch(node):
        return node.target, (source, list(sizes[1:])), {}
    if not isinstance(sizes, (list, tuple)) or not _has_batch(source):
        return None
    if not _has_batch(node):
        return (node.target, (inner(source), sizes), {}) if kind(node) == "view" else None
    if sizes[0] not in (1, -1):
        return None
    if kind(node) == "expand" and len(sizes) != fake_value(source).dim():
        return None
    return node.target, (inner(source), list(sizes[1:])), {}


def _moved(node: fx.Node, inner: Inner) -> Call | None:
    """What moves, adds or takes away dimensions."""
    source: Any = node.args[0] if node.args else None
    if node.kwargs or not _has_batch(source):
        return None
    dims: Any = node.args[1:]
    if is_call(node, "transpose"):
        return "transpose", (inner(source), *(_shifted(dim, source) for dim in dims)), {}
    if is_call(node, "permute") and isinstance(dims[0], (list, tuple)):
        first, *rest = (dim % len(dims[0]) for dim in dims[0])
        return ("permute", (inner(source), [dim - 1 for dim in rest]), {}) if first == 0 else None
    if is_call(node, "unsqueeze"):
        dim: Any = dims[0]
        if dim in (0, -fake_value(source).dim() - 1):
            return None
        return "unsqueeze", (inner(source), dim - 1 if dim > 0 else dim), {}
    if is_call(node, "select") and _takes_batch(node):
        whole = [*fake_value(source).shape[1:]]
        return ("detach", (inner(source),), {}) if whole else None
    if is_call(node, "select"):
        return "select", (inner(source), _shifted(dims[0], source), dims[1]), {}
    if is_call(node, "squeeze") and _takes_batch(node):
        return "detach", (inner(source),), {}
    if is_call(node, "squeeze"):
        return "squeeze", (inner(source), _shifted(dims[0], source)), {}
    return None


def _index(node: fx.Node, inner: Inner) -> Call | None:
    """A slice that takes the batch whole."""
    source: Any = node.args[0] if node.args else None
    if not is_call(node, operator.getitem) or not _has_batch(source) or not _has_batch(node):
        return None
    index = node.args[1]
    if not isinstance(index, tuple) or not all(
        i is Ellipsis or isinstance(i, slice) for i in index
    ):
        return None
    if Ellipsis not in index:
        if index[0] != slice(None):
            return None
        index = index[1:] or (Ellipsis,)
    elif index[0] is not Ellipsis or len(index) > fake_value(source).dim():
        return None
    return operator.getitem, (inner(source), index), {}


def _split(node: fx.Node, inner: Inner) -> Call | None:
    if not is_call(node, "split", "chunk") or not all(map(_has_batch, node.users)):
        return None
    source, sizes, *rest = node.args
    if node.kwargs or not _has_batch(source) or len(_batched_results(node)) != len(node.users):
        return None
    return node.target, (inner(source), sizes, _shifted(rest[0] if rest else 0, source)), {}


def _join(node: fx.Node, inner: Inner) -> Call | None:
    if kind(node) not in ("cat", "stack") or node.kwargs or not _has_batch(node):
        return None
    parts, *rest = node.args
    if not isinstance(parts, (list, tuple)) or not all(map(_has_batch, parts)):
        return None
    dim: Any = rest[0] if rest else 0
    num_dims = fake_value(node).dim()
    if dim in (0, -num_dims):
        return None
    return node.target, ([inner(part) for part in parts], dim - 1 if dim > 0 else dim), {}
