"""The ops ``all_reduce_<norm op>`` sum over ranks and then normalize [and quantize to FP8].

``all_reduce_<norm op>(x, ..., group_name)`` is ``<norm op>(all_reduce(x, group_name), ...)``, for
all six of ``rms_norm``, ``add_rms_norm`` and these with ``_quant_static`` and ``_quant_dynamic``.
Results are those of the norm op; one that returns no ``residual_out`` returns the sum over the
ranks after them, which is the next residual.  Every step rounds as the op that it is made of, so
fusing changes no bit.  ``fuse_all_reduce_norm`` makes calls of these ops; models do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from .add_rms_norm import OP as ADD_RMS_NORM
from .all_reduce import CASES_GROUP, check, sum_flops, sum_over_ranks, wire_bytes
from .quant_norm import ADD_DYNAMIC, ADD_STATIC, DYNAMIC, STATIC
from .rms_norm import OP as RMS_NORM


def all_reduce_before(norm: SemanticOp) -> SemanticOp:
    """``norm`` of the sum over ranks of its first argument, as one op.

    Its signature is that of ``norm`` without defaults, with ``group_name`` as one more argument
    and, unless the sum goes into ``residual_out``, with the sum as one more result.
    """
    signature = inspect.signature(norm.reference, eval_str=True)
    returns_sum = "residual" not in signature.parameters

    def results(normed: Any, total: Tensor) -> tuple[Tensor, ...]:
        made = (normed,) if isinstance(normed, Tensor) else tuple(normed)
        return (*made, total) if returns_sum else made

    def reference(*args: Any) -> tuple[Tensor, ...]:
        x, *rest, group_name = args
        total = sum_over_ranks(x, group_name)
        return results(norm.reference(total, *rest), total)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        x, *rest, group_name = args
        check(x, group_name)
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        return results(norm.fake(total, *rest), total)

    def cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
        for case in norm.cases(dtype, device, gen):
            given = dict(zip(signature.parameters, case.args, strict=False))
            args = (given.get(p.name, p.default) for p in signature.parameters.values())
            yield Case(case.label, (*args, CASES_GROUP))

    def cost(desc: OpDesc) -> Cost:
        alone, x = norm.cost(desc), desc["x"]
        written = x.nbytes if returns_sum else 0
        return Cost(alone.bytes + written + wire_bytes(x), alone.flops + sum_flops(x))

    group = inspect.Parameter("group_name", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
    returned = signature.return_annotation
    tensors = 1 if returned is Tensor else len(returned.__args__)
    reference.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(default=p.empty) for p in signature.parameters.values()] + [group],
        return_annotation=tuple[(Tensor,) * (tensors + returns_sum)],  # type: ignore[misc]
    )
    return SemanticOp(
        name=f"all_reduce_{norm.name}",
        reference=reference,
        fake=fake,
        cases=cases,
        cost=cost,
        implementations=(
            Implementation("native", reference, norm.implementation("native").supports),
        ),
        dtypes=norm.dtypes,
        tolerances=norm.tolerances,
    )


NORMS = (RMS_NORM, STATIC, DYNAMIC, ADD_RMS_NORM, ADD_STATIC, ADD_DYNAMIC)
OPS = tuple(all_reduce_before(norm) for norm in NORMS)
