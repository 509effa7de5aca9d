"""Seconds from process start to first token, cold and warm, each start in a process of its own.

Cold: the folders of fusewright, Inductor and Triton are empty.  Warm: an artifact is in the store,
and the folders of Inductor and Triton are empty still.

``fusewright bench startup MODEL -O2``
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import UserError
from ..config.process.logs import be_quiet

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 17
_STORE_OPTIONS = ("compile_cache", "require_cache", "compile_cache_dir", "trusted_keys")


def measure_startup(
    options: Mapping[str, Any],
    iterations: int,
    on_run: Callable[[str, dict[str, Any]], None] = lambda kind, run: None,
) -> dict[str, Any]:
    """Start ``iterations`` times cold, and as often warm.

    Args:
        options: engine options, without those of the store, which is a temporary one.
        on_run: told of each run, "cold" or "warm", as it ends.

    Returns:
        For cold and warm: every run, and mean and spread of each phase in seconds.

    Raises:
        UserError: there is nothing to compile or no store of its own; a start failed, or a warm one
            compiled something or gave other tokens.
    """
    for name in _STORE_OPTIONS:
        if name in options:
            raise UserError(f"{name}: every start is measured with a store of its own; drop it")
    if options.get("enforce_eager") or options.get("optimization_level") == 0:
        raise UserError("-O0 compiles nothing: no start is cold; use -O1 or higher")
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(iterations):
        with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as folder:
            for kind in ("cold", "warm"):
                run = start(options, _fresh(Path(folder) / "store", Path(folder) / kind))
                runs[kind].append(run)
                on_run(kind, run)
                _check(kind, run, runs["cold"][0])
    return {kind: _summary(starts) for kind, starts in runs.items()}


def _check(kind: str, run: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    if run["built"] != (kind == "cold"):
        raise UserError(f"a {kind} start {'compiled' if run['built'] else 'found'} its artifact")
    if run["token_ids"] != first["token_ids"]:
        raise UserError(
            f"a {kind} start gave tokens {run['token_ids']}, the first one {first['token_ids']}"
        )


def _fresh(store: Path, scratch: Path) -> dict[str, str]:
    """The environment of a start that finds nothing but what is in ``store``."""
    temporary = scratch / "tmp"  # where Inductor keeps C++ headers, whatever it is told
    temporary.mkdir(parents=True)
    return {
        "TMPDIR": str(temporary),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "FUSEWRIGHT_BAKED_DIR": str(scratch / "baked"),
        "FUSEWRIGHT_CACHE_DIR": str(store),
    }


def start(options: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """What ``one_start`` says in a process of its own, with ``env`` added to the environment.

    Raises:
        UserError: the start failed.
    """
    command = [sys.executable, "-m", f"{__package__}.startup", json.dumps(dict(options))]
    env = {**os.environ, **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"a start failed with code {done.returncode}: {last}")
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return run


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for run in runs for name in run["seconds"])
    return {
        "mean_s": {n: statistics.fmean(run["seconds"].get(n, 0.0) for run in runs) for n in names},
        "spread_s": {
            n: max(run["seconds"].get(n, 0.0) for run in runs)
            - min(run["seconds"].get(n, 0.0) for run in runs)
            for n in names
        },
        "runs": list(runs),
    }


def one_start(options: Mapping[str, Any]) -> dict[str, Any]:
    """Start in this process, generate from one prompt, and say when what was done."""
    from ..engine.llm import LLM
    from ..engine.messages.sampling_params import SamplingParams
    from ..engine.worker.startup_report import process_age_s

    be_quiet()
    llm = LLM(**options)
    ready_s = process_age_s()
    vocabulary = llm.engine.inputs.vocab_size
    prompt: Any = {"prompt_token_ids": [7 * i % vocabulary for i in range(PROMPT_TOKENS)]}
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    first_token_s = 0.0
    token_ids: list[int] = []
    for output in llm.stream(prompt, params):
        first_token_s = first_token_s or process_age_s()
        if output.error is not None:
            raise UserError(f"the first request failed: {output.error}")
        token_ids = list(output.outputs[0].token_ids)
    report = llm.report()
    phases = {phase["name"]: phase["seconds"] for phase in report["startup"]["phases"]}
    seconds = {
        "first token": first_token_s,
        "python and imports": report["startup"]["imports_s"],
        **phases,
        "first request": first_token_s - ready_s,
    }
    return {
        "seconds": seconds,
        "compile_s": report["compile"],
        "startup": report["startup"],
        "built": report["artifact"]["built"],
        "graphs": report["graphs"],
        "token_ids": token_ids,
    }


if __name__ == "__main__":
    try:
        print(json.dumps(one_start(json.loads(sys.argv[1]))))
    except UserError as error:
        sys.exit(f"error: {error}")
