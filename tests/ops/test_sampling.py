"""The sampling ops against brute force and statistics; conformance over cases is elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.ops.sampling.noise import gumbel_noise
from tests.ops.csrc import csrc_kernels

IMPLEMENTATIONS = ("native", "triton", pytest.param("cuda", marks=pytest.mark.gpu))
F32 = torch.float32


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        csrc_kernels()
    return str(request.param)


def randn(device: torch.device | str, *shape: int, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen).to(device)


def full(device: torch.device | str, n: int, value: float, dtype: torch.dtype = F32) -> Tensor:
    return torch.full((n,), value, dtype=dtype, device=device)


def draw(
    implementation: str,
    logits: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | int = 0,
    positions: Tensor | int = 0,
) -> Tensor:
    """``sample`` with scalars spread over the rows; positions count up from a scalar."""
    n, device = logits.shape[0], logits.device
    if not isinstance(temperature, Tensor):
        temperature = full(device, n, temperature)
    if not isinstance(seeds, Tensor):
        seeds = full(device, n, seeds, torch.int64)
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, positions + n, dtype=torch.int32, device=device)
    op = ops.BY_NAME["sample"].overload(implementation)
    out: Tensor = op(logits, temperature, top_k, top_p, min_p, seeds, positions)
    assert out.dtype == torch.int32 and out.shape == (n,)
    return out


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double().cpu() * tokens.numel()
    observed = torch.bincount(tokens.long().cpu(), minlength=expected.numel()).double()
    return float(((observed - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """About the 0.9999 quantile (Wilson and Hilferty, 1931)."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + 3.72 * math.sqrt(spread)) ** 3


def num_draws(implementation: str, device: torch.device | str) -> int:
    return 200 if interpreted(implementation, device) else 40_000


def interpreted(implementation: str, device: torch.device | str) -> bool:
    """Whether kernels run in Triton's interpreter, at some milliseconds a row."""
    return implementation == "triton" and torch.device(device).type == "cpu"


@pytest.mark.parametrize("vary", ["index", "position", "seed low", "seed high"])
def test_noise_is_uniform_along_every_coordinate(vary: str) -> None:
    n = 1 << 16
    count = torch.arange(n)
    zero = torch.zeros(n, dtype=torch.int64)
    if vary == "index":
        noise = gumbel_noise(zero[:1] + 5, zero[:1].int() + 9, n)[0]
    elif vary == "position":
        noise = gumbel_noise(zero + 5, count.int(), 18)[:, 17]
    else:
        noise = gumbel_noise(count << (32 if "high" in vary else 0), zero.int(), 18)[:, 17]
    uniform = torch.exp(-torch.exp(-noise.double()))
    cells = (uniform * 256).long().clamp(0, 255)
    statistic = chi_square(cells, torch.full((256,), 1 / 256))
    assert statistic < chi_square_limit(255)
    assert statistic > 150  # more even than chance would be a lattice, not noise
    pairs = (uniform[0::2] * 16).long() * 16 + (uniform[1::2] * 16).long()
    assert chi_square(pairs.clamp(0, 255), torch.full((256,), 1 / 256)) < chi_square_limit(255)


def test_noise_of_neighbouring_seeds_and_positions_is_uncorrelated() -> None:
    seeds = torch.tensor([0, 1, 2, -1, 1 << 32, 0, 0])
    positions = torch.tensor([0, 0, 0, 0, 0, 1, 2], dtype=torch.int32)
    noise = gumbel_noise(seeds, positions, 1 << 16).double()
    correlation = torch.corrcoef(noise)
    off_diagonal = correlation - torch.eye(len(seeds))
    assert off_diagonal.abs().max() < 5 / math.sqrt(1 << 16)


