"""``fuse_gated_linear`` attaches an activation to the linear layer whose sums it takes.

Before: ``y = silu_mul(linear(x, w[, b]))`` (or ``gelu_tanh_mul``).  After: ``y = linear(x, w[, b],
activation="silu")``; and so with ReLU, its square and GELU, which gate nothing.  A quantization of
the result by a static scale is attached with a gated one to a layer of FP8 operands; to a layer of
experts (``expert_linear``) the activation alone.  With few rows that is one kernel, which reads the
weight as the linear layer did and writes what is left; with many rows a dense layer runs as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ops.core.gate import PLAIN, Gate, spelled
from ..ops.experts.kernels import ExpertArgs
from ..ops.linear.desc import LinearArgs
from ..ops.norm.gated_act import activation_of
from .canonicalize import kind
from .rule import EXACT, is_call, written_between
from .sites import Match, Miss, SitePass, call, read_elsewhere
from .spellings_act import plain_activation
from .subgraph import fake_value

LINEAR = torch.ops.fw.linear.default
EXPERT_LINEAR = torch.ops.fw.expert_linear.default
_ARGS = LinearArgs._fields
_EXPERT_ARGS = ExpertArgs._fields


def linear_args(node: Any) -> dict[str, Any] | None:
    """The arguments of a call of ``linear`` by name, with defaults; None for anything else."""
    if not is_call(node, LINEAR):
        return None
    given = dict(zip(_ARGS, node.args, strict=False))
    return {**dict.fromkeys(_ARGS), **given, **node.kwargs}


def expert_linear_args(node: Any) -> dict[str, Any] | None:
    """The arguments of a call of ``expert_linear`` by name; None for anything else."""
    if not is_call(node, EXPERT_LINEAR):
        return None
    given = dict(zip(_EXPERT_ARGS, node.args, strict=False))
    return {**dict.fromkeys(_EXPERT_ARGS), **given, **node.kwargs}


def has_epilogue(args: dict[str, Any]) -> bool:
    """Whether something is attached to a layer already."""
    return args["activation"] is not None or args["out_scale"] is not None


def _read(act: fx.Node) -> Match | None:
    """Expected sites: every gated activation that ``fuse_act`` has raised, but for those of which
    ``up`` is of no linear layer, as where Gemma 4 gates each layer's own embedding; and every plain
    activation of a linear layer.

    Exact: gate and up are rounded before the activation, and its result before it is quantized, as
    without fusion.  A kernel may sum in another order than the kernel that it replaces.
    """
    activation = activation_of(act.target)
    if activation is None:
        return _read_plain(act)
    if not all(map(_is_of_layer, act.args[1:2])):
        return None
    if (of_experts := expert_linear_args(act.args[0])) is not None:
        return _read_experts(act, of_experts, activation)
    args = linear_args(act.args[0])
    quant = _static_quantization(act) if args and args["x_scale"] is not None else None
    if reason := _why_not(args, act, quant):
        raise Miss(reason)
    assert args is not None
    args["activation"] = activation
    args["out_scale"] = None if quant is None else quant.args[1]
    last = quant or act
    if args["weight_format"] is None:  # defaults at the end, which a call leaves out
        del args["weight_row_scale"], args["weight_format"], args["weight_zero"]
    return Match(last, [act.args[0], act, last], [last], call(LINEAR, tuple(args.values())))


def _read_plain(node: fx.Node) -> Match | None:
    """Exact but for GELU, of which kernels have several."""
    act = plain_activation(node)
    args = None if act is None else linear_args(act.x)
    if act is None or args is None:
        return None
    inner = [one for one in (act.x, *act.nodes[:-1]) if read_elsewhere(one, act.nodes)]
    if inner:
        raise Miss(read_elsewhere(inner[0], act.nodes))
    is_fp8 = args["weight_scale"] is not None and args["weight_format"] is None
    if has_epilogue(args) or is_fp8:
        raise Miss(f"{act.name} follows {act.x.name}, which is FP8 or has an activation already")
    if reason := written_between(act.x, node):
        raise Miss(reason)
    args["activation"] = act.name
    if args["weight_format"] is None:  # defaults at the end, which a call leaves out
        args = {name: args[name] for name in _ARGS[: 1 + _ARGS.index("activation")]}
    fused = call(LINEAR, tuple(args.values()))
    return Match(node, [act.x, *act.nodes], [node], fused, act.tier)


def _is_of_layer(up: Any) -> bool:
    """Whether a gate's other factor is None or a layer's result, or a part of one."""
    while kind(up) in ("item", "split", "view", "select", "slice"):
        up = up.args[0]
    return up is None or is_call(up, LINEAR, EXPERT_LINEAR)


def _read_experts(act: fx.Node, args: dict[str, Any], activation: str) -> Match:
    """The layer of all experts at once, also of FP8 operands, and with a gate's options: there,
    too, half as much is written and read."""
    layer: Any = act.args[0]
    reason = why_two(act, "layers") or written_between(layer, act)
    if args["activation"] is not None:
        reason = f"{layer.name} has an activation already"
    if len(layer.users) > 1:
        reason = f"{layer.name} has {len(layer.users)} users, not the activation alone"
    if reason:
        raise Miss(reason)
    args["activation"] = spelled(activation, gate_of(act))
    return Match(act, [layer, act], [act], call(EXPERT_LINEAR, without_defaults(*args.values())))


def without_defaults(*args: Any) -> tuple[Any, ...]:
    """Arguments in order, but for None and False at the end, which are their defaults."""
    last = max((place for place, arg in enumerate(args, 1) if arg not in (None, False)), default=0)
    return args[:last]


def gate_of(act: fx.Node) -> Gate:
    """The options of a gated activation's node."""
    return Gate(*act.args[2:])  # type: ignore[arg-type]


def why_two(act: fx.Node, sources: str) -> str:
    """Why not to fuse: gate and up are not two parts of one tensor."""
    return f"gate and up are two {sources}" if any(u is not None for u in act.args[1:2]) else ""


def why_not_packed(act: fx.Node, sources: str) -> str:
    """Why not to fuse: the fused kernels take two halves of one tensor, without attributes."""
    if reason := why_two(act, sources):
        return reason
    how = gate_of(act)
    return "" if how == PLAIN else f"it is {how}, for which there is no fused kernel"


def _static_quantization(act: fx.Node) -> fx.Node | None:
    """The one reader of an activation, if it quantizes by a static scale."""
    reader = next(iter(act.users)) if len(act.users) == 1 else None
    return reader if is_call(reader, torch.ops.fw.quant_fp8_static.default) else None


def _why_not(args: dict[str, Any] | None, act: fx.Node, quant: fx.Node | None) -> str:
    if reason := why_not_packed(act, "linear layers"):
        return reason
    layer: Any = act.args[0]
    if args is None or has_epilogue(args):
        return f"its input comes from {layer.name}, not from a linear layer"
    if len(layer.users) > 1:
        return f"{layer.name} has {len(layer.users)} users, not the activation alone"
    if args["x_scale"] is not None:
        if quant is None:
            return "the result is not quantized by a static scale alone: no launch would be saved"
        if fake_value(args["weight_scale"]).shape[1] > 1:
            return "the layer has scales of blocks, for which there is no fused kernel"
    return written_between(layer, act) or (written_between(act, quant) if quant else "")


FUSE_GATED_LINEAR = SitePass("fuse_gated_linear", EXACT, _read)
