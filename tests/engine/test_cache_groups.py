"""Layers in groups with a block table each: what a window keeps, gives back and finds again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, Hardware, UserError
from fusewright.config.step_fields import REJECTED
from fusewright.engine.core.batch import NO_DRAFT, ScheduledStep
from fusewright.engine.core.chunks import StepLimits
from fusewright.engine.core.drafting.model_drafter import ModelDrafter
from fusewright.engine.core.drafts import Drafts
from fusewright.engine.core.kv_blocks import BlockPool
from fusewright.engine.core.ngram import NgramDrafter
from fusewright.engine.core.scheduler import Scheduler
from fusewright.engine.engine import Engine
from fusewright.engine.messages.cache_group import CacheGroup
from fusewright.engine.messages.draft_run import DraftRun
from fusewright.engine.messages.step import StepResult
from fusewright.model_executor.cache_spec import KV_PAIRS, KVCacheSpec, group_layers
from tests.model_executor.tiny_models import BY_NAME, TinyModel

from .test_engine_random import Client
from .test_parity import MAX_LEN, NUM_TOKENS, references
from .test_prefix_cache import finish, request
from .test_scheduler import result, run, shape
from .toy import Setup, check_invariants, first_seen

WINDOWED = Setup(
    num_blocks=60,
    block_size=4,
    max_num_batched_tokens=16,
    max_model_len=200,
    prefix_caching=True,
    windows=(8, 0),
)
LONG, WINDOW = 8192, 512
HYBRID = TinyModel(
    "qwen2_hybrid",
    "Qwen2",
    {
        "num_hidden_layers": 5,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_position_embeddings": LONG + 64,
    },
)


def groups_of(*windows: int) -> list[tuple[int, tuple[int, ...]]]:
    specs = [KVCacheSpec(KV_PAIRS, 2, (16,), "bfloat16", window) for window in windows]
    return [(group.spec.window, group.layers) for group in group_layers(specs)]


def test_layers_of_equal_spec_form_groups_of_the_rarest_specs_size() -> None:
    assert groups_of(0, 0, 0) == [(0, (0, 1, 2))]
    assert groups_of(8, 8, 8) == [(8, (0, 1, 2))]
    assert groups_of(8, 8, 0, 8, 8, 0) == [(8, (0, 1)), (8, (3, 4)), (0, (2, 5))]
    assert [layers for _, layers in groups_of(*[0] * 15, 8)] == [
        *((i, i + 1) for i in range(0, 14, 2)),
        (14,),
        (15,),
    ]
    assert groups_of(0, 8, 8, 8, 0) == [(0, (0, 4)), (8, (1, 2)), (8, (3,))]


def test_a_group_has_layers_of_every_stage() -> None:
    """So that where stages are alike, each has a use for every block."""

    def of_stages(num_stages: int, *windows: int) -> list[tuple[int, ...]]:
        specs = [KVCacheSpec(KV_PAIRS, 2, (16,), "bfloat16", window) for window in windows]
        return [group.layers for group in group_layers(specs, num_stages)]

    assert of_stages(2, 0, 0, 0) == [(0, 1, 2)]
    assert of_stages(2, *[8, 8, 0] * 2) == [(0, 3), (1, 4), (2, 5)]
    assert of_stages(2, *[8, 8, 0] * 4) == [(0, 1, 6, 7), (3, 4, 9, 10), (2, 5, 8, 11)]
    assert of_stages(2, 0, 8, 8) == [(0,), (1,), (2,)], "of stages that are not, a block may be"


def test_blocks_behind_a_window_go_back_at_the_next_step() -> None:
    """Not within the step, whose own queries may see them; the table keeps its entries."""
    scheduler = WINDOWED.scheduler()
    a = request("a", [*range(40)])
    scheduler.add(a)
    pool = scheduler.pool
    run(scheduler, scheduler.schedule())
    assert (a.num_computed_tokens, pool.num_held) == (16, [4, 10]), "a window grows by chunks"
    first = list(a.blocks.tables[0])
    run(scheduler, scheduler.schedule())
    assert pool.num_held == [6, 10]  # queries from 16 on see what is behind position 8
    run(scheduler, scheduler.schedule())
    assert a.num_computed_tokens == 40 and pool.num_held == [4, 10]
    run(scheduler, scheduler.schedule())
    assert pool.num_held == [3, 11] and a.blocks.tables[0][:4] == first
    finish(scheduler)
    assert pool.num_free == pool.num_blocks and pool.peak_held == [6, 11]


@pytest.mark.parametrize("chunk", [1, 3, 8, 11, 16])
def test_a_window_keeps_the_blocks_of_a_chunk(chunk: int) -> None:
    """A layer of chunked attention has a window of a chunk: a query sees so many tokens at most,
    itself included.  Where a chunk ends it sees them all, and no block is kept for nothing."""
    group = CacheGroup(window=chunk)
    for size in (1, 4, 16):
        behind = [(group.num_behind(p, size), first_seen(p, -chunk) // size) for p in range(100)]
        assert all(freed <= needed for freed, needed in behind)
        assert all(behind[p][0] == behind[p][1] for p in range(chunk - 1, 100, chunk))


def test_answers_of_chunked_layers_survive_that_their_blocks_go_back() -> None:
    """Few blocks, which others take at once; prompts begin in the middle of a chunk."""
    setup = Setup(
        num_blocks=90,
        block_size=1,
        max_num_batched_tokens=7,
        prefix_caching=True,
        windows=(-6, 0, -9),
    )
    client = Client(setup)
    for length in (3, 22, 14, 22, 5, 14):
        client.add([*range(97, 97 + length)], SamplingParams(max_tokens=20, ignore_eos=True))
    client.drain()
    assert client.engine.core.scheduler.pool.peak_held[0] > 0


@pytest.mark.parametrize("windows", [(8, 0), (8,), (8, 12, 0)])
def test_a_prefix_is_found_behind_blocks_that_went_back(windows: tuple[int, ...]) -> None:
    scheduler = Setup(**{**vars(WINDOWED), "windows": windows}).scheduler()
    scheduler.add(request("a", [*range(40)]))
    finish(scheduler)
    b = request("b", [*range(41)])
    scheduler.add(b)
    assert shape(scheduler.schedule()) == [("b", 40, 1)]
    assert b.blocks.num_freed == [(41 - w) // 4 if w else 0 for w in windows]
    check_invariants(scheduler)


def test_a_hit_needs_the_blocks_of_each_window_and_all_others() -> None:
    keys = [bytes([i]) for i in range(6)]
    pool = BlockPool(20, 4, (CacheGroup(), CacheGroup(window=6)))
    everywhere, behind = pool.allocate(5), pool.allocate(6, 1)
    for block_id, key in zip(everywhere, keys, strict=False):
        pool.cache(block_id, key)
    for index in (0, 1, 2, 4, 5):  # one in the middle is lost
        pool.cache(behind[index], keys[index])
    found = pool.find(keys)
    # 5 blocks of the first group, but then the window would begin in the lost block.
    assert found.tables[0] == everywhere[:3]
    assert (found.num_freed, found.tables[1][1:]) == ([0, 1], behind[1:3])
    assert found.held() == [everywhere[0], everywhere[1], behind[1], everywhere[2], behind[2]]
    pool.cache(behind[3], keys[3])
    assert [len(table) for table in pool.find(keys).tables] == [5, 5]


def test_blocks_that_went_back_serve_others_and_are_then_not_found() -> None:
    scheduler = Setup(**{**vars(WINDOWED), "num_blocks": 24}).scheduler()
    scheduler.add(request("a", [*range(40)]))
    finish(scheduler)
    scheduler.add(request("large", [9] * 60, max_tokens=1))
    finish(scheduler)
    scheduler.add(request("again", [*range(41)]))
    ((_, start, _),) = shape(scheduler.schedule())
    assert start < 40
    scheduler.cache_blocks()
    check_invariants(scheduler)


@pytest.mark.parametrize("has_planner", [False, True])
def test_drafts_keep_no_blocks_behind_a_window(has_planner: bool) -> None:
    """N-grams on the device, or a model behind the step, draft; all drafts are wrong."""
    drafter: Any = NgramDrafter(3, 1)
    if has_planner:
        model = DraftRun(lambda _: [], lambda: 0, 0, 16, 2048, 512, 0.1, lambda: "")
        drafter = ModelDrafter(model)
    planner = drafter if has_planner else None
    without = held_by_a_window(None)
    held = held_by_a_window(Drafts(drafter, 4, on_device=True, planner=planner))
    # Tokens of two steps and drafts of three may be in one more block of each request.
    assert max(without) == 2 * 5 and max(held) <= max(without) + 2


def held_by_a_window(drafts: Drafts | None) -> list[int]:
    """Blocks that two requests hold for a layer with a window of 64, at each step behind their
    prompts, with a step in flight."""
    pool, held = BlockPool(200, 16, (CacheGroup(), CacheGroup(64))), list[int]()
    scheduler = Scheduler(pool, StepLimits(2, 512, 2048, max_num_rows=10), drafts=drafts)
    for name in "ab":
        scheduler.add(request(name, [1] * 200, max_tokens=200))
    in_flight: list[ScheduledStep] = []
    num_drafts = 0
    while scheduler.num_unfinished:
        if (step := scheduler.schedule()) is not None:
            in_flight.append(step)
            num_drafts += sum(each.num_drafts for each in step.drafted)
        running = scheduler.running.values()
        if len(running) == 2 and min(each.num_known_tokens for each in running) > 202:
            held.append(pool.num_held[1])
        if len(in_flight) == 2 or step is None:
            done = in_flight.pop(0)
            ids = [5 if each.draft == NO_DRAFT else REJECTED for each in done.scheduled]
            scheduler.update(done, StepResult(np.array(ids, np.int32)))
    assert (num_drafts > 1000) == (drafts is not None)
    assert pool.num_free == pool.num_blocks
    return held


def test_a_block_that_went_back_before_its_token_was_known_is_not_found() -> None:
    scheduler = Setup(block_size=1, windows=(2,), prefix_caching=True).scheduler()
    scheduler.add(request("a", [5, 6], max_tokens=9))
    steps = [scheduler.schedule() for _ in range(4)]
    assert scheduler.pool.num_cached == 2 and scheduler.pool.num_held == [2]
    assert steps[0] is not None
    scheduler.update(steps[0], result(steps[0]))  # of position 2, which is behind the window
    assert scheduler.pool.num_cached == 2


def test_a_request_is_refused_by_what_it_needs_at_once() -> None:
    setup = Setup(num_blocks=24, block_size=4, max_num_batched_tokens=8, windows=(8, 8, 0))
    scheduler = setup.scheduler()
    scheduler.add(request("fits", [1] * 40, max_tokens=9))  # 12 blocks, and 5 for each window
    with pytest.raises(UserError, match=r"need 2[0-9] blocks of 4, it has 24.*max_num_batched"):
        scheduler.add(request("large", [1] * 60, max_tokens=9))


def test_8192_tokens_behind_windows_of_512_hold_a_quarter_of_the_blocks() -> None:
    """4 of 5 layers with a window: 513 blocks of the layer without, 33 of each other."""
    setup = Setup(
        num_blocks=5 * 520,
        block_size=16,
        max_num_seqs=1,
        max_num_batched_tokens=WINDOW,
        max_model_len=LONG + 64,
        windows=(WINDOW,) * 4 + (0,),
    )
    held: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for windows in (setup.windows, (0,) * 5):
        scheduler = Scheduler(
            BlockPool(setup.num_blocks, 16, [CacheGroup(window) for window in windows]),
            StepLimits(1, WINDOW, max_model_len=LONG + 64),
        )
        scheduler.add(request("a", [7] * LONG, max_tokens=20))
        while scheduler.num_unfinished:
            step = scheduler.schedule()
            assert step is not None
            now = list(scheduler.pool.num_held)
            scheduler.update(step, result(step))
        held[windows] = now, scheduler.pool.peak_held
    assert held[setup.windows] == ([33] * 4 + [514], [64] * 4 + [514])
    assert held[(0,) * 5][0] == [514] * 5
    assert sum(held[setup.windows][0]) == 646 and 5 * 514 == 2570


def test_a_model_of_windows_answers_alike_and_takes_the_memory_of_its_windows(
    tmp_path: Path,
) -> None:
    """The whole engine at 8,192 tokens, against one that keeps every block."""
    HYBRID.save(tmp_path)
    llm = LLM(
        str(tmp_path),
        device="cpu",
        dtype="float32",
        optimization_level=0,
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        block_size=16,
        num_gpu_blocks_override=5 * 520,
    )
    engine, scheduler = llm.engine, llm.engine.core.scheduler
    assert isinstance(engine, Engine)
    prompt = {"prompt_token_ids": [(7 * i * i + i) % 120 + 3 for i in range(LONG)]}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

    def generate() -> tuple[list[int], list[dict[str, object]]]:
        engine.add_request(prompt, params, "long")
        seen: list[dict[str, object]] = []
        token_ids: list[int] = []
        while engine.has_unfinished():
            seen = engine.report()["memory"]["kv_groups"]
            for output in engine.step():
                token_ids = output.outputs[0].token_ids
        return token_ids, seen

    token_ids, groups = generate()
    memory = engine.report()["memory"]
    per_block = 2 * 16 * 16 * 4  # K and V of 16 tokens, a head of 16, one layer
    assert memory["kv_cache"] == 5 * 520 * per_block
    assert [group["layers"] for group in groups] == [[0], [1], [2], [3], [4]]
    assert [group["window"] for group in groups] == [WINDOW] * 4 + [0]
    assert [group["blocks"] for group in groups] == [33] * 4 + [514]
    assert [group["bytes"] for group in groups] == [33 * per_block] * 4 + [514 * per_block]
    assert all(group["blocks"] == 0 for group in memory["kv_groups"])
    pool = scheduler.pool
    scheduler.pool = BlockPool(pool.num_blocks, pool.block_size, (CacheGroup(),) * 5)
    assert generate()[0] == token_ids
    assert scheduler.pool.peak_held == [514] * 5


def test_graphs_read_the_table_of_each_group(tmp_path: Path) -> None:
    BY_NAME["qwen2_window"].save(tmp_path)
    options = EngineOptions(
        model=str(tmp_path),
        dtype="float32",
        max_num_seqs=4,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=16,
        block_size=8,
        cudagraph_mode="FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=(1, 2, 4, 8, 16),
    )
    recording = Hardware(device="cpu", name="recording", graphs="recording")
    llm = LLM.from_engine(Engine(options, recording))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = references("qwen2_window", True)
    outputs = llm.generate([list(r.prompt) for r in expected], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [r.token_ids for r in expected]
    dispatch = llm.report()["dispatch"]
    assert dispatch["decode"]["FULL"] > 0 and dispatch["mixed"]["PIECEWISE"] > 0
