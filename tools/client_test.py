"""Asks one server of the bundled model with lm-eval, guidellm, LiteLLM and LangChain, all at once.

``python tools/client_test.py BIN``, where BIN is the folder of their commands; ``make client-test``
makes an environment that has them. None asks the network for anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fusewright.model_executor.abacus as abacus
from fusewright.bench.http_server import serving

MODEL = Path(abacus.__file__).parent
SUMS = [(a, b) for a in (3, 17, 28, 45) for b in (2, 9, 31, 40, 54)]
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "target_delimiter": "",
}
TASKS: dict[str, dict[str, Any]] = {
    "sum_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "place",
        "metric_list": [{"metric": "acc"}],
    },
    "sum_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{result}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
"""A task of log probabilities of an echoed prompt, and one of generation."""


def run(folder: Path, name: str, *argv: str) -> str:
    """Run a client; returns what it printed.

    Raises:
        SystemExit: it fails; its output says why.
    """
    environment = os.environ | {"HF_HOME": str(folder / "hugging-face"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        sys.stdout.buffer.write(done.stdout)
        raise SystemExit(f"client-test: {name} has failed with code {done.returncode}; see above")
    return done.stdout.decode()


def write_tasks(folder: Path) -> None:
    """The tasks as lm-eval reads them; YAML has JSON in it."""
    lines = []
    for number, (a, b) in enumerate(SUMS):
        results = [f"{a + b + more}" for more in (0, 1, 10)]
        place = number % 3
        results.insert(place, results.pop(0))
        doc = {"question": f"{a}+{b}=", "result": f"{a + b}", "choices": results, "place": place}
        lines.append(json.dumps(doc))
    data = folder / "sums.jsonl"
    data.write_text("\n".join(lines) + "\n")
    for name, task in TASKS.items():
        files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, **files, **task}))


def ask_lm_eval(binary: Path, folder: Path, url: str) -> str:
    """All sums are right, by both kinds of task; returns what to print."""
    write_tasks(folder)
    where = f"base_url={url}/v1/completions,tokenizer={MODEL},add_bos_token=True"
    run(
        folder, "lm-eval",
        *(str(binary), "run", "--model", "local-completions", "--include_path", str(folder)),
        *("--tasks", ",".join(TASKS), "--model_args", f"model=abacus,{where}"),
        *("--output_path", str(folder / "results")),
    )  # fmt: skip
    (path,) = (folder / "results").rglob("results*.json")
    results: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text())["results"]
    found = {}
    for name, task in TASKS.items():
        metric = task["metric_list"][0]["metric"]
        found[name] = next(v for key, v in results[name].items() if key.startswith(f"{metric},"))
    if set(found.values()) != {1.0}:
        raise SystemExit(f"client-test: lm-eval: accuracies {found}, expected 1.0 of each")
    return f"lm-eval: {len(SUMS)} sums, accuracies {found}"


def ask_guidellm(binary: Path, folder: Path, url: str) -> str:
    """Chats by four at a time end without an error; returns what to print."""
    path = folder / "guidellm.json"
    run(
        folder, "guidellm",
        *(str(binary), "run", "--backend", f"kind=openai_http,target={url}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=24"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--tokenizer", f"kind=hf_auto,model={MODEL}", "--output", f"kind=json,path={path}"),
    )  # fmt: skip
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["successful"] < 24 or totals["errored"]:
        raise SystemExit(f"client-test: guidellm: {totals}, expected 24 answers and no error")
    return f"guidellm: {totals['successful']} chats, no error"


def ask_gateways(binary: Path, folder: Path, url: str) -> str:
    script = str(Path(__file__).with_name("gateway_clients.py"))
    return run(folder, "gateways", str(binary), "-P", script, url).splitlines()[-1]


def main() -> None:
    commands = Path(sys.argv[1]).resolve()
    options = {"model": "abacus", "device": "cpu", "optimization_level": 0}
    clients = {"lm-eval": ask_lm_eval, "guidellm": ask_guidellm, "python": ask_gateways}

    def ask(name: str) -> str:
        with TemporaryDirectory() as folder:
            return clients[name](commands / name, Path(folder), server.target.url)

    with serving(options) as server, ThreadPoolExecutor(len(clients)) as threads:
        for answer in threads.map(ask, clients):
            print(answer, flush=True)


if __name__ == "__main__":
    main()
