"""Replaces every semantic op of a graph by an implementation under another op name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from ... import ops
from ...passes import fake_value
from .check_kernels import check_kernels, unfit
from .tune import Tuner


class LoweringError(RuntimeError):
    """A semantic op is not listed, or none of its implementations fits the call."""


def lower(
    gm: fx.GraphModule,
    *,
    hand_kernels: bool,
    kernels: Mapping[str, str],
    sm: int,
    csrc: bool | None = None,
    tuner: Tuner | None = None,
) -> Counter[str]:
    """Lower ``gm`` in place; returns how often each choice, as printed, was made.

    Args:
        hand_kernels: prefer Triton and CUDA kernels; otherwise what Inductor can fuse.
        kernels: op name -> implementation that must be used.
        sm: compute capability of the target, such as 90; 0 without a GPU.
        csrc: whether the target has the kernels of csrc; None: as this machine.
        tuner: measures which implementation is fastest; without it each op's own order holds.

    Raises:
        UserError: ``kernels`` names what does not exist or does not fit its call.
        LoweringError: names op, call and the reasons.
    """
    check_kernels(kernels)
    choices: Counter[str] = Counter()
    for node in gm.graph.nodes:
        namespace, _, name = getattr(node.target, "_name", "").partition("::")
        if namespace != ops.NAMESPACE:
            continue
        op = ops.BY_NAME.get(name)
        if op is None:
            raise LoweringError(f"{node.format_node()}: {name} is not in ops.ALL_OPS")
        args: Any = fx.node.map_arg(node.args, fake_value)
        desc = op.describe(args, sm=sm, csrc=csrc)
        try:
            choice = ops.choose(
                op,
                desc,
                inline_first=not hand_kernels,
                override=kernels.get(name, ""),
                order=tuner.order(op, desc, args) if tuner else (),
            )
        except ops.NoImplementationError as error:
            if name in kernels:
                raise unfit(name, kernels[name], error) from error
            raise LoweringError(str(error)) from error
        node.target = op.overload(choice.name)
        choices[str(choice)] += 1
    gm.recompile()
    return choices
