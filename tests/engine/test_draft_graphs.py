"""The graphs of draft passes: once each size has come nothing is captured any more, and no request
takes the others off them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fusewright import LLM, SamplingParams
from fusewright.config.capture_sizes import capture_sizes
from fusewright.engine.core.drafting.seams import Always
from fusewright.engine.worker.drafts import pass_sizes
from fusewright.engine.worker.drafts.pass_sizes import Form, PassSizes

from .test_draft_passes import captured, replays_of_a_step
from .test_eagle3 import DRAFTERS
from .test_speculative import OPTIONS, PROMPTS, facts, params

Key = tuple[int, int, Form]
MB = 1 << 20


def bytes_of(depth: int, num_steps: int) -> int:
    return (133 + 14 * num_steps * depth) << 10


@given(
    st.sampled_from([1, 8, 60, 64, 256, 512]),
    st.integers(1, 8),
    st.sampled_from([7, 20, 150, 400]),
    st.integers(0, 2**32),
)
def test_what_is_chosen_is_bounded_and_stays_so(
    most_seqs: int, most_depth: int, num_steps: int, seed: int
) -> None:
    """The steps are those of a head, of a draft model of a few layers, and of larger ones."""
    numbers = [size for size in capture_sizes(most_seqs) if size <= most_seqs]
    sizes = PassSizes(numbers, most_depth, lambda depth: bytes_of(depth, num_steps))
    rng = random.Random(seed)

    def asks() -> Iterator[tuple[Key, int]]:
        for _ in range(500):
            least, depth = rng.randint(1, most_seqs), rng.randint(1, most_depth)
            form = rng.choice([*Form])
            yield (least, depth, form), sizes.choose(least, depth, form)

    chosen: dict[Key, int] = {}
    for _ in range(2):
        for (least, *rest), size in asks():
            assert size in numbers and size >= least
            # Nothing is dropped for another, so each number is padded as it was.
            assert chosen.setdefault((least, *rest), size) == size
    graphs = {(size, depth, form) for (_, depth, form), size in chosen.items()}
    assert sum(bytes_of(depth, num_steps) for _, depth, _ in graphs) <= sizes.most_bytes
    bound = max(pass_sizes._CERTAIN_BYTES, 3 * sum(bytes_of(d, num_steps) for d in range(1, 9)))
    assert sizes.most_bytes <= bound + pass_sizes._MORE_BYTES
    sizes.forget()
    for (least, *_), size in asks():
        assert size >= least


def test_a_head_has_graphs_of_all_sizes() -> None:
    numbers = [1, 2, 4, *range(8, 257, 8)]
    sizes = PassSizes(numbers, 4, lambda depth: bytes_of(depth, 20))
    for form, depth, least in (
        (form, d, n) for form in Form for d in (1, 2, 3, 4) for n in numbers
    ):
        assert sizes.choose(least, depth, form) == least
    assert sizes.most_bytes < 400 * MB


@pytest.mark.parametrize(("certain", "most"), [(1, 256), (2, 16), (4, 4), (8, 3)])
def test_few_sizes_are_padded_little(
    certain: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_sizes, "_CERTAIN_BYTES", certain * len(Form))
    monkeypatch.setattr(pass_sizes, "_MORE_BYTES", 0)
    sizes = PassSizes([1, 2, 4, *range(8, 257, 8)], 1, lambda depth: 1)
    chosen = {least: sizes.choose(least, 1, Form.DRAWN) for least in range(1, 257)}
    assert len({*chosen.values()}) == certain
    assert max(size / least for least, size in chosen.items()) <= most
    assert sizes.choose(257, 1, Form.DRAWN) == 0


class Wanders(Always):
    """A policy whose number of drafts changes as that of a server does."""

    def __init__(self, rng: random.Random, most: int) -> None:
        super().__init__(most)
        self._rng, self._now = rng, 1

    def choose(self, requests: Any, other_rows: int) -> Any:
        if self._rng.random() < 0.3:
            self._now = max(0, min(self._most, self._now + self._rng.choice([-2, -1, 1, 2])))
        return dict.fromkeys(requests, self._now)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 9, "min_p": 0.1},
    {"temperature": 0.0, "min_tokens": 8, "ignore_eos": False},
    {"temperature": 0.0, "logit_bias": {51: 3.0}},
]


def test_a_server_whose_batches_change_captures_nothing_when_they_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room for two sizes with all of their graphs, and for a few more."""
    monkeypatch.setattr(pass_sizes, "_CERTAIN_BYTES", 20 * MB)
    monkeypatch.setattr(pass_sizes, "_MORE_BYTES", 2 * MB)
    llm = captured("abacus-draft", max_num_seqs=16)
    engine: Any = llm.engine
    passes, graphs = engine.draft._passes, engine.draft.graphs
    drafts = engine.core.scheduler.drafts
    capture, run, counts = graphs.capture, passes.run, {"captures": 0, "passes": 0}

    def counted(name: str, call: Any) -> Any:
        def counting(given: Any) -> Any:
            counts[name] += 1
            return call(given)

        return counting

    graphs.capture, passes.run = counted("captures", capture), counted("passes", run)
    captures = []
    for _ in range(2):
        rng = random.Random(5)
        drafts.policy = Wanders(rng, 4)
        for step in range(160):
            most = 1 + (step // 10 * 7) % 16
            while engine.core.num_unfinished < most:
                kind = {"ignore_eos": True, "max_tokens": rng.randint(8, 20), **rng.choice(KINDS)}
                engine.add_request(rng.choice(PROMPTS), SamplingParams(**kind, seed=step))
            engine.step()
        while engine.has_unfinished():
            engine.step()
        captures.append(counts["captures"])
    assert len(passes._graphs) == captures[0] == captures[1] > 20 and counts["passes"] > 200
    needed = (graphs.predict_capture(size.depth) for size in passes._graphs)
    assert sum(needed) <= engine.draft._sizes.most_bytes
    assert drafts.stats().error == ""


@pytest.mark.product(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_request_takes_the_others_off_graphs(name: str) -> None:
    """A step is two replays, and as many drafts are right as where nothing is captured."""
    llm = captured(name)
    alone = LLM("abacus", **OPTIONS, speculative_config=DRAFTERS[name])
    plain, kinds = {"ignore_eos": True, "max_tokens": 30}, list[SamplingParams]()
    kinds.append(params(min_tokens=25, max_tokens=30))
    kinds.append(params(**plain, logit_bias={51: 4.0, 53: -100.0}))
    kinds.append(params(**plain, allowed_token_ids=[*b"0123456789 "]))
    for kind in kinds:
        asked = [params(**plain), kind, params(**plain, temperature=0.8, seed=3)]
        given = facts(llm.generate(PROMPTS[:3], asked, use_tqdm=False))
        assert given == facts(alone.generate(PROMPTS[:3], asked, use_tqdm=False))
        drafts = [each.report()["drafts"] for each in (llm, alone)]
        assert drafts[0]["error"] == ""
        assert drafts[0]["accepted_by_position"] == drafts[1]["accepted_by_position"]
    for kind in kinds:
        replays = replays_of_a_step(llm, kind)
        assert replays == {2}, (kind, replays)


def test_logits_are_changed_until_the_least_length_alone() -> None:
    llm = captured("abacus-draft")
    sampler: Any = llm.engine.draft._sampler  # type: ignore[attr-defined]
    form, forms = sampler.form, list[Form]()

    def asked(batch: Any) -> Form:
        forms.append(form(batch))
        return forms[-1]

    sampler.form = asked
    kind = params(ignore_eos=True, stop_token_ids=[200], min_tokens=12, max_tokens=30)
    llm.generate(PROMPTS[0], kind, use_tqdm=False)
    changed = forms.count(Form.CHANGED)
    assert 0 < changed < len(forms) - 1
    assert forms == [Form.CHANGED] * changed + [Form.LIKELIEST] * (len(forms) - changed)
    assert llm.report()["drafts"]["error"] == ""


def test_a_full_batch_has_a_graph_whatever_its_number() -> None:
    """No step of a row a sequence has a graph of three."""
    llm = captured("abacus-draft", max_num_seqs=3)
    assert 3 not in llm.engine.draft.graphs.dispatcher.decode_sizes  # type: ignore[attr-defined]
    assert replays_of_a_step(llm) == {2}
