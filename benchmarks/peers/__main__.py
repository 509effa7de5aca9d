"""Measures one engine and appends one JSON object to a file.

python -m fusewright.benchmarks.peers vllm FOLDER --output FILE

FOLDER needs only a config.json: weights are random unless --load-format says otherwise. Run it once
for each engine on the same machine, each in an environment that has that engine.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path

from ...bench.environment import environment
from ...bench.workloads import INPUT_LEN, equal
from ...config import UserError
from ...config.numbers import check_counts
from ...engine.worker.startup_report import process_age_s
from .peer import Peer, PeerOptions
from .work import THROUGHPUTS, latencies, longest_request, seconds, throughputs

ENGINES = ("fusewright", "vllm", "sglang", "transformers")
SIZES = ("1", "3", "17", "48", "64", "200", "256", "17:3000")


def adapter(engine: str) -> Callable[[PeerOptions], Peer]:
    """What starts the engine in this process.

    Raises:
        UserError: it is not installed here.
    """
    try:
        module = importlib.import_module(f"{__package__}.engine_{engine}")
    except ModuleNotFoundError as error:
        if error.name != engine:
            raise
        raise UserError(
            f"{engine} is not installed in this Python; run this in an environment that has it"
        ) from error
    engine_class: Callable[[PeerOptions], Peer] = module.Engine
    return engine_class


def vocab_size_of(model: str) -> int:
    config = Path(model) / "config.json"
    try:
        return int(json.loads(config.read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{config}: expected a file with a vocab_size: {error!r}") from error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fusewright.benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--output", type=Path, required=True, help="file to append the result to")
    parser.add_argument("--batch", nargs="*", default=SIZES, help="batch, or batch:context")
    mixes = [*THROUGHPUTS]
    parser.add_argument("--throughput", nargs="*", default=mixes, choices=mixes)
    parser.add_argument("--requests", type=int, default=500, help="of each throughput")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--load-format", default="dummy", choices=["dummy", "auto"])
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    return parser.parse_args()


def measure(given: argparse.Namespace) -> None:
    check_counts(1, requests=given.requests, repeats=given.repeats)
    vocab_size = vocab_size_of(given.model)
    longest = longest_request(given.batch, given.throughput, given.requests, vocab_size)
    if longest > given.max_model_len:
        raise UserError(
            f"--max-model-len {given.max_model_len}: the work has requests of {longest} tokens; "
            "raise it, or give other --batch and --throughput"
        )
    options = PeerOptions(
        given.model,
        given.max_model_len,
        given.load_format,
        given.quantization,
        given.kv_cache_dtype,
    )
    start = adapter(given.engine)
    try:
        with given.output.open("a"):
            pass
    except OSError as error:
        raise UserError(f"--output {given.output}: {error.strerror}") from error
    peer = start(options)
    seconds(peer, equal(1, INPUT_LEN, 1, vocab_size))
    record = {
        "engine": peer.name,
        "model": Path(given.model).resolve().name,
        "quant": given.quantization,
        "kv": given.kv_cache_dtype,
        "level": None,
        "tp": 1,
        "start_to_first_token_s": round(process_age_s(), 2),
        **latencies(peer, given.batch, vocab_size, given.repeats),
        **throughputs(peer, given.throughput, given.requests, vocab_size, given.repeats),
        "environment": environment(),
    }
    with given.output.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))


def main() -> None:
    try:
        measure(arguments())
    except UserError as error:
        raise SystemExit(f"peers: {error}") from error


if __name__ == "__main__":  # engines start processes that import this module again
    main()
