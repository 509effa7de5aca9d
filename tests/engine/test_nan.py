"""Logits that are no numbers end their own request with an error; nothing of it is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fusewright.model_executor.abacus as abacus
from fusewright import LLM
from fusewright.engine.frontend.outputs import CompletionOutput
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.serve.cli import main

from .test_faults import failed, run
from .toy import Setup, ToyRunner, check_invariants, solo
from .toy_slots import ToyStep

LONG = SamplingParams(max_tokens=20, ignore_eos=True)
POISON = 200


@dataclass
class NaNRunner(ToyRunner):
    """Whoever sees a poisoned token in its KV blocks has NaN logits, as long as it is poison."""

    poisoned: bool = True

    def run_next(self) -> None:
        step: ToyStep = self.queue[0]
        super().run_next()
        assert step.output is not None
        for row, entry in enumerate(step.entries):
            found = any(kv and kv[1] == POISON for kv in self.seen(entry))
            if entry.num_sampled and self.poisoned and found:
                step.output.token_ids[row] = -1
                self.last_tokens[entry.slot] = 0


def poisoned(setup: Setup) -> Any:
    engine = setup.engine()
    engine.core.runner = setup.runner(NaNRunner)
    return engine


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 17], ids=["", "with preemption"])
def test_a_request_with_nan_logits_ends_alone(async_scheduling: bool, num_blocks: int) -> None:
    setup = Setup(num_blocks, async_scheduling=async_scheduling, prefix_caching=True)
    engine = poisoned(setup)
    prompts = {name: [7] * 8 + [number] for number, name in enumerate("abcdef")}
    prompts |= {"x": [7] * 8 + [POISON], "y": [POISON, 1]}
    for name, prompt in prompts.items():
        engine.add_request(prompt, LONG, name)
    outputs = run(engine)
    assert (engine.core.scheduler.num_preemptions > 0) == (num_blocks < 64)
    assert failed(outputs) == {"x", "y"}
    for name, prompt in prompts.items():
        (given,) = outputs[name].outputs
        if name in "xy":
            assert given.token_ids == [] and given.text == ""
            assert given.error is not None and "NaN or infinite at output token 1" in given.error
        else:
            assert given.token_ids == solo(prompt, LONG, 64).token_ids


def test_what_a_request_with_nan_logits_stored_is_not_found_again() -> None:
    engine = poisoned(Setup(prefix_caching=True))
    bad, good = [*range(8), POISON, 1, 2, 3, 4], [*range(4), *range(20, 30)]
    for prompt in (good, bad):
        engine.add_request(prompt, LONG, str(prompt))
    run(engine)
    engine.core.runner.poisoned = False
    for prompt in (good, bad):
        before = engine.core.scheduler.num_prefix_hits
        engine.add_request(prompt, LONG, "again")
        (given,) = run(engine)["again"].outputs
        assert given.token_ids == solo(prompt, LONG, 64).token_ids
        hits = engine.core.scheduler.num_prefix_hits - before
        assert hits == (0 if prompt is good else 4), "good lost the block that it shared with bad"
    check_invariants(engine.core.scheduler)


def test_one_nan_output_of_several_ends_with_what_it_had() -> None:
    """The third output token is poison to whoever draws it; the others go on."""
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=5)
    engine = poisoned(Setup())
    first = solo([1, 2], params.of_child(0), 64).token_ids
    second = solo([1, 2], params.of_child(1), 64).token_ids
    engine.core.runner.poisoned = False
    engine.add_request([1, 2], params, "pair")
    for _ in range(3):
        engine.step()
    child = next(iter(engine.core.scheduler.running.values()))
    known = len(child.output_token_ids)
    address = child.blocks.tables[0][0] * engine.core.scheduler.pool.block_size
    engine.core.runner.check()
    engine.core.runner.kv[address] = (0, POISON)
    engine.core.runner.poisoned = True
    completions = run(engine)["pair"].outputs
    assert [c.finish_reason for c in completions] == ["error", "length"]
    assert completions[1].token_ids == second
    assert known <= len(completions[0].token_ids) < 6
    assert completions[0].token_ids == first[: len(completions[0].token_ids)]
    assert f"at output token {len(completions[0].token_ids) + 1}" in str(completions[0].error)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("abacus", device="cpu", max_model_len=64)


@contextmanager
def nan_in(llm: LLM, name: str, index: Any) -> Iterator[None]:
    """A part of a weight, or of the cosines and sines by position, is NaN."""
    model = llm.engine.weights.result()  # type: ignore[attr-defined]
    tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
    kept = tensor[index].clone()
    try:
        tensor.data[index] = torch.nan
        yield
    finally:
        tensor.data[index] = kept


PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(seed=1),
    "filtered": SamplingParams(seed=1, top_p=0.9, top_k=5, min_p=0.01),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=2),
    "greedy, logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "drawn, logprobs": SamplingParams(seed=1, logprobs=0),
}


def answers(llm: LLM, prompts: list[str], params: SamplingParams) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]


def check_error(given: CompletionOutput) -> None:
    assert (given.finish_reason, given.token_ids, given.text) == ("error", [], "")
    assert given.error is not None
    assert given.error.startswith("logits are NaN or infinite at output token 1: check the weights")


@pytest.mark.product
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(
    ("weight", "index"),
    [("embed.weight", (200, 0)), ("norm.weight", 0), ("layers.0.attention.qkv.weight", (3, 7))],
)
def test_a_nan_weight_is_an_error_of_every_request(
    llm: LLM, weight: str, index: Any, kind: str
) -> None:
    with nan_in(llm, weight, index):
        for output in llm.generate(["37+58=", "1+1="], PARAMS[kind], use_tqdm=False):
            check_error(output.outputs[0])
        last = [*llm.stream("37+58=", PARAMS[kind])][-1]
        check_error(last.outputs[0])
    assert answers(llm, ["37+58="], PARAMS["greedy"]) == ["95"], "something NaN is found again"


@pytest.mark.product(2)
@pytest.mark.parametrize("kind", PARAMS)
def test_nan_from_a_position_on_is_an_error_of_those_who_get_there(llm: LLM, kind: str) -> None:
    """The prompts have 9 tokens, 7 and 5."""
    prompts = ["123+456=", "37+58=", "1+1="]
    params = replace(PARAMS[kind], max_tokens=3, ignore_eos=True)
    right = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    with nan_in(llm, "cos_sin_cache", 8):
        long, middle, short = llm.generate(prompts, params, use_tqdm=False)
        streamed = [*llm.stream(prompts[1], params)][-1].outputs[0]
    check_error(long.outputs[0])
    for given in (middle.outputs[0], streamed):
        assert given.error is not None and "at output token 3" in given.error
        assert given.token_ids == right[1].token_ids[:2]
        assert given.logprobs is None or len(given.logprobs) == 2
    assert short.outputs[0].token_ids == right[2].token_ids and short.error is None


def test_a_row_without_any_token_left_is_an_error(llm: LLM) -> None:
    everything = SamplingParams(stop_token_ids=list(range(272)), min_tokens=1, seed=1)
    (output,) = llm.generate("37+58=", everything, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert output.error is not None
    assert output.error.startswith("all logits are -inf at output token 1: no token is left")


def test_a_checkpoint_with_nan_is_one_line_and_exit_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(Path(abacus.__file__).parent, tmp_path / "abacus")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    command = ["run", str(folder), "-p", "37+58=", "--device", "cpu", "--temperature", "0"]
    assert main(command) == 2
    said = capfd.readouterr()
    assert said.out.strip() == "37+58=" or said.out.strip() == ""
    (line,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert "logits are NaN or infinite at output token 1" in line
    assert main([*command, "--json"]) == 2
    (record,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert record["outputs"][0]["finish_reason"] == "error"
