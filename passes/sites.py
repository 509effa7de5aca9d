"""Most passes share one loop: they look at every node, and replace each site or report why not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
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


def read_elsewhere(node: fx.Node, readers: Collection[fx.Node]) -> str:
    """The reason not to fuse if another node reads a value that would disappear, else ""."""
    others = [user for user in node.users if user not in readers]
    return f"{node.name} is also read by {others[0].name}" if others else ""
