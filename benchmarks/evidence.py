"""Measures again what the documents show: one command a suite, one result file each.

python -m fusewright.benchmarks.evidence [SUITE ...] [--dry-run] [--commit HASH] [--results FOLDER]

Each suite runs in processes of its own and is ended at its limit; a result replaces the older one
only when its suite has finished. `python -m fusewright.benchmarks.report` then renders the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..bench.environment import ENGINE, KERNELS, ROOT, commit
from ..config import UserError

RESULTS = ROOT / "bench" / "results"
_OURS = '{"engine": "fusewright'
_8B, _1B = "{llama3-8b} -O2 --load-format dummy", "{llama3.2-1b} -O2 --load-format dummy"
_LATENCY = "serve.cli bench latency {} --max-model-len 4096 --repeats 3 --batch-size {}"
_THROUGHPUT = "serve.cli bench throughput {} --max-model-len 4096 --repeats 2 --dataset {}"
_STARTUP = "serve.cli bench startup {{llama3-8b}} {} --load-format dummy --max-model-len 4096"
_PASSES = "serve.cli bench passes {{llama3-8b}} --load-format dummy --max-model-len 4096 {}"
_BATCHES = "1 --batch-size 64 --batch-size 256"


@dataclass(frozen=True)
class Suite:
    """How one result file is made.

    Args:
        commands: modules of the package with their arguments; each gets ``--output``.
        limit_s: seconds after which the suite is ended.
        sources: folders whose change makes the result old.
    """

    commands: tuple[str, ...]
    limit_s: int
    sources: tuple[str, ...] = ENGINE


SUITES: dict[str, Suite] = {
    "peers.jsonl": Suite(
        (
            "benchmarks.peers fusewright {llama3-8b}",
            "benchmarks.peers fusewright {llama3-8b} --quantization fp8 --batch 1 17 64 200 256",
        ),
        420,
    ),
    "latency-llama3-8b-bf16.json": Suite(
        (_LATENCY.format(_8B, f"{_BATCHES} --batch-size 8 --batch-size 32 --batch-size 128"),), 90
    ),
    "latency-llama3-8b-fp8.json": Suite(
        (_LATENCY.format(_8B, f"{_BATCHES} --quantization fp8"),), 75
    ),
    "latency-llama3.2-1b.json": Suite((_LATENCY.format(_1B, _BATCHES),), 60),
    "throughput-llama3-8b-chat.json": Suite((_THROUGHPUT.format(_8B, "chat"),), 75),
    "throughput-llama3-8b-prefill-heavy.json": Suite(
        (_THROUGHPUT.format(_8B, "prefill-heavy"),), 75
    ),
    "throughput-llama3-8b-fp8-chat.json": Suite(
        (_THROUGHPUT.format(_8B, "chat --quantization fp8"),), 75
    ),
    "startup-llama3-8b-O2.json": Suite((_STARTUP.format("-O2 --iterations 2"),), 75),
    "startup-llama3-8b-O3.json": Suite((_STARTUP.format("-O3 --iterations 2"),), 90),
    "prefix-llama3-8b.json": Suite((f"serve.cli bench prefix {_8B} --max-model-len 4096",), 75),
    "compile-time-llama3-8b.json": Suite(("benchmarks.compile_time {llama3-8b}",), 100),
    "linear.json": Suite(("benchmarks.ops.bench_linear --rows 1 8 16 32",), 90, KERNELS),
}
"""These suites run when none is named; together they take at most 25 minutes."""

ON_REQUEST: dict[str, Suite] = {
    "kernels.jsonl": Suite(("serve.cli bench kernels -k 'not inductor'",), 1800, KERNELS),
    "kernels-inductor.jsonl": Suite(("serve.cli bench kernels -k inductor",), 1800, KERNELS),
    "passes-llama3-8b-bfloat16.json": Suite((_PASSES.format(""),), 900),
    "passes-llama3-8b-fp8.json": Suite((_PASSES.format("--quantization fp8"),), 900),
    "passes-llama3-8b-fp8_static.json": Suite((_PASSES.format("--quantization fp8_static"),), 900),
    "latency-llama3-8b-batch-invariant.json": Suite(
        (_LATENCY.format(_8B, f"{_BATCHES} --batch-invariant"),), 120
    ),
    "serve-llama3-8b-chat.json": Suite(
        (f"serve.cli bench serve {_8B} --max-model-len 4096 --offline --repeats 3",), 240
    ),
    "growth-llama3.2-1b.json": Suite((f"serve.cli bench growth {_1B} --max-model-len 32896",), 600),
}
"""These suites run only when they are named."""

_CONFIG = ROOT / "tests" / "serve" / "golden" / "llama3-8b" / "config.json"
_LLAMA_1B: dict[str, object] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_MODELS: dict[str, dict[str, object]] = {"llama3-8b": {}, "llama3.2-1b": _LLAMA_1B}
"""Name -> what its config.json has other than Llama-3-8B's; the weights are random."""


