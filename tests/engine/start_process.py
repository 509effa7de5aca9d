"""Starts of the engine in processes of their own, where compilers can be made impossible.

As a script: ``start_process.py JSON`` does what the JSON asks for and prints one JSON value.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import getpass
import importlib.abc
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_UNUSED = (
    *("core.drafters", "core.drafting.policy", "core.ngram"),
    *("read_draft", "worker.draft_model"),
)
FORBIDDEN = (
    *("torch._dynamo", "torch._inductor", "triton", "transformers", "jinja2"),
    *(f"fusewright.engine.{name}" for name in _UNUSED),
    *(f"fusewright.config.vllm.{name}" for name in ("bench", "requests", "speculative")),
    "fusewright.model_executor.quant.dialects",
)
"""A warm start imports none of these: compilers, the library of captured models, Jinja, which
conversations alone need, and what reads drafts, requests and quantized checkpoints."""
NO_ALGEBRA = ("sympy",)
"""Nor this one, unless it checks required fusions, by the module that has the passes too."""
COMPILERS = ("ptxas", "nvcc", "gcc", "g++", "cc", "c++", "clang", "clang++", "ld", "as", "ninja")
TIMEOUT_S = 500


# The side of the test


class Sandbox:
    """A folder that every user may read, with empty caches and compilers that only leave a mark."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marks = folder, folder / "marks"
        self.caches = [folder / name for name in ("triton", "inductor")]
        tools = folder / "tools"
        tools.mkdir(parents=True)
        for name in COMPILERS:
            (tools / name).write_text(
                f'#!/bin/sh\necho {name} "$@" >> {self.marks}/{name}\nexit 1\n'
            )
            (tools / name).chmod(0o755)
        for path in (self.marks, *self.caches):
            path.mkdir()
            path.chmod(0o777)
        self.tools = tools

    def env(self) -> dict[str, str]:
        """The environment of a user with empty caches and no compiler."""
        env = environment(self.folder)
        for name in ("CC", "CXX", "CUDA_HOME"):
            env.pop(name, None)
        triton, inductor = map(str, self.caches)
        more = {"TRITON_CACHE_DIR": triton, "TORCHINDUCTOR_CACHE_DIR": inductor}
        return env | more | {"PATH": str(self.tools), "TRITON_PTXAS_PATH": f"{self.tools}/ptxas"}

    def traces(self) -> list[str]:
        """What compilers left: calls of them, and files in the caches."""
        calls = [path.read_text() for path in self.marks.iterdir()]
        return calls + [str(path) for cache in self.caches for path in cache.rglob("*")]


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, as pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="fusewright-test-") as name:
        Path(name).chmod(0o755)
        try:
            yield Path(name)
        finally:
            writable(Path(name), True)


def environment(folder: Path) -> dict[str, str]:
    """This environment, with the stores of a fresh user and kernels that are not interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Where they are by default, even if the test moves TMPDIR and HOME.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor_folder()))
    env.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    for name in ("FUSEWRIGHT_BAKED_DIR", "FUSEWRIGHT_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        env[name] = str(folder / "absent" / name.lower())
    return env


def inductor_folder() -> Path:
    """Where Inductor keeps what it compiled, and C++ headers even if told another place."""
    return Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")


def writable(folder: Path, allowed: bool) -> None:
    """``chmod -R u+w`` or ``chmod -R a-w``."""
    subprocess.run(["chmod", "-R", "u+w" if allowed else "a-w", folder], check=True)


def _setpriv() -> str:
    import pytest

    if path := shutil.which("setpriv"):
        return path
    raise pytest.skip.Exception("root cannot drop its rights: setpriv (util-linux) is missing")


def bound_by_modes() -> tuple[str, ...]:
    """Words before a command that have it obey the modes of files, if this user is root."""
    return (_setpriv(), "--bounding-set=-dac_override,-dac_read_search") if _is_root() else ()


def _is_root() -> bool:
    return os.geteuid() == 0


@functools.cache
def unprivileged() -> tuple[str, ...]:
    """Words before a command that have it run as nobody, if this user is root.

    An interpreter in root's own folders is out of nobody's reach: then one right, to read all, is
    left.
    """
    if not _is_root():
        return ()
    drop = (_setpriv(), "--reuid=65534", "--regid=65534", "--clear-groups")
    reading = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    check = "import os, sys, fusewright; os.execv(sys.executable, [sys.executable, '-c', ''])"
    for words in (drop, (*drop, *reading)):
        # It must find itself again: setpriv still has root's rights when it executes Python.
        done = subprocess.run([*words, sys.executable, "-c", check], capture_output=True, cwd="/")
        if done.returncode == 0:
            return words
    import pytest

    raise pytest.skip.Exception(f"nobody cannot run {sys.executable}: {done.stderr.decode()}")


def begin(
    task: str,
    *,
    env: dict[str, str],
    before: Sequence[str] = (),
    guard: bool = False,
    cold: bool = False,
    **arguments: Any,
) -> subprocess.Popen[str]:
    """Start a task of this file.

    Args:
        guard: to import a compiler is an error.
        cold: nothing is imported when it starts, as always with a guard; else see ``tests.warm``.
    """
    from tests.warm import real_starts, warm_starts  # which a script does not find

    asked = json.dumps({"task": task, "guard": guard, **arguments})
    command = [*before, sys.executable, "-P", __file__, asked]
    pipe = subprocess.PIPE
    with real_starts() if guard or cold else warm_starts():
        return subprocess.Popen(command, env=env, cwd="/", stdout=pipe, stderr=pipe, text=True)


def result(process: subprocess.Popen[str]) -> Any:
    """What a task printed."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, f"{out}\n{err}"
    return json.loads(out.splitlines()[-1])


