"""What commands that run a model share: its options from flags, loading it, running a batch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...config import EngineDeadError, EngineOptions, MachineError, UserError

if TYPE_CHECKING:
    from ...engine.frontend.inputs import Prompt
    from ...engine.frontend.outputs import RequestOutput
    from ...engine.llm import LLM
    from ...engine.messages.sampling_params import SamplingParams


def merge(engine: dict[str, Any], **implied: Any) -> dict[str, Any]:
    """Options of ``engine`` plus those another argument implies (``None``: implies nothing).

    Raises:
        UserError: the argument and the flag disagree.
    """
    merged = dict(engine)
    for name, value in implied.items():
        if value is None:
            continue
        if merged.get(name, value) != value:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {merged[name]} contradicts {value}: give one of them")
        merged[name] = value
    return merged


def writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        UserError: names the option.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option}={path}: is a folder; give a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option}={path}: cannot be written; give a file in another folder")


def checked(options: dict[str, Any], *, weights: bool = False) -> EngineOptions:
    """``EngineOptions``, checked before torch is imported; ``weights``: they will be read.

    Raises:
        UserError: an option or the model's folder is bad.
    """
    from ...engine.frontend.check import check_start

    asked = EngineOptions(**options)
    check_start(asked, weights=weights)
    return asked


def check_to_measure(options: dict[str, Any]) -> None:
    """Check the options of a command that measures, before torch is imported.

    Raises:
        UserError: an option or the model's folder is bad.
    """
    model = options.get("model", "")
    if model.endswith((".json", ".jsonl")):
        raise UserError(
            f"model={model}: expected a model; --output FILE writes the result, --json prints it"
        )
    checked(options, weights=True)


@contextmanager
def at(where: str) -> Iterator[None]:
    """Put the place of a prompt, unless it is "", before what is said of it.

    Raises:
        UserError: as the body does.
    """
    try:
        yield
    except UserError as error:
        if not where or isinstance(error, EngineDeadError):
            raise
        raise UserError(f"{where}: {error}") from error


def write_result(
    path: Path | None, record: Mapping[str, Any], *, json_output: bool = False
) -> None:
    """A result as JSON: ``--output`` writes it to a file, ``--json`` prints it.

    Raises:
        MachineError: the file cannot be written.
    """
    if path is not None:
        try:
            path.write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise MachineError(
                f"output={path}: cannot be written: {error.strerror}; --json prints the result"
            ) from error
    if json_output:
        typer.echo(json.dumps(record))


def load(options: dict[str, Any], *, text: bool = False) -> LLM:
    """An ``LLM``, which checks the options and then imports torch.

    Args:
        options: engine options.
        text: prompts are text, for which there must be a tokenizer.

    Raises:
        UserError: an option or the model's folder is bad.
    """
    if text:
        from ...engine.frontend.check import check_tokenizer

        check_tokenizer(checked(options, weights=True))
    from ...engine.importing import importing

    with importing():
        from ...engine.llm import LLM

    return LLM(**options)


def stream(
    llm: LLM, prompt: Prompt, params: SamplingParams, show: Callable[[str], object]
) -> RequestOutput:
    """Show the text of a request piece by piece as it comes; returns the finished output."""
    num_shown, last = 0, None
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        show(text[num_shown:])
        num_shown, last = len(text), output
    assert last is not None, "a stream ends with a finished request"
    return last


def check_finished(outputs: Sequence[RequestOutput]) -> None:
    """Refuse outputs of which a step failed.

    Raises:
        UserError: how many did, and what was wrong with the first.
    """
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(outputs)} requests failed, first {failed[0].request_id}: "
            f"{failed[0].error}"
        )
