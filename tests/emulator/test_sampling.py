"""The sampling kernel on a CPU: its tokens are the reference's, and each row keeps as many logits,
whatever the number of blocks a row and the schedule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops.sampling.noise import GREEDY_TEMPERATURE, clean_logits
from fusewright.ops.sampling.sample import OP, keep_threshold

from .build import Program, build, run, what_is_missing
from .derive import Edit

pytestmark = [
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing()),
    pytest.mark.thorough,
]

SOURCE = "sampling/sample.cuh"
MISTAKES = {
    "a_blocks_maximum_is_read_before_it_is_there": Edit(
        SOURCE, "warp_maxima[warp] = v;\n  __syncthreads();", "warp_maxima[warp] = v;"
    ),
    "a_digit_is_read_before_it_is_there": Edit(
        SOURCE, "++round;\n    __syncthreads();", "++round;"
    ),
    "copies_are_merged_before_all_keys_are_counted": Edit(
        SOURCE,
        "__syncthreads();\n    if (kMass) send_outside();",
        "if (kMass) send_outside();",
    ),
    "bins_are_added_up_before_they_have_come": Edit(SOURCE, "inbox.wait(round / 2 % 2);", ""),
}


def program(*edits: Edit) -> Program:
    return Program("sample.cpp", "sampling/sample.cu", edits=edits)


def launches(number: int) -> tuple[str, ...]:
    """A case runs with the launch's choice of 8, 4 or 2 blocks a row, and with 1 to 8 in turn."""
    blocks = number % 8 + 1
    return (
        f"timing=random seed={number}",
        f"blocks={blocks} timing=late",
        f"blocks={9 - blocks} timing=early",
    )


def count_kept(args: tuple[Any, ...], tokens: Tensor) -> Tensor:
    """How many logits each row keeps, of those that draw a token; -1 for others."""
    logits, temperature, top_k, top_p, min_p, _, _ = args
    # In float64: sums of float32 may reach top_p a token early or late.
    values = clean_logits(logits).double()
    kept = (values >= keep_threshold(values, temperature, top_k, top_p, min_p)) & ~logits.isnan()
    draws = (tokens >= 0) & (temperature >= GREEDY_TEMPERATURE)
    return torch.where(draws, kept.sum(-1), -1).int()


def write_cases(folder: Path, dtype: torch.dtype) -> list[str]:
    """The op's own cases, each with the reference's results in a file; the words of each."""
    words = []
    generator = torch.Generator().manual_seed(20261129)
    for number, case in enumerate(OP.cases(dtype, torch.device("cpu"), generator)):
        logits, filters = case.args[0], zip("kpm", case.args[2:5], strict=True)
        tokens = OP.reference(*case.args)
        arrays = [*case.args, tokens, count_kept(case.args, tokens)]
        file = folder / f"{dtype}-{number}"
        there = [array for array in arrays if array is not None]
        file.write_bytes(b"".join(bytes(array.view(torch.uint8).numpy()) for array in there))
        names = "".join(name for name, values in filters if values is not None)
        words.append(
            f"file={file} rows={logits.shape[0]} vocab={logits.shape[1]} filters={names} "
            f"element={str(dtype).removeprefix('torch.')}"
        )
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampling")


@pytest.mark.parametrize("dtype", OP.dtypes, ids=str)
def test_tokens_are_those_of_the_reference(dtype: torch.dtype, folder: Path) -> None:
    cases = enumerate(write_cases(folder, dtype))
    scheduled = [f"{case} {how}" for number, case in cases for how in launches(number)]
    result = run(build(program(), folder), scheduled)
    assert result.passed, [line for line in result.lines if not line.startswith("PASS")]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_as_a_race(name: str, folder: Path) -> None:
    case = next(words for words in write_cases(folder, torch.bfloat16) if "filters=p " in words)
    result = run(build(program(MISTAKES[name]), folder), [f"{case} timing=random"])
    assert result.lines[-1].startswith("FAULT race"), result.lines
