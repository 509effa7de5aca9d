"""One ``LLM`` called by several threads: one batch, each its own answer, nobody left waiting."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import EngineDeadError, UserError
from fusewright.engine.engine import Engine
from fusewright.engine.frontend.loop import EngineLoop
from tests.serve.server_process import wait_for

from .test_faults import InterruptedRunner, faulty
from .toy import TOKENIZER, Setup, check_invariants, solo

LONG = SamplingParams(max_tokens=20, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def slowly(engine: EngineLoop, at_least: int = 1) -> EngineLoop:
    """Steps in which other threads run; early ones wait for so many requests to be there."""
    launch, count = engine.core.runner.launch, 0

    def slow(batch: Any) -> Any:
        nonlocal count
        count += 1
        time.sleep(0.25 if batch.num_seqs < at_least and count < 20 else 0.0005)
        return launch(batch)

    engine.core.runner.launch = slow  # type: ignore[method-assign]
    return engine


def halting(engine: EngineLoop, until: Callable[[], object]) -> EngineLoop:
    """Steps that halt, behind the first tokens, until something holds: what a test does meanwhile
    comes before the last token, however busy the machine is."""
    launch, count = engine.core.runner.launch, 0

    def halted(batch: Any) -> Any:
        nonlocal count
        count += 1
        if count > 6:
            wait_for(until)
        return launch(batch)

    engine.core.runner.launch = halted  # type: ignore[method-assign]
    return engine


def right(prompt: str, params: SamplingParams = LONG) -> str:
    return solo(TOKENIZER.encode(prompt), params, 64).text


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returns or raises in each of so many threads."""

    def run(index: int) -> Any:
        try:
            return work(index)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count), timeout=300))


@pytest.fixture(scope="module")
def abacus() -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return LLM("abacus", optimization_level=0, device="cpu", dtype="float32")


def test_four_threads_get_32_of_32_right(abacus: LLM) -> None:
    """With progress bars, as by default, and streams and chats in threads beside them."""

    def other(index: int) -> str:
        prompt = f"{index}+1="
        if index % 2:
            return [o.outputs[0].text for o in abacus.stream(prompt, GREEDY)][-1]
        message = {"role": "user", "content": prompt}
        return abacus.chat([message], GREEDY)[0].outputs[0].text

    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(4) as others:
        beside = others.map(other, range(20, 32))
        answers = list(pool.map(lambda i: abacus.generate(f"{i}+{i}=", GREEDY), range(10, 42)))
        assert list(beside) == [str(i + 1) for i in range(20, 32)]
    assert [a[0].outputs[0].text for a in answers] == [str(2 * i) for i in range(10, 42)]


def test_requests_of_several_threads_run_in_one_batch() -> None:
    engine = slowly(Setup().engine(), at_least=8)
    llm = LLM.from_engine(engine)
    texts = at_once(8, lambda i: llm.generate(f"p{i}", LONG, False)[0].outputs[0].text)
    assert texts == [right(f"p{i}") for i in range(8)]
    batches: Any = engine.core.runner
    assert max(batch.num_seqs for batch in batches.batches) == 8


@pytest.mark.product
@pytest.mark.parametrize("seed", range(4))
def test_threads_that_come_and_go_lose_nothing(seed: int) -> None:
    setup = Setup(num_blocks=24, max_num_seqs=4, prefix_caching=True)
    engine = slowly(setup.engine())
    llm = LLM.from_engine(engine)

    def work(index: int) -> None:
        rng = random.Random(100 * seed + index)
        for _ in range(12):
            prompt = f"p{rng.randrange(30)}"
            if rng.random() < 0.5:
                count = rng.randint(1, 6)
                outputs = llm.generate([prompt] * count, LONG, use_tqdm=False)
                assert [o.outputs[0].text for o in outputs] == [right(prompt)] * count
                continue
            stop = rng.randint(1, 20)
            stream = llm.stream(prompt, LONG)
            outputs = [next(stream) for _ in range(stop)]
            assert right(prompt).startswith(outputs[-1].outputs[0].text)
            del stream  # aborts
            llm.report()

    assert at_once(6, work) == [None] * 6
    assert not engine.has_unfinished()
    check_invariants(engine.core.scheduler)
    assert engine.core.scheduler.pool.num_free == setup.num_blocks
    assert gc.isenabled()


def test_a_stream_may_be_closed_by_another_thread() -> None:
    engine = slowly(Setup().engine())
    llm = LLM.from_engine(engine)
    stream: Any = llm.stream("abc", LONG)
    next(stream)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(llm.generate, "other", LONG, False)
        pool.submit(stream.close).result()
        assert running.result()[0].outputs[0].text == right("other")
    assert not engine.has_unfinished()


