"""Scripts for vLLM with the import changed: its offline examples, written anew over the bundled
model."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fusewright import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from fusewright.config import UserError

PROMPTS = ["37+58=", "sort 5 3 9 1=", "reverse abc="]
ANSWERS = ["95", "1 3 5 9", "cba"]
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float", "max_num_seqs": 16, "seed": None}
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        model="abacus",
        enforce_eager=True,
        max_logprobs=-1,
        trust_remote_code=True,
        swap_space=4,
        distributed_executor_backend="mp",
        **SMALL,
    ) as llm:
        yield llm


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_basic(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    for output, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
        assert output.prompt == prompt and output.outputs[0].token_ids
    assert texts(llm.generate(PROMPTS, GREEDY, lora_request=None)) == ANSWERS
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    prompts = [TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt=PROMPTS[0])]
    assert texts(llm.generate(prompts, GREEDY)) == ANSWERS[:1] * 2


def test_chat_with_engine_args_from_a_command_line() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    line = "--model abacus --enforce-eager --device cpu --dtype half --max-tokens 16"
    args = vars(parser.parse_args([*line.split(), "--max-num-seqs", "4", "--swap-space", "4"]))
    max_tokens = args.pop("max_tokens")
    with LLM(**args) as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens, params.temperature = max_tokens, 0.0
        conversation = [{"role": "user", "content": PROMPTS[0]}]
        assert texts(llm.chat(conversation, params, use_tqdm=False)) == ANSWERS[:1]
        assert texts(llm.chat([conversation] * 2, params, lora_request=None)) == ANSWERS[:1] * 2
        with pytest.raises(UserError, match=r"LLM.chat: lora_request=.*merge the adapter"):
            llm.chat(conversation, params, lora_request="x")


def test_engine_args_make_engines_in_three_ways() -> None:
    args = EngineArgs(model="abacus", enforce_eager=True, **SMALL)
    for llm in (LLM(**asdict(args)), LLM(**vars(args)), LLM.from_engine_args(args)):
        with llm:
            assert texts(llm.generate(PROMPTS[:1], GREEDY)) == ANSWERS[:1]
    with pytest.raises(UserError, match="enable_lora=True: LoRA adapters are not served"):
        LLM.from_engine_args(EngineArgs(enable_lora=True))
    with pytest.raises(TypeError, match="max_num_seq"):
        EngineArgs(max_num_seq=1)


FORMS: dict[str, tuple[StructuredOutputsParams, str]] = {
    "choice": (StructuredOutputsParams(choice=["Positive", "Negative"]), "Positive|Negative"),
    "regex": (StructuredOutputsParams(regex=r"[a-z]{3}=\d\d"), r"[a-z]{3}=\d\d"),
    "json": (
        StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {"a": {"enum": [1]}},
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
        r"\{[\s\S]*\}",
    ),
    "gbnf": (
        StructuredOutputsParams(grammar='root ::= "sum " number\nnumber ::= "1" | "2"'),
        "sum [12]",
    ),
    "lark": (StructuredOutputsParams(grammar='start: "sum " ("1"|"2")'), "sum [12]"),
}


@pytest.mark.parametrize("form", FORMS)
def test_structured_outputs(llm: LLM, form: str) -> None:
    structured, pattern = FORMS[form]
    params = SamplingParams(max_tokens=256, temperature=0, structured_outputs=structured)
    (output,) = llm.generate(PROMPTS[:1], params)
    assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0]
    if form == "json":
        assert json.loads(output.outputs[0].text) == {"a": 1}


def test_prefix_caching_and_its_reset(llm: LLM) -> None:
    shared = "12+34=46\n" * 8
    assert llm.reset_prefix_cache()
    hits = [llm.generate(shared + p, GREEDY)[0].num_cached_tokens for p in PROMPTS]
    assert hits[0] == 0 and min(hits[1:]) > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(shared + PROMPTS[1], GREEDY)[0].num_cached_tokens == 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_invariance(llm: LLM, batch_size: int) -> None:
    """What -O0 has by itself; ``batch_invariant=True`` promises it at -O2."""
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=8, logprobs=0)
    alone = llm.generate(PROMPTS[0], params)[0].outputs[0]
    together = llm.generate(PROMPTS[:batch_size], params)[0].outputs[0]
    assert together.token_ids == alone.token_ids


def test_all_log_probabilities_sum_to_one(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    output = llm.generate(PROMPTS[0], params)[0]
    assert output.outputs[0].logprobs and output.prompt_logprobs
    for entry in (output.outputs[0].logprobs[0], output.prompt_logprobs[-1]):
        assert entry is not None and len(entry) == llm.engine.inputs.vocab_size
        assert sum(math.exp(each.logprob) for each in entry.values()) == pytest.approx(1, abs=1e-4)


def test_more_log_probabilities_than_the_limit_name_the_option() -> None:
    with LLM("abacus", enforce_eager=True, **SMALL) as llm:
        for count in (21, -1):
            with pytest.raises(UserError, match=rf"logprobs={count}: expected 20 .* max_logprobs"):
                llm.generate("1", SamplingParams(logprobs=count))
        assert llm.generate("1", SamplingParams(logprobs=20, max_tokens=1))


def test_only_allowed_tokens_are_sampled(llm: LLM) -> None:
    allowed = llm.engine.inputs.encode("0123", add_special_tokens=False)
    free = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    asked = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, allowed_token_ids=allowed)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, allowed_token_ids=allowed)
    outputs = llm.generate(PROMPTS[1:2] * 3, [free, asked, greedy])
    ids = [set(output.outputs[0].token_ids) for output in outputs]
    assert ids[1] <= set(allowed) and ids[2] <= set(allowed) and not ids[0] <= set(allowed)
    assert llm.generate(PROMPTS[1], free)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    with pytest.raises(UserError, match="allowed_token_ids has 100000: outside the vocabulary"):
        llm.generate("1", SamplingParams(allowed_token_ids=[100000]))


def test_prompts_are_cut_in_front_and_text_may_be_left_out(llm: LLM) -> None:
    whole = llm.engine.inputs.encode("1+1=2\n" + PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=6, detokenize=False)
    output = llm.generate({"prompt_token_ids": whole}, params)[0]
    assert output.prompt_token_ids == whole[-6:]
    assert output.outputs[0].text == "" and output.outputs[0].token_ids
    params.truncate_prompt_tokens = -1
    longest = llm.engine.inputs.max_model_len - 1
    ids = whole * (longest // len(whole) + 1)
    assert llm.generate({"prompt_token_ids": ids}, params)[0].prompt_token_ids == ids[-longest:]


def test_streams_are_of_the_kind_that_is_asked_for(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0)
    last = [*llm.stream(PROMPTS[1], params)][-1].outputs[0]
    params.output_kind = RequestOutputKind.DELTA
    deltas = [output.outputs[0] for output in llm.stream(PROMPTS[1], params)]
    assert len(deltas) > 2
    assert "".join(delta.text for delta in deltas) == last.text
    assert [i for delta in deltas for i in delta.token_ids] == last.token_ids
    assert sum(len(delta.logprobs or ()) for delta in deltas) == len(last.token_ids)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    assert [output.finished for output in llm.stream(PROMPTS[1], params)] == [True]


def test_async_engines_come_from_their_arguments_too() -> None:
    async def run() -> None:
        with AsyncLLM.from_engine_args(AsyncEngineArgs(enforce_eager=True, **SMALL)) as llm:
            params = SamplingParams(temperature=0, max_tokens=16)
            params.output_kind = RequestOutputKind.DELTA
            parts = [o async for o in llm.generate(PROMPTS[1], params, lora_request=None)]
            assert "".join(part.outputs[0].text for part in parts) == ANSWERS[1]
            assert await llm.reset_prefix_cache()

    asyncio.run(run())


def test_beam_search_finds_the_likeliest_of_all_pairs(llm: LLM) -> None:
    """With a beam as wide as all first tokens that matter two steps leave nothing out."""
    width = 12
    params = BeamSearchParams(beam_width=width, max_tokens=2, ignore_eos=True)
    (found,) = llm.beam_search([{"prompt": PROMPTS[0]}], params)
    prompt, asked = llm.engine.inputs.encode(PROMPTS[0]), SamplingParams(max_tokens=1, logprobs=24)
    (first,) = llm.generate(PROMPTS[0], asked)[0].outputs[0].logprobs or ()
    tokens = sorted(first, key=lambda token: first[token].rank)[:width]
    steps = llm.generate([{"prompt_token_ids": [*prompt, token]} for token in tokens], asked)
    every = {
        (*prompt, token, second): first[token].logprob + entry.logprob
        for token, step in zip(tokens, steps, strict=True)
        for second, entry in (step.outputs[0].logprobs or [{}])[0].items()
    }
    best = sorted(every, key=lambda pair: every[pair], reverse=True)[:width]
    assert [tuple(beam.tokens) for beam in found.sequences] == best
    for beam, pair in zip(found.sequences, best, strict=True):
        assert beam.cum_logprob == pytest.approx(every[pair], abs=1e-4)


def test_beams_end_where_their_output_does(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=16)
    (found,) = llm.beam_search(PROMPTS[0], params)
    best = found.sequences[0]
    assert (best.text, best.finish_reason) == (PROMPTS[0] + ANSWERS[0], "stop")
    assert len(best.logprobs) == len(best.tokens) - len(llm.engine.inputs.encode(PROMPTS[0]))
    with pytest.raises(UserError, match="beam_width=0: expected at least 1"):
        BeamSearchParams(beam_width=0, max_tokens=1)


def test_a_chat_template_is_given_as_a_file_or_as_text(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}={% endfor %}"
    file = tmp_path / "t.jinja"
    file.write_text(template)
    for given in (template, str(file)):
        with LLM("abacus", enforce_eager=True, chat_template=given, **SMALL) as llm:
            assert texts(llm.chat([{"role": "user", "content": "37+58"}], GREEDY)) == ANSWERS[:1]
    for bad, message in (("no/such.jinja", "no such file"), ("{% if %}", "does not compile")):
        with pytest.raises(UserError, match=message):
            LLM("abacus", chat_template=bad)


def test_what_vllm_has_and_this_has_not_says_what_to_use(llm: LLM) -> None:
    for name, message in (
        ("apply_model", r"LLM.apply_model is not there: the model runs as compiled code"),
        ("embed", r"LLM.embed is not there: models generate text"),
        ("get_metrics", r"LLM.get_metrics is called report"),
        ("nothing", r"LLM.nothing: no such attribute"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(llm, name)
    with pytest.raises(UserError, match=r"LLM.generate: lora_request='x': LoRA adapters"):
        llm.generate("1", lora_request="x")
    with pytest.raises(UserError, match=r"LLM.generate: unknown argument 'prioritys'"):
        llm.generate("1", prioritys=[1])


def test_the_tokenizer_is_that_of_transformers_or_like_it(llm: LLM) -> None:
    theirs, ours = llm.get_tokenizer(), llm.engine.inputs.require_tokenizer()
    pytest.importorskip("transformers")
    assert type(theirs).__module__.startswith("transformers")
    assert list(theirs(PROMPTS).input_ids) == ours(PROMPTS).input_ids == ours(PROMPTS)["input_ids"]
    messages = [{"role": "user", "content": "1+1="}]
    for tokenize in (False, True):
        given = {"tokenize": tokenize, "add_generation_prompt": True, "return_dict": False}
        right = theirs.apply_chat_template(messages, **given)
        assert ours.apply_chat_template(messages, **given) == right  # type: ignore[arg-type]


def test_the_names_of_vllm_import_no_torch() -> None:
    code = (
        "import sys, fusewright\n"
        "for name in fusewright.__all__:\n"
        "    getattr(fusewright, name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
