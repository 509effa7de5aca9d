"""Reads the channels of gpt-oss, OpenAI's harmony format.

An output is one message or several: ``<|channel|>NAME [to=RECIPIENT] [<|constrain|>json]
<|message|>TEXT<|end|>``, with ``<|start|>assistant`` before all but the first.  The channel
``analysis`` is thinking, ``final`` the answer; ``commentary`` to a function is a call, and to
nobody it is for the user too.  See https://cookbook.openai.com/articles/openai-harmony.

The package ``openai-harmony`` is not used: it downloads its vocabulary when it is first asked for a
token, and prompts come from the model's own chat template anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from ....engine.messages.token_ids import ThinkingTokens
from ..tool_calls.call_json import strict_json
from ..tool_calls.call_reader import CallReader, new_call
from .counts import Decode
from .forms import FORM, TEXT, Form, IdsOf, parts_of, schema_part
from .marks import Opening
from .output_reader import Part
from .thought_reader import Thought, first_of, held_back

_START, _END, _CALL, _RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
_CHANNEL, _CONSTRAIN, _MESSAGE = "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = (_END, _CALL, _RETURN, _START, _CHANNEL)
"""Marks that end the text of a message; the last two begin another one."""
_HEADS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, "to=")
"""Texts of which one begins a message; what begins otherwise is the answer."""
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_THINKING = f"{_CHANNEL}analysis{_MESSAGE}"
_ANSWER = f"{_CHANNEL}final{_MESSAGE}"
_NEXT = f"{_END}{_START}assistant"


class ChannelReader:
    """Divides one output into thinking, content and calls, as it comes.

    Args:
        opening: where the output begins: in the thinking, in the answer, or before a message.
        finds_calls: whether messages to functions are calls; else they are content.
        max_calls: calls behind these are left out; None keeps all.
    """

    def __init__(
        self,
        opening: Opening,
        *,
        finds_calls: bool,
        max_calls: int | None = None,
    ) -> None:
        self._finds_calls, self._max_calls = finds_calls, max_calls
        self.num_calls = 0
        self._text, self._parts = "", list[Part]()
        self._kind: type[str] | type[Thought] = str
        self._function, self._arguments = "", list[str]()
        self._has: dict[type, bool] = {Thought: False, str: False}
        self._is_new = False
        self._ends_with_call = False
        self._read: Callable[[], bool] = self._read_body
        if opening is Opening.FREE:
            self._read = self._read_start
        elif opening is Opening.OPEN:
            self._kind = Thought

    def push(self, text: str) -> Sequence[Part]:
        """The parts that are certain behind this text, in their order."""
        self._text += text
        while self._text and self._read():
            pass
        return self._certain()

    def finish(self) -> Sequence[Part]:
        """The rest, when nothing more will come."""
        if self._read == self._read_head:  # which has not become one: a text such as "to=…"
            self._text = self._text.partition("<|")[0]
            self._text = self._text if self._text.strip() else ""
        self._add(self._text)
        self._text = ""
        self._end_call()
        return self._certain()

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason to give for an output that ended for ``reason``, once it is finished."""
        is_whole = reason == "stop" or (reason == "length" and self._ends_with_call)
        return "tool_calls" if self.num_calls and is_whole else reason

    def _certain(self) -> Sequence[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Each of these reads the beginning of self._text, and returns False if it needs more.

    def _read_start(self) -> bool:
        """The beginning of an output, which may be the answer without a channel."""
        text = self._text.lstrip()
        if any(text.startswith(head) for head in _HEADS):
            self._read = self._read_head
            return True
        if any(head.startswith(text) for head in _HEADS):
            return False
        self._read = self._read_body
        return True

    def _read_head(self) -> bool:
        """All that is said of a message before its text."""
        head, mark, rest = self._text.partition(_MESSAGE)
        if not mark:
            return False
        name, recipient = _NAME.search(head), _RECIPIENT.search(head)
        self._function = recipient[1] if recipient and self._finds_calls else ""
        is_thinking = name is not None and name[1] == "analysis"
        self._kind = Thought if is_thinking and not self._is_call else str
        self._text, self._read, self._is_new = rest, self._read_body, True
        return True

    @property
    def _is_call(self) -> bool:
        return self._function.startswith("functions.")

    def _read_body(self) -> bool:
        """The text of a message, as far as a mark."""
        end, mark = first_of(self._text, _ENDS)
        if not mark:
            length = len(self._text) - held_back(self._text, _ENDS)
            self._add(self._text[:length])
            self._text = self._text[length:]
            return False
        self._add(self._text[:end])
        self._end_call()
        is_next = mark in (_START, _CHANNEL)
        self._text = self._text[end:] if is_next else self._text[end + len(mark) :]
        self._kind, self._read = str, self._read_head if is_next else self._read_start
        return True

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._is_call:
            self._arguments.append(text)
            return
        if self._is_new and self._has[self._kind]:
            text = "\n" + text
        self._is_new, self._has[self._kind], self._ends_with_call = False, True, False
        self._parts.append(self._kind(text))

    def _end_call(self) -> None:
        """Hand on the call whose message has ended; its text is content if it is no JSON object."""
        if not self._is_call:
            return
        name, text = self._function.removeprefix("functions."), "".join(self._arguments)
        self._function, self._kind = "", str
        self._arguments.clear()
        try:
            arguments = strict_json(text.strip() or "{}")
        except (ValueError, RecursionError):
            arguments = ""
        if not arguments.startswith("{"):
            self._add(text)
        elif self._max_calls is None or self.num_calls < self._max_calls:
            self.num_calls += 1
            self._ends_with_call = True
            self._parts.append(new_call(name, arguments))


class Harmony:
    """The parser of gpt-oss."""

    shown_by = _CHANNEL
    marks = (_START, _END, _CALL, _RETURN, _CHANNEL, _CONSTRAIN, _MESSAGE)

    def refuses(self, ids_of: IdsOf) -> str:
        missing = [mark for mark in self.marks if len(ids_of(mark)) != 1]
        return f"the tokenizer has no token {', '.join(missing)}" if missing else ""

    def opening(self, prompt: str, continued: str | None = None) -> Opening:
        if continued is not None or prompt.endswith(_ANSWER):
            return Opening.CLOSED
        return Opening.OPEN if prompt.endswith(_THINKING) else Opening.FREE

    def reader(self, opening: Opening, calls: CallReader | None) -> ChannelReader:
        max_calls = None if calls is None else calls.max_calls
        return ChannelReader(opening, finds_calls=calls is not None, max_calls=max_calls)

    def form(self, form: Form, opening: Opening, ids_of: IdsOf) -> str:
        def lark(text: str) -> str:
            """A text with marks, each as its token."""
            pieces = re.split(r"(<\|\w+\|>)", text)
            return " ".join(
                f"<[{ids_of(piece)[0]}]>" if piece in self.marks else json.dumps(piece)
                for piece in pieces
                if piece
            )

        thought = f"({lark(_THINKING)} THOUGHT? {lark(_NEXT)})?"
        if opening is Opening.OPEN:
            thought = f"THOUGHT? {lark(_NEXT)}"
        if form.functions:
            heads = [f"commentary to=functions.{each['name']} " for each in form.functions]
            answers = " | ".join(
                f"{lark(f'{_CHANNEL}{head}{_CONSTRAIN}json{_MESSAGE}')} @{FORM}{number}"
                for number, head in enumerate(heads)
            )
            parts = [
                {**schema_part(each.get("parameters") or _OBJECT), "name": f"{FORM}{number}"}
                for number, each in enumerate(form.functions)
            ]
        elif opening is Opening.CLOSED:
            return form.grammar
        else:
            answers = f"{lark(_ANSWER)} @{FORM}"
            first, *others = parts_of(form.grammar)
            parts = [{**first, "name": FORM}, *others]
        rules = f"start: {thought} ({answers})\nTHOUGHT: {TEXT}"
        return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})

    def tokens(self, opening: Opening, ids_of: IdsOf, *, may_call: bool) -> ThinkingTokens:
        return ThinkingTokens(
            start_ids=ids_of(_THINKING),
            end_ids=ids_of(_END),
            forced_ids=ids_of(_NEXT if may_call else f"{_NEXT}{_ANSWER}"),
            is_open=opening is Opening.OPEN,
        )

    def count(
        self, token_ids: Sequence[int], opening: Opening, ids_of: IdsOf, decode: Decode
    ) -> int:
        (message,) = ids_of(_MESSAGE)
        ends = {token_id for mark in _ENDS for token_id in ids_of(mark)}
        head: list[int] = []
        is_head, is_thinking, num = opening is Opening.FREE, opening is Opening.OPEN, 0
        for token_id in token_ids:
            if token_id in ends:
                is_head, is_thinking = True, False
                head.clear()
            elif is_head and token_id == message:
                is_head, is_thinking = False, decode(head).strip().startswith("analysis")
            elif is_head:
                head.append(token_id)
            else:
                num += is_thinking
        return num


_OBJECT = {"type": "object"}
