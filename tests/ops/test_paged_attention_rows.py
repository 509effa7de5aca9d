"""Queries of one sequence that come as neighbouring sequences of one query, as of a step that
verifies drafts: they give what the sequence gives, and K and V are read once for several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import PAGED_ATTENTION as OP
from fusewright.ops.attention.paged_attention_cases import as_rows, batch
from fusewright.ops.attention.paged_attention_cuda import decode
from tests.ops.csrc import csrc_kernels

OUT, LENGTHS = 5, [(5, 21), (1, 22), (3, 300), (11, 19), (1, 0), (2, 2)]
IMPLEMENTATIONS = ["", "native", "triton", "invariant"]


def call(
    device: torch.device, lengths: list[tuple[int, int]], dtype: torch.dtype, **options: Any
) -> tuple[Any, ...]:
    generator = torch.Generator(device=device).manual_seed(1)
    heads = options.pop("heads", (4, 1, 16))
    return batch(dtype, device, generator, lengths, heads, 8, **options)


def run(implementation: str, args: tuple[Any, ...]) -> Tensor:
    out = torch.full_like(args[OUT], 7.0)
    OP.overload(implementation)(*args[:OUT], out, *args[OUT + 1 :])
    return out


def read_by_the_last(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rows' tables lead elsewhere but where a row is told to belong to the next one, so that
    only what the last row's table says gives right results."""
    table, seq_lens, block_size = args[2].clone(), args[3].tolist(), args[1].shape[2]
    for row in range(len(table) - 1):
        own = (seq_lens[row] - 1) // block_size
        if seq_lens[row + 1] == seq_lens[row] + 1 and table[row, own] == table[row + 1, own]:
            table[row, :own] = args[2][-1, 0]  # block 0 of another sequence
    return *args[:2], table, *args[3:]


@pytest.mark.parametrize("options", [{}, {"window": 18, "cap": 5.0}, {"chunk": 9}], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_give_what_their_sequence_gives(
    implementation: str, options: dict[str, Any], device: torch.device
) -> None:
    sinks = torch.float32 if "chunk" in options else None
    args = call(torch.device(device), LENGTHS, torch.float32, sinks=sinks, padding=1, **options)
    rows = as_rows(args)
    assert len(rows[3]) == 23 and len(rows[0]) == 24  # a row of padding stays as it was
    torch.testing.assert_close(run(implementation, rows), run("", args), rtol=2e-5, atol=2e-5)


def test_several_rows_read_keys_and_values_once(device: torch.device) -> None:
    """Four rows of four heads fill a tile of the invariant kernel in float32."""
    rows = as_rows(call(torch.device(device), [(4, 61), (2, 30), (1, 9)], torch.float32))
    elsewhere = read_by_the_last(rows)
    assert not torch.equal(elsewhere[2], rows[2])
    expected = run("", rows)
    torch.testing.assert_close(run("invariant", elsewhere), expected, rtol=2e-5, atol=2e-5)
    assert not torch.allclose(run("", elsewhere), expected, atol=1e-2)


@pytest.mark.parametrize("implementation", ["triton", "invariant"])
def test_other_sequences_are_no_rows(implementation: str, device: torch.device) -> None:
    """Lengths that follow each other are not enough, nor is the block of another sequence."""
    args = call(torch.device(device), [(1, 30), (1, 31), (1, 33), (1, 17)], torch.float32)
    table = args[2].clone()
    table[2, :3] = table[1, :3]  # a shared prefix
    shared = *args[:2], table, *args[3:]
    for case in (args, shared):
        torch.testing.assert_close(run(implementation, case), run("", case), rtol=2e-5, atol=2e-5)


def test_rows_have_the_bits_of_their_sequence_by_the_invariant_kernel(
    device: torch.device,
) -> None:
    args = call(torch.device(device), [(5, 21), (1, 22), (7, 70)], torch.float32)
    together = run("invariant", as_rows(args))
    assert torch.equal(together, run("invariant", args))
    if torch.device(device).type == "cpu":
        return  # interpreted, a tile's matmul is numpy's, which computes rows by their place
    rows = as_rows(args)
    for row in range(len(rows[3])):
        alone = rows[0][row : row + 1], rows[1], rows[2][row : row + 1], rows[3][row : row + 1]
        out = run("invariant", (*alone, rows[4][:2], rows[OUT][row : row + 1], *rows[6:]))
        assert torch.equal(out[0], together[row]), row


SHAPES: dict[str, list[tuple[int, float]]] = {
    "one of 12": [(12, 1.0)],
    "8 of 5": [(5, 1.0 + i / 8) for i in range(8)],
    "64 of 5": [(5, 1.0)] * 64,
    "uneven": [(1 + i % 8, 0.1 + i * 977 % 30) for i in range(150)],
    "300 of 3": [(3, 1.0 + i % 7) for i in range(300)],
}
"""(rows, relative context) of each sequence."""


def long_enough(shape: str, position_bytes: int) -> list[tuple[int, int]]:
    """(rows, context) of sequences whose rows save so many bytes that csrc takes them together.
    The first row begins a block of 8, so that up to 8 rows lie in it (``read_by_the_last``)."""
    saved = sum((rows - 1) * share for rows, share in SHAPES[shape])
    each = 350e6 / saved / position_bytes
    return [(rows, rows + int(each * share) // 8 * 8) for rows, share in SHAPES[shape]]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((32, 8, 128), {}),
        ((32, 8, 128), {"cap": 5.0}),
        ((32, 8, 128), {"fp8": "scaled kv, out"}),
        ((8, 8, 64), {"fp8": "kv"}),
        ((64, 8, 64), {}),
        ((12, 1, 128), {}),
    ],
    ids=str,
)
def test_csrc_gives_rows_what_their_sequence_gives(
    shape: str, heads: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """Items of several blocks, of a block, of a few warps, and shares; and rows that lie apart."""
    csrc_kernels()
    device = torch.device("cuda")
    itemsize = 1 if "kv" in options.get("fp8", "") else 2
    lengths = long_enough(shape, 2 * heads[1] * heads[2] * itemsize)
    args = call(device, lengths, torch.bfloat16, heads=heads, padding=1, **options)
    rows = as_rows(args)

    def result(call: tuple[Any, ...]) -> Tensor:
        out = torch.full_like(call[OUT], 7.0)
        decode(*call[:OUT], out, *call[OUT + 1 :])
        assert (out[-1].float() == 7).all()
        return out[:-1].float()

    got, expected = result(rows), run("", args)[:-1].float()
    tolerance = OP.tolerances[rows[OUT].dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance.rtol, atol=tolerance.atol)
    assert torch.equal(result(rows), got)
    apart = (rows[0].flip(0).roll(-1, 0), rows[1], rows[2].flip(0), rows[3].flip(0), *rows[4:])
    torch.testing.assert_close(
        result(apart).flip(0), expected, rtol=tolerance.rtol, atol=tolerance.atol
    )
    if heads[0] // heads[1] <= 4 and shape == "8 of 5":  # five rows are one item
        assert torch.equal(result(read_by_the_last(rows)), got)
