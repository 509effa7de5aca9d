"""``batch_invariant``: a request's tokens and logprobs have the same bits in any batch, order,
chunking and state of the cache, with drafts and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, Hardware, UserError
from fusewright.engine.worker.startup import read_model
from fusewright.model_executor.abacus.problems import held_out
from tests.model_executor.tiny_models import BY_NAME

PREFIX = "7+8=15\n12+34=46\n"
PROMPTS = [PREFIX * (i % 3) + problem.prompt for i, problem in enumerate(held_out(16, seed=9))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=9, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.9, seed=6, max_tokens=7, logprobs=5, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=8, logprobs=1),
]
REQUESTS = [(prompt, PARAMS[i % len(PARAMS)]) for i, prompt in enumerate(PROMPTS)]
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "adaptive": False,
}
SETUPS: list[dict[str, Any]] = [
    {"max_num_seqs": 1, "enable_prefix_caching": False},
    {"max_num_seqs": 3, "max_num_batched_tokens": 5},
    {"max_num_seqs": 16, "max_num_batched_tokens": 16, "speculative_config": DRAFTS},
    {"max_num_seqs": 16, "max_num_batched_tokens": 37, "block_size": 8},
    {"max_num_seqs": 24, "num_gpu_blocks_override": 40, "enable_prefix_caching": False},
    {"max_num_seqs": 24, "async_scheduling": False},
]


def results(llm: LLM, rng: random.Random, requests: list[tuple[Any, SamplingParams]]) -> list[Any]:
    """Results of all requests, which run in random order and in groups of random size."""
    order = rng.sample(range(len(requests)), len(requests))
    found: dict[int, Any] = {}
    while order:
        group = [order.pop() for _ in range(min(len(order), rng.choice([1, 5, 24])))]
        prompts, params = zip(*(requests[i] for i in group), strict=True)
        for i, output in zip(
            group, llm.generate([*prompts], [*params], use_tqdm=False), strict=True
        ):
            assert output.error is None
            found[i] = output.outputs[0].token_ids, output.outputs[0].logprobs
    return [found[i] for i in range(len(requests))]


def check(
    rng: random.Random, requests: list[tuple[Any, SamplingParams]], model: str, **options: Any
) -> None:
    expected = None
    on_cpu = options["device"] == "cpu"  # slow: row by row
    for setup in SETUPS[:3] if on_cpu else SETUPS:
        settings = {"max_model_len": 96, **options, **setup}
        llm = LLM(model, batch_invariant=True, **settings)
        cached = setup.get("enable_prefix_caching", True)
        for again in range(1 + cached):  # the second time prefixes are in the cache
            given = results(llm, rng, requests)
            expected = given if expected is None else expected
            assert given == expected, (setup, again)
        if cached:
            assert llm.report()["prefix_cache"]["hit_tokens"] > 0
        if "speculative_config" in setup:
            drafts = llm.report()["drafts"]
            assert drafts["drafted"] > 0
            if model == "abacus":  # random weights repeat themselves by chance alone
                assert drafts["accepted"] > 0


def test_bits_do_not_depend_on_batch_order_chunks_or_cache(
    device: torch.device, fw_seed: int
) -> None:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    requests = REQUESTS if device.type == "cuda" else REQUESTS[:8]
    check(random.Random(fw_seed), requests, "abacus", device=device.type, dtype=dtype)


def drafter(method: str, **fields: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": 4, "adaptive": False, **fields}


DRAFTERS = {
    "ngram": drafter("ngram", prompt_lookup_min=1),
    "abacus-draft": drafter("draft_model", model="abacus-draft"),
    "abacus-eagle3": drafter("eagle3", model="abacus-eagle3"),
}
MOE = "abacus-moe"
DRAFTED = [("abacus", name) for name in DRAFTERS] + [(MOE, "ngram"), (MOE, "abacus-draft")]
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True, stop=["777", "umju"]
)
TIGHT = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 11}


@pytest.mark.slow
@pytest.mark.product(10)
@pytest.mark.usefixtures("warm", "no_engine_is_left")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("model", "name"), DRAFTED)
def test_drafts_change_no_bit(model: str, name: str, ranks: int, device: torch.device) -> None:
    """Through chunks, preemption, cached prefixes and stop strings.  Two ranks add in an order of
    their own, so they are compared with two."""
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    options: dict[str, Any] = {"max_model_len": 80, "device": device.type, "batch_invariant": True}
    options["dtype"] = "bfloat16" if device.type == "cuda" else "float32"
    options |= {"tensor_parallel_size": ranks, "block_size": 8}

    def answers(llm: LLM) -> list[Any]:
        outputs = [o.outputs[0] for o in llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)]
        return [(o.token_ids, o.logprobs, o.text, o.stop_reason) for o in outputs]

    with LLM(model, **options) as alone:
        expected = answers(alone)
    assert {reason for *_, reason in expected} > {None}, "some stop, some do not"
    with LLM(model, **options, **TIGHT, speculative_config=DRAFTERS[name]) as llm:
        for again in range(2):  # the second time behind cached prefixes
            assert answers(llm) == expected, again
        report = llm.report()
    assert report["drafts"]["error"] == "" and report["drafts"]["accepted"] > 10
    assert report["num_preemptions"] > 0 and report["prefix_cache"]["hit_tokens"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
def test_bits_of_fp8_do_not_depend_on_them_either(quantization: str, fw_seed: int) -> None:
    settings = {"quantization": quantization, "kv_cache_dtype": "fp8"}
    check(random.Random(fw_seed), REQUESTS, "abacus", device="cuda", **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_qk_norm", "mistral_window"])
def test_bits_of_other_models_do_not_depend_on_them(
    name: str, tmp_path: Path, fw_seed: int
) -> None:
    BY_NAME[name].save(tmp_path)
    rng = random.Random(fw_seed)
    prompts = [[rng.randrange(90) for _ in range(rng.randint(1, 60))] for _ in range(24)]
    prompts[12:] = [prompts[i % 12] + prompts[i][:20] for i in range(12, 24)]
    requests = [({"prompt_token_ids": p}, PARAMS[i % 4]) for i, p in enumerate(prompts)]
    check(rng, requests, str(tmp_path), device="cuda", dtype="bfloat16")


GPU = Hardware("cuda", "a GPU", sm=90, num_sms=132, graphs="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimization_level": 0}, "batch_invariant: kernels of -O0 may add in another order"),
        ({"optimization_level": 3}, "kernels of -O3 .*; use -O2"),
        ({"attention_backend": "cuda"}, "which attention_backend=cuda contradicts: drop one"),
        ({"kernels": ("linear=native",)}, "kernels=linear=native contradicts"),
        ({"passes": ("cleanup", "fuse_chain")}, "passes=fuse_chain contradicts"),
    ],
)
def test_what_cannot_be_invariant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_model(EngineOptions(batch_invariant=True, **options), GPU)


def test_the_kernels_it_forces_are_in_the_key() -> None:
    plain, invariant = (
        read_model(EngineOptions(batch_invariant=value), GPU)[2] for value in (False, True)
    )
    assert plain.compile.kernels == ()
    assert dict(invariant.compile.kernels)["paged_attention"] == "invariant"
    assert set(plain.compile.passes) - set(invariant.compile.passes) == {
        "fuse_gated_linear",
        "fuse_moe",
        "fuse_chain",
    }
