"""Turns prompts into token ids, and checks them before anything is queued.

A prompt is text, token ids or a dict of them; a conversation becomes one by the chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict

from ...config import EngineOptions, UserError
from ...model_executor.hf_config import model_folder
from ..grammar.checks import GrammarChecks
from ..messages.sampling_params import SamplingParams
from .generation_config import default_sampling
from .grammar_sources import form_grammar
from .tokenizer import Tokenizer, load_tokenizer, missing_tokenizer

if TYPE_CHECKING:
    from .chat_messages import Message

_USUAL_TOKEN = 16
"""Characters; few tokens are longer."""
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class TextPrompt(TypedDict):
    """A prompt of text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids; ``prompt`` is their text, if it is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with ``prompt_token_ids`` and/or ``prompt`` (the text of the ids), and
``cache_salt`` to share cached prefixes only with prompts of the same salt."""


@dataclass(frozen=True)
class InputProcessor:
    """Checks and encodes prompts.

    Without a ``tokenizer`` token-id prompts still work; ``tokenizer_folder`` is then named in the
    error for the others.
    """

    tokenizer: Tokenizer | None
    tokenizer_folder: Path
    vocab_size: int
    max_model_len: int
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``SamplingParams`` of requests that leave them out, see ``default_sampling``."""

    def default_params(self) -> SamplingParams:
        return SamplingParams(**self.default_sampling)

    grammars: GrammarChecks | None = None
    """Tries the grammars of requests; None where there is no engine for them."""
    max_logprobs: int = 20
    """Most log probabilities of a token; -1: those of the whole vocabulary."""

    def settle(self, params: SamplingParams) -> SamplingParams:
        """A request's own copy of parameters, with a grammar in place of ``structured_outputs`` and
        a number in place of -1.

        Raises:
            UserError: a field was given a bad value, or more log probabilities are asked for than
                ``max_logprobs``.
        """
        params = params.clone()
        changes: dict[str, Any] = {}
        if (form := params.structured_outputs) is not None:
            changes = {"grammar": form_grammar(**vars(form)), "structured_outputs": None}
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is None:
                continue
            count = self.vocab_size if asked < 0 else asked
            if 0 <= self.max_logprobs < count:
                raise UserError(
                    f"SamplingParams: {name}={asked}: expected {self.max_logprobs} at most; the "
                    "engine's option max_logprobs sets the limit, and -1 is none"
                )
            if asked < 0:
                changes[name] = count
        return replace(params, **changes) if changes else params

    def prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], str | None]:
        """(token ids, text) of a prompt; the text is None when only ids were given.

        Raises:
            UserError: the prompt is empty, too long, of an unknown form, has ids outside the
                vocabulary, or needs a tokenizer that is not there.
        """
        if params.stop_strings and self.tokenizer is None:
            raise UserError(f"stop={params.stop!r} needs text: {self._missing()}")
        self._check_params(params)
        token_ids, text = self._token_ids(prompt)
        if (kept := params.truncate_prompt_tokens) is not None:
            token_ids = token_ids[-(kept if kept > 0 else self.max_model_len - 1) :]
        if not token_ids:
            raise UserError("prompt is empty: expected at least one token")
        if len(token_ids) >= self.max_model_len:  # first: all else takes as long as there are ids
            raise UserError(
                f"prompt of {len(token_ids)} tokens: max_model_len={self.max_model_len} leaves "
                f"room for {self.max_model_len - 1} and one output token; shorten it or raise "
                "max_model_len"
            )
        if [*map(type, token_ids)].count(int) < len(token_ids):
            token_ids = [_integer(each) for each in token_ids]
        # min and max beat a comparison of every id by far on long prompts.
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise UserError(
                    f"prompt token id {token_id}: outside the vocabulary, 0..{self.vocab_size - 1}"
                )
        return token_ids, text

    def _check_params(self, params: SamplingParams) -> None:
        """Raise ``UserError`` for a token id outside the vocabulary, or a bad grammar."""
        named = {
            "stop_token_ids": params.stop_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids,
            "thinking_tokens": params.thinking_tokens and params.thinking_tokens.all_ids,
        }
        for name, ids in named.items():
            for token_id in ids or ():
                if token_id >= self.vocab_size:
                    raise UserError(
                        f"SamplingParams: {name} has {token_id}: outside the vocabulary, "
                        f"0..{self.vocab_size - 1}"
                    )
        if params.grammar is not None:
            self.require_tokenizer()
            if self.grammars is None:
                raise UserError("grammar: this engine has none; make it with a tokenizer")
            self.grammars.check(params.grammar)

    def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """The tokens of ``bad_words``, as vLLM finds them: those of the word by itself and, if the
        first of them is another one behind a space, those too, unless the space only adds a token.

        Raises:
            UserError: there is no tokenizer, or it has no token for a word.
        """
        spellings = []
        for word in params.bad_texts:
            encode = self.require_tokenizer().encode
            alone, spaced = (
                encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
            )
            if not alone or max(*alone, *spaced) >= self.vocab_size:
                raise UserError(
                    f"SamplingParams: bad_words has {word!r}: the model has no token for it"
                )
            spellings.append(alone)
            if len(spaced) == len(alone) and spaced[0] != alone[0]:
                spellings.append(spaced)
        return spellings

    @staticmethod
    def cache_salt(prompt: Prompt) -> str | None:
        """The salt that a prompt brings.

        Raises:
            UserError: it is not text.
        """
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if salt is not None and not (isinstance(salt, str) and salt):
            raise UserError(f"cache_salt {salt!r}: expected a non-empty string")
        return salt

    def max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        if params.max_tokens is None:
            return self.max_model_len
        return min(num_prompt_tokens + params.max_tokens, self.max_model_len)

    def chat_prompt(
        self, messages: Sequence[Message], *, add_special_tokens: bool = False, **variables: Any
    ) -> Prompt:
        """The prompt of a conversation, through the model's chat template.

        Args:
            add_special_tokens: those around a prompt too, though templates write them themselves.
            variables: the template's variables; ``tools`` and ``documents`` are lists of objects.

        Raises:
            UserError: there is no chat template, it refuses the messages, or the text is too long.
        """
        text = self.require_tokenizer().render_chat(messages, **variables)
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return {"prompt": text, "prompt_token_ids": ids}

    def check_template_variables(self, names: Iterable[str]) -> None:
        """Raise ``UserError`` if the chat template reads no variable of such a name."""
        self.require_tokenizer().chat_templates.check_variables(names)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            UserError: there is no tokenizer, or the text has more characters than the longest
                prompt could have; to encode it would take long.
        """
        tokenizer = self.require_tokenizer()
        if len(text) > _USUAL_TOKEN * self.max_model_len:  # else the vocabulary need not be read
            most = max(_USUAL_TOKEN, tokenizer.most_characters) * self.max_model_len
            if len(text) > most:
                raise UserError(
                    f"prompt of {len(text)} characters: max_model_len={self.max_model_len} leaves "
                    f"room for {most} at most; shorten it or raise max_model_len"
                )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise self._missing()
        return self.tokenizer

    def _missing(self) -> UserError:
        return missing_tokenizer(self.tokenizer_folder)

    def _token_ids(self, prompt: Prompt) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            return (self.encode(prompt) if prompt else []), prompt
        if isinstance(prompt, Mapping):
            unknown = [str(key) for key in prompt if key not in _KEYS and prompt[key] is not None]
            ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
            if not unknown and ids is not None and (text is None or isinstance(text, str)):
                return _id_list(ids, "prompt_token_ids (a list of integers)"), text
            if not unknown and ids is None and isinstance(text, str):
                return self._token_ids(text)
            refused = f"{', '.join(unknown)} is not served; " if unknown else ""
            raise UserError(
                f"prompt has keys {sorted(map(str, prompt))}: {refused}expected prompt (text) "
                "or prompt_token_ids (a list of integers), and perhaps cache_salt"
            )
        return _id_list(prompt, "text, token ids or {'prompt_token_ids': […]}"), None


def plain(value: Any) -> Any:
    """Arrays and tensors as lists; anything else as it is."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        return value.tolist()
    return value


