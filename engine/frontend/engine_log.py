"""Logs what an engine is, once it has started, and every ten seconds of generating a line of its
load: requests, throughput, and use of the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...config.process.logs import facts
from ..messages.requests import CoreStats
from .output_processor import OutputProcessor

_log = logging.getLogger(__name__)
EVERY_S = 10.0
_SHORTEST_SAID_S = 0.05
_MOST_REASONS = 3
"""Reasons of misses that are told of one pass; ``explain`` has all."""


class Load(NamedTuple):
    """The load says what engines have done since their start, and what they do now.  Loads may be
    subtracted."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_prefix_tokens: int = 0
    num_prefix_hits: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    num_draft_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @classmethod
    def of(cls, stats: CoreStats, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> Load:
        """The load of one core, and the tokens that were counted elsewhere."""
        own = (getattr(stats, name) for name in cls._fields[2:-3])
        drafts = stats.drafts
        counts = (drafts.num_steps, drafts.num_drafted, drafts.num_accepted) if drafts else ()
        return cls(num_prompt_tokens, num_output_tokens, *own, *counts)

    @property
    def is_idle(self) -> bool:
        return not (self.num_running or self.num_waiting)


def log_load(now: Load, before: Load, seconds: float) -> None:
    """Log the line of an interval: rates and the share of prompt tokens found in the prefix cache
    are those of the interval, all else is as it is at its end."""
    looked_up = now.num_prefix_tokens - before.num_prefix_tokens
    hits = 100 * (now.num_prefix_hits - before.num_prefix_hits) / looked_up if looked_up else None
    used = 100 * (1 - now.num_free_kv_blocks / max(now.num_kv_blocks, 1))
    prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
    output = (now.num_output_tokens - before.num_output_tokens) / seconds
    said, drafts = _drafts(now, before)
    _log.info(
        "running %d, waiting %d; in %.1f tokens/s, out %.1f tokens/s; KV cache %.1f %% in use, "
        "prefix cache hits %s%s",
        now.num_running,
        now.num_waiting,
        prompt,
        output,
        used,
        "-" if hits is None else f"{hits:.1f} %",
        said,
        extra=facts(
            running=now.num_running,
            waiting=now.num_waiting,
            prompt_tokens_per_s=round(prompt, 1),
            output_tokens_per_s=round(output, 1),
            kv_cache_percent=round(used, 1),
            prefix_hit_percent=None if hits is None else round(hits, 1),
            **drafts,
        ),
    )


def _drafts(now: Load, before: Load) -> tuple[str, dict[str, float]]:
    """What became of the drafts of an interval, as the end of its line and as facts; nothing if
    there were none."""
    drafted = now.num_drafted - before.num_drafted
    steps = now.num_draft_steps - before.num_draft_steps
    if drafted <= 0 or steps <= 0:
        return "", {}
    accepted = now.num_accepted - before.num_accepted
    rate, length = 100 * accepted / drafted, 1 + accepted / steps
    text = f"; {rate:.1f} % of {drafted} drafts accepted, {length:.2f} tokens a request and step"
    return text, {"draft_acceptance_percent": round(rate, 1), "accepted_length": round(length, 2)}


class StatsLog:
    """Counts the time in steps, so that what an engine does at rest is in no average."""

    def __init__(self, stats: Callable[[], CoreStats], outputs: OutputProcessor) -> None:
        self._stats, self._outputs = stats, outputs
        self._seconds = 0.0
        self._before = Load()

    def add_step(self, seconds: float) -> None:
        self._seconds += seconds
        if self._seconds >= EVERY_S:
            self._write()

    def _write(self) -> None:
        outputs = self._outputs
        now = Load.of(self._stats(), outputs.num_prompt_tokens, outputs.num_output_tokens)
        log_load(now, self._before, self._seconds)
        self._before, self._seconds = now, 0.0


def log_start(report: Mapping[str, Any], where: str = "") -> None:
    """Log the lines of an engine's start.

    Args:
        report: of ``Engine.report``.
        where: what tells the engine from others, as "engine 1: ".
    """
    for name, line, values in _lines(report):
        _log.info("%s%s", where, line, extra=facts(**{name: values}))


def _lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, line, plain data) of each part of a start."""
    model, kv, artifact = report["model"], report["kv_cache"], report["artifact"]
    dtype = model["dtype"]
    if model["quantization"] != "none":
        dtype += f", {model['quantization']} weights"
    ranks = len(report["ranks"]["processes"]) + 1
    more = f", {ranks} ranks" if ranks > 1 else ""
    said = (
        f"model {model['name']}: {model['architecture']}, {report['num_layers']} layers, {dtype}, "
        f"-O{report['level']} on {report['hardware']}{more}, max_model_len={model['max_model_len']}"
    )
    where = {"device": report["hardware"], "level": report["level"], "ranks": ranks}
    yield "model", said, {**model, **where}
    said = (
        f"KV cache: {kv['tokens']:,} tokens of {kv['dtype']} in {report['num_kv_blocks']:,} blocks "
        f"of {kv['block_size']}, {kv['bytes'] / 1e9:.2f} GB; {kv['full_requests']:.1f} requests of "
        f"max_model_len={model['max_model_len']} fit"
    )
    yield "kv_cache", said, kv
    yield "fusions", f"fusions: {_fusions(report)}", [*_sites(report)]
    if artifact["key"] is None:
        said = "artifact: none, -O0 compiles nothing"
    else:
        took = sum(report["compile"].values())
        built = f"built in {took:.1f} s" if artifact["built"] else f"loaded in {took:.2f} s"
        said = f"artifact {artifact['key'][:12]}: {built}"
    yield "artifact", said, artifact
    graphs = report["graphs"]
    if graphs["captured"] or graphs["pending"]:
        more = f", {graphs['pending']} more when needed or at rest" if graphs["pending"] else ""
        yield (
            "graphs",
            f"graphs: {graphs['captured']} captured{more}, mode {graphs['mode']}",
            {name: graphs[name] for name in ("captured", "pending", "mode")},
        )
    began_s, phases = report["startup"]["imports_s"], _phases(report["startup"])
    took_s = ready_s(report["startup"]) - began_s
    said = (
        f"started in {took_s:.1f} s{phases and f' ({phases})'}, {began_s:.1f} s after the process"
    )
    yield "startup", said, report["startup"]


def _fusions(report: Mapping[str, Any]) -> str:
    """Each fusion that has sites as "NAME MATCHED/SITES", with reasons where it missed some; other
    passes only if they did."""
    parts = []
    for entry in _sites(report):
        if not entry["name"].startswith("fuse_") and not entry["missed"]:
            continue
        text = f"{entry['name']} {entry['matched']}/{entry['sites']}"
        if reasons := entry["missed"]:
            more = f"; and {len(reasons) - _MOST_REASONS} more reasons"
            text += f" ({'; '.join(reasons[:_MOST_REASONS])}"
            text += f"{more if len(reasons) > _MOST_REASONS else ''})"
        parts.append(text)
    return ", ".join(parts) or f"none at -O{report['level']}"


def _sites(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The passes that have sites; each distinct reason of a miss once."""
    for entry in report["passes"]:
        if entry["sites"]:
            missed = list(dict.fromkeys(miss["reason"] for miss in entry["missed"]))
            yield {**{n: entry[n] for n in ("name", "sites", "matched")}, "missed": missed}


def ready_s(startup: Mapping[str, Any]) -> float:
    """When the engine was ready, in seconds from the process's birth."""
    ends = (phase["begin_s"] + phase["seconds"] for phase in startup["phases"])
    return max(ends, default=float(startup["imports_s"]))


def startup_line(startup: Mapping[str, Any]) -> str:
    """A line on the time of a start and of its longest phases."""
    longest = f"python and imports {startup['imports_s']:.1f}"
    if phases := _phases(startup):
        longest += f", {phases}"
    return f"{ready_s(startup):.1f} s ({longest})"


def _phases(startup: Mapping[str, Any]) -> str:
    """The longest phases of a start, with their seconds."""
    phases = [(p["name"], p["seconds"]) for p in startup["phases"] if not p["beside"]]
    return ", ".join(f"{name} {took:.1f}" for name, took in phases if took >= _SHORTEST_SAID_S)
