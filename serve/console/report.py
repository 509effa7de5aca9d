"""The engine's account of itself, for reading: level, fusions, start-up, steps, memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from .table import line_width, table, wrap

_SHORTEST_S = 0.005
"""Shorter phases would be listed as 0.00 s."""


def summary(facts: dict[str, Any], stream: TextIO | None = None) -> str:
    """What ``LLM.report()`` says about level, fusions, start-up and steps, for reading on
    ``stream``, standard output if None."""
    lines = [level_line(facts), passes_table(facts["passes"], stream)]
    lines.append(startup_table(facts["startup"], facts["compile"], stream))
    lines += step_lines(facts)
    if facts["memory"]["driver"]:
        lines.append(_memory(facts["memory"]))
    return "\n".join(lines)


def level_line(facts: Mapping[str, Any]) -> str:
    note = " (CPU: no CUDA graphs)" if _without_graphs(facts) else ""
    return f"level -O{facts['level']} on {facts['hardware']}{note}"


def step_lines(facts: Mapping[str, Any]) -> list[str]:
    """How many steps there were of each kind, and which graphs they replayed."""
    lines = []
    for kind, modes in facts["dispatch"].items():
        counts = ", ".join(
            f"{count} without a graph" if mode == "NONE" else f"{count} in graph mode {mode}"
            for mode, count in modes.items()
        )
        if _without_graphs(facts):
            counts = str(sum(modes.values()))
        outside = facts["graphs"]["outside"].get(kind)
        if outside:
            counts += f"; {outside['steps']} beyond the captured sizes, up to "
            counts += f"{outside['most_tokens']} tokens"
        lines.append(f"{kind} steps: {counts or 'none'}")
    return lines


def _without_graphs(facts: Mapping[str, Any]) -> bool:
    """Whether this is a CPU, whose steps no graph could hold."""
    return not facts["memory"]["driver"] and facts["graphs"]["mode"] == "NONE"


def passes_table(passes: Iterable[Mapping[str, Any]], stream: TextIO | None = None) -> str:
    """Sites of each pass that has any, with the reasons of those that were missed or matched in
    part; and the others."""
    rows = [["pass", "sites", "matched", "missed"]]
    without = []
    for entry in passes:
        if not entry["sites"]:
            without.append(entry["name"])
            continue
        reasons = dict.fromkeys(miss["reason"] for miss in entry["missed"])
        missed = f"{len(entry['missed'])}: {'; '.join(reasons)}" if reasons else "0"
        if in_part := entry.get("in_part"):
            missed += f"; {len(in_part)} in part: {'; '.join(dict.fromkeys(in_part.values()))}"
        rows.append([entry["name"], str(entry["sites"]), str(entry["matched"]), missed])
    parts = [table(rows, stream=stream)] if len(rows) > 1 else []
    if without:
        parts += wrap(f"no sites in this model: {', '.join(without)}", line_width(stream), "  ")
    return "\n".join(parts) or "no passes at this level"


_ERRORS = {"max abs error": "max_abs", "max rel error": "max_rel", "atol": "atol", "rtol": "rtol"}


def checks_table(passes: Iterable[Mapping[str, Any]], *, verbose: bool = False) -> str:
    """Each distinct rewrite that was run, before against after, under a sentence; "" if none was.
    With ``verbose`` also the largest errors, and those that its rule declares."""
    rows = [["pass", "site", "outputs", *([*_ERRORS, "seed"] if verbose else [])]]
    for entry in passes:
        for check in entry.get("checks", ()):
            errors = [f"{check[name]:.3g}" for name in _ERRORS.values()]
            outcome = "within tolerance" if check["max_abs"] else "the same bits"
            numbers = [*errors, str(check["seed"])] if verbose else []
            rows.append([entry["name"], check["site"], outcome, *numbers])
    if len(rows) == 1:
        return ""
    return titled("Rewrites that were verified: each ran before and after, on random inputs.", rows)


def titled(sentence: str, rows: Sequence[Sequence[str]]) -> str:
    """A table under the sentence that says what it is."""
    lines = wrap(sentence, line_width())
    return "\n".join([*lines, table(rows)])


def checks_line(passes: Iterable[Mapping[str, Any]], key: str) -> str:
    """How many rewrites of the artifact ``key`` were verified; one beyond its tolerance would have
    stopped the build."""
    count = sum(len(entry["checks"]) for entry in passes)
    if not count:
        return "no rewrite was verified"
    said = f"all {count} distinct rewrites" if count > 1 else "the one distinct rewrite"
    return f"verified: {said} within tolerance (`fusewright cache show {key[:12]}` lists them)"


def startup_table(
    startup: dict[str, Any], compile_s: dict[str, float], stream: TextIO | None = None
) -> str:
    """Every phase of a start that took time: when it began, counted from the process's birth, and
    how long it took."""
    rows = [["start-up", "began", "took"]]
    rows.append(["python and imports", "0.00 s", _seconds(startup["imports_s"])])
    for phase in startup["phases"]:
        beside = " (beside)" if phase["beside"] else ""
        if phase["seconds"] >= _SHORTEST_S:
            began, took = _seconds(phase["begin_s"]), _seconds(phase["seconds"])
            rows.append([phase["name"] + beside, began, took])
        if phase["name"] == "compile":
            parts = [(name, took) for name, took in compile_s.items() if took >= _SHORTEST_S]
            rows += [[f"  {name}", "", _seconds(took)] for name, took in parts]
    return table(rows, stream=stream)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _memory(memory: dict[str, int]) -> str:
    """Where the GPU's memory went; graphs with what was predicted for them."""
    parts = ", ".join(
        f"{label} {_gb(memory[name])}"
        for label, name in [
            ("weights", "weights"),
            ("KV cache", "kv_cache"),
            ("graphs", "graphs"),
            ("activations", "activations"),
            ("CUDA context", "context"),
        ]
    )
    return (
        f"memory: {parts}; in all {_gb(memory['accounted'])}, the driver says "
        f"{_gb(memory['driver'])} (graphs were predicted at {_gb(memory['graphs_predicted'])})"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
