"""Reads the tokenizer of a Hugging Face folder: ``tokenizer.json`` and the settings next to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from ...config import UserError
from ...model_executor.hf_json import HfConfig, read_json_if_there

if TYPE_CHECKING:
    from .chat_template import ChatTemplate, Message

# A batch here has one text, for which the library would start a thread on each core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_MANY_TOKENS = 1000
"""Tokens that are decoded within a millisecond."""


class Tokenizer:
    """Text to ids and back.

    Args:
        folder: holds ``tokenizer.json``; read when present: ``tokenizer_config.json`` (special
            tokens, chat template) and ``chat_template.jinja``.

    Raises:
        UserError: ``tokenizer.json`` is missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise missing_tokenizer(folder)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{path}: not a tokenizer: {error}; download it again") from error
        # Both may be stored in the file and would silently change prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = read_json_if_there(folder / "tokenizer_config.json")
        self._token_texts: dict[int, str] = {}
        self._chat_template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        eos = self.special_tokens.get("eos_token")
        return None if eos is None else self._tokenizer.token_to_id(eos)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens, such as ``eos_token``, that the config declares."""
        found: dict[str, str] = {}
        for name, value in self._config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects around a prompt.

        Raises:
            UserError: the text holds a lone surrogate, which no encoding has.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"prompt is not valid Unicode: {error}") from error
        # As a batch, without offsets: that is several times faster, and lets other threads run.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    @cached_property
    def most_characters(self) -> int:
        """Characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids beyond the vocabulary (padding rows of embeddings) have none."""
        if len(token_ids) > _MANY_TOKENS:  # as a batch, which lets other threads run
            (text,) = self._tokenizer.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
            return text
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One id alone, special tokens shown; part of a character is a replacement character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], False)
        return text

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation; encode it without adding special tokens.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            # Only now: Jinja takes 0.1 s of a start, and most scripts never chat.
            from .chat_template import ChatTemplate

            source, origin = self._find_chat_template()
            self._chat_template = ChatTemplate(source, self.special_tokens, origin)
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )

    @property
    def chat_template(self) -> str:
        """The Jinja text of the chat template; "" if there is none."""
        try:
            return self._find_chat_template()[0]
        except UserError:
            return ""

    def _find_chat_template(self) -> tuple[str, str]:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8"), str(path)
        stored = self._config.get("chat_template")
        if isinstance(stored, list):  # several, by name
            named = [e for e in stored if isinstance(e, dict) and e.get("name") == "default"]
            stored = named[0].get("template") if named else None
        if not isinstance(stored, str):
            raise UserError(
                f"{self.folder}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); this is a base model: use a plain prompt"
            )
        return stored, str(self.folder / "tokenizer_config.json")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; None without ``tokenizer.json``: token-id prompts need none."""
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def missing_tokenizer(folder: Path) -> UserError:
    return UserError(
        f"{folder / 'tokenizer.json'}: no such file; give prompts as token ids, "
        "or name a folder that has it with tokenizer=…"
    )


def find_eos_token_ids(model_folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that end generation: of ``generation_config.json`` (else ``config.json``), which may list
    several, and the tokenizer's own.

    Raises:
        UserError: a file cannot be read, or holds something else than token ids.
    """
    paths = [model_folder / name for name in ("generation_config.json", "config.json")]
    declared = (
        HfConfig(path, read_json_if_there(path)).token_ids("eos_token_id") for path in paths
    )
    ids = set(next(filter(None, declared), ()))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
