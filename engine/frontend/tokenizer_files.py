"""Reads the files of a tokenizer as ``transformers`` reads them.

``tokenizer.json`` is the tokenizer; ``tokenizer_config.json``, ``special_tokens_map.json`` and
``added_tokens.json`` add and name tokens.  Chat templates lie in files of their own, or in
``tokenizer_config.json``.  Files come with downloads: whatever is wrong with one is one clear line.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from ...config import UserError
from ...model_executor.hf_json import read_bytes, read_json, read_json_if_there

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_MOST_DIGITS = 10
_LONGEST_PATH = 1024
_PANIC = "PanicException"
_EXAMPLES = ("", "Ab 12.\n")
"""Texts that every tokenizer must take."""


def is_library_error(error: BaseException) -> bool:
    """Whether the library raised it: its panics are no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == _PANIC


@contextmanager
def refusing(prefix: str, remedy: str) -> Iterator[None]:
    """Errors of the library as a ``UserError``."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError) or not is_library_error(error):
            raise
        why = " ".join(str(error).split())[:300]
        raise UserError(f"{prefix}: {why}; {remedy}") from None


class _Parts(msgspec.Struct):
    """The parts of ``tokenizer.json`` that are looked at; its vocabulary is not."""

    normalizer: Any = None


def load_library_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in ``tokenizer.json``, without truncation and padding.

    Raises:
        UserError: the file cannot be read, is no tokenizer, or its tokenizer cannot be used.
    """
    data = read_bytes(path)
    with refusing(f"{path}: not a tokenizer", "download it again"):
        _check_charsmaps(msgspec.json.decode(data, type=_Parts).normalizer)
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        # Both may be stored in the file and would silently change prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def try_out(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Encode and decode, which is where a damaged part of a tokenizer shows.

    Raises:
        UserError: the library panics.
    """
    with refusing(f"{path}: its tokenizer cannot be used", "download it again"):
        for text in _EXAMPLES:
            try:
                ids = tokenizer.encode(text).ids
            except Exception:  # it knows no token for this text, which may be so
                ids = [0]
            tokenizer.decode(ids, skip_special_tokens=False)


def _check_charsmaps(normalizer: Any) -> None:
    """Refuse a map of characters that says it is longer than it is: the library allocates what it
    says, which ends the process."""
    if isinstance(normalizer, list):
        for each in normalizer:
            _check_charsmaps(each)
    if not isinstance(normalizer, dict):
        return
    _check_charsmaps(normalizer.get("normalizers"))
    encoded = normalizer.get("precompiled_charsmap")
    if not isinstance(encoded, str):
        return
    try:
        charsmap = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"precompiled_charsmap: {error}") from error
    says, has = int.from_bytes(charsmap[:4], "little"), len(charsmap) - 4
    if says > has:
        raise ValueError(f"precompiled_charsmap says it has {says} bytes, it has {max(has, 0)}")


@dataclass
class TokenFacts:
    """What the files beside ``tokenizer.json`` say of tokens.

    Attributes:
        named: special tokens by name, such as ``eos_token``.
        extra: special tokens without a name.
        by_id: tokens under their ids.
        listed: whether these are of ``added_tokens_decoder``, which wins over ``tokenizer.json``.
    """

    named: dict[str, AddedToken] = field(default_factory=dict)
    extra: list[AddedToken] = field(default_factory=list)
    by_id: dict[int, AddedToken] = field(default_factory=dict)
    listed: bool = False

    def add_to(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Add the tokens that the tokenizer lacks, those with ids first, in their order.  One that
        is in the vocabulary keeps its id; others get the next ones."""
        has = tokenizer.get_added_tokens_decoder()
        equal = {repr(token) for token in has.values()}
        added = [
            token
            for token_id, token in sorted(self.by_id.items())
            if repr(token) not in equal and (self.listed or token_id not in has)
        ]
        known = {token.content for token in (*has.values(), *added)}
        names = {token.content for token in self.named.values()}
        for token in added:
            token.special = token.special or token.content in names
        for token in (*self.named.values(), *self.extra):
            if token.content not in known:
                known.add(token.content)
                added.append(token)
        tokenizer.add_tokens(added)


