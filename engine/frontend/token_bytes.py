"""Finds the bytes that a token stands for, which decoding alone does not tell: parts of a character
become replacement characters, and the space before a first word is dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import tokenizers

_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""How byte fallback spells a byte."""


class TokenBytes:
    """The bytes of each token of a tokenizer, special ones shown, each found once."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token within a text; none for an id beyond the vocabulary."""
        data = self._found.get(token_id)
        if data is None:
            data = self._found[token_id] = self._find(token_id)
        return data

    def _find(self, token_id: int) -> bytes:
        spelled = self._tokenizer.id_to_token(token_id)
        if spelled is None:
            return b""
        if "ByteLevel" in self._decoders:
            if all(character in _BYTE_OF for character in spelled):
                return bytes(_BYTE_OF[character] for character in spelled)
            return spelled.encode()  # an added token
        if "ByteFallback" in self._decoders and (byte := _BYTE.fullmatch(spelled)):
            return bytes.fromhex(byte[1])
        # The second of two tells how it reads behind another.
        once, twice = (self._decode([token_id] * count) for count in (1, 2))
        text = twice[len(once) :] if twice.startswith(once) else once
        return text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of decoders that make text of tokens."""
        decoder = self._tokenizer.decoder
        return frozenset(_kinds(json.loads(decoder.__getstate__())) if decoder else ())


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for each in decoder.get("decoders", ()):
        yield from _kinds(each)


def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary spells: those that show as a
    character of Latin-1 are spelled so, and the others by the characters from 256 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    spelled = {chr(byte): byte for byte in shown}
    return spelled | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTE_OF = _byte_of()
