"""The chain kernel of rows: norms, a product and the add of the residual, in one Triton launch."""

from __future__ import annotations

from typing import Any

from ..core.launch import Launches, run_all
from ..launches.norm import ADD, MOST_NORMS, NormOf, RowStage, row_stages, too_wide
from .kernels import ChainKernel, Part
from .row_stages import Add, AddNorm, Norm, Scale
from .stages import Operands, Stage, State

_ROW_STAGES = (Norm, Scale, Add, AddNorm)


def row_span(stages: tuple[Stage, ...]) -> int:
    """How many of the first stages one launch computes: at most ``MOST_NORMS`` norms, one product
    and one add."""
    norms = adds = scales = 0
    for at, stage in enumerate(stages):
        norms += isinstance(stage, (Norm, AddNorm))
        adds += isinstance(stage, (Add, AddNorm))
        scales += isinstance(stage, Scale)
        too_many = norms > MOST_NORMS or adds > 1 or scales > 1
        if not isinstance(stage, _ROW_STAGES) or too_many or _why_not(stage):
            return at
    return len(stages)


def _why_not(stage: Stage) -> str:
    if not isinstance(stage, AddNorm):
        return ""
    if stage.reduce:
        return "a sum over ranks comes before its norm"
    return "" if stage.group_size is None else "a norm quantizes"


def _never(stages: tuple[Any, ...]) -> str:
    if not any(isinstance(stage, (Add, AddNorm)) for stage in stages):
        return "nothing is added to the residual"
    if not any(isinstance(stage, (Norm, AddNorm)) for stage in stages):
        return "it has no norm: Inductor fuses the rest"
    return next(filter(None, map(_why_not, stages)), "")


def _row_stages(stage: Stage, operands: Operands) -> list[RowStage]:
    """What a stage is to the kernel."""
    if isinstance(stage, Scale):
        return [float(stage.factor)]
    if isinstance(stage, Add):
        return [ADD]
    assert isinstance(stage, (Norm, AddNorm))
    how = (stage.offset, operands.get("bias"), stage.center)
    norm = NormOf(operands["weight"], float(stage.eps), *how)
    return [ADD, norm] if isinstance(stage, AddNorm) else [norm]


def _launches(part: Part) -> Launches[State]:
    state = part.state
    pairs = zip(part.stages, part.operands, strict=True)
    stages = [each for stage, operands in pairs for each in _row_stages(stage, operands)]
    planned, (out, total) = row_stages(state.x, state.total, stages)
    return planned, state._replace(x=out, total=out if total is None else total)


def _run(part: Part) -> State:
    planned, state = _launches(part)
    run_all(planned)
    return state


ROWS = ChainKernel(
    "norms and the add of rows",
    ((Norm, AddNorm), (Scale, AddNorm), (Norm, Add)),
    _never,
    lambda part, target: too_wide(part.state.total.shape[-1]),
    _run,
    lambda part: ("_rms_norm_kernel",),
    _launches,
    row_span,
)
