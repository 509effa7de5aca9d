"""The tuner of experts keeps what beats the rule, to a time limit, and goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Barrier, Event

import pytest
import torch

from fusewright import ops
from fusewright.compiler import build
from fusewright.compiler.lowering import search
from fusewright.compiler.lowering.search import Found
from fusewright.compiler.lowering.tune_experts import (
    TOKENS,
    Measure,
    candidates,
    rule_tile,
    table_of,
    tune,
    tune_for,
)
from fusewright.config import CompileConfig, EngineOptions, Hardware, MachineError, UserError
from fusewright.config.device_table import DeviceTable, read_table
from fusewright.config.expert_tables import Experts, ExpertTable, ExpertTile
from fusewright.engine.worker.source import configured_store, find_or_compile
from fusewright.engine.worker.startup import read_model
from fusewright.ops import Binary, Variant, variants_of
from fusewright.ops.core import device_table as _device_table
from fusewright.ops.experts.kernels import plan_gemm
from fusewright.ops.launches.experts import sort_by_expert
from fusewright.serve.cli import main
from fusewright.serve.measure.tune_gpus import GpuProcess, measures
from tests.model_executor.tiny_models import BY_NAME

QWEN = Experts(128, 768, 2048, 8, "bfloat16")
META = torch.device("meta")


def faster(*fast: ExpertTile, by: float = 0.5) -> Measure:
    """A measure for which these tiles take that share of the time of the first, all others more."""

    def measure(tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        return [100.0, *(100.0 * (by if tile in fast else 2.0) for tile in tiles[1:])]

    return measure


@pytest.mark.parametrize(("by", "kept"), [(0.5, True), (0.97, True), (0.98, False), (1.5, False)])
def test_a_tile_is_kept_only_where_it_beats_the_rule(by: float, kept: bool) -> None:
    rule = rule_tile(QWEN, 64)
    better = next(t for t in candidates(QWEN, 64) if t != rule)
    found = tune(QWEN, [faster(better, by=by)], tokens=(64,), seconds=1e9)
    assert found.winners() == {64: better if kept else rule}
    assert found.to_json()["us"] == {"64": [100.0 * by if kept else 100.0, 100.0]}
    assert table_of(QWEN, found.winners()).find(64) == found.winners()[64]


def test_a_tile_that_does_not_run_is_never_kept() -> None:
    def measure(tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        return [100.0, *[torch.inf] * (len(tiles) - 1)]

    found = tune(QWEN, [measure], tokens=(16,), seconds=1e9)
    assert found.winners() == {16: rule_tile(QWEN, 16)}


def test_it_stops_in_time() -> None:
    clock: Iterator[int] = count()
    done: list[int] = []
    found = tune(
        QWEN,
        [faster()],
        tokens=(1, 16, 64, 256),
        seconds=2,
        on_done=lambda tokens, tuned: done.append(tokens),
        clock=lambda: float(next(clock)),
    )
    assert (done, found.skipped) == ([1], [16, 64, 256])


def test_gpus_take_numbers_of_tokens_in_turn_and_measure_at_once() -> None:
    both = Barrier(2, timeout=300)
    seen: dict[str, list[int]] = {"first": [], "other": []}

    def gpu(name: str) -> Measure:
        def measure(tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
            both.wait()  # until the other measures too
            seen[name].append(tokens)
            return [100.0] * len(tiles)

        return measure

    done: list[int] = []
    counts = (1, 16, 64, 256)
    found = tune(
        QWEN,
        [gpu("first"), gpu("other")],
        tokens=counts,
        seconds=1e9,
        on_done=lambda tokens, tuned: done.append(tokens),
    )
    assert sorted(found.times) == sorted(done) == [*counts] and not found.skipped
    assert sorted(seen["first"] + seen["other"]) == [*counts]
    assert [len(tokens) for tokens in seen.values()] == [2, 2]


def test_what_others_found_is_kept_when_a_gpu_fails() -> None:
    began, failed = Event(), Event()

    def fails(tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        assert began.wait(300)
        failed.set()
        raise MachineError("GPU 1: gone")

    def slow(tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        began.set()
        assert failed.wait(300)
        return [100.0] * len(tiles)

    done: list[int] = []
    with pytest.raises(MachineError, match="GPU 1: gone"):
        tune(
            QWEN,
            [slow, fails],
            tokens=(1, 16, 64, 256),
            seconds=1e9,
            on_done=lambda tokens, tuned: done.append(tokens),
        )
    assert done in ([1], [16]), "that which was being measured; no other was begun"


def slow_from_64(gpu: int, last: float) -> Measure:
    """Runs in a process of its own, which ends at 64 tokens."""

    def measure(tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        if tokens == 64:
            os._exit(3)
        return [gpu + tokens / tile.rows for tile in tiles[:-1]] + [last]

    return measure


def test_a_process_answers_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where the process finds this module
    with closing(GpuProcess(5, slow_from_64, torch.inf)) as process:
        tiles = [*candidates(QWEN, 256)][:3]
        assert process(256, tiles) == [5 + 256 / tiles[0].rows, 5 + 256 / tiles[1].rows, torch.inf]
        assert process(32, tiles)[0] == 5 + 32 / tiles[0].rows
        for _ in range(2):
            with pytest.raises(MachineError, match=r"GPU 5: its process ended .* exit code 3"):
                process(64, tiles)


@pytest.mark.gpu
def test_processes_measure_what_this_one_does() -> None:
    small = Experts(8, 128, 256, 2, "bfloat16")
    tiles = [*candidates(small, 64)][:2]
    times = []
    for gpus in ([0], [0, 0]):  # a GPU twice has two processes
        with measures(small, gpus) as each:
            times += [measure(tokens, tiles) for tokens in (64, 16) for measure in each]
    assert [len(found) for found in times] == [2] * 6
    assert all(0.0 < us < torch.inf for found in times for us in found), times


@pytest.fixture
def no_tables() -> Iterator[None]:
    _device_table.forget()
    yield
    _device_table.forget()


def on_gpu(table: ExpertTable) -> DeviceTable:
    return DeviceTable("a.json", "a GPU", 90, 132, experts=(table,))


def constants(tokens: int) -> dict[str, object]:
    x = torch.empty(tokens, 2048, dtype=torch.bfloat16, device=META)
    weight = torch.empty(128, 1536, 2048, dtype=torch.bfloat16, device=META)
    ids = torch.empty(tokens, 8, dtype=torch.int32, device=META)
    _, by_expert = sort_by_expert(ids, 128)
    launches, _ = plan_gemm(by_expert, x, weight, ids, None, None, None, "silu")
    (variant,) = variants_of(launches)
    return dict(variant.constexprs) | {"stages": variant.num_stages}


def test_kernels_have_the_tiles_of_a_table(no_tables: None) -> None:
    table = ExpertTable(128, 768, "bfloat16", ((64, ExpertTile(32, 256, 64, 4, 8, 2)),))
    before = constants(64)
    _device_table.take_all((on_gpu(table),))
    after = constants(64)
    assert before != after
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SWAPPED", "stages")
    assert [after[n] for n in names] == [32, 128, 64, 4, True, 2]  # 256 columns: gate and up
    told = _device_table.report(torch.device("cpu"))
    assert told["found"]["tiles: 128 experts of 768, bfloat16, tokens"] == [64, 64]


def test_a_process_uses_one_set_of_tables(no_tables: None) -> None:
    table = ExpertTable(8, 64, "bfloat16", ((1, ExpertTile(16, 64, 64, 1, 4, 2)),))
    _device_table.take_all(())
    _device_table.take_all(())
    with pytest.raises(UserError, match="this process uses other device tables"):
        _device_table.take_all((on_gpu(table),))


class FakeMeasure:
    """Is fastest with the last tile."""

    def __init__(self, experts: Experts) -> None:
        assert experts == QWEN
        self.freed = False
        self.tokens: list[int] = []

    def __call__(self, tokens: int, tiles: Sequence[ExpertTile], /) -> list[float]:
        self.tokens.append(tokens)
        return [10.0 - i / len(tiles) * 5 for i in range(len(tiles))]

    def free(self) -> None:
        self.freed = True


def test_a_program_of_o3_has_its_own_tiles(no_tables: None) -> None:
    made: list[FakeMeasure] = []
    config = CompileConfig(3, True, (), (), True, True, (), True, tune_seconds=60.0)

    def measure(experts: Experts) -> FakeMeasure:
        made.append(FakeMeasure(experts))
        return made[-1]

    counts: list[tuple[int, int]] = []

    def tuned() -> ExpertTable | None:
        return tune_for(QWEN, config, measure, on_point=lambda *done: counts.append(done))[0]

    _device_table.take_all((), measures=True)
    table = tuned()
    assert table is not None
    _device_table.take(on_gpu(table))
    assert table == _device_table.expert_table(QWEN.shape)
    assert counts == [(i, len(TOKENS)) for i in range(len(TOKENS))]
    (own,) = made
    assert own.freed and own.tokens == [*TOKENS[4:], *TOKENS[:4]]
    # Another stage of the model finds them.
    assert tuned() == table and len(made) == 1
    # A program of another level was compiled for other tiles.
    with pytest.raises(UserError, match="this process uses tiles for experts that -O3 measured"):
        _device_table.take_all(())
    assert ExpertTable.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_an_o3_build_compiles_and_keeps_measured_tiles(
    no_tables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Build for a GPU that is not here, with given measures and without Triton's compiler."""
    tile = ExpertTile(16, 64, 64, 8, 4, 3)

    class Prefers(FakeMeasure):
        def __init__(self, experts: Experts) -> None:
            assert experts.shape == (16, 32, "bfloat16")

        def __call__(self, tokens: int, tiles: Sequence[ExpertTile], /) -> list[float]:
            return [1.0 if found == tile else 2.0 for found in tiles]

    monkeypatch.setattr(build, "ExpertMeasure", Prefers)
    monkeypatch.setattr(build, "Tuner", lambda: None)
    monkeypatch.setattr(build, "tune_weights", lambda weights, **how: Found())
    for module in (build, search):
        monkeypatch.setattr(module, "gpu_of", lambda device: ("a GPU", 90))
    compiled: dict[Variant, Binary] = {}

    def precompile(variants: set[Variant], sm: int, **how: object) -> None:
        compiled.update(dict.fromkeys(variants, Binary("kernel", sm, 0, 32, b"code")))

    monkeypatch.setattr(ops.KERNELS, "precompile", precompile)
    monkeypatch.setattr(ops.KERNELS, "binaries", lambda: compiled)
    monkeypatch.setattr(ops.KERNELS, "add", lambda variant, binary: None)
    BY_NAME["qwen3_moe"].config().save_pretrained(tmp_path / "model")
    (tmp_path / "store").mkdir()
    options = EngineOptions(
        model=str(tmp_path / "model"),
        load_format="dummy",
        optimization_level=3,
        dtype="bfloat16",
        max_model_len=64,
        compile_cache_dir=str(tmp_path / "store"),
    )
    gpu = Hardware(device="cuda", name="NVIDIA H200", sm=90, graphs="cuda")
    _, spec, config = read_model(options, gpu)
    store = configured_store(config.store)
    made = find_or_compile(spec, config, store, on_phase=lambda phase: None)
    assert made.built and made.artifact is not None
    us = made.report["tuned_experts"]["us"]
    assert us["64"] == [1.0, 2.0] and len(us) == len(TOKENS)
    of_experts = [dict(v.constexprs) for v in compiled if "_expert_linear" in v.kernel]
    assert {found["BLOCK_N"] for found in of_experts} >= {32, 64}  # gate and up; down
    _device_table.forget()  # as in another process
    again = find_or_compile(spec, config, store, on_phase=lambda phase: None)
    table = _device_table.expert_table((16, 32, "bfloat16"))
    assert not again.built and table is not None and table.find(64) == tile


