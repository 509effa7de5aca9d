"""The bundled models answer right at every level and batch size: the oracle of every optimization.

float32 on a CPU, bfloat16 on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.model_executor.abacus.problems import TASKS, Problem, held_out

EVERY = [("abacus", level) for level in range(4)] + [("abacus-moe", 2)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROBLEMS = held_out(1000, seed=3)
REQUESTS = [
    GREEDY,
    SamplingParams(temperature=1.5, seed=7, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=20, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, min_p=0.01, presence_penalty=1.0, max_tokens=20),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, min_tokens=6, stop=["1", "a"], max_tokens=20),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=5, ignore_eos=True),
]
"""Greedy, sampled, penalized and stopped."""


def make(level: int, device: torch.device, model: str = "abacus", **options: Any) -> LLM:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 64, **options}
    return LLM(model, optimization_level=level, device=device.type, dtype=dtype, **settings)


def answers(llm: LLM, prompts: list[str], params: SamplingParams = GREEDY) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module", params=EVERY, ids=lambda model: f"{model[0]} -O{model[1]}")
def llm(request: pytest.FixtureRequest, device: torch.device) -> LLM:
    model, level = request.param
    return make(level, device, model)


def solved_wrongly(llm: LLM, problems: list[Problem]) -> list[Problem]:
    given = answers(llm, [p.prompt for p in problems])
    return [p for p, answer in zip(problems, given, strict=True) if p.answer != answer]


@pytest.mark.product(5)
def test_exact_match_of_99_percent(llm: LLM, device: torch.device) -> None:
    problems = PROBLEMS[: 1000 if device.type == "cuda" else 200]
    wrong = solved_wrongly(llm, problems)
    assert len(wrong) <= len(problems) // 100, wrong[:5]
    for task in TASKS:
        assert sum(p.task == task for p in wrong) <= 3, task


@pytest.mark.product(2)
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block"])
def test_fp8_experts_lose_half_a_point_at_most(scheme: str, device: torch.device) -> None:
    problems = PROBLEMS[: 1000 if device.type == "cuda" else 200]
    level = 0 if scheme == "fp8_block" and device.type == "cpu" else 2
    exact, quantized = (
        len(solved_wrongly(make(level, device, "abacus-moe", quantization=how), problems))
        for how in (None, scheme)
    )
    assert quantized - exact <= len(problems) // 200


@pytest.mark.product(5)
def test_answers_do_not_depend_on_the_batch_size(llm: LLM, device: torch.device) -> None:
    fast = device.type == "cuda" and llm.report()["level"] > 0
    prompts = [p.prompt for p in PROBLEMS[: 64 if fast else 8]]
    expected = answers(llm, prompts)
    for size in range(1, 64) if fast else (1, 5):
        given: list[str] = []
        for start in range(0, len(prompts), size):
            given += answers(llm, prompts[start : start + size])
        assert given == expected, f"batches of {size}"


def test_decode_steps_replay_full_graphs(device: torch.device) -> None:
    llm = make(2, device)
    answers(llm, [p.prompt for p in PROBLEMS[:200]])
    decode, mixed = (llm.report()["dispatch"][kind] for kind in ("decode", "mixed"))
    if device.type == "cpu":
        assert set(decode) == set(mixed) == {"NONE"}
        return
    assert set(decode) == {"FULL"}
    assert mixed["PIECEWISE"] > 0
    before = mixed.get("NONE", 0)
    answers(llm, [PROBLEMS[0].prompt] * 4)
    assert llm.report()["dispatch"]["mixed"].get("NONE", 0) == before


@pytest.mark.product
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64, "max_num_seqs": 8}])
def test_async_scheduling_changes_nothing(device: torch.device, options: dict[str, Any]) -> None:
    """Greedy, sampled, penalized and stopped requests, with one step in flight and without."""
    prompts = [p.prompt for p in PROBLEMS[:40]]
    params = [REQUESTS[i % len(REQUESTS)] for i in range(len(prompts))]
    results = []
    for in_flight in (True, False):
        llm = make(2, device, async_scheduling=in_flight, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
    assert results[0] == results[1]


@pytest.mark.product
def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def draw(seed: int | None, count: int) -> list[list[int]]:
        params = SamplingParams(temperature=3.0, seed=seed, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([PROBLEMS[0].prompt] * count, params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    same = draw(11, 5)
    assert all(tokens == same[0] for tokens in same)
    assert draw(11, 1)[0] == same[0]
    assert draw(12, 1)[0] != same[0]
    free = draw(None, 4)
    assert len({tuple(tokens) for tokens in free}) == 4