def test_noise_tail_is_finite_and_reaches_as_far_as_it_should() -> None:
    noise = gumbel_noise(torch.arange(64), torch.zeros(64, dtype=torch.int32), 1 << 16)
    assert noise.isfinite().all()
    # The maximum of 2**22 draws is log(2**22) + Gumbel: outside these bounds once in 10**3.
    assert 15.25 - 2.0 < noise.max() < 15.25 + 7.0
    assert abs(noise.mean().item() - 0.57722) < 5 * 1.2825 / math.sqrt(noise.numel())


@pytest.mark.parametrize(("temperature", "vary"), [(0.6, "seed"), (1.0, "position"), (1.7, "seed")])
def test_draws_follow_softmax(
    implementation: str, device: torch.device, temperature: float, vary: str
) -> None:
    n = num_draws(implementation, device)
    row = randn(device, 7)
    logits = row.expand(n, -1).contiguous()
    count = torch.arange(n, device=device)
    if vary == "position":
        tokens = draw(implementation, logits, temperature, seeds=7)
    else:
        positions = full(device, n, 7, torch.int32)
        tokens = draw(implementation, logits, temperature, seeds=count, positions=positions)
    right = torch.softmax(row / temperature, -1)
    wrong = torch.softmax(row / (temperature * 1.3), -1)
    assert chi_square(tokens, right) < chi_square_limit(6)
    if n > 20_000:
        assert chi_square(tokens, wrong) > chi_square_limit(6)


def test_draws_within_filters_follow_renormalized_softmax(
    implementation: str, device: torch.device
) -> None:
    n = 60 if interpreted(implementation, device) else 40_000
    row = randn(device, 23, seed=3).bfloat16().float()
    k = 3
    tokens = draw(
        implementation,
        row.bfloat16().expand(n, -1).contiguous(),
        0.9,
        top_k=full(device, n, k, torch.int32),
        seeds=11,
    )
    kept = row.topk(k).indices
    assert set(tokens.tolist()) == set(kept.tolist())
    probabilities = torch.softmax(row[kept] / 0.9, -1)
    places = {int(token): place for place, token in enumerate(kept)}
    drawn = torch.tensor([places[token] for token in tokens.tolist()])
    assert chi_square(drawn, probabilities) < chi_square_limit(k - 1)


def test_different_seeds_draw_independently(device: torch.device) -> None:
    n, vocab = 20_000, 8
    logits = torch.zeros((n, vocab), device=device)
    first = draw("native", logits, seeds=1).long()
    second = draw("native", logits, seeds=2).long()
    joint = first * vocab + second
    assert chi_square(joint, torch.full((64,), 1 / 64)) < chi_square_limit(63)


def filters(device: torch.device, n: int) -> dict[str, Tensor]:
    def cycle(values: list[float], dtype: torch.dtype = F32) -> Tensor:
        return torch.tensor([values[i % len(values)] for i in range(n)], dtype=dtype, device=device)

    return {
        "top_k": cycle([0, 3, 20], torch.int32),
        "top_p": cycle([1.0, 0.8437, 0.4311, 0.97177]),
        "min_p": cycle([0.0, 0.0171, 0.0, 0.0, 0.3119]),
    }


@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_draws_the_same_alone_and_in_any_batch(
    implementation: str, device: torch.device, filtered: bool
) -> None:
    n, vocab = (8, 600) if interpreted(implementation, device) else (64, 2500)
    logits = 2 * randn(device, n, vocab)
    temperature = torch.linspace(0.0, 2.0, n, device=device)
    seeds = torch.arange(n, device=device) * 7919 - 3
    positions = torch.arange(n, dtype=torch.int32, device=device) * 31
    chosen = filters(device, n) if filtered else {}

    def at(rows: Tensor) -> Tensor:
        return draw(
            implementation,
            logits[rows],
            temperature[rows],
            seeds=seeds[rows],
            positions=positions[rows],
            **{name: value[rows] for name, value in chosen.items()},
        )

    everyone = torch.arange(n, device=device)
    batch = at(everyone)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(at(order), batch[order])
    for row in range(0, n, 3):
        assert torch.equal(at(everyone[row : row + 1]), batch[row : row + 1])
    assert torch.equal(at(everyone), batch)
    again = draw(implementation, logits, temperature, seeds=seeds + 1, positions=positions)
    assert (again != batch).sum() > n // 2  # another seed, other tokens


