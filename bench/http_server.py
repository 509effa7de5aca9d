"""Starts ``fusewright serve`` to measure it, and measures the same requests without it.

``python -m fusewright.bench.http_server REQUESTS`` is the part that runs ``LLM``: in a process of
its own, as both would not fit on one GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..config import EngineOptions, MachineError, option_specs
from ..config.process.logs import be_quiet
from ..model_executor.hf_config import served_name
from .http_load import HttpTarget
from .workloads import Work

_LINE = re.compile(r"serving .+ at (http://\S+)$")


def flags_of(options: Mapping[str, Any]) -> list[str]:
    flags = []
    for spec in option_specs():
        value = options.get(spec.name)
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(spec.flag if value else f"--no-{spec.flag.removeprefix('--')}")
        elif isinstance(value, tuple | list):
            flags += [spec.flag, ",".join(map(str, value))] if value else []
        else:
            flags += [spec.flag, str(value)]
    return flags


class Server:
    """A server that runs; ``cpu_s`` is the processor time of its API process so far."""

    def __init__(self, process: subprocess.Popen[str], target: HttpTarget) -> None:
        self._process, self.target = process, target

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(options: Mapping[str, Any], flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server of these engine options, and flags of ``serve``, on a free port.

    Raises:
        MachineError: it does not start; the message is its own.
    """
    model = served_name(str(options.get("model", EngineOptions().model)))
    command = [sys.executable, "-P", "-m", "fusewright.serve.cli", "serve", "--port", "0"]
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as written:
            process = subprocess.Popen(
                [*command, *flags_of(options), *flags], stderr=written, stdout=written, text=True
            )
        try:
            while (address := _address(log)) is None:
                if process.poll() is not None:
                    last = (log.read_text().splitlines() or ["no message"])[-1]
                    raise MachineError(f"the server has not started: {last}")
                time.sleep(0.05)
            yield Server(process, HttpTarget(address, model))
        finally:
            process.terminate()
            process.wait()


def _address(log: Path) -> str | None:
    addresses = [match[1] for line in log.read_text().splitlines() if (match := _LINE.search(line))]
    return addresses[0] if addresses else None


def offline(
    options: Mapping[str, Any], works: Sequence[Work], single: Work, repeats: int
) -> dict[str, float]:
    """Time ``LLM.generate`` with all requests as one batch, the best of ``repeats`` in ``seconds``,
    and the first token of ``LLM.stream`` for ``single``, as ``measure_first_token`` does.

    Raises:
        MachineError: the process fails; the message is its own.
    """
    with TemporaryDirectory() as folder:
        asked = Path(folder) / "requests.json"
        record = {
            "options": dict(options),
            "works": [[work.prompt_token_ids, work.output_len] for work in works],
            "single": single.prompt_token_ids,
            "single_len": single.output_len,
            "repeats": repeats,
        }
        asked.write_text(json.dumps(record))
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(asked)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise MachineError("what LLM.generate takes could not be measured; see above")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _measure(asked: Mapping[str, Any]) -> dict[str, float]:
    from ..engine.llm import LLM
    from .cases import measure_first_token
    from .serving import capture_graphs, greedy

    be_quiet()
    llm = LLM(**asked["options"])
    capture_graphs(llm.engine)
    asks = [greedy(Work(*work)) for work in asked["works"]]
    prompts, params = [prompt for prompt, _ in asks], [params for _, params in asks]
    seconds = []
    for _ in range(asked["repeats"] + 1):  # the first warms up
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    alone = measure_first_token(llm, Work(asked["single"], asked["single_len"]))
    return {"seconds": min(seconds[1:]), **alone}


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(Path(sys.argv[1]).read_text()))))
