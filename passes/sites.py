"""Most passes share one loop: they look at every node, and replace each site or report why not."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .report import PassReport
from .rule import Context, Tier

Build = Callable[[fx.Graph], Sequence[fx.Node]]


class Miss(Exception):
    """Ends the reading of a site that is not replaced; the message is the reason in the report."""


class NotASite(Exception):
    """Ends the reading of nodes that begin as a site does and compute something else: no pass
    expects to replace them, and no report counts them."""


@dataclass(frozen=True)
class Match:
    """How to replace a site, as ``Context.replace`` takes it; ``old`` has any order.  ``left`` says
    which part of the site stays as it is, and why; "" if none does."""

    at: fx.Node
    old: Collection[Any]
    outputs: Sequence[fx.Node]
    build: Build
    tier: Tier | None = None
    left: str = ""


@dataclass(eq=False)
class SitePass:
    """A pass that replaces every site which it reads.

    Attributes:
        read: reads the site of a node, or returns None where no site is expected; ``Miss`` says why
            a site is not replaced.
    """

    name: str
    tier: Tier
    read: Callable[[fx.Node], Match | None]

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for node in list(gm.graph.nodes):
            name = node.name
            try:
                found = self.read(node)
            except Miss as miss:
                report.miss(name, str(miss))
                continue
            if found is not None:
                old = sorted(set(found.old))
                context.replace(self, found.at, old, found.outputs, found.build, found.tier)
                report.match(name, found.left)
        return report


def call(target: Any, args: Any, count: int = 1) -> Build:
    """Make a call, and nodes of its results if there are several."""

    def build(graph: fx.Graph) -> list[fx.Node]:
        made = graph.call_function(target, args)
        if count == 1:
            return [made]
        return [graph.call_function(operator.getitem, (made, i)) for i in range(count)]

    return build


def op_name(node: Any) -> str:
    """What a node calls, which is the same in every layer; of an item, what made it."""
    if getattr(node, "op", "") == "placeholder":
        return "an input"
    target = getattr(node, "target", node)
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        return op_name(node.args[0])
    schema = getattr(target, "_schema", None)
    if schema:
        return str(schema.name.partition("::")[2])
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


_NUMBERED = re.compile(r"\b\w+(?:_default|_\d+)\b")


def without_nodes(reason: str, calls: Mapping[str, str]) -> str:
    """A reason in which nodes are called by what they call: ``calls`` is by name.  Layers that are
    alike then have the same reasons, and a report tells them once."""
    return _NUMBERED.sub(lambda name: calls.get(name[0], name[0]), reason)


def read_elsewhere(node: fx.Node, readers: Collection[fx.Node]) -> str:
    """The reason not to fuse if another node reads a value that would disappear, else ""."""
    others = [user for user in node.users if user not in readers]
    return f"{op_name(node)} is also read by {op_name(others[0])}" if others else ""
