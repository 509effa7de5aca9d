"""Numbers values by what computes them, so that two graphs can be compared without data.

This is value numbering (Alpern, Wegman, Zadeck, 1988).  Calls that change nothing have the number
of their argument.  Which calls those are is decided here and not by ``cleanup``, which is checked
by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .rule import is_call, memory, writes
from .subgraph import fake_value, layout

_CASTS = ("to", "float", "double", "half", "bfloat16", "type_as")
_COPIES = (*_CASTS, "reshape", "flatten", "contiguous", "clone", torch.reshape, torch.flatten)
_SIZE = "size"
_LOSSLESS = {
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


@dataclass
class ValueNumbering:
    """Gives terms numbers: equal terms have equal numbers."""

    numbers: dict[Any, int] = field(default_factory=dict)
    widened: dict[int, tuple[int, torch.dtype]] = field(default_factory=dict)
    """Number of a cast that loses nothing -> the number and the dtype of what it casts."""

    def number(self, term: Any) -> int:
        return self.numbers.setdefault(term, len(self.numbers))

    def of(self, node: fx.Node, args: dict[fx.Node, int]) -> int:
        """The number of ``node``, whose arguments have the numbers ``args``."""
        value = fake_value(node)
        if isinstance(value, torch.SymInt):
            return self.number((_SIZE, str(value)))
        if node.op == "placeholder":
            return self.number((node.op, node.name))
        if changes_nothing(node):
            return args[node.args[0]]  # type: ignore[index]
        term = (node.op, node.target, key_of(node.args, args), key_of(node.kwargs, args))
        if not is_call(node, *_CASTS) or not isinstance(node.args[0], fx.Node):
            return self.number(term)
        return self._of_cast(term, node.args[0], value, args)

    def _of_cast(self, term: Any, source: fx.Node, value: Tensor, args: dict[fx.Node, int]) -> int:
        """The number of a cast.  A cast back from a wider type is the original value, since nothing
        was rounded between."""
        old = fake_value(source)
        if not isinstance(old, Tensor) or str(old.stride()) != str(value.stride()):
            return self.number(term)
        narrow, dtype = self.widened.get(args[source], (0, None))
        if dtype == value.dtype:
            return narrow
        number = self.number(term)
        if (old.dtype, value.dtype) in _LOSSLESS and old.device == value.device:
            self.widened[number] = (args[source], old.dtype)
        return number


def key_of(arg: Any, numbers: dict[fx.Node, int]) -> Any:
    """A hashable form of ``arg`` in which nodes are replaced by their ``numbers``."""
    if isinstance(arg, fx.Node):
        return ("node", numbers[arg])
    if isinstance(arg, (list, tuple)):
        return tuple(key_of(item, numbers) for item in arg)
    if isinstance(arg, dict):
        return tuple((name, key_of(item, numbers)) for name, item in sorted(arg.items()))
    if isinstance(arg, slice):
        return ("slice", *(key_of(part, numbers) for part in (arg.start, arg.stop, arg.step)))
    return (type(arg).__name__, str(arg))


def changes_nothing(node: fx.Node) -> bool:
    """Whether the node returns what its first argument holds, in the same shape, strides and dtype;
    it may be a copy."""
    source: Any = node.args[0] if node.args else None
    if not node.op.startswith("call_") or not isinstance(source, fx.Node) or writes(node):
        return False
    old, new = fake_value(source), fake_value(node)
    if layout(old) is None or layout(old) != layout(new):
        return False
    same_place = str(old.storage_offset()) == str(new.storage_offset())
    return (same_place and memory(source) == memory(node)) or is_call(node, *_COPIES)