def test_greedy_and_random_rows_share_a_batch(implementation: str, device: torch.device) -> None:
    n, vocab = 12 if interpreted(implementation, device) else 40, 1009
    logits = randn(device, n, vocab)
    temperature = full(device, n, 1.5)
    temperature[::2] = 0.0
    tokens = draw(implementation, logits, temperature, **filters(device, n))
    best = logits.argmax(-1).int()
    assert torch.equal(tokens[::2], best[::2])
    assert (tokens[1::2] != best[1::2]).any()


def test_all_draw_the_same(implementation: str, device: torch.device) -> None:
    n = 12 if interpreted(implementation, device) else 48
    logits = 3 * randn(device, n, 1500, seed=5)
    for chosen in ({}, filters(device, n)):
        native = draw("native", logits, 0.8, seeds=-(2**40) + 3, **chosen)
        assert torch.equal(native, draw(implementation, logits, 0.8, seeds=-(2**40) + 3, **chosen))


def brute_force_kept(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """vLLM's order, min-p, top-k, top-p, on plain Python floats (no ties expected)."""
    best = max(row)
    weight = [math.exp((value - best) / temperature) for value in row]
    kept = sorted(range(len(row)), key=lambda token: -row[token])
    if min_p > 0:
        kept = [token for token in kept if weight[token] >= min_p]
    if 0 < top_k < len(row):
        kept = kept[:top_k]
    if top_p < 1:
        target = top_p * math.fsum(weight[token] for token in kept)
        mass, nucleus = 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weight[token]
            if mass >= target:
                break
        kept = nucleus
    return set(kept)


def thresholds(
    implementation: str, logits: Tensor, temperature: Tensor, **chosen: Tensor
) -> Tensor:
    top_k, top_p, min_p = (chosen.get(name) for name in ("top_k", "top_p", "min_p"))
    if implementation == "native":
        from fusewright.ops.sampling.sample import keep_threshold

        return keep_threshold(logits.float(), temperature, top_k, top_p, min_p)
    unused = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    if implementation == "cuda":
        found = torch.empty_like(temperature)
        filters = (top_k, top_p, min_p)
        draw_tokens = torch.ops.fw_cuda.draw_tokens.default
        draw_tokens(logits, temperature, *filters, unused, unused.int(), found)
        return found[:, None]
    launches_of = ops.BY_NAME["sample"].implementation("triton").launches
    assert launches_of is not None
    args: tuple[Any, ...] = (logits, temperature, top_k, top_p, min_p, unused, unused.int())
    search = launches_of(*args)[0][0]
    search.run()
    threshold: Tensor = search.args["threshold_ptr"]
    return threshold[:, None]


@pytest.mark.product
@pytest.mark.parametrize("names", ["top_k", "top_p", "min_p", "top_k top_p", "top_k top_p min_p"])
@pytest.mark.parametrize("vocab", [1, 37, 1021])
def test_kept_sets_match_brute_force(
    implementation: str, device: torch.device, names: str, vocab: int
) -> None:
    n = 12 if interpreted(implementation, device) else 24
    spaced = torch.stack(
        [torch.randperm(vocab, generator=torch.Generator().manual_seed(i)) for i in range(n)]
    )
    logits = ((spaced - vocab * 0.7) * (9.7 / vocab)).to(device)  # no ties, both signs
    temperature = torch.linspace(0.3, 2.1, n, device=device)
    chosen = {name: filters(device, n)[name] for name in names.split()}
    kept = logits >= thresholds(implementation, logits, temperature, **chosen)
    plain = {name: value.tolist() for name, value in chosen.items()}
    for row in range(n):
        expected = brute_force_kept(
            logits[row].tolist(),
            temperature[row].item(),
            plain["top_k"][row] if "top_k" in plain else 0,
            plain["top_p"][row] if "top_p" in plain else 1.0,
            plain["min_p"][row] if "min_p" in plain else 0.0,
        )
        assert set(kept[row].nonzero().flatten().tolist()) == expected, f"row {row}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ties_at_the_threshold_are_all_kept(
    implementation: str, device: torch.device, dtype: torch.dtype
) -> None:
    row = [-3.0, 2.0, -1.0, 2.0, -1.0, -1.0, -3.0]
    logits = torch.tensor([row], device=device).to(dtype)
    one = full(device, 1, 1.0)
    for k, expected in [(1, 2), (2, 2), (3, 5), (5, 5), (6, 7), (7, 7)]:
        top_k = full(device, 1, k, torch.int32)
        kept = logits.float() >= thresholds(implementation, logits, one, top_k=top_k)
        assert kept.sum() == expected, f"top_k {k}"
    for p, expected in [(0.0, 2), (0.4, 2), (0.95, 5), (0.9999, 7), (1.0, 7)]:
        kept = logits.float() >= thresholds(implementation, logits, one, top_p=one * p)
        assert kept.sum() == expected, f"top_p {p}"


