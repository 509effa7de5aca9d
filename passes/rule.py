"""Defines the signature of a pass, and ``Context.replace``, the one way to replace nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..ops import NAMESPACE
from .module_paths import STACK
from .report import PassReport
from .subgraph import Subgraph, compute_fake, describe_value, external_inputs, extract, fake_value


@dataclass(frozen=True)
class Tier:
    """How far a rewrite may move its outputs; only zeros promise equal bits.

    ``of_row`` is relative to the largest magnitude in a value's row, for sums in which large terms
    cancel.
    """

    atol: float
    rtol: float
    of_row: float = 0.0

    @property
    def exact(self) -> bool:
        return self.atol == self.rtol == self.of_row == 0.0


EXACT = Tier(0.0, 0.0)
KNOWN = "known_value"


@dataclass(frozen=True)
class Rewrite:
    """Both sides of one replacement, over the same inputs in the same order."""

    rule: str
    site: str
    tier: Tier
    before: Subgraph
    after: Subgraph


@dataclass
class Context:
    """State of one pass over one graph.

    Attributes:
        keep_rewrites: keep both sides of each replacement in ``rewrites``.
        limit: most replacements; None: as many as the rule asks for.
        replaced: names of the sites that were replaced, in order.
    """

    keep_rewrites: bool = False
    rewrites: list[Rewrite] = field(default_factory=list)
    limit: int | None = None
    replaced: list[str] = field(default_factory=list)
    _fakes: dict[Any, Any] = field(default_factory=dict)

    def replace(
        self,
        rule: Rule,
        site: fx.Node,
        old: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        build: Callable[[fx.Graph], Sequence[fx.Node]],
        tier: Tier | None = None,
    ) -> None:
        """Replace ``outputs`` by the nodes that ``build`` makes, which come right before ``site``.

        ``old`` are the matched nodes in graph order, and ``outputs`` those whose values are used
        outside; ``build`` returns their replacements in the same order, and may give them the
        values that they stand for as ``meta[KNOWN]``.  Matched nodes with other users stay.
        ``tier`` is for this rewrite, if it may move its outputs less than its rule.
        """
        if self.limit is not None and len(self.replaced) >= self.limit:
            return
        self.replaced.append(site.name)
        graph = site.graph
        first = site.prev
        with graph.inserting_before(site):
            new_outputs = list(build(graph))
        spare = [fake_value(node) for node in outputs if _is_alone(node)]
        new: list[fx.Node] = []
        node = first.next
        while node is not site:
            # A node that ``build`` copied has the value of the one that it is a copy of.
            known = node.meta.pop(KNOWN, None)
            node.meta["example_value"] = self._fake(node, spare) if known is None else known
            if STACK in site.meta:
                node.meta[STACK] = site.meta[STACK]
            new.append(node)
            node = node.next
        for old_output, new_output in zip(outputs, new_outputs, strict=True):
            if "stack_trace" in old_output.meta:
                new_output.meta["stack_trace"] = old_output.meta["stack_trace"]
            _keep_memory(old_output, new_output)
        if self.keep_rewrites:
            # Matched nodes that the new ones read are computed on both sides.
            new = [*_needed(new, old), *new]
            inputs = external_inputs(list(old))
            inputs += [n for n in external_inputs(new) if n not in inputs]
            self.rewrites.append(
                Rewrite(
                    rule=rule.name,
                    site=site.name,
                    tier=tier or rule.tier,
                    before=extract(old, outputs, inputs),
                    after=extract(new, new_outputs, inputs),
                )
            )
        for old_output, new_output in zip(outputs, new_outputs, strict=True):
            old_output.replace_all_uses_with(new_output)
        for node in reversed(old):
            if not node.users:
                graph.erase_node(node)

    def _fake(self, node: fx.Node, spare: list[FakeTensor]) -> Any:
        """``compute_fake`` with a cache for calls of semantic ops: layers are alike, and a pass
        spends its time on making fakes.  A cached fake is given other memory, if possible that of
        a node that it replaces."""
        target = node.target
        if (same := _unchanged(node)) is not None:
            return fake_value(same)
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
            return compute_fake(node)
        key = (target, _kind(node.args), _kind(tuple(node.kwargs.items())))
        if key in self._fakes:
            return tree_map_only(FakeTensor, partial(_afresh, spare), self._fakes[key])
        return self._fakes.setdefault(key, compute_fake(node))


def _unchanged(node: fx.Node) -> fx.Node | None:
    """x of ``x.detach()`` and of ``x.unsqueeze(0).squeeze(0)``."""
    if is_call(node, "detach"):
        return node.args[0]  # type: ignore[return-value]
    if not is_call(node, "squeeze") or node.args[1:] != (0,):
        return None
    source: Any = node.args[0]
    if not is_call(source, "unsqueeze") or source.args[1:] != (0,):
        return None
    return source.args[0]  # type: ignore[return-value]


def refresh_view(node: fx.Node) -> bool:
    """Compute a view's fake value anew if it does not lie in the memory of what it is a view of,
    which has been replaced; returns whether it did."""
    sources = [arg for arg in node.all_input_nodes if isinstance(fake_value(arg), Tensor)]
    views = node.op == "call_method" or is_call(node, operator.getitem)
    if not views or len(sources) != 1 or not isinstance(fake_value(node), Tensor):
        return False
    if memory(node) <= memory(*sources):
        return False
    value = compute_fake(node)
    if value.untyped_storage()._cdata not in memory(*sources):
        return False
    node.meta["example_value"] = value
    return True


def _needed(new: Sequence[fx.Node], old: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of ``old`` that ``new`` reads, and those that they are computed from, in order."""
    needed: set[fx.Node] = set()
    for node in reversed(old):
        if any(user in needed or user in new for user in node.users):
            needed.add(node)
    return [node for node in old if node in needed]