def test_no_time_leaves_the_rule(no_tables: None) -> None:
    config = CompileConfig(3, True, (), (), True, True, (), True, tune_seconds=0.0)
    table, tuned = tune_for(QWEN, config, FakeMeasure, on_point=lambda *done: None)
    assert table is None and len(tuned.to_json()["skipped"]) == len(TOKENS)


def test_a_folders_tiles_are_not_measured(no_tables: None) -> None:
    table = ExpertTable(*QWEN.shape, ((64, ExpertTile(32, 256, 64, 4, 8, 2)),))
    config = CompileConfig(3, True, (), (), True, True, (), True, tables=(on_gpu(table),))
    _device_table.take_all(config.tables, measures=True)
    assert tune_for(QWEN, config, FakeMeasure, on_point=lambda *done: None)[0] is None


def test_tiles_do_not_change_under_a_program(no_tables: None) -> None:
    constants(64)  # of a program by the rule
    table = ExpertTable(*QWEN.shape, ((64, ExpertTile(32, 256, 64, 4, 8, 2)),))
    with pytest.raises(UserError, match="uses other tiles for 128 experts of 768, bfloat16"):
        _device_table.take(on_gpu(table))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["abacus"], "abacus: LlamaForCausalLM has no experts, so there is nothing to tune"),
        (["MODEL", "--tp", "5"], "tp=5: the experts' intermediate size 32 does not divide"),
        (["MODEL", "--dtype", "int4"], "dtype=int4: expected one of bfloat16, fp8, fp8_block"),
        (["MODEL", "--batch-sizes", "4,x"], "batch_sizes=4,x: expected numbers of tokens"),
    ],
)
def test_the_command_refuses_what_it_cannot_tune(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BY_NAME["qwen3_moe"].config().save_pretrained(tmp_path)
    assert main(["tune", "moe", *[str(tmp_path) if w == "MODEL" else w for w in words]]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.gpu
def test_the_command_writes_what_an_engine_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BY_NAME["qwen3_moe"].config().save_pretrained(tmp_path)
    output = tmp_path / "new" / "tiles"
    words = ["--batch-sizes", "16", "--output", str(output)]
    assert main(["tune", "moe", str(tmp_path), *words]) == 0
    (path,) = output.glob("nvidia-*.json")
    (entry,) = read_table(path).experts
    assert "1 tiles in" in capsys.readouterr().out and dict(entry.tiles).keys() == {16}
