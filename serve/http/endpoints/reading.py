"""How the outputs of one chat are read: which thinking, tools and counts they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from ....engine.frontend.tokenizer import Tokenizer
from ....engine.messages.sampling_params import SamplingParams
from ..reasoning.forms import Form
from ..reasoning.marks import Opening
from ..reasoning.output_reader import OutputReader, Reader, WithoutThoughts
from ..reasoning.parsers import Parser
from .tools import Tools


@dataclass(frozen=True)
class Reading:
    """How the outputs of one chat are read.

    Attributes:
        tools: those that may be called.
        parser: finds the thinking; None where none is looked for.
        opening: where the outputs begin.
        shows: whether answers have the thinking.
    """

    tools: Tools
    parser: Parser | None = None
    opening: Opening = Opening.CLOSED
    shows: bool = True
    tokenizer: Tokenizer | None = None

    def reader(self) -> Reader:
        """A reader of one output."""
        calls = self.tools.reader()
        if self.parser is None:
            return OutputReader(None, calls)
        reader = self.parser.reader(self.opening, calls)
        return reader if self.shows else WithoutThoughts(reader)

    def num_thoughts(self, outputs: Iterable[Sequence[int]]) -> int | None:
        """Number of tokens of thinking in the token ids of outputs; None where none is looked
        for."""
        if self.parser is None or self.tokenizer is None:
            return None
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        how = (self.opening, self._ids_of, decode)
        return sum(self.parser.count(token_ids, *how) for token_ids in outputs)

    def applied(self, params: SamplingParams, budget: int | None = None) -> SamplingParams:
        """Parameters by which texts show the marks, a form begins behind the thinking, and that
        ends after ``budget`` tokens."""
        changes: dict[str, Any] = {}
        parser = self.parser
        if budget is not None and parser is not None and self.opening is not Opening.CLOSED:
            may_call = self.tools.tools is not None
            changes["thinking_token_budget"] = budget
            changes["thinking_tokens"] = parser.tokens(
                self.opening, self._ids_of, may_call=may_call
            )
        if any(_is_hidden(mark, self.tokenizer) for mark in self._all_marks()):
            changes["skip_special_tokens"] = False
        if params.grammar is not None and parser is not None:
            form = Form(params.grammar, self.tools.required)
            changes["grammar"] = parser.form(form, self.opening, self._ids_of)
        return replace(params, **changes) if changes else params

    def _all_marks(self) -> list[str]:
        marks = [] if self.parser is None else [*self.parser.marks]
        form = self.tools.form
        if self.tools.tools is not None and form is not None and self.tools.grammar is None:
            marks += [form.start, form.end]
        return [mark for mark in marks if mark]

    def _ids_of(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return _ids_of(self.tokenizer, text)


@lru_cache(maxsize=256)
def _ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@lru_cache(maxsize=256)
def _is_hidden(mark: str, tokenizer: Tokenizer | None) -> bool:
    """Whether texts show a mark only with special tokens."""
    if tokenizer is None:
        return False
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return mark in tokenizer.decode(ids, False) and mark not in tokenizer.decode(ids)


def continued_text(message: Mapping[str, Any]) -> str:
    """The text of a message with which an output goes on."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))
