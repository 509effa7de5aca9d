"""Mistakes that need no hardware to be seen are refused in one line, before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusewright.model_executor.abacus import FOLDER as ABACUS

CONFIG: dict[str, Any] = json.loads((ABACUS / "config.json").read_text())

# Each runs in the same process: torch, once imported, would stay.
RUN_ALL = """
import contextlib, io, json, sys
from fusewright.serve.cli import main
told = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    told.append([code, out.getvalue(), err.getvalue(), "torch" in sys.modules])
print(json.dumps(told))
"""


def folder(**changes: Any) -> Callable[[Path], None]:
    """Makes a folder with only a config: that of the bundled model with changes."""

    def make(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG | changes))

    return make


def nothing(path: Path) -> None:
    """Makes nothing: the model's folder is missing."""


RUN = ("run", "{model}", "-p", "1+1=")
# What is at {model}, the command line, and words of the refusal.
MISTAKES: list[tuple[Callable[[Path], None], tuple[str, ...], tuple[str, ...]]] = [
    (nothing, RUN, ("{model}", "not there", "Hugging Face")),
    (Path.mkdir, RUN, ("{model}", "no config.json")),
    (Path.touch, RUN, ("{model}", "not a folder")),
    (folder(architectures=["FooForCausalLM"]), RUN, ("FooForCausalLM", "LlamaForCausalLM")),
    (folder(hidden_size="256"), RUN, ("hidden_size", "'256'", "an integer")),
    (folder(), RUN, ("{model}", "model.safetensors", "--load-format dummy")),
    (folder(quantization_config={"quant_method": "eetq"}), RUN, ("eetq", "compressed-tensors")),
    (folder(), (*RUN, "--load-format", "dummy"), ("tokenizer.json", "token ids")),
    (folder(), ("explain", "{model}", "-O7"), ("optimization_level=7", "0, 1, 2 or 3")),
    (nothing, ("run", "-p", "x", "-O7"), ("optimization_level=7", "0, 1, 2 or 3")),
    (nothing, ("demo", "-O7"), ("optimization_level=7",)),
    (nothing, ("eval", "abacus", "--max-num-seqs", "0"), ("max_num_seqs=0", "at least 1")),
    (nothing, ("run", "-p", "x", "--no-such-flag"), ("--no-such-flag", "run --help")),
    (nothing, ("run", "-p", "x", "--dtype", "int3"), ("'int3'", "bfloat16")),
    (
        nothing,
        ("run", "-p", "x", "--quantization", "awq"),
        ("--quantization': quantization='awq': a ", "leave it out"),
    ),
    (nothing, ("run", "-p", "x", "--quantization", "int3"), ("'int3'", "fp8_block")),
    (nothing, ("run", "-p", "x", "--max-model-len", "10**6"), ("10**6", "--max-model-len")),
    (nothing, ("run", "-p", "x", "--max-model-len", "9999"), ("max_model_len=9999", "positions")),
    (nothing, ("run", "-p", "x", "--quantization", "fp8_static"), ("fp8_static", "use fp8")),
    (nothing, ("run", "-p", "x", "--temperature", "-1"), ("temperature", "-1")),
    (nothing, ("run", "-p", "x", "--tokenizer", "/nope"), ("tokenizer='/nope'", "tokenizer.json")),
    (nothing, ("run", "--prompts-file", "/nope.txt"), ("/nope.txt", "No such file")),
    (nothing, ("run", "-p"), ("'-p' requires an argument", "fusewright run --help")),
    (nothing, ("run", "-p", "x", "--kernels", "silu_mul"), ("'silu_mul'", "op=implementation")),
    (nothing, ("run", "-p", "x", "--passes", "fuse_all"), ("'fuse_all'", "fuse_act")),
    (nothing, ("run", "-p", "x", "--require-fusion", "fuse_all:2"), ("'fuse_all'", "fuse_act")),
    (nothing, ("run", "-p", "x", "-O0", "--verify"), ("verify", "-O1 or higher")),
    (nothing, ("run", "-p", "x", "--no-cache", "--require-cache"), ("contradicts no_cache",)),
    (nothing, ("run", "-p", "x", "-O1", "--batch-invariant"), ("batch_invariant", "use -O2")),
    (nothing, ("run", "-p", "x", "--enforce-eager", "--cudagraph-mode", "FULL"), ("FULL", "drop")),
    (nothing, ("run", "-p", "x", "--compile-cache-limit-gb", "nan"), ("limit_gb=nan", "expected")),
    (nothing, ("run", "-p", "x", "--compile-cache-limit-gb", "inf"), ("limit_gb=inf", "expected")),
    (nothing, ("compile", "/nope"), ("'/nope'", "not there")),
    (nothing, ("bisect", "/nope"), ("'/nope'", "not there")),
    (nothing, ("explain", "/nope"), ("'/nope'", "not there")),
    (nothing, ("run", "", "-p", "x"), ("model=''", "model folder")),
    (nothing, ("explain", "abacus", "--html", "/nope/x.html"), ("html=/nope/x.html", "cannot be")),
    (nothing, ("rum",), ("'rum'", "'run'", "fusewright --help")),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str, bool]]:
    """Exit code, both outputs, and whether torch was imported, of every mistake."""
    root = tmp_path_factory.mktemp("mistakes", numbered=False)
    lines = []
    for number, (make, argv, _) in enumerate(MISTAKES):
        make(root / str(number))
        lines.append([word.format(model=root / str(number)) for word in argv])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps(lines), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


@pytest.mark.parametrize(
    "number", range(len(MISTAKES)), ids=[f"{n}-{m[1][0]}-{m[2][0]}" for n, m in enumerate(MISTAKES)]
)
def test_a_cheap_mistake_is_refused_in_one_line_without_torch(
    number: int, told: list[tuple[int, str, str, bool]]
) -> None:
    code, out, err, torch_imported = told[number]
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in MISTAKES[number][2]:
        assert word.replace("{model}", f"mistakes/{number}") in err
    assert not torch_imported


def test_python_refuses_a_missing_model_without_torch() -> None:
    code = (
        "import sys\nfrom fusewright import LLM\nfrom fusewright.config import UserError\n"
        "try:\n    LLM('/nope')\n"
        "except UserError as error:\n    print(error)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "'/nope': not there" in done.stdout
