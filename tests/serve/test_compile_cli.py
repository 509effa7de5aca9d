"""Claims about ``fusewright compile``, its dump, other GPUs, and ``fusewright bench startup``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright.bench import startup
from fusewright.compiler.artifacts.artifact import Artifact
from fusewright.ops import KERNELS
from fusewright.serve.cli import main
from tests.engine.start_process import environment, run

pytestmark = pytest.mark.usefixtures("warm")
Capture = pytest.CaptureFixture[str]
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
EAGLE3 = {"method": "eagle3", "model": "abacus-eagle3", "num_speculative_tokens": 2}


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's store; nothing is baked, and --require-cache seals no table but this test's."""
    monkeypatch.setattr(KERNELS, "sealed", False)
    monkeypatch.setenv("FUSEWRIGHT_BAKED_DIR", str(tmp_path / "baked"))
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def refusal(capsys: Capture, *argv: str) -> str:
    """The one line with which the command line refuses ``argv``."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


# Here


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--attention-backend", "triton"],
            "error: attention backend triton: not for cpu; use native or auto\n",
        ),
        (["--kernels", "rms_norm=triton"], "error: kernels=rms_norm=triton: not for cpu; use "),
        (
            ["--kernels", "gelu_tanh_mul=native"],
            "nothing calls gelu_tanh_mul in this model with these passes; its ops: add_rms_norm, ",
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_a_kernel_that_cannot_serve_is_refused_in_words(
    flags: list[str], told: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    line = refusal(capsys, "compile", "abacus", "--device", "cpu", "--no-verify", *flags)
    assert told in line
    assert "OpDesc" not in line


@pytest.mark.slow
def test_compile_keeps_what_the_second_run_finds_and_dumps_how_it_came_to_be(
    device: torch.device, stores: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ["compile", "abacus", "-O2", "--device", device.type]
    assert main([*argv, "--dump", str(tmp_path / "dump"), "--max-model-len", "256"]) == 0
    out = capsys.readouterr().out
    path = Path(out.splitlines()[1])
    assert re.match(r"compiled LlamaForCausalLM, 5 layers, hidden 256, bfloat16, -O2, \w+\n", out)
    assert path.parent == stores / "artifacts"
    for phase in ("trace", "passes"):  # those of some milliseconds are not listed
        assert re.search(rf"\n  {phase} +\d+\.\d\d s", out), phase
    assert out.endswith(f"read {tmp_path}/dump/index.md\n")
    check_dump(tmp_path / "dump", Artifact.open(path))

    assert main([*argv, "--json", "--max-num-seqs", "7", "--max-model-len", "99"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["built"], facts["path"]) == (False, str(path))
    assert facts["key"] == path.name
    assert facts["report"] == Artifact.open(path).manifest.report
    assert {"find artifact", "load"} == set(facts["compile"])
    assert (facts["left"] == []) == (device.type == "cpu")
    checks = [check for entry in facts["report"]["passes"] for check in entry["checks"]]
    assert len(checks) == 6 and all(check["max_rel"] < 0.01 for check in checks)
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"found {facts['label']}\n{path}\n")
    assert f"6 distinct rewrites within tolerance (`fusewright cache show {path.name[:12]}`" in out
    assert main([*argv, "--no-verify", "--json"]) == 0  # verified code serves all
    assert json.loads(capsys.readouterr().out)["path"] == str(path)
    assert main([*argv, "--require-cache"]) == 0


def check_dump(folder: Path, artifact: Artifact) -> None:
    """Graphs in order, each pass changing what it says it changed, then the generated code."""
    index = (folder / "index.md").read_text()
    links = re.findall(r"^- \[(.+)\]\((.+)\)", index, re.M)
    texts = {title: (folder / name).read_text() for title, name in links}
    assert {name for _, name in links} | {"index.md"} == {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    }
    passes = artifact.manifest.report["passes"]
    titles = ["traced", *(f"after {entry['name']}" for entry in passes), "lowered"]
    assert [title for title, _ in links][: len(titles)] == titles
    assert [name[:2] for _, name in links][: len(titles)] == [f"{i:02}" for i in range(len(titles))]
    matched = 0
    for before, after, entry in zip(titles, titles[1:], passes, strict=False):
        assert (texts[before] != texts[after]) == bool(entry["matched"]), after
        matched += entry["matched"]
    assert matched > 0
    readable = {name for name in artifact.manifest.files if name.endswith((".py", ".json"))}
    assert {name: texts[name].encode() for name in readable} == {
        name: artifact.read(name) for name in readable
    }
    code = [text for title, text in texts.items() if title.endswith("/code.py")]
    assert code and all("def call(" in text for text in code)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-O0"], "compile: -O0 compiles nothing; use -O1 or higher"),
        (["--enforce-eager"], "compile: -O0 compiles nothing; use -O1 or higher"),
        (["--no-cache"], "compile: no_cache would throw the artifact away; drop it"),
        (["--require-cache", "--dump", "x"], "dump: needs a build, which require_cache forbids"),
        (["--dump", "/proc/x"], "dump=/proc/x: No such file or directory"),
        (["--require-cache"], "no artifact of key"),
        (["--target-sm", "90"], "target_sm=90 contradicts device=cpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_compile_refuses(
    flags: list[str], expected: str, capsys: Capture, tmp_path: Path, stores: Path
) -> None:
    assert expected in refusal(capsys, "compile", "abacus", "--device", "cpu", *flags)
    assert not stores.exists()


def test_compile_compiles_what_drafts_too(capsys: Capture) -> None:
    asked = ["abacus", "-O1", "--device", "cpu", "--max-model-len", "64"]
    asked += ["--speculative-config", json.dumps(EAGLE3), "--kernels", "accept_tokens=native"]
    assert main(["compile", *asked, "--json"]) == 0
    built = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["built"] for line in built] == [True, True]
    assert built[0]["key"] != built[1]["key"]
    assert main(["run", *asked, "--require-cache", "--prompt", "1+1=", "--max-tokens", "4"]) == 0


def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("in the way")
    where = str(tmp_path / "file" / "store")
    line = refusal(capsys, "compile", "abacus", "--device", "cpu", "--compile-cache-dir", where)
    assert "the artifact store cannot be written" in line


# GPUs that are not here

ABSENT = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@ABSENT
@pytest.mark.slow
def test_kernels_for_an_absent_gpu_are_compiled(tmp_path: Path) -> None:
    argv = ["compile", "abacus", "-O2", "--target-sm", "90", "--dtype", "bfloat16", "--json"]
    # Drafts need the same program, and an artifact of their own kernels.
    drafting = [*argv, "--no-verify", "--speculative-config", json.dumps(NGRAM)]
    strict = [*drafting, "--require-cache"]
    env = environment(tmp_path) | {"FUSEWRIGHT_CACHE_DIR": str(tmp_path / "store")}
    # In a process where kernels are compiled, not interpreted.
    told = run("commands", env=env, argvs=[argv, strict, drafting, strict])["told"]
    (code, out, err), (refused, _, why), (_, of_drafts, _), (found, _, _) = told
    assert code == 0, err
    facts = json.loads(out)
    assert facts["label"].endswith("bfloat16, -O2, sm_90")
    artifact = Artifact.open(Path(facts["path"]))
    artifact.verify()
    cubins = [name for name in artifact.manifest.files if name.endswith(".cubin")]
    assert len(cubins) == facts["report"]["kernels"] > 0
    assert all(artifact.read(name).startswith(b"\x7fELF") for name in cubins)
    names = {name.removeprefix("kernels/").partition("_kernel")[0] for name in cubins}
    for kernel in ("_decode", "_prefill", "_rms_norm", "_argmax", "_threshold", "_penalties"):
        assert kernel in names or f"{kernel}_partial" in names, sorted(names)
    assert artifact.manifest.factors["config.hardware.sm"] == "90"
    assert set(facts["report"]["pieces"].values()) == {"direct"}
    left = " | ".join(facts["left"])
    for item in ("CUDA graphs", "cuBLAS", "a real sm_90", torch.__version__):
        assert item in left
    assert "compile with the torch that will serve" in left

    assert refused == 2 and "in kernels: (none) -> of drafts" in why
    program, drafts = (json.loads(line) for line in of_drafts.splitlines())
    assert (program["built"], program["key"]) == (False, facts["key"])
    more = Artifact.open(Path(drafts["path"])).manifest.files
    own = {
        name.removeprefix("kernels/").partition("_kernel")[0] for name in more if ".cubin" in name
    }
    assert "_place_rows" in own and "_propose_ngrams" in own and not own & names
    assert found == 0


@ABSENT
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-O3"], "-O3 measures kernels on the GPU, and there is no sm_90 here"),
        (["-O1"], "needs Inductor (it can fuse "),
        (["--device", "cpu"], "target_sm=90 contradicts device=cpu"),
        (["--target-sm", "70"], "target_sm=70: expected a compute capability such as 90"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_needs_the_gpu_is_refused(
    flags: list[str], expected: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert expected in refusal(capsys, "compile", "abacus", "--target-sm", "90", *flags)


@ABSENT
def test_nothing_is_compiled_for_a_gpu_where_triton_interprets(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset it" in refusal(capsys, "compile", "abacus", "--target-sm", "90")


# bench startup


def test_a_start_that_is_measured_finds_nothing_but_its_store(tmp_path: Path) -> None:
    """Headers that Inductor has compiled are in the folder for temporary files."""
    found = startup._fresh(tmp_path / "store", tmp_path / "cold")
    assert found.pop("FUSEWRIGHT_CACHE_DIR") == str(tmp_path / "store")
    assert {*found} == {
        *("TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FUSEWRIGHT_BAKED_DIR")
    }
    assert all(Path(path).is_relative_to(tmp_path / "cold") for path in found.values())
    assert not [path for path in (tmp_path / "cold").rglob("*") if path.is_file()]


@pytest.fixture
def measured(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Table, progress and JSON of one cold and one warm start, at the level that compiles least.

    What Inductor compiles once for a machine, headers and probes of the processor, is that of all
    tests: it would take half a minute."""
    fresh = startup._fresh

    def with_a_store(store: Path, scratch: Path) -> dict[str, str]:
        found = fresh(store, scratch)
        return {name: found[name] for name in found if name.startswith("FUSEWRIGHT_")}

    monkeypatch.setattr(startup, "_fresh", with_a_store)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    argv = ["bench", "startup", "abacus", "-O1", "--device", device.type, "--iterations", "1"]
    argv += ["--num-gpu-blocks-override", "64", "--output", str(tmp_path / "startup.json")]
    code = main(argv)
    out, err = capsys.readouterr()
    assert code == 0, err
    yield out, err, json.loads((tmp_path / "startup.json").read_text())
    assert not (tmp_path / "store").exists(), "it has stores of its own"


