"""Beam search over an ``LLM``: each step asks for one token of every beam with its likeliest
alternatives.  Prefix caching makes a step cost as much as one of as many plain requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..config import UserError
from ..config.numbers import check_counts
from .frontend.inputs import InputProcessor, Prompt
from .frontend.outputs import Logprob, RequestOutput
from .messages.sampling_params import SamplingParams


@dataclass(kw_only=True)
class BeamSearchParams:
    """How to search, under vLLM's names.

    Attributes:
        beam_width: beams that are kept, and outputs of a prompt.
        max_tokens: most tokens of an output.
        ignore_eos: end-of-sequence tokens end no beam.
        length_penalty: sums of log probabilities are divided by the number of tokens, the prompt's
            included as in vLLM, to this power.
        include_stop_str_in_output: keep the end-of-sequence token.
        temperature: taken for vLLM's sake; beams are never drawn.

    Raises:
        UserError: a number is out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_counts(1, beam_width=self.beam_width, max_tokens=self.max_tokens)


@dataclass
class BeamSearchSequence:
    """A beam: the tokens of its prompt and of its output, and the text of both.

    ``logprobs`` has an entry for each output token, as ``CompletionOutput.logprobs``;
    ``finish_reason`` is "stop" or "length".
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    prompt_len: int
    live: list[BeamSearchSequence]
    done: list[BeamSearchSequence] = field(default_factory=list)


Generate = Callable[..., list[RequestOutput]]


def search(
    inputs: InputProcessor,
    eos_token_ids: frozenset[int],
    generate: Generate,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
) -> list[BeamSearchOutput]:
    """Search for the ``beam_width`` likeliest outputs of each prompt.

    A step extends every beam by each of its ``2 * beam_width`` likeliest tokens and keeps the best;
    a beam that ends with an end-of-sequence token is set aside.

    Args:
        generate: ``LLM.generate``.

    Raises:
        UserError: a prompt or a parameter is bad, or ``max_logprobs`` is too small.
    """
    if not isinstance(params, BeamSearchParams):
        raise UserError(f"params={params!r}: expected BeamSearchParams")
    likeliest = min(2 * params.beam_width, inputs.vocab_size)
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=likeliest, detokenize=False)
    ends = frozenset[int]() if params.ignore_eos else eos_token_ids
    prompt_ids = [inputs.prepare(prompt, asked)[0] for prompt in prompts]
    searches = [_Search(len(ids), [BeamSearchSequence(ids)]) for ids in prompt_ids]
    for _ in range(params.max_tokens):
        beams = [beam for each in searches for beam in each.live]
        if not beams:
            break
        steps = iter(
            generate([{"prompt_token_ids": beam.tokens} for beam in beams], asked, use_tqdm=False)
        )
        for each in searches:
            grown = [new for beam in each.live for new in _grow(beam, next(steps))]
            stopped = [beam for beam in grown if beam.tokens[-1] in ends]
            each.done += stopped
            each.live = _best([b for b in grown if b.tokens[-1] not in ends], params, ends)
            if each.live and len(each.live[0].tokens) >= inputs.max_model_len:
                each.done, each.live = each.done + each.live, []
    return [_output(each, params, ends, inputs) for each in searches]


def _grow(beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
    (completion,) = output.outputs
    if not completion.logprobs:
        raise UserError(f"a step of beam search failed: {completion.error}")
    entry = completion.logprobs[0]
    return [
        BeamSearchSequence(
            [*beam.tokens, token_id],
            [*beam.logprobs, entry],
            beam.cum_logprob + likely.logprob,
        )
        for token_id, likely in entry.items()
    ]


def _best(
    beams: list[BeamSearchSequence], params: BeamSearchParams, ends: frozenset[int]
) -> list[BeamSearchSequence]:
    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in ends)
        return beam.cum_logprob / float(max(1, length) ** params.length_penalty)

    return sorted(beams, key=score, reverse=True)[: params.beam_width]


def _output(
    each: _Search, params: BeamSearchParams, ends: frozenset[int], inputs: InputProcessor
) -> BeamSearchOutput:
    best = _best(each.done + each.live, params, ends)
    for beam in best:
        stops = beam.tokens[-1] in ends and len(beam.tokens) > each.prompt_len
        beam.finish_reason = "stop" if stops else "length"
        if stops and not params.include_stop_str_in_output:
            del beam.tokens[-1], beam.logprobs[-1]
        if inputs.tokenizer is not None:
            beam.text = inputs.tokenizer.decode(beam.tokens)
    return BeamSearchOutput(best)