def command(text: str, models: Path, output: Path) -> list[str]:
    """The process of one of a suite's commands."""
    for name in _MODELS:
        text = text.replace(f"{{{name}}}", shlex.quote(str(models / name)))
    module, *arguments = shlex.split(text)
    return [sys.executable, "-m", f"fusewright.{module}", *arguments, "--output", str(output)]


def write_models(folder: Path) -> None:
    """A folder with a config.json for each model."""
    base = json.loads(_CONFIG.read_text())
    for name, other in _MODELS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps({**base, **other}))


def measure(name: str, suite: Suite, models: Path, results: Path, unknown: str | None) -> None:
    """Run a suite and put its result in place.

    Args:
        unknown: the commit to write where git does not know it.

    Raises:
        UserError: a command failed, or the suite took longer than its limit.
    """
    end = time.monotonic() + suite.limit_s
    draft = models / name
    for text in suite.commands:
        # A group of its own: the processes that a bench starts are ended with it.
        with subprocess.Popen(command(text, models, draft), process_group=0) as process:
            try:
                code = process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired as error:
                raise UserError(f"{name}: ended at its limit of {suite.limit_s} s") from error
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if code:
            raise UserError(f"{name}: `{text}` ended with exit code {code}")
    if unknown is not None:
        draft.write_text(draft.read_text().replace('"commit": "unknown"', f'"commit": "{unknown}"'))
    target = results / name
    if name == "peers.jsonl" and target.is_file():  # other engines are measured elsewhere
        lines = [s for s in target.read_text().splitlines() if not s.startswith(_OURS)]
        draft.write_text("\n".join([*lines, draft.read_text()]))
    shutil.copyfile(draft, target)


def results_folder() -> Path:
    """The folder of this machine's GPU, as ``bench/results/h200``.

    Raises:
        UserError: there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError("evidence: torch sees no CUDA GPU; --dry-run lists the commands")
    device = torch.cuda.get_device_name(0).lower().removeprefix("nvidia ")
    return RESULTS / device.replace(" ", "-")


def run(names: Iterable[str], results: Path, unknown: str | None) -> list[str]:
    """Measure the suites; what went wrong, a line each."""
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory(prefix="fusewright-evidence-") as folder:
        write_models(Path(folder))
        for name in names:
            start = time.monotonic()
            try:
                measure(name, {**SUITES, **ON_REQUEST}[name], Path(folder), results, unknown)
                print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
            except UserError as error:
                failed.append(str(error))
                print(f"failed: {error}", file=sys.stderr, flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fusewright.benchmarks.evidence")
    known = {**SUITES, **ON_REQUEST}
    parser.add_argument("suites", nargs="*", help=f"{', '.join(known)}; if none: {len(SUITES)}")
    parser.add_argument("--dry-run", action="store_true", help="only list the commands")
    parser.add_argument("--commit", help="the commit of a checkout without git")
    parser.add_argument("--results", type=Path, help="folder; if unset bench/results/DEVICE")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    names = options.suites or [*SUITES]
    if options.dry_run:
        for name in names:
            for text in known[name].commands:
                print(shlex.join(command(text, Path("MODELS"), Path(name))[1:]))
        return
    if options.commit is None and commit() == "unknown":
        raise SystemExit("error: git does not know the commit here; give it by --commit")
    try:
        failed = run(names, options.results or results_folder(), options.commit)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
