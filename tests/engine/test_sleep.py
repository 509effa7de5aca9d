"""A sleeping engine holds no weights and no KV cache, and answers as before once it is awake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusewright import LLM, AsyncLLM, SamplingParams
from fusewright.config import UserError
from fusewright.engine.engine import Engine

PROMPTS = ["37+58=", "sort 5 3 9 1=", "reverse abc="]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def answers(llm: LLM) -> list[str]:
    return [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def held_bytes(llm: LLM) -> int:
    """What weights and KV cache take now."""
    engine = llm.engine
    assert isinstance(engine, Engine)
    model = engine.weights.result()
    tensors = [*model.parameters(), *model.buffers(), *engine.kv_caches]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.fixture(scope="module", params=[(0, "adapter"), (0, "transformers"), (2, "adapter")])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    level, impl = request.param
    options = {"optimization_level": level, "model_impl": impl, "enable_sleep_mode": True}
    with LLM("abacus", device="cpu", **options) as made:
        yield made


@pytest.mark.product
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_wakes_up_answers_as_before(llm: LLM, level: int) -> None:
    before, held = answers(llm), held_bytes(llm)
    llm.sleep(level)
    assert held_bytes(llm) < held / 20
    with pytest.raises(UserError, match=r"the engine sleeps and takes no request: call wake_up"):
        answers(llm)
    with pytest.raises(UserError, match=r"sleep: the engine sleeps already"):
        llm.sleep()
    llm.wake_up(["weights"])
    with pytest.raises(UserError, match="the engine sleeps"):
        answers(llm)
    llm.wake_up(["kv_cache"])
    assert (answers(llm), held_bytes(llm)) == (before, held)
    llm.wake_up()  # it is awake


def test_bad_arguments_are_refused_and_change_nothing(llm: LLM) -> None:
    for level in (0, 3, True, "1"):
        with pytest.raises(UserError, match=r"level=.*: expected 1 .* or 2"):
            llm.sleep(level)  # type: ignore[arg-type]
    for tags in ("weights", ["graphs"]):
        with pytest.raises(UserError, match=r"tags=.*: expected a list of weights, kv_cache"):
            llm.wake_up(tags)
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    with pytest.raises(UserError, match="sleep: 1 requests run; wait for them, or abort"):
        llm.sleep()
    assert [*stream][-1].outputs[0].text == "1 3 5 9"


def test_an_async_engine_sleeps_too() -> None:
    async def asleep() -> list[bool]:
        with AsyncLLM("abacus", device="cpu", optimization_level=0) as llm:
            said = [await llm.is_sleeping()]
            await llm.sleep()
            said.append(await llm.is_sleeping())
            await llm.wake_up()
            return [*said, await llm.is_sleeping()]

    assert asyncio.run(asleep()) == [False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_is_free_while_an_engine_sleeps(level: int, record_property: Any) -> None:
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved()  # of tests that ran in this process before
    with LLM("abacus", optimization_level=2, kv_cache_memory_bytes=2**30) as llm:
        before, used = answers(llm), torch.cuda.memory_reserved() - others
        began = time.perf_counter()
        llm.sleep(level)
        slept = time.perf_counter()
        assert torch.cuda.memory_reserved() - others < used / 4
        llm.wake_up()
        record_property("sleep_s", slept - began)
        record_property("wake_s", time.perf_counter() - slept)
        assert answers(llm) == before
