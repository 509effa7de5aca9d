"""``fusewright run``: prompts in; streaming text, or a JSON object a finished request, out."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import option_specs
from .flags import DEFAULT_MAX_TOKENS, SAMPLING, takes_flags
from .options import load, merge
from .progress import generate
from .prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from ..engine.llm import LLM
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
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Generate text for prompts: one is streamed, several run as one batch.

    Sampling defaults are vLLM's (temperature 1.0), except for --max-tokens.
    """
    prompts = read_prompts(prompt or [], prompts_file)
    options = merge(engine, model=model_argument)
    from ..engine.sampling_params import SamplingParams

    params = SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **sampling})
    llm = load(options)
    if chat:
        prompts = [_chat_prompt(llm, prompt) for prompt in prompts]
    if json_output:
        for output in generate(llm, prompts, params):
            typer.echo(json.dumps(as_json(output), ensure_ascii=False))
    elif len(prompts) == 1 and params.n == 1:
        _stream(llm, prompts[0], params)
    else:
        for output in generate(llm, prompts, params):
            _print_outputs(output)


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    shown = 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        typer.echo(text[shown:], nl=False)
        sys.stdout.flush()
        shown = len(text)
    typer.echo()
