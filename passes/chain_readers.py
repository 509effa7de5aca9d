"""Reads the stages of a chain in a graph, one at a time: what follows the last value of a chain.

A reader is given the chain as far as it is read and the call that takes its value.  It returns the
``Read`` of one stage, or None if the call is no such stage, or raises ``Miss`` with the reason why
the chain is cut there.  ``READERS`` has them all; a stage from outside brings its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..ops.chain.lowbit import why_not_read
from ..ops.chain.row_stages import Add, AddNorm, Norm, Scale
from ..ops.chain.stages import Act, AllReduce, Experts, Linear, Stage
from ..ops.experts.moe import Call as ExpertsCall
from ..ops.norm.gated_act import GATED_ACTS
from ..ops.norm.norm import Norm as Axes, norm_axes
from .canonicalize import is_dense
from .fuse_add_norm import ADDS, why_not_summed
from .fuse_gated_linear import linear_args, why_not_packed
from .rule import is_call, writes_shared
from .sites import Miss, op_name, read_elsewhere
from .subgraph import fake_value

QUANTIZE = torch.ops.fw.quant_fp8_dynamic.default
_ALL_REDUCE = torch.ops.fw.all_reduce.default
MOE = torch.ops.fw.fused_moe.default
_PRODUCTS = (
    *(operator.mul, operator.imul, torch.mul, "mul", "mul_"),
    *(torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor),
)
_ACTS = {op.overload(): key for key, op in GATED_ACTS.items() if key[1] in ("", "dynamic")}


@dataclass(frozen=True)
class Reading:
    """A chain as far as it is read.

    Attributes:
        x, residual: what the chain is given; ``residual`` is None before the first add.
        stages, operands: read so far; ``operands`` are nodes, in order.
        nodes: the nodes that the chain replaces.
        value: the node of the last stage's result, or of its FP8 values, which have a ``scale`` for
            each group of ``group_size`` columns.
        totals: nodes that take the sum of the residual stream.
        group: the process group over which it sums.
        joints: the nodes of norms, activations, sums and experts among ``nodes``, each with the
            number of its stage.
    """

    x: fx.Node
    value: fx.Node
    residual: Any = None
    stages: tuple[Stage, ...] = ()
    operands: tuple[Any, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    scale: Any = None
    group_size: int | None = None
    totals: tuple[fx.Node, ...] = ()
    group: str | None = None
    joints: tuple[tuple[fx.Node, int], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """In which layers are summed."""
        value: torch.dtype = fake_value(self.x).dtype
        return value

    def grown(self, read: Read) -> Reading:
        """The chain with one more stage."""
        names, nodes = tuple(read.operands), tuple(read.operands.values())
        return replace(
            self,
            value=read.value,
            scale=read.scale,
            group_size=read.group_size,
            stages=(*self.stages, read.stage(names)),
            operands=(*self.operands, *nodes),
            nodes=(*self.nodes, *read.nodes),
            residual=read.residual if self.residual is None else self.residual,
            totals=read.totals or self.totals,
            group=read.group or self.group,
            joints=(*self.joints, *((node, len(self.stages)) for node in read.joints)),
        )


@dataclass(frozen=True)
class Read:
    """One stage as it is found.

    Attributes:
        stage: makes the stage of the names of its operands.
        operands: nodes by name.
        nodes: what it consists of: all that reads the chain's value, and the rest of the stage.
        value, scale, group_size: its result.
        joints: which of its nodes are a norm, an activation, a sum or experts.
        residual, totals: of a stage that adds to the residual stream.
        group: over which it sums.
    """

    stage: Callable[[tuple[str, ...]], Stage]
    operands: dict[str, Any]
    nodes: Sequence[fx.Node]
    value: fx.Node
    scale: Any = None
    group_size: int | None = None
    joints: Sequence[fx.Node] = ()
    residual: Any = None
    totals: tuple[fx.Node, ...] = ()
    group: str | None = None


Reader = Callable[[Reading, fx.Node], "Read | None"]


def named(stage: type[Stage], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The operands of a stage that are given, of arguments by name."""
    return {name: arguments[name] for name in stage.takes() if arguments[name] is not None}


def items(node: fx.Node, index: int) -> list[fx.Node]:
    """The nodes that take one result of a call."""
    return [user for user in node.users if user.args[1] == index]


def _one_item(node: fx.Node, index: int) -> fx.Node:
    found = items(node, index)
    if len(found) != 1:
        raise Miss(f"the result of {op_name(node)} is read {len(found)} times")
    return found[0]


def why_read_elsewhere(chain: Reading, nodes: Sequence[Any]) -> str:
    """Why the chain's value cannot disappear, or an empty string: it is read beside these nodes, is
    not what the chain is given, and no sum that it hands out."""
    kept = chain.value is chain.x or chain.value in chain.totals
    return "" if kept else read_elsewhere(chain.value, nodes)


