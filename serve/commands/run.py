"""``fusewright run``: prompts in; streaming text, or a JSON object a finished request, out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ..console.flags import DEFAULT_MAX_TOKENS, ENGINE_FLAGS, SAMPLING, takes_flags, takes_model
from ..console.options import at, check_finished, load, stream
from ..console.report import summary
from .prompts import GivenPrompt, read_prompts

if TYPE_CHECKING:
    from ...engine.frontend.inputs import Prompt
    from ...engine.frontend.outputs import RequestOutput
    from ...engine.llm import LLM
    from ...engine.messages.sampling_params import SamplingParams


@takes_flags(engine=ENGINE_FLAGS, sampling=SAMPLING)
@takes_model
def run(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option("-p", "--prompt", help="a prompt (repeatable)", show_default=False),
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            help='one prompt a line; in a .jsonl, {"prompt": "text"}, {"prompt_token_ids": [1]} or '
            '{"messages": […]} with sampling options such as "max_tokens": 8; - is standard input',
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

    Several outputs are printed in their order, each as soon as it and all before it are finished,
    below a line such as "--- prompt 0, output 1 of 2"; with --json each as it finishes, request_id
    being its prompt's number. Defaults are vLLM's, but for --max-tokens; a .jsonl record's win.
    """
    prompts = read_prompts(prompt or [], prompts_file)
    ids = next((p for p in prompts if isinstance(p.prompt, list)), None)
    if chat and ids is not None:
        raise UserError(
            f"{ids.where}: --chat needs prompts of text: prompt_token_ids are past its template"
        )
    params = [_params(p, sampling) for p in prompts]
    for each, asked in zip(prompts, params, strict=True):
        if not json_output and (asked.logprobs, asked.prompt_logprobs) != (None, None):
            where = f"{each.where}: " if each.where else ""
            raise UserError(
                f"{where}logprobs are shown with --json alone; give it, or ask for none"
            )
    llm = load(engine, text=any(isinstance(p.prompt, str) or p.messages for p in prompts))
    requests = [
        _Request(_prompt(llm, p, chat), q, p.where, plain=not chat and p.messages is None)
        for p, q in zip(prompts, params, strict=True)
    ]
    if json_output:
        outputs = _print_json(llm, requests)
    elif len(requests) == 1 and params[0].n == 1:
        outputs = [_stream(llm, requests[0])]
    else:
        outputs = _print_in_order(llm, requests)
    if show_report:
        typer.echo(summary(llm.report(), sys.stderr), err=True)
    check_finished(outputs)


@dataclass(frozen=True)
class _Request:
    """A prompt as the engine takes it; ``plain``: its text is printed before its output."""

    prompt: Prompt
    params: SamplingParams
    where: str
    plain: bool


def as_json(output: RequestOutput) -> dict[str, Any]:
    """The fields of a finished ``RequestOutput``, its metrics as durations from arrival.

    ``request_id`` is the prompt's number, from 0; logprobs are keyed by token id, as text, and the
    bytes of a token are a list.
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


def _params(prompt: GivenPrompt, sampling: dict[str, Any]) -> SamplingParams:
    from ...engine.messages.sampling_params import SamplingParams

    with at(prompt.where if prompt.sampling else ""):
        return SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **sampling, **prompt.sampling})


def _prompt(llm: LLM, prompt: GivenPrompt, chat: bool) -> Prompt:
    messages = prompt.messages
    if chat and messages is None:
        messages = ({"role": "user", "content": prompt.prompt},)
    if messages is None:
        assert prompt.prompt is not None, "a prompt is one of the three"
        return prompt.prompt
    with at(prompt.where):
        return llm.engine.inputs.chat_prompt(messages)


def _finished(llm: LLM, requests: Sequence[_Request]) -> Iterator[RequestOutput]:
    """Runs all requests as one batch; yields each as it finishes."""
    for number, request in enumerate(requests):
        with at(request.where):
            llm.engine.add_request(request.prompt, request.params, str(number), final_only=True)
    while llm.engine.has_unfinished():
        yield from llm.engine.step()


def _print_json(llm: LLM, requests: Sequence[_Request]) -> list[RequestOutput]:
    outputs = []
    for output in _finished(llm, requests):
        typer.echo(json.dumps(as_json(output), ensure_ascii=False, default=list))
        outputs.append(output)
    return outputs


def _print_in_order(llm: LLM, requests: Sequence[_Request]) -> list[RequestOutput]:
    """Prints each output once all before it are printed, and the others at an interrupt."""
    from ...engine.worker.progress import Progress, show_progress

    outputs: dict[int, RequestOutput] = {}
    printed = 0
    # On a terminal the outputs themselves are the progress, and a bar between them would be torn.
    bar = nullcontext(Progress()) if sys.stdout.isatty() else show_progress()
    try:
        with bar as progress, progress.bar("generating", len(requests)) as advance:
            for output in _finished(llm, requests):
                outputs[int(output.request_id)] = output
                while printed in outputs:
                    _print(requests, printed, outputs[printed])
                    printed += 1
                advance(1)
    except KeyboardInterrupt:
        for number in sorted(number for number in outputs if number >= printed):
            _print(requests, number, outputs[number])
        typer.echo(f"interrupted: {len(outputs)} of {len(requests)} prompts are done", err=True)
        raise
    return [outputs[number] for number in range(len(requests))]


def _print(requests: Sequence[_Request], number: int, output: RequestOutput) -> None:
    """Print the outputs of a prompt, each below a line that says whose it is: texts may have any
    lines themselves."""
    if output.error is not None:
        return  # `check_finished` tells
    several = len(output.outputs) > 1
    for completion in output.outputs:
        which = f", output {completion.index} of {len(output.outputs)}" if several else ""
        begin = (output.prompt or "") if requests[number].plain else ""
        typer.echo(f"--- prompt {number}{which}\n{begin}{completion.text}")


def _stream(llm: LLM, request: _Request) -> RequestOutput:
    try:
        with at(request.where):
            output = stream(llm, request.prompt, request.params, partial(typer.echo, nl=False))
    except KeyboardInterrupt:
        typer.echo()
        raise
    typer.echo()
    return output
