"""The whole engine against transformers: equal tokens and logits, however it is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from fusewright import LLM, SamplingParams
from fusewright.engine.core.kv_blocks import BlockPool
from fusewright.engine.core.scheduler import Scheduler
from tests.model_executor.tiny_models import BY_NAME, MOE_MODELS, TINY_MODELS

PROMPT_LENGTHS = (1, 5, 17, 40)
NUM_TOKENS = 64
FEW_TOKENS = 24
"""Enough for every chunk and kind of step; too few for requests to preempt each other."""
CHUNKS = (1, 7, 16, 64)
BLOCK_SIZES = (8, 16, 32)
MAX_LEN = 128
ATOL = 1e-4


@dataclass(frozen=True)
class Reference:
    """What transformers generates greedily for one prompt, with the logits of each token."""

    prompt: tuple[int, ...]
    token_ids: list[int]
    logits: Tensor


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    return [
        tuple(torch.randint(3, 128, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS
    ]


@cache
def references(name: str, crowded: bool = False) -> list[Reference]:
    model, num_tokens = BY_NAME[name].model(), NUM_TOKENS if crowded else FEW_TOKENS
    return [_generate(model, prompt, num_tokens) for prompt in prompts()]


@torch.inference_mode()
def _generate(model: Any, prompt: tuple[int, ...], num_tokens: int) -> Reference:
    token_ids: list[int] = []
    rows: list[Tensor] = []
    step, cache_ = torch.tensor([prompt]), None
    for _ in range(num_tokens):
        out = model(step, past_key_values=cache_, use_cache=True)
        rows.append(out.logits[0, -1].float())
        cache_ = out.past_key_values
        token_ids.append(int(rows[-1].argmax()))
        step = torch.tensor([[token_ids[-1]]])
    return Reference(prompt, token_ids, torch.stack(rows))


class LogitsRecorder:
    """Keeps the logits that the engine samples from, by request and position."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[str, int], Tensor] = {}
        scheduler = llm.engine.core.scheduler
        sampler = llm.engine.runner.sampler
        sample = sampler.sample

        def recorded(logits: Tensor, batch: Any, *args: Any) -> Any:
            names = {r.slot: r.request_id for r in scheduler.running.values()}
            ends = (batch.starts + batch.query_lens).tolist()
            for row, slot, end, sampled in zip(
                logits, batch.slots.tolist(), ends, batch.num_sampled, strict=True
            ):
                if sampled:
                    self.rows[names[slot], end] = row.float().cpu()
            return sample(logits, batch, *args)

        monkeypatch.setattr(sampler, "sample", recorded)


def check(llm: LLM, recorder: LogitsRecorder, expected: list[Reference], label: str) -> None:
    num_tokens = len(expected[0].token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    recorder.rows.clear()
    outputs = llm.generate([list(r.prompt) for r in expected], params, use_tqdm=False)
    for output, reference in zip(outputs, expected, strict=True):
        start = len(reference.prompt)
        rows = [recorder.rows[output.request_id, start + i] for i in range(num_tokens)]
        error = (torch.stack(rows) - reference.logits).abs().max().item()
        assert error <= ATOL, f"{label}: logits of a prompt of {start} tokens are off by {error}"
        assert list(output.outputs[0].token_ids) == reference.token_ids, label


def crowd(scheduler: Scheduler) -> None:
    """Leave so few blocks that the requests of ``prompts()`` preempt each other."""
    pool = scheduler.pool
    chunk = CHUNKS[1]
    scheduler.step_limits = replace(scheduler.step_limits, max_num_batched_tokens=chunk)
    scheduler.limits = msgspec.structs.replace(scheduler.limits, longest_chunk=chunk)
    longest = pool.most_blocks(PROMPT_LENGTHS[-1] + NUM_TOKENS - 1, chunk)
    num_blocks = max(longest, 3 * len(pool.groups))
    scheduler.pool = BlockPool(num_blocks, pool.block_size, pool.groups)


NAMES = [tiny.name for tiny in TINY_MODELS]
OF_EXPERTS = [tiny.name for tiny in MOE_MODELS]
CASES = [
    *((name, 0 if "_rope_" in name else 2, 16) for name in NAMES),
    *((name, 0, 8) for name in ("llama_gqa", "qwen2_window", OF_EXPERTS[0])),
    *((name, 1, 32) for name in ("qwen2_window", OF_EXPERTS[1])),
    *((name, 3, 32) for name in ("llama_gqa", OF_EXPERTS[2])),
]
"""Every model at the level that users get, but those that differ in their table of rotations alone;
a mixture of experts at each other level.  The two dense models that several levels have meet every
block size."""
IN_EVERY_RUN = {"llama_gqa", "qwen2_window", *OF_EXPERTS}


def is_compiled(name: str, seed: int, cases: int) -> bool:
    """Whether -O2 is this run's for a model; for half of the dense ones, others with each seed."""
    return cases > 1 or name in IN_EVERY_RUN or (NAMES.index(name) + seed) % 2 == 0


CROWDED = ("llama_gqa", "mistral_window", "qwen2_window", OF_EXPERTS[1])
"""Models whose requests also preempt each other: what is computed anew depends on groups of layers
and their windows, not on what a layer is made of."""


@pytest.mark.product(6)
@pytest.mark.parametrize(("name", "level", "block_size"), CASES)
def test_tokens_and_logits_equal_transformers(
    name: str,
    level: int,
    block_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fw_seed: int,
    fw_cases: int,
) -> None:
    """Ragged batches in chunks, for some models with preemption too.  Every chunk size is one of
    some model's."""
    BY_NAME[name].save(tmp_path)
    expected = references(name, name in CROWDED)
    chunk = CHUNKS[CASES.index((name, level, block_size)) % len(CHUNKS)]
    if level == 2 and not is_compiled(name, fw_seed, fw_cases):
        level = 0
    llm = LLM(
        str(tmp_path),
        optimization_level=level,
        device="cpu",
        dtype="float32",
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=max(CHUNKS),
        max_model_len=MAX_LEN,
        verify=level > 0,
    )
    recorder = LogitsRecorder(llm, monkeypatch)
    scheduler = llm.engine.core.scheduler
    pool = scheduler.pool
    scheduler.step_limits = replace(scheduler.step_limits, max_num_batched_tokens=chunk)
    check(llm, recorder, expected, f"-O{level} block {block_size} chunk {chunk}")
    assert scheduler.num_preemptions == 0
    if name in CROWDED:
        crowd(scheduler)
        check(llm, recorder, expected, f"-O{level} block {block_size} preempted")
        assert scheduler.num_preemptions > 0
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert pool.num_free == pool.num_blocks