def run(task: str, **arguments: Any) -> Any:
    """Start a task of this file and wait for what it prints."""
    return result(begin(task, **arguments))


# The side of the process


class _Refuse(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a forbidden import an error that nothing takes for an optional package.

    To look whether there is one, as torch does for Triton, is no import.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        forbidden = any(name == root or name.startswith(f"{root}.") for root in self._roots)
        return ModuleSpec(name, self) if forbidden else None

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError(f"{module.__name__} is imported")


_executed: list[str] = []


def _record(event: str, args: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        _executed.append(Path(os.fsdecode(args[0])).name)


def start_all(starts: list[dict[str, Any]], batches: list[Any]) -> Any:
    """Start with each set of options in turn, generate for the batches, tell what came of it."""
    from fusewright import ops
    from fusewright.engine.llm import LLM
    from fusewright.engine.messages.sampling_params import SamplingParams

    told = []
    for options in starts:
        llm = LLM(**options)
        outputs = []
        for batch in batches:
            prompts = [prompt for prompt, _ in batch]
            params = [SamplingParams(**given) for _, given in batch]
            found = llm.generate(prompts, params, use_tqdm=False)
            outputs.append([_exact(c) for output in found for c in output.outputs])
        facts = llm.report()
        told.append(
            {
                "outputs": outputs,
                "artifact": facts["artifact"],
                "kv_blocks": facts["num_kv_blocks"],
                "late": [variant.name for variant in ops.KERNELS.compiled_late],
                "sealed": ops.KERNELS.sealed,
                "passes": "fusewright.passes" in sys.modules,
                "captured": "fusewright.model_executor.captured.model" in sys.modules,
                "tuned_experts": [
                    name for name in facts["device_table"]["found"] if name.startswith("tiles: ")
                ],
            }
        )
        del llm
        gc.collect()
    return told


def _exact(completion: Any) -> Any:
    """Text, tokens and log probabilities, every bit of them."""
    steps = completion.logprobs or []
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "logprobs": [{str(i): [e.logprob.hex(), e.rank] for i, e in s.items()} for s in steps],
        "cumulative": float(completion.cumulative_logprob or 0).hex(),
    }


def commands(argvs: list[list[str]]) -> Any:
    """Run command lines in turn: exit code, standard output and error of each."""
    from fusewright.serve.cli import main

    told = []
    for argv in argvs:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
        told.append([code, out.getvalue(), err.getvalue()])
    return told


def _main() -> None:
    given = json.loads(sys.argv[1])
    starts = given.pop("task") == "start_all"
    refused = FORBIDDEN + NO_ALGEBRA if starts else FORBIDDEN
    if given.pop("guard", False):
        sys.meta_path.insert(0, _Refuse(refused))
        sys.addaudithook(_record)
    told = (start_all if starts else commands)(**given)
    loaded = [name for name in refused if name in sys.modules]
    print(json.dumps({"told": told, "loaded": loaded, "executed": _executed}))


if __name__ == "__main__":
    _main()
