"""``apply_penalties`` applies repetition, frequency and presence penalties to logits, in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, nothing, triton
from ..launches import penalties


@dispatched
def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    slots: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
) -> None:
    """Penalize tokens seen before, in place.

    A token of the prompt or output has its logit divided by ``repetition_penalty`` when positive,
    else multiplied by it (Keskar et al., 2019, CTRL, section 4.1); then ``frequency_penalty`` times
    its count in the output is subtracted, and ``presence_penalty`` if it occurs there at all
    (OpenAI's definitions).

    Args:
        logits: [num_seqs, vocab] float32, mutated.
        output_counts: [max_num_seqs, vocab] int32, occurrences in each slot's output.
        prompt_mask: [max_num_seqs, vocab] bool, whether the slot's prompt has the token.
        slots: [num_seqs] int32, state row of each logits row; -1 leaves that row as it is.
        repetition_penalty: [num_seqs] float32, positive; 1 is neutral.
        frequency_penalty: [num_seqs] float32; 0 is neutral.
        presence_penalty: [num_seqs] float32; 0 is neutral.
    """
    rows = slots.clamp(min=0).long()
    counts = output_counts[rows]
    in_output = counts > 0
    seen = (in_output | prompt_mask[rows]) & (slots >= 0)[:, None]
    repetition = repetition_penalty[:, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    additive = frequency_penalty[:, None] * counts + presence_penalty[:, None] * in_output
    penalized = torch.where(in_output, scaled - additive, scaled)
    logits.copy_(torch.where(seen, penalized, logits))


def _triton_supports(desc: OpDesc) -> str:
    dtype = desc["logits"].dtype
    return "" if dtype == torch.float32 else f"logits are {dtype}, not torch.float32"


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    for num_seqs, vocab in [(1, 40), (6, 1003), (3, 32001)]:
        max_num_seqs = num_seqs + 2

        def uniform(low: float, high: float, n: int = num_seqs) -> Tensor:
            return draw.rand(n) * (high - low) + low

        counts = draw.integers(-4, 4, max_num_seqs, vocab)
        in_prompt = draw.rand(max_num_seqs, vocab) < 0.3
        slots = draw.permutation(max_num_seqs)[:num_seqs].int()
        if num_seqs > 1:
            slots[1] = -1
        repetition = uniform(0.5, 2.0)
        repetition[-1] = 1.0
        yield Case(
            f"{num_seqs} x {vocab}",
            (
                4 * draw.randn(num_seqs, vocab),
                counts.clamp(min=0).int(),
                in_prompt,
                slots,
                repetition,
                uniform(-2.0, 2.0),
                uniform(-2.0, 2.0),
            ),
        )


def _cost(desc: OpDesc) -> Cost:
    logits = desc["logits"]
    state = logits.numel * (desc["output_counts"].dtype.itemsize + 1)
    return Cost(bytes=2 * logits.nbytes + state + 16 * logits.shape[0], flops=6 * logits.numel)


OP = SemanticOp(
    reference=apply_penalties,
    fake=nothing,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(penalties.apply_penalties, _triton_supports),
        Implementation("native", apply_penalties),
    ),
    mutates=("logits",),
    dtypes=(torch.float32,),
)
