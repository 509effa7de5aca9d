"""``fusewright chat``: a conversation at the terminal, with a server or a model of this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ..console.flags import DEFAULT_MAX_TOKENS, ENGINE_FLAGS, SAMPLING, takes_flags, takes_model
from ..console.options import load
from .ask import Server

if TYPE_CHECKING:
    from ...engine.llm import LLM
    from ...engine.messages.sampling_params import SamplingParams

Answer = Callable[[Sequence[dict[str, str]]], Generator[str, None, None]]
"""From a conversation to the pieces of the next answer."""


@takes_flags(engine=ENGINE_FLAGS, sampling=tuple(s for s in SAMPLING if s.name != "logprobs"))
@takes_model
def chat(
    *,
    url: Annotated[
        str | None, typer.Option(help="ask this server, http://HOST:PORT, and load no model")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="the key that the server asks for")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="the conversation's first message")] = (
        None
    ),
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Chat with a model at the terminal: a line is a message, the answer is streamed.

    /clear forgets the conversation, /exit ends the chat, /help lists such lines; Ctrl-C ends an
    answer, Ctrl-D the chat. Lines of a pipe are messages too. A server's thinking goes to stderr.
    """
    if sampling.get("n", 1) != 1:
        raise UserError("--n: a chat has one answer; `fusewright run` gives several")
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling}
    if url is None:
        if api_key is not None:
            raise UserError("--api-key: without --url no server is asked; leave it out")
        answer = _of_model(engine, sampling)
    else:
        answer = _of_server(Server(url, api_key), engine, sampling)
    _talk(answer, [] if system_prompt is None else [{"role": "system", "content": system_prompt}])


def _of_model(engine: dict[str, Any], sampling: dict[str, Any]) -> Answer:
    llm = load(engine, text=True)
    from ...engine.messages.sampling_params import SamplingParams

    params = SamplingParams(**{**llm.engine.inputs.default_sampling, **sampling})
    return partial(_generated, llm, params)


def _generated(
    llm: LLM, params: SamplingParams, messages: Sequence[dict[str, str]]
) -> Generator[str, None, None]:
    shown = 0
    with closing(llm.stream(llm.engine.inputs.chat_prompt(messages), params)) as outputs:
        for output in outputs:
            if output.error is not None:
                raise UserError(output.error)
            text = output.outputs[0].text
            yield text[shown:]
            shown = len(text)


def _of_server(server: Server, engine: dict[str, Any], sampling: dict[str, Any]) -> Answer:
    if others := [name for name in engine if name != "model"]:
        flag = "--" + others[0].replace("_", "-")
        raise UserError(f"{flag}: the server of --url has its own options; leave it out")
    body = {"model": engine.get("model") or server.model(), **sampling}

    def answer(messages: Sequence[dict[str, str]]) -> Generator[str, None, None]:
        asked, thinks = {**body, "messages": messages}, False
        with closing(server.stream("/v1/chat/completions", asked)) as events:
            for event in events:
                for delta in (choice["delta"] for choice in event.get("choices", ())):
                    if thought := delta.get("reasoning_content"):
                        thinks = True
                        typer.echo(thought, nl=False, err=True)
                    if text := delta.get("content"):
                        if thinks:
                            typer.echo("\n", err=True)
                        thinks = False
                        yield text

    return answer


_COMMAND = re.compile(r"/[a-z?]+")
"""A line that is no message: a path or a fraction has more than one word or slash."""
_ENDS = ("/exit", "/quit", "/bye")
_ASKS = ("/help", "/?")
_HELP = "/clear forgets the conversation, /exit ends the chat; other lines are messages"


def _talk(answer: Answer, beginning: list[dict[str, str]]) -> None:
    messages, is_person = list(beginning), sys.stdin.isatty()
    while (text := _message(is_person)) is not None:
        if (word := text.strip()) in _ENDS:
            return
        if word == "/clear":
            messages = list(beginning)
            continue
        if _COMMAND.fullmatch(word):
            typer.echo(
                _HELP if word in _ASKS else f"error: {word} is no command; {_HELP}", err=True
            )
            continue
        if not word:
            continue
        messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            with closing(answer(messages)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    typer.echo(piece, nl=False)
        except KeyboardInterrupt:
            if not is_person:
                raise
        except UserError as error:
            if not is_person:
                raise
            typer.echo(f"error: {error}", err=True)
            del messages[-1]
            continue
        typer.echo()
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _message(is_person: bool) -> str | None:
    """The next line; None at the end."""
    if not is_person:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    import readline  # noqa: F401  # lines can be edited, and earlier ones be found

    try:
        return input("> ")
    except EOFError:
        typer.echo()
        return None
