"""The tables of the documents, each made from what its result files hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..bench.kernels.figures import Figure
from ..bench.result_file import Record
from ..config import PASSES
from ..config.gates import Measured, verdict
from .kernel_page import summary


@dataclass(frozen=True)
class Result:
    """A result file: its path below the repository, and its JSON objects."""

    path: str
    records: list[Record]

    @property
    def ours(self) -> list[Record]:
        """The environments of what this package was measured in."""
        return [r["environment"] for r in self.records if "environment" in r and is_ours(r)]

    @property
    def newest(self) -> Record:
        return max(self.ours, key=lambda environment: str(environment["date"]))


def is_ours(record: Record) -> bool:
    """Whether a record is of this package, not of another engine."""
    engine = record.get("engine")
    return not isinstance(engine, str) or engine.startswith("fusewright ")


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    head, *body = ([cell.replace("|", "/") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _name(options: Mapping[str, Any]) -> str:
    """The name of a configuration: model, level and what differs from the defaults."""
    model = Path(str(options["model"]).removesuffix(" config.json")).name.lower()
    given = [f"-O{options.get('optimization_level', 2)}"]
    if quantization := options.get("quantization"):
        given.append(f"--quantization {quantization}")
    if options.get("kv_cache_dtype", "auto") != "auto":
        given.append(f"--kv-cache-dtype {options['kv_cache_dtype']}")
    if options.get("batch_invariant"):
        given.append("--batch-invariant")
    return f"{model} `{' '.join(given)}`"


_SIZES = ("1", "3", "17", "48", "64", "200", "256", "17:3000")
_MIXES = {
    "chat": "tput_sharegpt",
    "prefill-heavy": "tput_prefill",
    "decode-heavy": "tput_decode",
    "chat, sampled": "tput_sampled",
}
Column = tuple[str, Callable[[Record], Any]]


def _tpot(size: str) -> Column:
    batch, _, context = size.partition(":")
    title = f"{batch}, context {context}" if context else batch
    return title, lambda record: _shown(record["tpot_ms"].get(size), 2)


def _ttft(size: str) -> Column:
    return f"first token b={size}, ms", lambda r: _shown(r["ttft_ms"].get(size), 1)


def _rate(mix: str) -> Column:
    return f"{mix}, requests/s", lambda r: _shown(r.get(_MIXES[mix], {}).get("req_s"), 1)


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


_CHOSEN = [_tpot(size) for size in ("1", "17", "64", "256", "17:3000")]


def _engines(results: Sequence[Result], columns: Sequence[Column], models: Sequence[str]) -> str:
    """A row for each engine and configuration."""
    rows = [["TPOT, ms: b =" if columns[0][0] == "1" else "", *(title for title, _ in columns)]]
    for name, r in latest(results, models).items():
        title = f"**{name}**" if is_ours(r) else name
        rows.append([title, *(value(r) for _, value in columns)])
    return _markdown(rows)


def latest(results: Sequence[Result], models: Sequence[str]) -> dict[str, Record]:
    """The newest record of each engine and configuration by its name, ours first."""
    newest: dict[tuple[str, ...], Record] = {}
    for result in results:
        for r in result.records:
            if not is_ours(r) or r["environment"]["commit"] == result.newest["commit"]:
                newest[r["engine"].split()[0], r["model"], str(r["quant"]), r["kv"]] = r
    order = sorted(
        (r for r in newest.values() if not models or r["model"] in models),
        key=lambda r: (r["model"] != "llama3-8b", r["model"], r["quant"] or "", not is_ours(r)),
    )
    named = {}
    for r in order:
        engine = "fusewright" if is_ours(r) else r["engine"].replace("vllm", "vLLM")
        kv = "" if r["kv"] == "auto" else f", {r['kv']} KV cache"
        model = "" if len(models) == 1 else f", {r['model']}"
        named[f"{engine.replace('sglang', 'SGLang')} {r['quant'] or 'bf16'}{kv}{model}"] = r
    return named


def _rows(results: Sequence[Result]) -> list[tuple[str, Record]]:
    """Every row of every result with the name of its configuration."""
    return [(_name(r.records[0]["options"]), row) for r in results for row in r.records[0]["rows"]]


def _latency(results: Sequence[Result]) -> str:
    batches = sorted({row["batch"] for _, row in _rows(results)})
    rows = [["TPOT, ms: b =", *map(str, batches), "first token b=1, ms"]]
    for result in results:
        found = {row["batch"]: row for row in result.records[0]["rows"]}
        cells = [_shown(found.get(b, {}).get("tpot_ms"), 2) for b in batches]
        name = _name(result.records[0]["options"])
        rows.append([name, *cells, _shown(found.get(1, {}).get("ttft_ms"), 1)])
    return _markdown(rows)


def _throughput(results: Sequence[Result]) -> str:
    head = ["requests at once", "requests/s", "output tokens/s", "TTFT p50, ms", "TPOT p50, ms"]
    rows = [[*head, "TPOT p99, ms"]]
    for name, row in _rows(results):
        figures = [row["requests_per_s"], row["output_tokens_per_s"], row["ttft_ms"]["p50"]]
        figures += [row["tpot_ms"]["p50"], row["tpot_ms"]["p99"]]
        digits = (1, 0, 0, 1, 1)
        cells = [_shown(value, n) for value, n in zip(figures, digits, strict=True)]
        rows.append([f"{name}, {row['requests']} x {row['workload']}", *cells])
    return _markdown(rows)


def _startup(results: Sequence[Result]) -> str:
    rows = [["seconds to the first token", "cold: caches empty", "spread", "warm", "spread", "n"]]
    for result in results:
        record = result.records[0]
        kinds = [record[kind] for kind in ("cold", "warm")]
        cells = [f"{k[w]['first token']:.1f}" for k in kinds for w in ("mean_s", "spread_s")]
        rows.append([_name(record["options"]), *cells, str(len(kinds[0]["runs"]))])
    return _markdown(rows)


def _compile_time(results: Sequence[Result]) -> str:
    found = [row for r in results for row in r.records[0]["rows"]]
    heads = ["layers", *(str(row["layers"]) for row in found)]
    return _markdown([heads, ["compile, s", *(f"{row['whole_s']:.1f}" for row in found)]])


def _prefix(results: Sequence[Result]) -> str:
    kinds = ("without", "cold", "cached")
    titles = ("no prefix caching", "empty cache", "prefix cached", "outputs identical")
    rows = [["mean time to first token, ms", *titles]]
    for result in results:
        r = result.records[0]
        work = f"{r['num_prompts']} requests, {r['prefix_len']} tokens shared"
        cells = [f"{r['ttft_mean_ms'][kind]:.0f}" for kind in kinds]
        rows.append([f"{_name(r['options'])}, {work}", *cells, f"{r['identical']}"])
    return _markdown(rows)


_FORMATS = {
    "bf16": "bf16",
    "token": "FP8, a scale a token and channel",
    "tensor": "FP8, one scale",
    "block": "FP8, a scale a block",
}
_WHOSE = {"native": "cuBLAS and cuBLASLt", "skinny": "fusewright"}


def _linear(results: Sequence[Result]) -> str:
    chains = {
        (f["format"], f["implementation"], f["rows"]): f["us"] / 1e3
        for f in results[0].records[0]["figures"]
        if f["work"] == "chain"
    }
    counts = sorted({rows for *_, rows in chains})
    rows = [["linear layers of one step, ms: tokens =", *map(str, counts)]]
    for name, title in _FORMATS.items():
        for key, whose in _WHOSE.items():
            cells = [_shown(chains.get((name, key, count)), 2) for count in counts]
            rows.append([f"{title}: {whose}", *cells])
    return _markdown(rows)


def _memory(results: Sequence[Result]) -> str:
    names = ("weights", "kv_cache", "activations", "graphs", "graphs_predicted", "context")
    rows = [["GB", *(name.replace("_", " ") for name in names), "sum", "in use by the driver"]]
    for result in results:
        record = result.records[0]
        memory = record["engine"]["memory"]
        cells = [f"{memory[name] / 1e9:.2f}" for name in (*names, "accounted", "driver")]
        rows.append([_name(record["options"]), *cells])
    return _markdown(rows)


def _passes(results: Sequence[Result]) -> str:
    found = [dict(row) for r in results for row in r.records[0]["rows"]]
    measured = [Measured(**{k: v for k, v in row.items() if k != "ratios"}) for row in found]
    rows = [["pass", *(f"{work}, ms" for work in measured[0].on_ms), "at its gate"]]
    for m in measured:
        cells = [
            f"{m.on_ms[w]:.3f} / {m.off_ms[w]:.3f} ({ratio - 1:+.1%} ± {m.noise[w]:.1%})"
            for w, ratio in m.ratios.items()
        ]
        on = "off" if verdict(m) else "on"
        if m.name not in PASSES:
            on = "no longer a pass"
        rows.append([m.name, *cells, on])
    return _markdown(rows)


def _kernels(results: Sequence[Result]) -> str:
    figures = [Figure(**f) for r in results for f in r.records if "environment" not in f]
    return _markdown(summary(figures))


TABLES: Mapping[str, Callable[[Sequence[Result]], str]] = {
    "engines": partial(
        _engines, columns=[*_CHOSEN, _ttft("1"), _rate("chat")], models=("llama3-8b",)
    ),
    "engines-tpot": partial(_engines, columns=[_tpot(size) for size in _SIZES], models=()),
    "engines-requests": partial(
        _engines, columns=[_ttft("1"), _ttft("64"), *map(_rate, _MIXES)], models=()
    ),
    "latency": _latency,
    "throughput": _throughput,
    "startup": _startup,
    "compile-time": _compile_time,
    "prefix": _prefix,
    "linear": _linear,
    "memory": _memory,
    "passes": _passes,
    "kernels": _kernels,
}