def test_an_interrupt_in_the_thread_that_drives_leaves_the_others_theirs() -> None:
    engine = slowly(faulty(Setup(), InterruptedRunner, waits={12}), at_least=4)
    llm = LLM.from_engine(engine)
    found = at_once(4, lambda i: llm.generate(f"p{i}", LONG, False)[0].outputs[0].text)
    interrupted = [isinstance(text, KeyboardInterrupt) for text in found]
    assert sum(interrupted) == 1
    for index in range(4):
        assert interrupted[index] or found[index] == right(f"p{index}")
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_blocks


def test_a_lost_device_is_told_to_every_thread() -> None:
    error = RuntimeError("CUDA error: unspecified launch failure")
    engine = slowly(faulty(Setup(), lost=True, results={12: error}), at_least=4)
    llm = LLM.from_engine(engine)
    found = at_once(4, lambda i: llm.generate(f"p{i}", LONG, False))
    assert [type(each) for each in found] == [EngineDeadError] * 4
    assert not engine.has_unfinished()


def test_a_report_is_made_between_two_steps() -> None:
    engine = slowly(Setup().engine())
    llm = LLM.from_engine(engine)
    report, inside, step = engine.report, [], engine.step

    def watched() -> Any:
        inside.append(True)
        try:
            return step()
        finally:
            inside.clear()

    def checked() -> dict[str, Any]:
        assert not inside
        return report()

    engine.step, engine.report = watched, checked  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, ["a"] * 20, LONG, False)
        while not running.done():
            assert llm.report()["num_kv_blocks"] == 64
        assert {o.outputs[0].text for o in running.result()} == {right("a")}


def test_every_thread_steps_on_the_engines_device() -> None:
    engine, here = slowly(Setup().engine(), at_least=3), threading.local()

    @contextmanager
    def on_device() -> Iterator[None]:
        here.entered = True
        yield
        here.entered = False

    step, threads = engine.step, set()

    def checked() -> Any:
        assert here.entered
        threads.add(threading.get_ident())
        return step()

    engine.step, engine.on_device = checked, on_device  # type: ignore[method-assign]
    llm = LLM.from_engine(engine)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (5, 10, 15)]

    def work(index: int) -> str:
        if index:
            wait_for(lambda: threads)  # the thread that has the fewest tokens drives first
        return llm.generate(f"p{index}", params[index], False)[0].outputs[0].text

    assert at_once(3, work) == [right(f"p{i}", params[i]) for i in range(3)]
    assert len(threads) > 1, "whoever waits steps"


def test_a_call_from_within_a_step_is_refused_rather_than_waited_for() -> None:
    llm = LLM.from_engine(Setup().engine())
    found: list[Any] = []

    def listen(_: Any) -> None:
        found.append(llm.report()["num_kv_blocks"])
        with pytest.raises(RuntimeError, match="called from within a step"):
            llm.generate("b", LONG, use_tqdm=False)

    llm.engine.on_tokens = listen
    llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    assert found == [64]


def test_closing_ends_what_runs_and_refuses_the_rest_by_name() -> None:
    engine = slowly(Setup().engine(), at_least=4)
    started = threading.Event()
    engine.on_tokens = lambda tokens: started.set()
    llm = LLM.from_engine(engine)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(llm.generate, "abc", LONG, False) for _ in range(3)]
        assert started.wait(300)
        llm.close()
        for each in running:
            with pytest.raises(UserError, match="the engine is closed"):
                each.result()
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_blocks
    llm.close()
    calls = {
        "generate": lambda: llm.generate("a"),
        "stream": lambda: next(llm.stream("a")),
        "chat": lambda: llm.chat([{"role": "user", "content": "a"}]),
        "report": llm.report,
    }
    for name, call in calls.items():
        with pytest.raises(UserError, match=rf"^LLM\.{name}: the engine is closed.*make a new LLM"):
            call()


@pytest.mark.parametrize("level", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_leaving_the_block_frees_the_memory(level: int) -> None:
    options = {"device": "cpu", "dtype": "float", "max_num_seqs": 4, "tensor_parallel_size": 1}
    with LLM("abacus", optimization_level=level, disable_log_stats=True, **options) as llm:
        assert llm.engine.stats is None
        assert llm.generate("2+3=", GREEDY, use_tqdm=False)[0].outputs[0].text == "5"
        engine = llm.engine
        assert isinstance(engine, Engine)
        tensors = [*engine.kv_caches, *engine.weights.result().parameters()]
        left = [weakref.ref(tensor) for tensor in tensors]
        del tensors
    assert not [each for each in left if each() is not None]
    with pytest.raises(UserError, match="the engine is closed"):
        engine.step()
