"""Requests for ``bench serve``: of a mix, of random tokens, or of a file of conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..config import UserError
from .workloads import MIXES, Work, fitting, mix

FILES = ("sharegpt", "jsonl")
DATASETS = (*MIXES, "random", "prefix", *FILES)
_SHARED = 0.8
"""Share of a prompt that all prompts of the data set ``prefix`` begin with."""

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
) -> list[Work]:
    """``count`` requests of a data set, scaled to fit the model.

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
    return fitting(works, max_model_len)[0]


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
        found = json.loads(read())
    except (OSError, ValueError) as error:
        raise UserError(f"dataset_path={file}: cannot be read: {error}") from error
    if not isinstance(found, list):
        raise UserError(f"dataset_path={file}: expected a list of conversations")
    return found