def why_not_stored(layer: Mapping[str, Any]) -> str:
    """Why a layer is in no chain because of how its weight is stored, or an empty string."""
    if (stored := layer["weight_format"]) is None:
        return ""
    reason = why_not_read(stored, int(fake_value(layer["x"]).shape[-1]))
    return reason and f"a weight is stored as {stored!r}: {reason}"


def read_linear(chain: Reading, node: fx.Node) -> Read | None:
    """A linear layer, behind a quantization by scales of its own x or by those of the chain."""
    nodes: list[Any] = []
    values, scale, group_size = chain.value, chain.scale, chain.group_size
    if is_call(node, QUANTIZE) and scale is None:
        values, scale = _one_item(node, 0), _one_item(node, 1)
        group_size = node.args[1]  # type: ignore[assignment]
        nodes = [node, values, scale]
        node = _only_reader(values)
    layer = linear_args(node)
    if layer is None or layer["x"] is not values:
        return None
    nodes.append(node)
    if reason := why_not_stored(layer):
        raise Miss(reason)
    if layer["out_scale"] is not None:
        raise Miss("the layer behind it quantizes by a static scale")
    if layer["x_scale"] is not scale:
        raise Miss("the layer is FP8 and its x has a static scale, for which there is no kernel")
    if reason := why_read_elsewhere(chain, nodes):
        raise Miss(reason)
    for value in (values, scale) if values is not chain.x else ():
        if value is not None and (reason := read_elsewhere(value, nodes)):
            raise Miss(reason)
    if scale is not None:
        if layer["out_dtype"] != chain.dtype:
            raise Miss(
                f"the layer makes {layer['out_dtype']}, where the chain began in {chain.dtype}"
            )
        if not group_size and tuple(fake_value(layer["weight_scale"]).shape)[1:] != (1,):
            raise Miss("the weight of the layer has scales of blocks, its x one a token")
    elif fake_value(node).dtype != chain.dtype:
        raise Miss(
            f"the layer makes {fake_value(node).dtype}, where the chain began in {chain.dtype}"
        )
    tensors = named(Linear, layer)
    activation, stored = layer["activation"], layer["weight_format"]
    return Read(
        lambda names: Linear(
            tensors=names, activation=activation, group_size=group_size, weight_format=stored
        ),
        tensors,
        nodes,
        node,
    )


def _only_reader(value: fx.Node) -> Any:
    readers = list(value.users)
    if len(readers) != 1:
        raise Miss(f"{len(readers)} nodes read what is quantized, not one linear layer")
    return readers[0]


def read_add_norm(chain: Reading, node: fx.Node) -> Read | None:
    """The add of the residual stream with its norm, which may sum over ranks or quantize."""
    axes = norm_axes(node.target)
    if axes is None or not axes.add:
        return None
    args: list[Any] = [*node.args, None, None]
    x, residual, weight, eps, how = args[:5]
    if x is residual:
        raise Miss("what a layer makes is added to itself")
    if chain.value not in (x, residual):
        return None
    if axes.reduce and x is not chain.value:
        raise Miss("the residual comes from a linear layer, what is summed over ranks does not")
    other: Any = residual if x is chain.value else x
    if chain.residual is not None and other not in chain.totals:
        raise Miss("what it is added to is not the sum that the chain made")
    if axes.quant.startswith("int8"):
        raise Miss("the layer multiplies int8, for which no chain has a kernel")
    if axes.quant == "static":
        raise Miss("the layer is FP8 and its x has a static scale, for which there is no kernel")
    group = str(node.args[-1]) if axes.reduce else None
    if chain.group not in (None, group) and axes.reduce:
        raise Miss("two process groups sum in it")
    if fake_value(other).dtype != chain.dtype:
        raise Miss(f"the residual is {fake_value(other).dtype}, what is added {chain.dtype}")
    if reason := why_read_elsewhere(chain, [node]):
        raise Miss(reason)
    for total in chain.totals:
        if reason := read_elsewhere(total, [node]):
            raise Miss(f"the sum of {reason}")
    values, last = _one_item(node, 0), 2 if axes.quant else 1
    scale = _one_item(node, 1) if axes.quant else None
    totals = tuple(items(node, last))
    group_size = how if axes.quant else None
    operands, constants = _norm_of(axes, weight, eps, None if axes.quant else how)
    return Read(
        lambda names: AddNorm(
            tensors=names, **constants, group_size=group_size, reduce=axes.reduce
        ),
        operands,
        [node, *items(node, 0), *([scale] if scale else []), *totals],
        values,
        scale,
        group_size,
        [node],
        other,
        totals,
        group,
    )


