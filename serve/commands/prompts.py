"""Prompts from flags and files, in the order given: text, token ids or chat messages, each with
the sampling options that its own record sets."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from ...config import UserError
from ...config.ports import unknown

TextOrIds: TypeAlias = str | list[int]
Message: TypeAlias = dict[str, Any]

_FORMS = ("prompt", "prompt_token_ids", "messages")
_EXPECTED = (
    'expected {"prompt": "text"}, {"prompt_token_ids": [1, 2]} or {"messages": [{"role": …, '
    '"content": …}]}, with sampling options such as "max_tokens": 8 beside it'
)


@dataclass(frozen=True)
class GivenPrompt:
    """One prompt as the user gave it.

    Attributes:
        prompt: text or token ids; None for ``messages``.
        messages: a conversation for the chat template.
        sampling: options of ``SamplingParams`` that win over those of the flags.
        where: "FILE:LINE" for errors; "" for a prompt of ``-p``.
    """

    prompt: TextOrIds | None = None
    messages: tuple[Message, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


def read_prompts(texts: Sequence[str], file: str | None) -> list[GivenPrompt]:
    """Those of ``-p`` first, then those of ``--prompts-file``.

    Raises:
        UserError: there is none, or the file cannot be read as prompts.
    """
    prompts = [GivenPrompt(_text(text, "-p")) for text in texts]
    if file is not None:
        of_file = _from_file(file)
        if not of_file:
            raise UserError(f"--prompts-file {file}: holds no prompt; expected one a line")
        prompts += of_file
    if not prompts:
        raise UserError("no prompt: give -p TEXT, or --prompts-file FILE with one prompt a line")
    return prompts


def _from_file(file: str) -> list[GivenPrompt]:
    """Blank lines separate nothing and are skipped; ``-`` is standard input.

    The byte order mark that some editors put in front, and the carriage returns of Windows, are
    no part of a prompt.
    """
    content = _read(file).removeprefix(b"\xef\xbb\xbf")
    prompts = []
    for number, line in enumerate(content.split(b"\n"), 1):
        where = f"{file}:{number}"
        try:
            text = line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UserError(
                f"--prompts-file {where}: not UTF-8 text (byte {error.start + 1} of the line is "
                f"0x{line[error.start]:02x}); give a text file in UTF-8"
            ) from None
        if not text.strip():
            continue
        jsonl = file.lower().endswith(".jsonl")
        prompts.append(_from_json(where, text) if jsonl else GivenPrompt(text, where=where))
    return prompts


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        if file == "-" and error.errno == errno.EBADF:
            reason = "standard input is closed; pipe prompts into it, or name a file"
        else:
            reason = f"{error.strerror}; give a readable text file"
        raise UserError(f"--prompts-file {file}: {reason}") from None


def _from_json(where: str, line: str) -> GivenPrompt:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{where}: not JSON ({reason}); {_EXPECTED}") from None
    if not isinstance(record, dict) or len(record.keys() & set(_FORMS)) != 1:
        raise UserError(f"{where}: {_EXPECTED}")
    sampling = {key: value for key, value in record.items() if key not in _FORMS}
    _check_names(where, sampling)
    match record:
        # bool is an int to isinstance, but true is no token.
        case {"prompt_token_ids": list(ids)} if all(type(token) is int for token in ids):
            if not ids:
                raise UserError(f"{where}: the prompt is empty; expected token ids")
            return GivenPrompt(ids, sampling=sampling, where=where)
        case {"prompt": str(text)}:
            return GivenPrompt(_text(text, where), sampling=sampling, where=where)
        case {"messages": list(messages)} if all(isinstance(m, dict) for m in messages):
            return GivenPrompt(messages=tuple(messages), sampling=sampling, where=where)
    raise UserError(f"{where}: {_EXPECTED}")


def _check_names(where: str, sampling: Mapping[str, Any]) -> None:
    """Refuse keys that mean nothing here: a misspelled option would be ignored."""
    from ...engine.messages.sampling_params import SamplingParams

    known = [f.name for f in fields(SamplingParams)]
    for name in sampling:
        if name not in known:
            raise unknown(f"{where}: unknown key {name!r}", name, [*_FORMS, *known])


def _text(text: str, where: str) -> str:
    """Refuse nothing at all, and halves of surrogate pairs, which JSON can spell and a shell's
    bytes become."""
    if not text:
        raise UserError(f"{where}: the prompt is empty; expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: the prompt's character {error.start + 1} is {text[error.start]!r}, half of "
            "a surrogate pair or a byte that is not UTF-8; expected text"
        ) from None
    return text
