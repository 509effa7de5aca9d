"""Reads a linear layer of FP8 operands together with the node that quantizes what it multiplies."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import fx

from ..ops.launches.quant import WHOLE_ROW
from .fuse_gated_linear import has_epilogue, linear_args
from .rule import is_call
from .sites import Miss, read_elsewhere
from .subgraph import fake_value


class Fp8Layer(NamedTuple):
    """A linear layer of FP8 operands: its node, its arguments, the node that quantizes its input,
    and the quantized values with their scales."""

    node: fx.Node
    args: dict[str, Any]
    quantizer: fx.Node
    quantized: tuple[fx.Node, fx.Node]

    @classmethod
    def of(cls, node: Any, quantizer: Any, group_size: int = WHOLE_ROW) -> Fp8Layer:
        """The layer that a node is.

        Raises:
            Miss: it is none, or its x is not made by a call of ``quantizer`` with scales for groups
                of this size, or is also read by another node.
        """
        args = linear_args(node)
        if args is None or has_epilogue(args) or args["x_scale"] is None:
            raise Miss(f"{node.name} is not an FP8 linear layer without an epilogue")
        x, scale = args["x"], args["x_scale"]
        source = x.args[0] if is_call(x, operator.getitem) else None
        if not is_call(source, quantizer) or source.args[-1] != group_size:
            name = quantizer._schema.name.partition("::")[2]
            scales = f"a scale for each {group_size} columns" if group_size else "a scale a token"
            raise Miss(f"the x of {node.name} is not quantized by {name}, with {scales}")
        if (reason := read_elsewhere(x, [node])) or (reason := read_elsewhere(scale, [node])):
            raise Miss(reason)
        if not group_size and tuple(fake_value(args["weight_scale"]).shape)[1:] != (1,):
            raise Miss(f"the weight of {node.name} has scales of blocks, not of rows")
        return cls(node, args, source, (x, scale))

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (self.quantizer, *self.quantized, self.node)
