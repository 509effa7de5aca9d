"""``AsyncLLM``: coroutines get what ``LLM`` gives, and an end whatever happens."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from fusewright import LLM, AsyncLLM, RequestOutput, SamplingParams
from fusewright.config import EngineDeadError, UserError

from .test_faults import faulty
from .test_threads import GREEDY, LONG, abacus, halting, right, slowly
from .toy import Setup

__all__ = ["abacus"]


@pytest.fixture
def toy() -> Iterator[AsyncLLM]:
    with AsyncLLM.from_engine(slowly(Setup().engine())) as llm:
        yield llm


async def every(llm: AsyncLLM, prompt: str, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, *args, **kwargs)]


async def text(llm: AsyncLLM, prompt: str, *args: Any, **kwargs: Any) -> str:
    return (await every(llm, prompt, *args, **kwargs))[-1].outputs[0].text


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fusewright-engine"]


def test_32_coroutines_and_a_batch_beside_them_are_all_right(abacus: LLM) -> None:
    llm = AsyncLLM.from_engine(abacus.engine)

    async def gathered(llm: AsyncLLM) -> list[str]:
        return await asyncio.gather(*(text(llm, f"{i}+{i}=", GREEDY) for i in range(10, 42)))

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(abacus.generate, [f"{i}+1=" for i in range(32)], GREEDY)
        assert asyncio.run(gathered(llm)) == [str(2 * i) for i in range(10, 42)]
        assert [o.outputs[0].text for o in beside.result()] == [str(i + 1) for i in range(32)]
    del llm
    gc.collect()
    wait_until(lambda: not engine_threads())
    assert abacus.generate("2+3=", GREEDY, False)[0].outputs[0].text == "5"


def test_outputs_grow_to_the_last_or_come_once(toy: AsyncLLM) -> None:
    outputs = asyncio.run(every(toy, "abc", LONG, "mine"))
    texts = [output.outputs[0].text for output in outputs]
    assert all(len(a) <= len(b) and b.startswith(a) for a, b in pairwise(texts))
    assert texts[-1] == right("abc")
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"mine"}
    (only,) = asyncio.run(every(toy, "abc", LONG, final_only=True))
    assert only.finished and only.outputs[0].text == right("abc")


def test_a_slow_reader_gets_the_newest_output(toy: AsyncLLM) -> None:
    async def read() -> list[int]:
        lengths = []
        async for output in toy.generate("abc", LONG):
            lengths.append(len(output.outputs[0].token_ids))
            if len(lengths) == 1:
                while toy.engine.has_unfinished():
                    await asyncio.sleep(0.001)
        return lengths

    lengths = asyncio.run(read())
    assert lengths[-1] == 20 and len(lengths) < 20


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_who_goes_away_aborts_the_request(toy: AsyncLLM, how: str) -> None:
    async def go() -> None:
        endless = SamplingParams(max_tokens=None, ignore_eos=True)
        started = asyncio.Event()

        async def read() -> None:
            async for _ in toy.generate("abc", endless):
                started.set()
                if how == "leave":
                    break

        task = asyncio.create_task(read())
        await started.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await text(toy, "other", LONG) == right("other")

    asyncio.run(go())
    wait_until(lambda: not toy.engine.has_unfinished())
    assert toy.engine.core.scheduler.pool.num_free == 64


def test_an_aborted_request_ends_with_what_it_has(toy: AsyncLLM) -> None:
    async def go() -> RequestOutput:
        outputs, sixty = [], SamplingParams(max_tokens=60, ignore_eos=True)
        async for output in toy.generate("abc", sixty, "x"):
            outputs.append(output)
            await toy.abort("x")
            await toy.abort(["x", "unknown"])
            aborted.set()
        return outputs[-1]

    aborted = threading.Event()
    halting(toy.engine, aborted.is_set)
    output = asyncio.run(go())
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 60


def test_mistakes_are_errors_of_their_own_request(toy: AsyncLLM) -> None:
    async def go() -> list[Any]:
        first = toy.generate("abc", LONG, "taken")
        await anext(first)
        calls = [("", LONG), ("a", {"max_tokens": 3}), ("b", LONG, "taken"), ("c", LONG)]
        answers = asyncio.gather(*(text(toy, *c) for c in calls), return_exceptions=True)
        await asyncio.sleep(0)  # each is submitted
        submitted.set()
        found = await answers
        rest = [output async for output in first]
        return [*found, rest[-1].outputs[0].text]

    submitted = threading.Event()
    halting(toy.engine, submitted.is_set)
    *errors, fine, first = asyncio.run(go())
    assert all(type(error) is UserError for error in errors)
    messages = ["prompt is empty", "sampling_params is a dict", "request_id 'taken' is in use"]
    for error, message in zip(errors, messages, strict=True):
        assert message in str(error)
    assert (fine, first) == (right("c"), right("abc"))


def test_a_lost_device_is_told_to_every_coroutine() -> None:
    error = RuntimeError("CUDA error: unspecified launch failure")
    engine = slowly(faulty(Setup(), lost=True, results={12: error}), at_least=4)

    async def go(llm: AsyncLLM) -> list[Any]:
        calls = (text(llm, f"p{i}", LONG) for i in range(4))
        found = await asyncio.gather(*calls, return_exceptions=True)
        return [*found, *await asyncio.gather(text(llm, "later", LONG), return_exceptions=True)]

    with AsyncLLM.from_engine(engine) as llm:
        assert [type(each) for each in asyncio.run(go(llm))] == [EngineDeadError] * 5


def test_a_step_that_fails_as_a_whole_ends_its_requests_and_serves_later_ones() -> None:
    engine = slowly(Setup().engine())
    failed: list[bool] = []

    def listen(tokens: Any) -> None:
        if not failed:
            failed.append(True)
            raise ValueError("from outside")

    engine.on_tokens = listen

    async def go(llm: AsyncLLM) -> str:
        with pytest.raises(ValueError, match="from outside"):
            await text(llm, "abc", LONG)
        return await text(llm, "other", LONG)

    with AsyncLLM.from_engine(engine) as llm:
        assert asyncio.run(go(llm)) == right("other")


def test_closing_ends_requests_and_the_thread_and_refuses_later_calls() -> None:
    llm = AsyncLLM.from_engine(halting(Setup().engine(), lambda: llm._stepper.closing))

    async def go() -> list[Any]:
        tasks = [asyncio.create_task(text(llm, f"p{i}", LONG)) for i in range(12)]
        await anext(llm.generate("first", LONG))
        llm.shutdown()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in asyncio.run(go()):
        assert type(error) is UserError and "the engine is closed" in str(error)
    assert not engine_threads()
    assert llm.engine.core.scheduler.pool.num_free == 64
    llm.close()
    with pytest.raises(UserError, match=r"^AsyncLLM\.generate: the engine is closed"):
        asyncio.run(text(llm, "a"))
    with pytest.raises(UserError, match=r"^AsyncLLM\.report: the engine is closed"):
        llm.report()


def test_several_event_loops_share_the_engine(toy: AsyncLLM) -> None:
    async def four(thread: int) -> list[str]:
        return await asyncio.gather(*(text(toy, f"{thread}/{i}", LONG) for i in range(4)))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda thread: asyncio.run(four(thread)), range(3)))
    assert found == [[right(f"{thread}/{i}") for i in range(4)] for thread in range(3)]


def test_a_loop_that_is_gone_keeps_no_request_running(toy: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    halting(toy.engine, loop.is_closed)
    generator = toy.generate("abc", SamplingParams(max_tokens=60, ignore_eos=True))
    assert not loop.run_until_complete(anext(generator)).finished
    loop.close()
    wait_until(lambda: not toy.engine.has_unfinished())
    assert asyncio.run(text(toy, "other", LONG)) == right("other")


def test_an_idle_engine_is_not_stepped(toy: AsyncLLM) -> None:
    steps, step = [], toy.engine.step

    def counted() -> Any:
        steps.append(True)
        return step()

    toy.engine.step = counted  # type: ignore[method-assign]
    for _ in range(2):
        asyncio.run(text(toy, "abc", LONG))
        wait_until(lambda: not toy.engine.has_unfinished())
        time.sleep(0.1)  # thousands of steps, if there were any
    assert 2 * 20 <= len(steps) <= 2 * 30, "20 tokens, and some steps behind the last"


def test_the_tokenizer_and_the_report_are_there(toy: AsyncLLM) -> None:
    tokenizer = asyncio.run(toy.get_tokenizer())
    assert tokenizer.decode(tokenizer.encode("12+34=", add_special_tokens=False)) == "12+34="
    assert toy.report()["num_kv_blocks"] == 64
