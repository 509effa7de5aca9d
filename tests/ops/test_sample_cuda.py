"""``sample`` by csrc's kernel: what it takes, and what it keeps and draws beyond the op's cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME, OpDesc, choose, variants_of
from fusewright.ops.sampling.noise import clean_logits, gumbel_noise
from fusewright.ops.sampling.sample import keep_threshold
from tests.ops.csrc import csrc_kernels

SAMPLE = BY_NAME["sample"]
IMPL = SAMPLE.implementation("cuda")
NUM_SEQS = 24
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def description(
    dtype: torch.dtype = torch.bfloat16, vocab: int = 128256, filters: str = "k", sm: int = 90
) -> OpDesc:
    rows, ids = torch.empty(3), torch.empty(3, dtype=torch.int32)
    given = [ids if "k" in filters else None, *(rows if f in filters else None for f in "pm")]
    logits = torch.empty((3, vocab), dtype=dtype, device="meta")
    desc = SAMPLE.describe((logits, rows, *given, ids.long(), ids), sm=sm, csrc=True)
    return replace(desc, device="cuda")


@pytest.mark.parametrize(
    ("desc", "reason"),
    [
        (description(), ""),
        (description(torch.float16, filters="p"), ""),
        (description(torch.float32, 262144, "kpm"), ""),
        (description(filters="m", vocab=1), ""),
        (description(sm=80), "built for SM 9.0, not 8.0"),
        (description(sm=0), "not an unknown one"),
        (replace(description(), device="cpu"), "on cpu, not CUDA"),
        (description(torch.float64), "logits are torch.float64"),
        (description(filters=""), ""),
        (description(torch.float32, 262145), "262145 columns of torch.float32"),
        (description(vocab=524289), "524289 columns of torch.bfloat16"),
        (replace(description(), csrc=False), "csrc is not built into this installation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_what_it_does_not_take(desc: OpDesc, reason: str) -> None:
    answer = IMPL.supports(desc)
    assert reason in answer and bool(reason) == bool(answer)


def test_it_is_the_first_choice_where_it_runs() -> None:
    for filters in ("k", "p", "m", ""):
        desc = description(filters=filters)
        assert choose(SAMPLE, desc, inline_first=False).name == "cuda"
    chosen = choose(SAMPLE, description(), inline_first=False, override="triton")
    assert chosen.name == "triton"


@pytest.mark.parametrize(
    ("num_seqs", "filters", "by_triton"),
    [(1, "", True), (32, "", True), (33, "", False), (1, "k", False), (300, "kpm", False)],
)
def test_few_rows_without_a_filter_are_left_to_triton(
    num_seqs: int, filters: str, by_triton: bool
) -> None:
    rows = torch.empty(num_seqs, device="meta")
    given = [rows if f in filters else None for f in "kpm"]
    logits = torch.empty((num_seqs, 128256), dtype=torch.bfloat16, device="meta")
    args = (logits, rows, *given, rows.long(), rows.int())
    expected = SAMPLE.implementation("triton").launches
    assert IMPL.launches is not None
    assert expected is not None
    variants = variants_of(IMPL.launches(*args)[0])
    assert variants == (variants_of(expected(*args)[0]) if by_triton else set())


@pytest.fixture
def kernel() -> Callable[..., Tensor]:
    kernel: Callable[..., Tensor] = csrc_kernels().draw_tokens.default
    return kernel


def column(values: list[float], num_seqs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    cycled = [values[i % len(values)] for i in range(num_seqs)]
    return torch.tensor(cycled, dtype=dtype, device="cuda")


def calls(logits: Tensor, gen: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls with some of the filters, over rows of every mixture of temperatures and filters."""
    num_seqs, vocab = logits.shape
    temperature = column([0.0, 0.7, 1.0, 1.6], num_seqs)
    top_k = column([0, 1, 5, 40, 10**6, -1, vocab, vocab - 1], num_seqs, torch.int32)
    top_p = column([1.0, 0.9137, 0.5171, 0.0, 0.2311, 1e-9], num_seqs)
    min_p = column([0.0, 0.0313, 0.2117], num_seqs)
    seeds = torch.randint(-(2**62), 2**62, (num_seqs,), device="cuda", generator=gen)
    positions = torch.arange(num_seqs, device="cuda").int() * 37
    for filters in ("k", "p", "m", "kpm", ""):
        given = [
            v if f in filters else None for f, v in zip("kpm", (top_k, top_p, min_p), strict=True)
        ]
        yield filters, (logits, temperature, *given, seeds, positions)


