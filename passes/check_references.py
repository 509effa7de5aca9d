"""Checks that the ops a program calls do what they say: each reference against its oracle, on data.

Rewrites are compared with references, and so are kernels; a model that calls an op directly has
nothing else to be compared with.  On a CPU another implementation may run in place of a reference,
such as PyTorch's own attention; it is held against the oracle too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ..config import VerificationError
from ..ops import BY_NAME, NAMESPACE, SemanticOp
from .subgraph import fake_value

_SEED = 20_260_711


def check_references(
    gm: fx.GraphModule, outside: Iterable[tuple[str, Sequence[Any]]] = ()
) -> dict[str, int]:
    """Compare what computes the ops that ``gm`` or the calls ``outside`` of it use with the float64
    oracle of each, on small cases of the dtype used: references, and the implementations that run
    on a CPU in their place.  Collective ops are left to their tests.

    Args:
        outside: name and arguments of each call.

    Returns:
        Number of cases by op and dtype.

    Raises:
        VerificationError: names op, case, tensor and both values.
    """
    checked: dict[str, int] = {}
    for op, args in (*_calls(gm), *((BY_NAME[name], args) for name, args in outside)):
        if not op.collective:
            dtype = _dtype_of(op, args)
            checked[f"{op.name}, {dtype}"] = _check(op.name, dtype)
    return checked


@cache
def _check(name: str, dtype: torch.dtype) -> int:
    """Cases that were compared; once in a process."""
    from ..ops.conformance import ConformanceError
    from ..ops.oracles import check_reference

    try:
        return check_reference(BY_NAME[name], dtype, _SEED)
    except ConformanceError as error:
        raise VerificationError(f"the reference of an op is wrong: {error}") from error
    except Exception as error:
        raise VerificationError(
            f"the reference of op {name} does not run: {type(error).__name__}: {error}"
        ) from error


def _calls(gm: fx.GraphModule) -> Iterator[tuple[SemanticOp, list[Any]]]:
    for node in gm.graph.nodes:
        if getattr(node.target, "namespace", "") == NAMESPACE:
            values = [fake_value(a) if isinstance(a, fx.Node) else a for a in node.args]
            yield BY_NAME[node.target._schema.name.partition("::")[2]], values


def _dtype_of(op: SemanticOp, args: Iterable[Any]) -> torch.dtype:
    """The first dtype among the call's arguments, then its tensors, for which the op has cases;
    else the op's first."""
    values = list(args)
    given = [value for value in values if isinstance(value, torch.dtype)]
    given += [value.dtype for value in values if isinstance(value, Tensor)]
    return next((dtype for dtype in given if dtype in op.dtypes), op.dtypes[0])