def _id_list(ids: Any, expected: str) -> list[int]:
    if isinstance(ids, bytes | bytearray | memoryview):
        raise UserError(f"prompt of type {type(ids).__name__}: expected {expected}; use .decode()")
    ids = plain(ids)
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise UserError(f"prompt of type {type(ids).__name__}: expected {expected}")
    return [*ids]


def _integer(token_id: object) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, Integral):
        raise UserError(f"prompt token id {token_id!r}: expected an integer")
    return int(token_id)


def read_tokenizer(options: EngineOptions) -> tuple[Tokenizer | None, Path]:
    """The tokenizer that options name, and its folder; None without ``tokenizer.json``."""
    folder = model_folder(options.tokenizer or options.model)
    return load_tokenizer(folder, options.chat_template), folder


def input_processor(
    options: EngineOptions,
    vocab_size: int,
    max_model_len: int,
    tokenizer: tuple[Tokenizer | None, Path],
    grammars: GrammarChecks | None = None,
) -> InputProcessor:
    """Make the processor of a model's prompts; without a tokenizer it takes token ids alone.

    Args:
        tokenizer: what ``read_tokenizer`` returned.
    """
    defaults = default_sampling(options.model, options.generation_config)
    sizes = (vocab_size, max_model_len)
    return InputProcessor(*tokenizer, *sizes, defaults, grammars, options.max_logprobs)