@pytest.mark.product(2, of="commands that measure")
@pytest.mark.slow
def test_bench_startup_tells_every_phase_of_cold_and_warm_starts(
    measured: tuple[str, str, dict[str, Any]],
) -> None:
    table, progress, record = measured
    assert re.fullmatch(r"cold: first token .* s\nwarm: first token .* s\n", progress)
    assert {"environment", "options", "cold", "warm"} == set(record)
    assert record["environment"]["torch"] == torch.__version__
    (cold,), (warm,) = record["cold"]["runs"], record["warm"]["runs"]
    assert (cold["built"], warm["built"]) == (True, False)
    assert cold["token_ids"] == warm["token_ids"]
    assert "emit" in cold["compile_s"]
    assert set(warm["compile_s"]) == {"find artifact", "load"}
    for kind in ("cold", "warm"):
        mean, spread = record[kind]["mean_s"], record[kind]["spread_s"]
        assert mean == record[kind]["runs"][0]["seconds"]
        assert set(spread.values()) == {0.0}, "one run"
        parts = mean["python and imports"] + mean["compile"] + mean["first request"]
        assert 0 < parts <= mean["first token"] + 0.02  # ages of processes come in 10 ms
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    assert rows[0] == ["seconds", "cold", "spread", "warm", "spread"]
    shown = {name: (cold_s, warm_s) for name, cold_s, _, warm_s, _ in rows[2:]}
    assert set(shown) == set(record["cold"]["mean_s"]) | set(record["warm"]["mean_s"])
    assert shown["first token"] == tuple(
        f"{record[kind]['mean_s']['first token']:.2f}" for kind in ("cold", "warm")
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--iterations", "0"], "iterations=0: expected at least 1"),
        (["-O0"], "-O0 compiles nothing"),
        (["--no-cache"], "compile_cache: every start is measured with a store of its own"),
        (["--compile-cache-dir", "x"], "compile_cache_dir: every start is measured"),
        (["--output", "/nowhere/x.json"], "output=/nowhere/x.json: cannot be written"),
        (["--max-num-seqs", "0"], "max_num_seqs=0: expected at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_startup_refuses(flags: list[str], expected: str, capsys: Capture) -> None:
    argv = ["bench", "startup", "abacus", "--device", "cpu", "--iterations", "1"]
    assert expected in refusal(capsys, *argv, *flags)