def check_kept(values: Tensor, args: tuple[Any, ...], found: Tensor, place: str) -> None:
    """``found`` [num_seqs], the smallest logit that each row keeps, is right for rows that draw.

    Of top-p it must be the largest t such that logits of t or more hold top_p of the mass, which is
    added up in float64; the kernel's own weights are right to 2e-6.
    """
    _, temperature, top_k, top_p, min_p, *_ = args
    floor, found = keep_threshold(values, temperature, top_k, None, min_p), found[:, None]
    has_mass = values.amax(-1, keepdim=True) > -torch.inf
    nucleus = torch.zeros_like(has_mass) if top_p is None else (top_p[:, None] < 1) & has_mass
    draws = (temperature > 0)[:, None]
    same = ((values >= found) == (values >= floor)).all(-1, keepdim=True)
    assert (same | nucleus | ~draws).all(), place
    if top_p is not None:
        exponents = (values.double() - values.amax(-1, keepdim=True)) / temperature[
            :, None
        ].double()
        mass = torch.where(values >= floor, exponents.exp(), 0.0)
        target = top_p[:, None].double() * mass.sum(-1, keepdim=True)
        held = torch.where(values >= found, mass, 0.0).sum(-1, keepdim=True)
        above = torch.where(values > found, mass, 0.0).sum(-1, keepdim=True)
        right = (held >= target * (1 - 2e-6)) & (held > 0)
        right &= (above < target * (1 + 2e-6)) | (above == 0)
        assert (right | ~nucleus | ~draws).all(), place


def check(kernel: Callable[..., Tensor], logits: Tensor, gen: torch.Generator, where: str) -> None:
    """What rows keep, what is drawn of it, and which have no token; a second run and a row by
    itself say the same."""
    num_seqs, vocab = logits.shape
    for filters, args in calls(logits, gen):
        place = f"{where}, filters {filters!r}"
        found = torch.full((num_seqs,), 7.0, device="cuda")
        tokens = kernel(*args, found)
        expected = SAMPLE.reference(*args)
        good = expected >= 0
        assert torch.equal(tokens[~good], expected[~good]), place
        assert (found[~good] == -torch.inf).all(), place
        rows = tuple(a[good] if isinstance(a, Tensor) else a for a in args)
        values, kept = clean_logits(rows[0]), found[good]
        check_kept(values, rows, kept, place)
        draws, temperature = (rows[1] > 0)[:, None], rows[1].clamp(min=0.1)[:, None]
        noisy = values / temperature + gumbel_noise(*rows[5:], vocab)
        noisy = torch.where(values >= kept[:, None], noisy, -torch.inf)
        noisy = torch.where(draws, noisy, values)
        first, best = noisy.argmax(-1), noisy.amax(-1)
        # Noise may be off by a few roundings: of two that are as close either may win.
        drawn = noisy.gather(-1, tokens[good, None].long())[:, 0]
        near = best.isfinite() & (drawn >= best - 4e-7 * best.abs().clamp(min=1.0))
        assert ((tokens[good] == first) | near).all(), place
        again = found.clone()
        assert torch.equal(kernel(*args, again), tokens) and torch.equal(again, found), place
        for row in (1, num_seqs - 1):
            alone = [a[row : row + 1] if isinstance(a, Tensor) else a for a in args]
            assert kernel(*alone).item() == tokens[row].item(), f"{place}, row {row}"


