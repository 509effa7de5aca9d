"""Logs what an engine is, from its report, once it has started."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ...config.logs import facts

_log = logging.getLogger(__name__)
_SHORTEST_SAID_S = 0.05
_MOST_REASONS = 3
"""Reasons of misses that are told of one pass; ``explain`` has all."""


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
    """Each pass that has sites as "NAME MATCHED/SITES", with reasons where it missed some."""
    parts = []
    for entry in _sites(report):
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
