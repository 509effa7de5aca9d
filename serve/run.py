"""``fusewright run``: prompts in; streaming text, or a JSON object a finished request, out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import UserError, option_specs
from .flags import DEFAULT_MAX_TOKENS, SAMPLING, takes_flags
from .options import batch, check_finished, load, merge
from .prompts import read_prompts
from .report import summary

if TYPE_CHECKING:
    from ..engine.inputs import Prompt
    from ..engine.llm import LLM
    from ..engine.outputs import RequestOutput
    from ..engine.sampling_params import SamplingParams


@takes_flags(engine=option_specs(), sampling=SAMPLING)
def run(
    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", show_default=False, help="the same as --model [default: abacus]"
        ),
    ] = None,
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option("-p", "--prompt", help="a prompt (repeatable)", show_default=False),
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            help='one prompt a line; in a .jsonl, {"prompt": "text"} or {"prompt_token_ids": [1]}; '
            "- is standard input",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="each prompt is a user's turn in the chat template")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="print one JSON object a finished request")
    ] = False,
    show_report: Annotated[
        bool,
        typer.Option(
            "--report", help="print fusions, times, graphs and memory to stderr at the end"
        ),
    ] = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Generate text for prompts: one is streamed, several run as one batch.

    With --json each request is printed as it finishes; request_id is its prompt's number.
    Sampling defaults are vLLM's (temperature 1.0), except for --max-tokens.
    """
    given = read_prompts(prompt or [], prompts_file)
    if chat and not all(isinstance(p, str) for p in given):
        raise UserError("--chat needs prompts of text: prompt_token_ids are past the chat template")
    options = merge(engine, model=model_argument)
    from ..engine.sampling_params import SamplingParams

    params = SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **sampling})
    llm = load(options, text=any(isinstance(p, str) for p in given))
    prompts: list[Prompt] = [_chat_prompt(llm, str(p)) for p in given] if chat else [*given]
    if json_output:
        outputs = []
        for output in _finished(llm, prompts, params):
            typer.echo(json.dumps(as_json(output), ensure_ascii=False))
            sys.stdout.flush()
            outputs.append(output)
    elif len(prompts) == 1 and params.n == 1:
        outputs = [_stream(llm, prompts[0], params)]
    else:
        outputs = batch(llm, prompts, params)
        for output in outputs:
            for completion in output.outputs:
                typer.echo(completion.text if chat else f"{output.prompt or ''}{completion.text}")
    if show_report:
        typer.echo(summary(llm.report(), sys.stderr), err=True)
    check_finished(outputs)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """The fields of a finished ``RequestOutput``, its metrics as durations from arrival.

    ``request_id`` is the prompt's number, from 0; logprobs are keyed by token id, as text.
    """
    record: dict[str, Any] = asdict(output)
    metrics = record.pop("metrics")
    started = metrics["arrival_s"]
    record["timing"] = {
        "first_token_s": (metrics["first_token_s"] or metrics["finished_s"]) - started,
        "finished_s": metrics["finished_s"] - started,
    }
    record["num_preemptions"] = metrics["num_preemptions"]
    return record


def _chat_prompt(llm: LLM, text: str) -> Prompt:
    return llm.engine.inputs.chat_prompt([{"role": "user", "content": text}])


def _finished(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams
) -> Iterator[RequestOutput]:
    """Runs all prompts as one batch; yields each request as it finishes."""
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(prompt, params, str(number), final_only=True)
    while llm.engine.has_unfinished():
        yield from llm.engine.step()


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    shown, last = 0, None
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        typer.echo(text[shown:], nl=False)
        sys.stdout.flush()
        shown, last = len(text), output
    typer.echo()
    assert last is not None, "a stream ends with a finished request"
    return last