def read_token_facts(folder: Path, config: Mapping[str, Any]) -> TokenFacts:
    """The tokens of a folder whose ``tokenizer_config.json`` is ``config``.

    Where that file lists its ``added_tokens_decoder``, the older files beside it are not read.

    Raises:
        UserError: a file cannot be read, or a token in it is none.
    """
    path = folder / "tokenizer_config.json"
    facts = TokenFacts(listed="added_tokens_decoder" in config)
    values = {name: (path, value) for name, value in config.items()}
    listed, older = config.get("added_tokens_decoder"), {}
    if not facts.listed:
        map_path = folder / "special_tokens_map.json"
        named = read_json_if_there(map_path)
        values |= {name: (map_path, value) for name, value in named.items()}
        older = read_json_if_there(folder / "added_tokens.json")
    elif not isinstance(listed, dict | None):
        raise _bad(path, "added_tokens_decoder", listed, "an object of tokens by id")
    for name, (file, value) in values.items():
        # Other names may end alike, such as that of the flag add_bos_token.
        is_token = isinstance(value, str) or (isinstance(value, dict) and "content" in value)
        if (name in _NAMED and value is not None) or (name.endswith("_token") and is_token):
            facts.named[name] = _token(file, name, value, special=True)
    source, extra = values.get("extra_special_tokens", (path, None))
    if not extra:
        source, extra = values.get("additional_special_tokens", (path, None))
    if isinstance(extra, dict):
        facts.named |= {
            name: _token(source, f"extra_special_tokens.{name}", value, special=True)
            for name, value in extra.items()
        }
    elif isinstance(extra, list):
        facts.extra = [_token(source, "extra_special_tokens", each, special=True) for each in extra]
    elif extra is not None:
        raise _bad(source, "extra_special_tokens", extra, "a list of tokens")
    _read_ids(facts, path, listed or {}, folder / "added_tokens.json", older)
    return facts


def _read_ids(
    facts: TokenFacts,
    path: Path,
    listed: Mapping[str, Any],
    older_path: Path,
    older: Mapping[str, Any],
) -> None:
    for key, value in listed.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS):
            raise _bad(path, f"added_tokens_decoder.{key[:50]}", value, "a token id as key")
        if not isinstance(value, dict):
            raise _bad(path, f"added_tokens_decoder.{key}", value, "an object with its content")
        facts.by_id[int(key)] = _token(path, f"added_tokens_decoder.{key}", value, special=False)
    specials = {token.content for token in (*facts.named.values(), *facts.extra)}
    for text, token_id in older.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 or not text:
            raise _bad(older_path, text[:50], token_id, "a token id")
        is_special = text in specials
        flags = {"content": text, "normalized": not is_special}
        facts.by_id[token_id] = _token(older_path, text[:50], flags, special=is_special)
    by_text = {token.content: token for token in facts.by_id.values()}
    facts.named = {name: by_text.get(t.content, t) for name, t in facts.named.items()}


def _token(path: Path, name: str, value: Any, *, special: bool) -> AddedToken:
    """A token, which files write as text or as an object of its text and flags."""
    flags = {"content": value} if isinstance(value, str) else value
    if not isinstance(flags, dict) or not isinstance(flags.get("content"), str):
        raise _bad(path, name, value, "a token: its text, or an object with its content")
    try:
        flags["content"].encode("utf-8")
    except UnicodeEncodeError:
        raise _bad(path, name, value, "text, which holds no lone surrogate") from None
    if any(not isinstance(flags.get(flag, False), bool) for flag in _FLAGS[1:]):
        raise _bad(path, name, value, "flags that are true or false")
    known = {flag: flags[flag] for flag in _FLAGS if flag in flags}
    return AddedToken(**{"special": special, **known, **({"special": True} if special else {})})


def _bad(path: Path, name: str, value: Any, expected: str) -> UserError:
    name = name.encode("utf-8", "backslashreplace").decode("utf-8")
    return UserError(f"{path}: {name} is {str(value)[:100]!r}; expected {expected}")


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, Path]]:
    """The chat templates of a folder, each with the file it is from, by name: "default" is for
    every conversation, and "tool_use", if it is there, for those with tools.

    Raises:
        UserError: a file of one cannot be read.
    """
    files = {"default": folder / "chat_template.jinja"}
    more = folder / "additional_chat_templates"
    files |= {path.name.removesuffix(".jinja"): path for path in sorted(more.glob("*.jinja"))}
    templates = {name: (_read_text(path), path) for name, path in files.items() if path.is_file()}
    if templates:
        return templates
    path, stored = folder / "tokenizer_config.json", config.get("chat_template")
    if stored is None and (legacy := folder / "chat_template.json").is_file():
        path, stored = legacy, read_json(legacy).get("chat_template")
    if isinstance(stored, str):
        return {"default": (stored, path)}
    listed = stored if isinstance(stored, list) else []
    named = [each for each in listed if isinstance(each, dict)]
    return {
        each["name"]: (each["template"], path)
        for each in named
        if isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
    }


def given_chat_template(template: str) -> dict[str, tuple[str, Path]]:
    """A chat template that the user gives, as ``read_chat_templates`` returns one: the text of a
    file of that name, else itself.

    Raises:
        UserError: it is neither a file nor the text of a template.
    """
    path = Path(template)
    if "{" not in template or (len(template) < _LONGEST_PATH and path.is_file()):
        if not path.is_file():
            raise UserError(
                f"chat_template={template!r}: no such file; give a file of Jinja, or its text"
            )
        return {"default": (_read_text(path), path)}
    return {"default": (template, Path("chat_template"))}


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error.reason}; download it again") from error
