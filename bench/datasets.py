"""Requests for benches of throughput: of a mix, of random tokens, or of a file of texts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..config import UserError
from .workloads import MIXES, Work, fitting, mix

FILES = ("sharegpt", "sonnet", "jsonl")
DATASETS = (*MIXES, "random", "prefix", *FILES)
_SHARED = 0.8
"""Share of a prompt that all prompts of the data set ``prefix`` begin with."""
_SONNET = "Pick as many lines as you can from these poem lines:\n"
_SONNET_SHARED = 200 / 550
"""Share of the lines of a prompt that all prompts begin with, by vLLM's defaults."""

Encode = Callable[[str], list[int]]


def make_works(
    name: str,
    count: int,
    *,
    vocab_size: int,
    max_model_len: int,
    input_len: int,
    output_len: int,
    file: Path | None = None,
    encode: Encode | None = None,
) -> tuple[list[Work], float]:
    """``count`` requests of a data set, and the scale by which they fit the model: 1 as they are.

    Args:
        input_len, output_len: lengths, where the data set does not say them.
        file, encode: for those of ``FILES``: where it is, and how a text becomes token ids.

    Raises:
        UserError: the data set is unknown, or its file cannot be read.
    """
    if name in MIXES:
        works = mix(name, count, vocab_size)
    elif name in ("random", "prefix"):
        works = _random(count, input_len, output_len, vocab_size, _SHARED * (name == "prefix"))
    elif name in FILES:
        if file is None or encode is None:
            raise UserError(f"dataset={name}: give its file with --dataset-path")
        if name == "sonnet":
            works = _sonnet(file, encode, count, input_len, output_len)
        else:
            texts = _sharegpt(file) if name == "sharegpt" else _jsonl(file, output_len)
            works = [
                Work(ids, length if isinstance(length, int) else max(1, len(encode(length))))
                for text, length in texts
                if (ids := encode(text))
            ][:count]
        if not works:
            raise UserError(f"dataset_path={file}: holds no request")
    else:
        raise UserError(f"dataset={name}: expected one of {', '.join(DATASETS)}")
    return fitting(works, max_model_len)


def _random(
    count: int, input_len: int, output_len: int, vocab_size: int, shared: float
) -> list[Work]:
    rng = random.Random(0)
    prefix = [rng.randrange(vocab_size) for _ in range(int(input_len * shared))]
    rest = input_len - len(prefix)
    return [
        Work(prefix + [rng.randrange(vocab_size) for _ in range(rest)], output_len)
        for _ in range(count)
    ]


def _sonnet(file: Path, encode: Encode, count: int, input_len: int, output_len: int) -> list[Work]:
    """Prompts as vLLM's: a question and lines of a text, of which the first are the same in all
    prompts and the others are drawn; about ``input_len`` tokens, and never more."""
    try:
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"dataset_path={file}: cannot be read: {error}") from error
    of_line = sum(len(encode(line)) for line in lines) / max(1, len(lines))
    room = (input_len - len(encode(_SONNET))) / max(1, of_line)
    if room < 1:
        raise UserError(
            f"input_len={input_len}: the question of sonnet and a line of {file} have more tokens"
        )
    rng, num_shared = random.Random(0), int(room * _SONNET_SHARED)
    start = _SONNET + "".join(lines[:num_shared])
    num_drawn = round(room) - num_shared
    prompts = (start + "".join(rng.choices(lines, k=num_drawn)) for _ in range(count))
    return [Work(encode(prompt)[:input_len], output_len) for prompt in prompts]


def _sharegpt(file: Path) -> Iterator[tuple[str, str]]:
    """The first question and its answer, whose length is asked for, of each conversation."""
    for entry in _parse(file, file.read_text) or ():
        turns = entry.get("conversations", []) if isinstance(entry, dict) else []
        if len(turns) >= 2 and all(isinstance(turn, dict) for turn in turns[:2]):
            yield str(turns[0].get("value", "")), str(turns[1].get("value", ""))


def _jsonl(file: Path, output_len: int) -> Iterator[tuple[str, int]]:
    """``{"prompt": "text", "max_tokens": 8}`` a line."""
    lines = _parse(file, lambda: "[" + ",".join(filter(str.strip, _lines(file))) + "]")
    for entry in lines:
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise UserError(f'dataset_path={file}: expected {{"prompt": "text"}} a line')
        yield entry["prompt"], int(entry.get("max_tokens", output_len))


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def _parse(file: Path, read: Callable[[], str]) -> list[Any]:
    try:
        records = json.loads(read())
    except (OSError, ValueError) as error:
        raise UserError(f"dataset_path={file}: cannot be read: {error}") from error
    if not isinstance(records, list):
        raise UserError(f"dataset_path={file}: expected a list of conversations")
    return records
