"""Penalties, token counts, log-probabilities and argmax against plain Python models, however rows
are divided among programs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.ops.oracles import check_case


@pytest.fixture(params=["native", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def randn(device: torch.device | str, *shape: int, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen).to(device)


def penalized_row(
    row: list[float], prompt: list[int], output: list[int], rep: float, freq: float, pres: float
) -> list[float]:
    result = list(row)
    for token in set(prompt) | set(output):
        result[token] = result[token] / rep if result[token] > 0 else result[token] * rep
    for token in output:
        result[token] -= freq
    for token in set(output):
        result[token] -= pres
    return result


def test_penalties_match_a_plain_model_while_tokens_are_counted(
    implementation: str, device: torch.device
) -> None:
    vocab, max_num_seqs, steps = 61, 5, 12
    prompts = [[1, 2, 2, 60], [5], [0, 7, 9, 11]]
    slot_of = [4, -1, 2]  # the middle request has no penalties
    parameters = [(1.3, 0.4, 0.7), (1.0, 0.0, 0.0), (0.8, -0.5, 1.1)]
    storage = torch.zeros((max_num_seqs + 1, vocab), dtype=torch.int32, device=device)
    counts = storage[1:]  # what is written at slot -1 shows up in storage[0]
    prompt_mask = torch.zeros((max_num_seqs, vocab), dtype=torch.bool, device=device)
    counts[0], prompt_mask[0] = 3, True  # a foreign slot, which nothing may read or change
    for prompt, slot in zip(prompts, slot_of, strict=True):
        if slot >= 0:
            prompt_mask[slot, prompt] = True
    slots = torch.tensor(slot_of, dtype=torch.int32, device=device)
    rep, freq, pres = torch.tensor(parameters, device=device).T.contiguous()
    penalize = ops.BY_NAME["apply_penalties"].overload(implementation)
    count = ops.BY_NAME["count_tokens"].overload(implementation)
    outputs: list[list[int]] = [[], [], []]
    for step in range(steps):
        logits = 2 * randn(device, 3, vocab, seed=step)
        expected = [
            penalized_row(row, prompts[i], outputs[i], *parameters[i])
            for i, row in enumerate(logits.tolist())
        ]
        penalize(logits, counts, prompt_mask, slots, rep, freq, pres)
        torch.testing.assert_close(logits.cpu(), torch.tensor(expected), atol=1e-5, rtol=1e-5)
        tokens = logits[:, :8].argmax(-1).int()  # of few, so that tokens repeat
        count(tokens, slots, counts)
        for output, token in zip(outputs, tokens.tolist(), strict=True):
            output.append(token)
    assert max(counts[2].max().item(), counts[4].max().item()) > 1
    assert storage[0].sum() == 0
    assert (counts[0] == 3).all() and counts[1].sum() == counts[3].sum() == 0


def test_counting_a_whole_output_at_once_rebuilds_the_state(
    implementation: str, device: torch.device
) -> None:
    output = torch.tensor([3, 3, 0, 9, 3, -1], dtype=torch.int32, device=device)
    counts = torch.zeros((3, 10), dtype=torch.int32, device=device)
    ops.BY_NAME["count_tokens"].overload(implementation)(
        output, torch.ones(6, dtype=torch.int32, device=device), counts
    )
    assert counts.tolist() == [[0] * 10, [1, 0, 0, 3, 0, 0, 0, 0, 0, 1], [0] * 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [40, 4097])
def test_logprobs_match_their_oracle(
    implementation: str, device: torch.device, dtype: torch.dtype, vocab: int
) -> None:
    logits = (5 * randn(device, 7, vocab)).to(dtype)  # bfloat16 rounding makes ties
    token_ids = torch.tensor([0, vocab - 1, 3, 5, 7, 11, 13], dtype=torch.int32, device=device)
    token_ids[3] = logits[3].argmax()
    op = ops.BY_NAME["token_logprobs"]
    case = ops.Case("ties", (logits, token_ids, 20))
    check_case(op, case, dtype, op.overload(implementation))


def test_logprobs_of_masked_rows(implementation: str, device: torch.device) -> None:
    logits = torch.full((2, 300), -torch.inf, device=device)
    logits[0, 299] = -5.0
    token_ids = torch.tensor([299, 4], dtype=torch.int32, device=device)
    op = ops.BY_NAME["token_logprobs"].overload(implementation)
    chosen, rank, top, top_ids = op(logits, token_ids, 2)
    assert chosen.tolist() == [0.0, -math.inf]
    assert rank.tolist() == [1, 5]
    assert top.tolist() == [[0.0, -math.inf], [-math.inf, -math.inf]]
    assert top_ids.tolist() == [[299, 0], [0, 1]]


def test_more_logprobs_than_the_kernel_selects_fall_back_with_a_reason() -> None:
    op = ops.BY_NAME["token_logprobs"]
    args = (torch.zeros(2, 100), torch.zeros(2).int(), 50)
    choice = ops.choose(op, op.describe(args), inline_first=False)
    assert choice.name == "native"
    assert dict(choice.refused)["triton"] == "num_logprobs 50 > 32: one selection round each"


def test_more_logprobs_than_tokens_are_refused(implementation: str, device: torch.device) -> None:
    op = ops.BY_NAME["token_logprobs"].overload(implementation)
    with pytest.raises(ValueError, match="num_logprobs is 12, expected 0 to the vocabulary, 11"):
        op(randn(device, 1, 11), torch.zeros(1, dtype=torch.int32, device=device), 12)


@pytest.mark.parametrize(
    ("num_seqs", "vocab"), [(1, 1), (70, 1), (1, 4099), (4, 1000), (5, 4099), (70, 1000)]
)
def test_argmax_takes_the_lowest_of_ties(
    implementation: str, device: torch.device, num_seqs: int, vocab: int
) -> None:
    op = ops.BY_NAME["argmax"].overload(implementation)
    padded = randn(device, num_seqs, vocab + 13, seed=vocab).round().to(torch.bfloat16)
    logits = padded[:, :vocab]  # a row stride that is not the vocabulary
    padded[:, vocab:] = 100.0
    logits[0, vocab // 2 :] = 9.0
    assert op(logits)[0] == vocab // 2
    assert op(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("programs", [1, 7, 1056])
@pytest.mark.parametrize("num_seqs", [2, 5])
def test_results_do_not_depend_on_the_split_of_a_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_seqs: int, programs: int
) -> None:
    from fusewright.ops.launches import sampling

    # 1: a program loops over the blocks of its row, as in large batches; 1056: a block each.
    monkeypatch.setattr(sampling, "_TARGET_PROGRAMS", programs)
    vocab = 9001
    logits = (2 * randn(device, num_seqs, vocab)).to(torch.bfloat16)  # with ties
    logits[0] = 0.0
    logits[0, 700::1024] = 5.0
    split = sampling.split_rows(num_seqs, vocab)
    assert split.block * split.num_blocks * split.splits >= vocab
    assert split.splits <= split.lanes and (split.splits == 1) == (programs == 1)
    rows = torch.arange(num_seqs, device=device)
    temperature, seeds, positions = rows * 0.9, rows - 1, rows.int() + 40
    calls = {
        "argmax": (logits,),
        "sample": (logits, temperature, None, None, None, seeds, positions),
        "token_logprobs": (logits, rows.int() * 1000 + 700, 4),
    }
    for name, args in calls.items():
        op = ops.BY_NAME[name]
        expected, result = op.overload("native")(*args), op.overload("triton")(*args)
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)
    assert ops.BY_NAME["argmax"].overload("triton")(logits)[0] == 700
