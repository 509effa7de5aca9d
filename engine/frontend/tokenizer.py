"""The tokenizer of a Hugging Face folder: text to ids and back, conversations to text."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config import UserError
from ...model_executor.hf_json import read_json_if_there
from .token_bytes import TokenBytes
from .tokenizer_files import (
    given_chat_template,
    is_library_error,
    load_library_tokenizer,
    read_chat_templates,
    read_token_facts,
    refusing,
    try_out,
)

if TYPE_CHECKING:
    from .chat_messages import Message
    from .chat_template import ChatTemplates

_log = logging.getLogger(__name__)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A batch here has one text, for which the library would start a thread on each core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_MANY_TOKENS = 1000
"""Tokens that are decoded within a millisecond."""


class Tokenizer:
    """Text to ids and back.

    Args:
        folder: holds ``tokenizer.json``, and what ``tokenizer_files.py`` reads beside it.
        chat_template: a file of a chat template, or its text, in place of the folder's.

    Raises:
        UserError: ``tokenizer.json`` is missing, or a file is unreadable.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        self.folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise missing_tokenizer(folder)
        self._config = read_json_if_there(folder / "tokenizer_config.json")
        self._facts = read_token_facts(folder, self._config)
        self._tokenizer = load_library_tokenizer(path)
        with refusing(f"{path}: its tokens cannot be added to", "download the files again"):
            self._facts.add_to(self._tokenizer)
        self._tokenizer.encode_special_tokens = self._config.get("split_special_tokens") is True
        try_out(self._tokenizer, path)
        self.token_bytes = TokenBytes(self._tokenizer)
        self._chat_template = chat_template
        self._chat_templates: ChatTemplates | None = None
        self._has_failed = False

    @property
    def vocab_size(self) -> int:
        """The number of tokens, with those that were added."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def tokens_from(self, first_id: int) -> list[str]:
        """The tokens with this id and greater ones, in the order of their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        if self._tokenizer.get_vocab_size(with_added_tokens=False) <= first_id:  # the usual case
            return [token.content for i, token in sorted(added.items()) if i >= first_id]
        by_id = sorted((i, text) for text, i in self._tokenizer.get_vocab().items())
        return [text for i, text in by_id if i >= first_id]

    @property
    def eos_token_id(self) -> int | None:
        eos = self.special_tokens.get("eos_token")
        return None if eos is None else self._tokenizer.token_to_id(eos)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens, such as ``eos_token``, that the files declare."""
        return {name: token.content for name, token in self._facts.named.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects around a prompt.

        Raises:
            UserError: the text holds a lone surrogate, which no encoding has, or the tokenizer has
                no token for it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"prompt is not valid Unicode: {error}") from error
        # As a batch, without offsets: that is several times faster, and lets other threads run.
        with refusing("prompt: the tokenizer fails", "give token ids, or another text"):
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return encoding.ids

    @cached_property
    def most_characters(self) -> int:
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids beyond the vocabulary (padding rows of embeddings) have none.  Where the
        tokenizer's decoder fails the text is a replacement character, and the log has why."""
        how = {"skip_special_tokens": skip_special_tokens}
        try:
            if len(token_ids) > _MANY_TOKENS:  # as a batch, which lets other threads run
                return self._tokenizer.decode_batch([token_ids], **how)[0]
            return self._tokenizer.decode(token_ids, **how)
        except BaseException as error:
            if not is_library_error(error):
                raise
            if not self._has_failed:
                _log.warning("%s: the tokenizer cannot decode: %s", self.folder, error)
            self._has_failed = True  # a step with the tokens of many requests goes on
            return _REPLACEMENT

    def token_text(self, token_id: int) -> str:
        """The text of one id behind others, special tokens shown; part of a character is a
        replacement character."""
        return self.token_bytes(token_id).decode(errors="replace")

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the folder, compiled.

        Raises:
            UserError: there is none, or one does not compile.
        """
        if self._chat_templates is None:
            # Only now: Jinja takes 0.1 s of a start, and most scripts never chat.
            from .chat_template import ChatTemplates

            sources = self._template_sources
            self._chat_templates = ChatTemplates(sources, self.special_tokens, self.folder)
        return self._chat_templates

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """The token ids of a text or of several, as ``transformers`` gives them."""
        if isinstance(text, str):
            return Encoding(self.encode(text, add_special_tokens=add_special_tokens))
        return Encoding([self.encode(t, add_special_tokens=add_special_tokens) for t in text])

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
        **variables: Any,
    ) -> str | list[int] | Encoding:
        """The prompt of a conversation as an ``Encoding``, as token ids or as text, under the name
        that ``transformers`` has.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        text = self.render_chat(
            conversation, add_generation_prompt=add_generation_prompt, **variables
        )
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return Encoding(ids) if return_dict else ids

    @property
    def given_template(self) -> str | None:
        """The text of the chat template that stands in place of the folder's."""
        return None if self._chat_template is None else self._template_sources["default"][0]

    @property
    def _template_sources(self) -> dict[str, tuple[str, Path]]:
        if self._chat_template is None:
            return read_chat_templates(self.folder, self._config)
        return given_chat_template(self._chat_template)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: ChatTemplates | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; encode it without adding special tokens.

        Args:
            template: in place of the model's, as ``template_of`` makes it.
            variables: the template's variables; ``tools`` and ``documents`` are lists of objects.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        return (template or self.chat_templates).render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )

    def template_of(self, text: str) -> ChatTemplates:
        """The chat template of a Jinja text, with this tokenizer's special tokens.

        Raises:
            UserError: it does not compile.
        """
        from .chat_template import ChatTemplates

        sources = {"default": (text, Path("chat_template"))}
        return ChatTemplates(sources, self.special_tokens, self.folder)

    @property
    def chat_template(self) -> str:
        """The Jinja text of the chat template, of that for tools if there are several; "" if there
        is none."""
        sources = self._template_sources
        return next((sources[name][0] for name in ("tool_use", "default") if name in sources), "")


class Encoding(dict[str, Any]):
    """A tokenizer returns ``input_ids`` and ``attention_mask`` so, as keys and as attributes."""

    def __init__(self, ids: list[Any]) -> None:
        mask = (
            [[1] * len(row) for row in ids] if ids and isinstance(ids[0], list) else [1] * len(ids)
        )
        super().__init__(input_ids=ids, attention_mask=mask)

    @property
    def input_ids(self) -> list[Any]:
        ids: list[Any] = self["input_ids"]
        return ids


def library_tokenizer(tokenizer: Tokenizer) -> Any:
    """The tokenizer of ``transformers`` of the same folder, and with the same chat template; the
    one given where that package is not installed or cannot read the folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return tokenizer
    try:
        theirs = AutoTokenizer.from_pretrained(tokenizer.folder, trust_remote_code=False)
    except Exception as error:  # of any kind
        _log.info("%s: transformers cannot read the tokenizer: %s", tokenizer.folder, error)
        return tokenizer
    if template := tokenizer.given_template:
        theirs.chat_template = template
    return theirs


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer | None:
    """The folder's tokenizer; None without ``tokenizer.json``: token-id prompts need none."""
    return Tokenizer(folder, chat_template) if (folder / "tokenizer.json").is_file() else None


def missing_tokenizer(folder: Path) -> UserError:
    return UserError(
        f"{folder / 'tokenizer.json'}: no such file; give prompts as token ids, "
        "or name a folder that has it with tokenizer=…"
    )