def _norm_of(axes: Axes, weight: Any, eps: Any, how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the operands, the constants) of the stage of a norm; ``how`` is its bias or offset."""
    operands = {"weight": weight}
    if axes.center and how is not None:
        operands["bias"] = how
    return operands, {"eps": eps, "offset": None if axes.center else how, "center": axes.center}


def read_norm(chain: Reading, node: fx.Node) -> Read | None:
    """The norm of what a layer made, before the residual is added."""
    axes = norm_axes(node.target)
    if axes is None or not axes.is_alone:
        return None
    args: list[Any] = [*node.args, None]
    x, weight, eps, how = args[:4]
    if x is not chain.value or fake_value(x).dim() != fake_value(chain.x).dim():
        return None
    if reason := why_read_elsewhere(chain, [node]):
        raise Miss(reason)
    operands, constants = _norm_of(axes, weight, eps, how)
    return Read(
        lambda names: Norm(tensors=names, **constants), operands, [node], node, joints=[node]
    )


def read_all_reduce(chain: Reading, node: fx.Node) -> Read | None:
    """A sum over ranks that is no part of a norm."""
    if not is_call(node, _ALL_REDUCE):
        return None
    if reason := why_read_elsewhere(chain, [node]):
        raise Miss(reason)
    group = str(node.args[1])
    if chain.group not in (None, group):
        raise Miss("two process groups sum in it")
    return Read(
        lambda names: AllReduce(tensors=names), {}, [node], node, joints=[node], group=group
    )


def read_act(chain: Reading, node: fx.Node) -> Read | None:
    """A gated activation of what a layer made, which may quantize."""
    key = _ACTS.get(node.target)
    if key is None or node.args[0] is not chain.value:
        return None
    activation, quant = key
    if reason := why_read_elsewhere(chain, [node]):
        raise Miss(reason)
    if not quant:
        if reason := why_not_packed(node, "linear layers"):
            raise Miss(reason)
        return Read(
            lambda names: Act(tensors=names, activation=activation), {}, [node], node, joints=[node]
        )
    size: Any = node.args[1]
    values, scale = _one_item(node, 0), _one_item(node, 1)
    return Read(
        lambda names: Act(tensors=names, activation=activation, group_size=size),
        {},
        [node, values, scale],
        values,
        scale,
        size,
        [node],
    )


def read_experts(chain: Reading, node: fx.Node) -> Read | None:
    """A mixture of experts that reads the norm alone."""
    if not is_call(node, MOE) or node.args[0] is not chain.value:
        return None
    call = ExpertsCall(*list[Any](node.args))
    if call.gate_up_input_scale is not None or call.down_input_scale is not None:
        raise Miss("the experts' inputs have static scales: they are quantized for any tokens")
    if call.first_expert is not None:
        raise Miss("the experts are spread over ranks, whose sum is in between")
    if call.shared is not None:
        raise Miss("a shared expert reads the norm too")
    if reason := why_read_elsewhere(chain, [node]):
        raise Miss(reason)
    tensors = named(Experts, call._asdict())
    constants = {name: getattr(call, name) for name in Experts.constants()}
    return Read(
        lambda names: Experts(tensors=names, **constants), tensors, [node], node, joints=[node]
    )


def read_scale(chain: Reading, node: fx.Node) -> Read | None:
    """A product with a number."""
    if not is_call(node, *_PRODUCTS) or len(node.args) != 2 or node.args[0] is not chain.value:
        return None
    factor: Any = node.args[1]
    if type(factor) not in (int, float) or node.kwargs:
        return None
    value = fake_value(node)
    if not isinstance(value, Tensor):  # a product of sizes
        return None
    if value.dtype != chain.dtype or not is_dense(value) or writes_shared(node):
        return None
    is_sum = chain.value in chain.totals
    # No site, so no reason: the chain ends before a product of what others read too.
    if why_read_elsewhere(chain, [node]) or (is_sum and read_elsewhere(chain.value, [node])):
        return None
    totals = (node,) if is_sum else ()
    return Read(
        lambda names: Scale(tensors=names, factor=float(factor)), {}, [node], node, totals=totals
    )


def read_add(chain: Reading, node: fx.Node) -> Read | None:
    """An add of the residual stream whose sum goes to no norm."""
    if not is_call(node, *ADDS) or chain.value not in node.args or chain.totals:
        return None
    if reason := why_not_summed(node) or why_read_elsewhere(chain, [node]):
        raise Miss(reason)
    left, right = node.args
    if left is right:
        raise Miss("what a layer makes is added to itself")
    other: Any = right if left is chain.value else left
    if chain.dtype != fake_value(other).dtype:
        raise Miss(f"the residual is {fake_value(other).dtype}, what is added {chain.dtype}")
    return Read(lambda names: Add(tensors=names), {}, [node], node, residual=other, totals=(node,))


READERS: list[Reader] = [
    read_linear,
    read_add_norm,
    read_act,
    read_experts,
    read_norm,
    read_all_reduce,
    read_scale,
]
"""Every reader, in the order in which they are asked."""
ROW_READERS = (read_norm, read_scale, read_add_norm, read_add)
"""The readers of all that the kernel of rows computes."""