def spoiled(normal: Tensor) -> Tensor:
    """Rows with NaN of both signs, infinities, and nothing else."""
    logits = 3 * normal
    logits[::2, ::3] = -torch.inf
    logits[0], logits[2] = -torch.inf, torch.nan
    logits[1, normal.shape[1] // 2] = torch.inf
    logits[3, :-1], logits[3, -1] = -torch.inf, -5.0
    logits[4, normal.shape[1] // 2] = torch.inf
    logits[5, -1], logits[6, 0] = -torch.nan, -torch.nan
    logits[7, normal.shape[1] // 2], logits[8, -1] = torch.nan, torch.nan
    logits[9::6, ::3] = torch.nan
    return logits


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda normal: 3 * normal,
    "far from zero": lambda normal: 40 + 2 * normal,
    "flat": lambda normal: 0.01 * normal,
    "constant": lambda normal: torch.full_like(normal, -1.5),
    "tied": lambda normal: (2 * normal).round(),
    "sorted": lambda normal: (3 * normal).sort(-1).values,
    "heavy tails": lambda normal: normal / (normal.roll(1, -1).abs() + 1e-3),
    "spoiled": spoiled,
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 7, 1000, 1003, 32000, 128256, 151936])
def test_it_keeps_and_draws_what_the_reference_does(
    kernel: Callable[..., Tensor], vocab: int, dtype: torch.dtype, fw_seed: int
) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    for name, make in ROWS.items():
        normal = torch.randn((NUM_SEQS, vocab), device="cuda", generator=gen)
        check(kernel, make(normal).to(dtype), gen, f"{name}, --fw-seed={fw_seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_lie_anywhere(
    kernel: Callable[..., Tensor], dtype: torch.dtype, fw_seed: int
) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    for vocab, skipped, padding in [(1000, 0, 3), (999, 1, 0), (4096, 8, 8), (70000, 3, 1)]:
        shape = (5, skipped + vocab + padding)
        wide = 3 * torch.randn(shape, device="cuda", generator=gen)
        wide[:, :skipped], wide[:, skipped + vocab :] = 99.0, 99.0
        logits = wide.to(dtype)[:, skipped : skipped + vocab]
        check(kernel, logits, gen, f"{vocab} of {shape[1]}, --fw-seed={fw_seed}")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.bfloat16, 524288), (torch.float16, 256000), (torch.float32, 262144)]
)
def test_it_takes_rows_as_long_as_it_says(
    kernel: Callable[..., Tensor], dtype: torch.dtype, vocab: int, fw_seed: int
) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    logits = 3 * torch.randn((5, vocab), device="cuda", generator=gen)
    check(kernel, logits.to(dtype), gen, f"--fw-seed={fw_seed}")


@pytest.mark.gpu
def test_equal_logits_share_the_mass(kernel: Callable[..., Tensor]) -> None:
    """With 2^17 equal logits half a unit below 2^10 larger ones, each top_p has one answer."""
    logits = torch.zeros((64, 1 << 17), dtype=torch.bfloat16, device="cuda")
    logits[:, 77 :: 1 << 7] = 0.5
    high = (1 << 10) * 2.718281828**0.5
    low = (1 << 17) - (1 << 10)
    share = high / (high + low)
    top_p = torch.linspace(0.0, 2 * share, 64, device="cuda")
    state = torch.arange(64, device="cuda"), torch.arange(64, device="cuda").int()
    found, ones = torch.empty(64, device="cuda"), torch.ones(64, device="cuda")
    kernel(logits, ones, None, top_p, None, *state, found)
    assert found.tolist() == [0.5] * 32 + [0.0] * 32


@pytest.mark.gpu
def test_bad_arguments_are_refused_by_name(kernel: Callable[..., Tensor]) -> None:
    logits = torch.zeros((3, 64), device="cuda")
    rows, ids = torch.ones(3, device="cuda"), torch.ones(3, dtype=torch.int32, device="cuda")
    good = [logits, rows, ids, rows, rows, ids.long(), ids]
    assert kernel(*good).shape == (3,)
    assert kernel(*[t[:0] for t in good]).shape == (0,)
    wrong = [
        (0, logits[0], "logits have shape [64]"),
        (0, logits[:, ::2], "without gaps"),
        (0, logits[:, :0], "logits have shape [3, 0]"),
        (0, logits.double(), "elements of 8 bytes"),
        (0, torch.zeros((3, 400_000), device="cuda"), "400000 columns"),
        (1, rows[:2], "temperature has shape [2]"),
        (1, rows.double(), "of float32"),
        (
            2,
            rows,
            "top_k has shape [3] and elements of 4 bytes, expected a contiguous [3] of int32",
        ),
        (3, rows.cpu(), "top_p is not on logits' device"),
        (4, rows[:, None], "min_p has shape [3, 1]"),
        (5, ids, "seeds has shape"),
        (6, torch.ones(6, dtype=torch.int32, device="cuda")[::2], "positions has shape"),
    ]
    for place, value, message in wrong:
        args = [*good[:place], value, *good[place + 1 :]]
        with pytest.raises(RuntimeError) as error:
            kernel(*args)
        assert "fw_cuda::draw_tokens: " in str(error.value) and message in str(error.value)
