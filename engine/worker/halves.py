"""Runs a large step of several ranks in two halves, one of which computes while the other's sums
travel between the ranks.

A step is cut at its middle token, within a sequence if need be: to the second half, the tokens of
the first are context, as an earlier chunk of a prompt is.  (vLLM calls this dual batch overlap.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...compiler.run.program import Program
from ...config import Per, StepSchema
from ...ops import Turns
from ..messages.step import Ints

_ALIGNED = 128
"""A cut lies at a multiple of so many tokens: GEMMs have no tile that is partly empty because of
it, and views of the second half begin where kernels like."""


@dataclass(frozen=True)
class Cut:
    """Where a step is cut.

    Attributes:
        token: the first of the second half.
        end: sequences that the first half has tokens of.
        start: the first sequence that the second half has tokens of: ``end - 1`` if the cut is
            within it, else ``end``.
        left: tokens of that sequence in the second half, if the cut is within it, else 0.
    """

    token: int
    end: int
    start: int
    left: int


def middle(query_lens: Ints) -> Cut:
    """The cut that is nearest below the middle of a step of twice ``_ALIGNED`` tokens or more."""
    ends = np.cumsum(query_lens)
    token = int(ends[-1]) // (2 * _ALIGNED) * _ALIGNED
    last = int(np.searchsorted(ends, token))
    left = int(ends[last]) - token
    return Cut(token, last + 1, last + (left == 0), left)


def divide(
    inputs: Mapping[str, Tensor], schema: StepSchema, cut: Cut
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs of both halves.  Those of tokens are views, and so are the first half's tables;
    the others are in fresh memory, where kernels find the alignment that they count on."""
    first, second = dict(inputs), dict(inputs)
    for field in schema.program:
        value = inputs.get(field.name)
        if value is None:
            continue
        if field.per is Per.TOKEN:
            first[field.name], second[field.name] = value[: cut.token], value[cut.token :]
        elif field.per is Per.BOUNDARY:
            first[field.name] = value[: cut.end + 1].clamp(max=cut.token)
            second[field.name] = (value[cut.start :] - cut.token).clamp_(min=0)
        else:
            first[field.name], second[field.name] = value[: cut.end], value[cut.start :].clone()
    if cut.left:
        first["seq_lens"] = first["seq_lens"].clone()
        first["seq_lens"][-1] -= cut.left
    return first, second


class Halves:
    """Runs steps of ``least_tokens`` tokens or more in halves; 0: none.  ``count`` says how many
    ran so."""

    def __init__(self, least_tokens: int, schema: StepSchema, device: torch.device) -> None:
        self.least_tokens = least_tokens
        self.count = 0
        self._schema = schema
        self._turns = Turns(device) if least_tokens else None

    def report(self) -> dict[str, int]:
        """Plain data: least tokens of a step in halves, and the steps so far."""
        return {"least_tokens": self.least_tokens, "steps": self.count}

    def run(self, program: Program, inputs: Mapping[str, Tensor], query_lens: Ints) -> Tensor:
        """Run a step without a graph, in halves if it is large; returns the logits, a row a
        sequence."""
        num_tokens = int(query_lens.sum())
        if self._turns is None or num_tokens < max(self.least_tokens, 2 * _ALIGNED):
            return program.run(inputs)
        self.count += 1
        cut = middle(query_lens)
        first, second = divide(inputs, self._schema, cut)
        heads, tails = self._turns.run(lambda: program.run(first), lambda: program.run(second))
        return torch.cat([heads[: cut.start], tails])
