"""Says where in the model a node was traced, from Dynamo's module stack, as a module's path."""

from __future__ import annotations

import re
from functools import cache

from torch import fx

STACK = "nn_module_stack"


def module_path(node: fx.Node) -> str:
    """The innermost module that computed ``node``, such as ``layers.3.mlp.down``; "" for the model
    itself, and if it is not known."""
    stack = node.meta.get(STACK)
    return _path(next(reversed(stack.values()))[0]) if stack else ""


@cache
def _path(text: str) -> str:
    """``L['self'].layers.3.mlp`` or ``L['self']._modules['layers']._modules['3']``, as a path."""
    names: list[str] = re.findall(r"\w+", re.sub(r"^L\['\w+'\]", "", text))
    return ".".join(name for name in names if name != "_modules")