def _is_alone(node: fx.Node) -> bool:
    """Whether a node makes a tensor in memory that it does not share with its inputs."""
    call: Any = node.args[0] if is_call(node, operator.getitem) else node
    if not isinstance(fake_value(node), FakeTensor):
        return False
    return memory(node).isdisjoint(memory(*call.all_input_nodes))


def _afresh(spare: list[FakeTensor], value: FakeTensor) -> FakeTensor:
    """A fake tensor like this one in other memory: one of ``spare`` if that has one."""
    kind = _kind(value)
    for index, other in enumerate(spare):
        if _kind(other) == kind:
            return spare.pop(index)
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, made, value.device)


def _kind(arg: Any) -> Any:
    """A hashable form of an argument, with all that a fake result depends on."""
    value = fake_value(arg) if isinstance(arg, fx.Node) else arg
    if isinstance(value, Tensor):
        dims = (*value.shape, *value.stride())
        return (
            value.dtype,
            value.device,
            *(getattr(getattr(d, "node", d), "expr", d) for d in dims),
        )
    return tuple(map(_kind, value)) if isinstance(value, (list, tuple)) else str(value)


class Rule(Protocol):
    """A pass.  Its options are bound when it is constructed, and it rewrites the graph in place."""

    name: str
    tier: Tier

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport: ...


_IN_PLACE = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv)


def writes(node: fx.Node) -> bool:
    """Whether a node has an effect besides its result.  fx takes every method for pure, even
    ``x.zero_()``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.op.startswith("call_") and name.endswith("_") and not name.endswith("__")
    in_place |= node.target in _IN_PLACE or bool(node.kwargs.get("inplace"))
    return bool(node.is_impure() or in_place or "out" in node.kwargs)


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node writes to; all of them if that is not known."""
    if not writes(node):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))
        given |= node.kwargs
        marked: Any = [given.get(a.name) for a in node.target._schema.arguments if a.is_write]
    elif "out" in node.kwargs:
        marked = [node.kwargs["out"]]
    else:
        marked = node.all_input_nodes if node.is_impure() else list(node.args[:1])
    return [arg for arg in marked if isinstance(arg, fx.Node)]


def writes_shared(node: fx.Node) -> bool:
    """Whether a node writes to memory that another node may read.  It does not if it overwrites a
    result that nobody else uses, as in ``y = silu(x); y *= z``."""
    if not writes(node):
        return False
    made: Any = node.args[0] if node.args else None
    if isinstance(node.target, torch._ops.OpOverload) or "out" in node.kwargs:
        return True
    if not isinstance(made, fx.Node) or len(made.users) > 1:
        return True
    held = memory(made)
    while made.op != "placeholder":
        sources = [source for source in made.all_input_nodes if held & memory(source)]
        if not sources:
            return False
        # It is a view.  Of a tuple, only items in the same memory matter.
        readers = {user for source in sources for user in source.users}
        whole = all(isinstance(fake_value(source), Tensor) for source in sources)
        if any(user is not made and (whole or held & memory(user)) for user in readers):
            return True
        made = sources[0]
    return True


def written_between(first: fx.Node, last: fx.Node) -> str:
    """A reason not to join two nodes: a node between them writes to memory that they may read."""
    node = first.next
    while node is not last:
        if writes_shared(node):
            return f"{node.name} writes to memory between {first.name} and {last.name}"
        node = node.next
    return ""


def _keep_memory(old: fx.Node, new: fx.Node) -> None:
    """Give the fake value of ``old`` to ``new``, unless ``new`` is a view.  Views of ``old`` stay
    and are known by the memory that they share with it."""
    value = fake_value(new)
    if describe_value(value) != describe_value(fake_value(old)) or not isinstance(value, Tensor):
        return
    sources = [n for n in new.all_input_nodes if isinstance(fake_value(n), Tensor)]
    if memory(new).isdisjoint(memory(*sources)):
        new.meta["example_value"] = fake_value(old)


def memory(*nodes: fx.Node) -> set[int]:
    """The storages that hold the values of these nodes."""
    values = tree_leaves([fake_value(node) for node in nodes])
    return {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)}


def is_call(node: Any, *targets: Any) -> TypeGuard[fx.Node]:
    """Whether ``node`` calls one of these functions, or the method of that name."""
    return (
        isinstance(node, fx.Node)
        and node.op in ("call_function", "call_method")
        and any(node.target is t or (isinstance(t, str) and node.target == t) for t in targets)
    )
