"""``bench passes``: each pass on against off in a whole engine; work of passes over 80 layers."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fusewright.bench.passes import Steps, _order, _pairs, _rounds, measure_passes
from fusewright.compiler.capture.trace import trace
from fusewright.compiler.capture.unroll import unroll
from fusewright.config import PASSES, EngineOptions, UserError, gates
from fusewright.engine.aot_compile import target_hardware
from fusewright.engine.engine import Engine
from fusewright.engine.llm import LLM
from fusewright.engine.recompile import recompile
from fusewright.engine.worker.progress import show_progress
from fusewright.engine.worker.source import model_source
from fusewright.engine.worker.startup import read_model
from fusewright.passes import build_passes, run_passes
from fusewright.serve.cli import main

from ..effort import calls

CONFIG = Path(__file__).parents[1] / "serve" / "golden" / "llama3-8b" / "config.json"
OPTIONS: dict[str, Any] = {"model": "abacus", "device": "cpu", "max_model_len": 256}


@pytest.mark.product(2, of="commands that measure")
@pytest.mark.slow
def test_a_pass_is_measured_against_the_same_engine_without_it() -> None:
    said: list[str] = []
    steps = Steps(batches=(1, 3), prefill=8, turn=3, rounds=2)
    names = ["fuse_act", "fuse_gated_linear"]
    less = {"disable_passes": ("fuse_gated_linear",)}
    found = measure_passes({**OPTIONS, **less}, names, steps=steps, say=said.append)
    base, again, without, with_gated = found["configurations"]
    assert base.passes == again.passes
    assert set(base.passes) - set(without.passes) == {"fuse_act"}
    assert set(with_gated.passes) - set(base.passes) == {"fuse_gated_linear"}
    assert (base.matched["fuse_act"], with_gated.matched["fuse_gated_linear"]) == (5, 5)
    act, gated = found["rows"]
    assert (act.name, act.sm, act.on_ms, act.off_ms) == (
        "fuse_act",
        0,
        without.beside_ms,
        without.ms,
    )
    assert (gated.name, gated.on_ms, gated.off_ms) == (
        names[1],
        with_gated.ms,
        with_gated.beside_ms,
    )
    for row in found["rows"]:
        assert list(row.on_ms) == list(row.noise) == ["decode 1", "decode 3", "prefill 8"]
        assert all(ms > 0 for ms in (*row.on_ms.values(), *row.off_ms.values()))
        for work, noise in row.noise.items():
            assert noise >= abs(statistics.median(again.ratios(work)) - 1) - 1e-5
    titles = ["without fuse_act", "with fuse_gated_linear"]
    measured = ["as it is", "as it is, again", *titles]
    assert [line.partition(":")[0] for line in said] == [*titles, *measured]
    for configuration in found["configurations"]:
        assert all(len(figures) == 2 for figures in configuration.rounds.values())


def test_what_all_turns_share_cancels() -> None:
    """Steps that take longer and longer, and a round that does as a whole: a pass that costs a
    tenth costs a tenth, and equal programs differ in nothing."""
    factors = [1.0, 1.0, 1.1, 0.8, 1.0]
    for number, slow in enumerate((1.0, 2.0, 1.0)):
        order = _order(5, number)
        assert sorted(order) == [0, 0, 1, 1, 2, 3, 4] and order[::2] == [0, 1, 0, 1]
        times = [factors[i] * slow * (1 + 0.01 * place) for place, i in enumerate(order)]
        ratios = [ms / beside for ms, beside in _pairs(order, times)]
        assert ratios == pytest.approx(factors)
    ((_, beside), *_, last) = _pairs([0, 2, 1], [4.0, 3.0, 6.0])
    assert beside == 6.0 and last == (3.0, 5.0)
    assert {_order(5, number)[1] for number in range(3)} == {2, 3, 4}


def test_programs_take_turns_over_the_same_requests() -> None:
    """Prefilled by one program, continued by two others in turn: the tokens of one alone."""
    engine = LLM(**OPTIONS).engine
    assert isinstance(engine, Engine)
    # Programs that the test before has compiled.
    without = [{"fuse_gated_linear"}, {"fuse_gated_linear", "fuse_act"}]
    with show_progress() as progress:
        programs = [
            recompile(engine, [name for name in PASSES if name not in names], progress)
            for names in without
        ]
    assert "fuse_act" in programs[0].matched and "fuse_act" not in programs[1].matched
    runners = [engine.core.runner, *(program.runner for program in programs)]
    prompts = ["12+34=", "7*8=", "99-3="]
    alone = [LLM.from_engine(engine).generate(p, use_tqdm=False)[0] for p in prompts]
    requests = [engine.add_request(prompt, final_only=True) for prompt in prompts]
    outputs = {}
    for turn in itertools.cycle(range(3)):
        engine.core.runner = runners[turn]
        outputs |= {output.request_id: output for output in engine.step()}
        if not engine.has_unfinished():
            break
    for request, other in zip(requests, alone, strict=True):
        assert outputs[request].outputs[0].token_ids == other.outputs[0].token_ids


def test_an_engine_is_as_it_was_behind_a_round_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(EngineOptions(**OPTIONS))
    right = LLM.from_engine(engine).generate("12+34=", use_tqdm=False)[0].outputs[0]
    with show_progress() as progress:
        programs = [recompile(engine, engine.config.compile.passes, progress) for _ in range(3)]

        def listen(tokens: Any) -> None:
            heard.append(tokens)

        heard: list[Any] = []
        own, engine.on_tokens = engine.core.runner, listen
        monkeypatch.setattr(programs[2].runner, "_run", None)  # the third cannot run
        steps = Steps(batches=(2,), prefill=8, turn=2, rounds=1)
        with pytest.raises(UserError, match=r"request request-.* failed: TypeError"):
            _rounds(engine, programs, steps, progress)
    assert engine.core.runner is own and engine.on_tokens is listen
    assert not engine.has_unfinished() and not heard
    again = LLM.from_engine(engine).generate("12+34=", use_tqdm=False)[0].outputs[0]
    assert again.token_ids == right.token_ids and len(heard) == len(right.token_ids)


@pytest.mark.product
@pytest.mark.parametrize("quantization", [None, "fp8_static"])
def test_passes_take_as_much_work_for_each_layer_of_80_as_of_20(
    quantization: str | None, tmp_path: Path
) -> None:
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": 80}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineOptions(model=str(tmp_path), load_format="dummy", quantization=quantization)
    _, spec, resolved = read_model(options, target_hardware(options, 90))
    source = model_source(spec, resolved)
    example, passes = source.example, build_passes(resolved.compile.passes)
    traced = trace(source.model, example.args, example.named, example.dynamic)
    assert source.repeat is not None
    efforts = {}
    for depth in (1, 20, 80):
        repeat = replace(source.repeat, layers=source.repeat.layers[:depth])
        graph = unroll(traced, repeat).gm
        efforts[depth] = calls(partial(run_passes, graph, passes))
    assert efforts[80] - efforts[20] < 1.05 * 3 * (efforts[20] - efforts[1]) * 20 / 19


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="pass=fuse_everything: unknown; known: cleanup"):
        measure_passes(OPTIONS, ["fuse_everything"])
    with pytest.raises(UserError, match="pass=fuse_norm_quant: it matches nothing in this model"):
        measure_passes(OPTIONS, ["fuse_norm_quant"])
    with pytest.raises(UserError, match="optimization_level=0: it runs no passes; use -O1"):
        measure_passes({**OPTIONS, "optimization_level": 0})
    with pytest.raises(UserError, match=r"max_model_len=128: the decodes .* up to \d+ tokens"):
        measure_passes({**OPTIONS, "max_model_len": 128}, ["fuse_act"])
    with pytest.raises(UserError, match="enable_prefix_caching=False: bench passes needs it"):
        measure_passes({**OPTIONS, "enable_prefix_caching": False})
    assert main(["bench", "passes", "abacus", "--input-len", "0"]) == 2
    assert "input_len=0: expected at least 1" in capsys.readouterr().err


def test_figures_of_another_machine_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "gates.json"
    table.write_text('{"measured": []}')
    monkeypatch.setattr(gates.update, "__defaults__", (table,))
    result = CONFIG.parents[4] / "bench" / "results" / "h200" / "passes-llama3-8b-fp8_static.json"
    assert main(["bench", "passes", "--read", str(result), "--update-gates"]) == 0
    assert "fuse_gated_linear_fp8" in capsys.readouterr().out
    rows = json.loads(result.read_text())["rows"]
    kept = {row["name"]: row for row in json.loads(table.read_text())["measured"]}
    assert kept.keys() == {row["name"] for row in rows}
    assert all(kept[row["name"]]["on_ms"] == row["on_ms"] for row in rows)
    assert {row["source"] for row in kept.values()} == {result.name}
    (tmp_path / "other.json").write_text("{}")
    assert main(["bench", "passes", "--read", str(tmp_path / "other.json")]) == 2
    assert main(["bench", "passes", "--read", str(tmp_path / "missing.json")]) == 2
    said = capsys.readouterr().err
    assert "is not a result of `fusewright bench passes` with --output" in said
    assert "No such file" in said
