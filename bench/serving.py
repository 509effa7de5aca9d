"""Runs requests through an engine and times every token of every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from ..config import UserError
from ..engine.frontend.gc_pause import gc_paused
from ..engine.frontend.loop import EngineLoop
from ..engine.messages.requests import NewTokens
from ..engine.messages.sampling_params import SamplingParams
from ..engine.worker.progress import show_progress
from .limits.clocks import watch_clocks
from .workloads import Work

PERCENTILES = (50, 90, 99)
QUANTILES = np.linspace(0, 1, 51)
"""Shares of the requests whose longest TTFT a result keeps, as a distribution to draw."""
MEASURES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class RequestTimes:
    """Times of one request in milliseconds: until the first token (``ttft``), for each token after
    it (``tpot``), for the whole request (``e2e``), and the longest between two tokens (``itl``)."""

    ttft: float
    tpot: float
    e2e: float
    itl: float = 0.0


@dataclass
class Run:
    """The times of a run.  ``gaps`` are those between two tokens of a request, in ms; ``token_ids``
    are the tokens that each request got; ``clocks`` has the GPU's clock and power if known."""

    seconds: float
    input_tokens: int
    output_tokens: int
    requests: list[RequestTimes] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)

    def to_json(self, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Rates per second, and means and percentiles in ms.  With ``limits``, in ms, goodput is
        added: the requests per second that keep all limits, that of ``itl`` at every token."""
        count = len(self.requests)
        result: dict[str, Any] = {
            "seconds": round(self.seconds, 4),
            "requests": count,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_s": round(count / self.seconds, 3),
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 1),
        }
        for measure in MEASURES:
            values = self.gaps if measure == "itl" else [getattr(r, measure) for r in self.requests]
            result[f"{measure}_ms"] = _summary(values)
        if self.requests:
            ttft = np.quantile([request.ttft for request in self.requests], QUANTILES)
            result["ttft_quantiles_ms"] = [round(float(ms), 3) for ms in ttft]
        if self.clocks:
            result["clocks"] = self.clocks
        if limits:
            good = sum(
                all(getattr(r, m) <= most for m, most in limits.items()) for r in self.requests
            )
            result["goodput_limits_ms"] = dict(limits)
            result["goodput_per_s"] = round(good / self.seconds, 3)
        return result


def _summary(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    summary = {"mean": float(np.mean(values))}
    points = np.percentile(values, PERCENTILES)
    summary |= {f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}
    return {name: round(value, 3) for name, value in summary.items()}


def parse_limits(items: Iterable[str]) -> dict[str, float]:
    """``ttft:500 tpot:50`` as numbers.

    Raises:
        UserError: an item has another form, or names no measure of requests.
    """
    limits: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in MEASURES or not 0 < limits[name] < inf:
            raise UserError(
                f"goodput={item!r}: expected a measure of {', '.join(MEASURES)} and ms, as ttft:500"
            )
    return limits


def check_length(engine: EngineLoop, longest: int) -> None:
    """Refuse requests with more tokens than ``max_model_len``, before they are generated."""
    if longest > engine.inputs.max_model_len:
        raise UserError(
            f"the data set has requests of {longest} tokens, max_model_len is "
            f"{engine.inputs.max_model_len}; ask for fewer tokens a request"
        )


def run(engine: EngineLoop, works: Sequence[Work], times: Sequence[float] | None = None) -> Run:
    """Generate exactly the lengths asked for, greedily.

    Args:
        times: seconds at which each request comes, as ``arrivals`` makes them; all at once if
            unset.

    Raises:
        UserError: a request is longer than ``max_model_len``.
    """
    check_length(engine, max(len(work.prompt_token_ids) + work.output_len for work in works))
    with measuring(len(works)) as advance, watch_clocks() as clocks:
        result = _run(engine, works, times, advance)
    result.clocks = clocks.to_json()
    return result


@contextmanager
def measuring(count: int) -> Iterator[Callable[[int], None]]:
    """Have the log say every ten seconds how many of ``count`` requests are answered; yields what
    counts them."""
    with (
        show_progress(draws=False) as progress,
        progress.bar("Measuring: requests", count) as advance,
    ):
        yield advance


def _run(
    engine: EngineLoop,
    works: Sequence[Work],
    times: Sequence[float] | None,
    advance: Callable[[int], None],
) -> Run:
    came: list[tuple[float, NewTokens]] = []

    def on_tokens(tokens: NewTokens) -> None:
        came.append((time.perf_counter(), tokens))

    start = time.perf_counter()
    due = {
        f"bench-{index}": (start + time_s, work)
        for index, (time_s, work) in enumerate(zip(times or [0.0] * len(works), works, strict=True))
    }
    before, engine.on_tokens = engine.on_tokens, on_tokens
    try:
        with gc_paused() as added:
            added()
            _serve(engine, due, advance)
    except BaseException:
        for request_id in due:
            engine.abort(request_id)
        raise
    finally:
        engine.on_tokens = before
    seconds = time.perf_counter() - start
    stamps: dict[str, list[float]] = {request_id: [] for request_id in due}
    token_ids: dict[str, list[int]] = {request_id: [] for request_id in due}
    for now, tokens in came:
        for name, token_id in zip(tokens.request_ids, tokens.token_ids.tolist(), strict=True):
            stamps[name].append(now)
            token_ids[name].append(token_id)
    inputs, outputs = (
        sum(map(len, x)) for x in ([w.prompt_token_ids for w in works], stamps.values())
    )
    result = Run(seconds, inputs, outputs)
    for request_id, times in stamps.items():
        gaps = np.diff(times) * 1e3
        result.gaps.extend(gaps.tolist())
        tpot = float(gaps.mean()) if len(gaps) else 0.0
        ttft, e2e = ((t - due[request_id][0]) * 1e3 for t in (times[0], times[-1]))
        result.requests.append(RequestTimes(ttft, tpot, e2e, float(max(gaps, default=0.0))))
        result.token_ids.append(token_ids[request_id])
    return result


def greedy(work: Work) -> tuple[dict[str, Any], SamplingParams]:
    """The prompt and parameters with which a request generates exactly the length asked for."""
    params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
    return {"prompt_token_ids": work.prompt_token_ids}, params


def _serve(
    engine: EngineLoop, due: Mapping[str, tuple[float, Work]], advance: Callable[[int], None]
) -> None:
    """Add each request when it is due, in order, and step until all are finished."""
    waiting = list(due)[::-1]
    while waiting or engine.has_unfinished():
        while waiting and due[waiting[-1]][0] <= time.perf_counter():
            request_id = waiting.pop()
            engine.add_request(*greedy(due[request_id][1]), request_id, final_only=True)
        if engine.has_unfinished():
            for output in engine.step():
                if output.error is not None:
                    raise UserError(f"request {output.request_id} failed: {output.error}")
                advance(1)
        elif waiting:
            time.sleep(max(0.0, due[waiting[-1]][0] - time.perf_counter()))


def capture_graphs(engine: EngineLoop) -> None:
    """Capture every graph now instead of beside the first requests."""
    capture_next = getattr(engine, "capture_next", lambda: False)
    while capture_next():
        pass


def warm_up(engine: EngineLoop, works: Sequence[Work]) -> None:
    """Capture every graph and run some requests, so that neither is measured."""
    capture_graphs(engine)
    run(engine, works)
