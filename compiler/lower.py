"""Replace every semantic op by an implementation under another op name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import fx

from .. import ops
from ..passes import fake_value


class LoweringError(RuntimeError):
    """A semantic op was left, or none of its implementations fits the call."""


def lower(
    gm: fx.GraphModule, *, hand_kernels: bool, kernels: Mapping[str, str], sm: int
) -> Counter[str]:
    """Lower ``gm`` in place; returns how often each choice (printed) was made.

    Args:
        hand_kernels: prefer Triton and CUDA kernels; otherwise what Inductor can fuse.
        kernels: op name -> implementation that must be used.
        sm: compute capability of the target, such as 90; 0 without a GPU.

    Raises:
        LoweringError: names op, call and the reasons.
    """
    unknown = set(kernels) - set(ops.BY_NAME)
    if unknown:
        known = ", ".join(ops.BY_NAME)
        raise LoweringError(f"kernels: unknown op {sorted(unknown)}; known: {known}")
    choices: Counter[str] = Counter()
    for node in gm.graph.nodes:
        namespace, _, name = getattr(node.target, "_name", "").partition("::")
        if namespace != ops.NAMESPACE:
            continue
        op = ops.BY_NAME.get(name)
        if op is None:
            raise LoweringError(f"{node.format_node()}: {name} is not in ops.ALL_OPS")
        desc = op.describe(fx.node.map_arg(node.args, fake_value), sm=sm)
        try:
            choice = ops.choose(
                op, desc, inline_first=not hand_kernels, override=kernels.get(name, "")
            )
        except ValueError as error:
            raise LoweringError(str(error)) from error
        node.target = op.overload(choice.implementation)
        choices[str(choice)] += 1
    gm.recompile()
    return choices