def test_extreme_filters_keep_the_best_token(implementation: str, device: torch.device) -> None:
    logits = randn(device, 8, 700)
    best = logits.argmax(-1).int()
    zero, one = full(device, 8, 0.0), full(device, 8, 1.0)
    assert torch.equal(draw(implementation, logits, 5.0, top_k=one.int()), best)
    assert torch.equal(draw(implementation, logits, 5.0, top_p=zero), best)
    assert torch.equal(draw(implementation, logits, 5.0, min_p=one), best)
    assert torch.equal(draw(implementation, logits, 1e-4), best)
    assert not torch.equal(draw(implementation, logits, 5.0, top_p=one, min_p=zero), best)


def test_masked_and_broken_rows(implementation: str, device: torch.device) -> None:
    """-1 where a logit is NaN, or +inf in a row that is drawn; -2 where all are -inf."""
    vocab = 2300
    logits = torch.full((6, vocab), -torch.inf, device=device)
    logits[0, 2299] = -40.0
    logits[1, 5] = logits[1, 2100] = 1.0
    logits[2] = torch.nan
    logits[3], logits[3, 2299] = 1.0, -torch.nan
    logits[4], logits[4, 77] = 0.0, torch.inf
    for chosen in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        dtypes = {"top_k": torch.int32}
        tensors = {k: full(device, 6, v, dtypes.get(k, F32)) for k, v in chosen.items()}
        for temperature in (0.0, 1.0):
            tokens = draw(implementation, logits, temperature, seeds=3, **tensors).tolist()
            assert tokens[0] == 2299
            assert tokens[1] in ((5,) if temperature == 0 else (5, 2100))
            assert tokens[2:] == [-1, -1, 77 if temperature == 0 else -1, -2]


@pytest.mark.gpu
def test_sampling_replays_from_a_cuda_graph(implementation: str) -> None:
    device = torch.device("cuda")
    n, vocab = 8, 32003
    logits = randn(device, n, vocab)
    positions = torch.zeros(n, dtype=torch.int32, device=device)
    temperature, chosen = full(device, n, 0.9), filters(device, n)
    seeds = torch.arange(n, device=device)

    def step() -> tuple[Tensor, ...]:
        tokens = draw(
            implementation, logits, temperature, seeds=seeds, positions=positions, **chosen
        )
        others = "triton" if implementation == "cuda" else implementation
        best = ops.BY_NAME["argmax"].overload(others)(logits)
        logprobs = ops.BY_NAME["token_logprobs"].overload(others)(logits, tokens, 5)
        return (tokens, best, *logprobs)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for position in (3, 4):
        positions.fill_(position)
        logits.copy_(randn(device, n, vocab, seed=position))
        graph.replay()
        for replayed, eager in zip(captured, step(), strict=True):
            torch.testing.assert_close(replayed, eager, atol=0, rtol=0)
