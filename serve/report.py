"""The engine's account of itself, for reading: level, fusions, start-up, steps, memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .table import table


def summary(facts: dict[str, Any]) -> str:
    """What ``LLM.report()`` says about level, fusions, start-up and steps, for reading."""
    lines = [f"level -O{facts['level']} on {facts['hardware']}"]
    lines.append(passes_table(facts["passes"]))
    lines.append(startup_table(facts["startup"], facts["compile"]))
    for kind, modes in facts["dispatch"].items():
        counts = ", ".join(f"{count} in graph mode {mode}" for mode, count in modes.items())
        outside = facts["graphs"]["outside"].get(kind)
        if outside:
            counts += f"; {outside['steps']} beyond the captured sizes, up to "
            counts += f"{outside['most_tokens']} tokens"
        lines.append(f"{kind} steps: {counts or 'none'}")
    if facts["memory"]["driver"]:
        lines.append(_memory(facts["memory"]))
    return "\n".join(lines)


def passes_table(passes: Iterable[Mapping[str, Any]]) -> str:
    """Sites of each pass, with the reasons of the missed ones."""
    rows = [["pass", "sites", "matched", "missed"]]
    for entry in passes:
        reasons = dict.fromkeys(miss["reason"] for miss in entry["missed"])
        missed = f"{len(entry['missed'])}: {'; '.join(reasons)}" if reasons else "0"
        rows.append([entry["name"], str(entry["sites"]), str(entry["matched"]), missed])
    return table(rows) if len(rows) > 1 else "no passes at this level"


def checks_table(passes: Iterable[Mapping[str, Any]]) -> str:
    """Each distinct rewrite that was run, before against after: largest errors, and those that its
    rule declares; "" if none was."""
    rows = [["verified", "site", "max abs error", "max rel error", "atol", "rtol", "seed"]]
    for entry in passes:
        for check in entry.get("checks", ()):
            names = ("max_abs", "max_rel", "atol", "rtol")
            errors = [f"{check[name]:.3g}" for name in names]
            rows.append([entry["name"], check["site"], *errors, str(check["seed"])])
    return table(rows) if len(rows) > 1 else ""


def checks_line(passes: Iterable[Mapping[str, Any]]) -> str:
    """How many rewrites were verified, and the largest errors."""
    checks = [check for entry in passes for check in entry["checks"]]
    if not checks:
        return "no rewrite was verified"
    absolute, relative = (max(check[name] for check in checks) for name in ("max_abs", "max_rel"))
    return (
        f"{len(checks)} distinct rewrites verified: largest absolute error {absolute:.3g}, "
        f"relative {relative:.3g} (`fusewright cache show` has each)"
    )


def startup_table(startup: dict[str, Any], compile_s: dict[str, float]) -> str:
    """Every phase of a start: when it began, counted from the process's birth, and how long it
    took."""
    rows = [["start-up", "began", "took"]]
    rows.append(["python and imports", "0.00 s", f"{startup['imports_s']:.2f} s"])
    for phase in startup["phases"]:
        beside = " (beside)" if phase["beside"] else ""
        began, took = f"{phase['begin_s']:.2f} s", f"{phase['seconds']:.2f} s"
        rows.append([phase["name"] + beside, began, took])
        if phase["name"] == "compile":
            rows += [[f"  {name}", "", f"{took:.2f} s"] for name, took in compile_s.items()]
    return table(rows)


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
