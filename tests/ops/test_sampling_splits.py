"""How the sampling kernels divide rows among programs must not show in their results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright import ops


@pytest.fixture(params=["native", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def randn(device: torch.device | str, *shape: int, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen).to(device)


@pytest.mark.parametrize("num_seqs", [1, 4, 5, 70])
@pytest.mark.parametrize("vocab", [1, 1000, 4099])
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
