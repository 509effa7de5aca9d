"""How models mark their thinking: a table, under the names of vLLM's ``--reasoning-parser``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ....engine.messages.token_ids import ThinkingTokens
from ..tool_calls.call_reader import CallReader
from .counts import Decode, num_thoughts
from .forms import Form, IdsOf, behind_thinking
from .harmony import Harmony
from .marks import Marks, Opening
from .output_reader import OutputReader, Reader
from .thought_reader import ThoughtReader


class Parser(Protocol):
    """Tells a model's thinking from its answer.

    Attributes:
        shown_by: a text in chat templates that tells of it; "": none does.
        marks: the texts that outputs must show for it.
    """

    @property
    def shown_by(self) -> str: ...

    @property
    def marks(self) -> Sequence[str]: ...

    def refuses(self, ids_of: IdsOf) -> str:
        """Why outputs of a tokenizer cannot be read; "" if they can."""
        ...

    def opening(self, prompt: str, continued: str | None = None) -> Opening:
        """Where the output behind a prompt begins; it goes on with the text ``continued``."""
        ...

    def reader(self, opening: Opening, calls: CallReader | None) -> Reader:
        """A reader of one output, with calls of tools if ``calls`` is given."""
        ...

    def form(self, form: Form, opening: Opening, ids_of: IdsOf) -> str:
        """A grammar by which a form begins behind the thinking."""
        ...

    def tokens(self, opening: Opening, ids_of: IdsOf, *, may_call: bool) -> ThinkingTokens:
        """The tokens that a budget of thinking needs."""
        ...

    def count(
        self, token_ids: Sequence[int], opening: Opening, ids_of: IdsOf, decode: Decode
    ) -> int:
        """Number of tokens of an output's thinking, without its marks."""
        ...


@dataclass(frozen=True)
class Tagged:
    """The parser of outputs that begin with thinking between two marks."""

    between: Marks
    shown_by: str = ""

    @property
    def marks(self) -> Sequence[str]:
        return (*self.between.starts, *self.between.ends)

    def refuses(self, ids_of: IdsOf) -> str:
        return ""

    def opening(self, prompt: str, continued: str | None = None) -> Opening:
        return self.between.opening(prompt, continued)

    def reader(self, opening: Opening, calls: CallReader | None) -> Reader:
        return OutputReader(ThoughtReader(self.between, opening), calls)

    def form(self, form: Form, opening: Opening, ids_of: IdsOf) -> str:
        return behind_thinking(form.grammar, self.between, opening, ids_of)

    def tokens(self, opening: Opening, ids_of: IdsOf, *, may_call: bool) -> ThinkingTokens:
        return ThinkingTokens(
            start_ids=ids_of(self.between.starts[0]),
            end_ids=ids_of(self.between.ends[0]),
            is_open=opening is Opening.OPEN,
        )

    def count(
        self, token_ids: Sequence[int], opening: Opening, ids_of: IdsOf, decode: Decode
    ) -> int:
        return num_thoughts(token_ids, self.between, opening, ids_of, decode)


_THINK = Marks(("<think>",), ("</think>",))
_GRANITE = Marks(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
PARSERS: dict[str, Parser] = {
    "openai_gptoss": Harmony(),
    "gpt_oss": Harmony(),
    "qwen3": Tagged(_THINK, "<think>"),
    "deepseek_r1": Tagged(Marks(_THINK.starts, _THINK.ends, implicit=True)),
    "deepseek_v3": Tagged(_THINK),
    "glm45": Tagged(_THINK),
    "granite": Tagged(_GRANITE, _GRANITE.starts[0]),
    "mistral": Tagged(Marks(("[THINK]",), ("[/THINK]",)), "[THINK]"),
    "olmo3": Tagged(_THINK),
    "seed_oss": Tagged(Marks(("<seed:think>",), ("</seed:think>",)), "<seed:think>"),
}
"""Parsers by the names of vLLM's ``--reasoning-parser``, in the order of detection."""


def detect(template: str) -> str | None:
    """The name of the parser that a chat template shows; None if it shows none.

    A name that is detected changes only outputs that begin with a start mark, or whose prompt ends
    with one.
    """
    named = ((name, parser.shown_by) for name, parser in PARSERS.items())
    return next((name for name, shown in named if shown and shown in template), None)
