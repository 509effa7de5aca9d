"""A warm start compiles nothing and gives the bits of the cold one; what it refuses, and how."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.compiler.store_process import small_disk
from tests.engine.damages import DAMAGES
from tests.engine.start_process import (
    Sandbox,
    begin,
    bound_by_modes,
    environment,
    inductor_folder,
    open_folder,
    run,
    unprivileged,
    writable,
)
from tests.model_executor.tiny_models import BY_NAME
from tests.serve.progress_lines import without_progress

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True, "logprobs": 5}
SAMPLED: dict[str, Any] = {"temperature": 1.3, "max_tokens": 5, "ignore_eos": True, "logprobs": 5}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
PROMPTS = [[1, 50, 43, 51, 52, 61], [7, 9], list(range(3, 40))]
BATCHES = [
    [[prompt, GREEDY] for prompt in PROMPTS],
    [[prompt, SAMPLED | {"seed": seed}] for seed, prompt in enumerate(PROMPTS)],
]
WAYS: list[dict[str, Any]] = [
    SAMPLED | {"seed": 1} | top_k | top_p | min_p | penalties
    for top_k in ({}, {"top_k": 7})
    for top_p in ({}, {"top_p": 0.9})
    for min_p in ({}, {"min_p": 0.02})
    for penalties in ({}, PENALTIES)
]
OF_SAMPLING = [
    *([[PROMPTS[0], way]] for way in WAYS),
    [[PROMPTS[i % 3], way] for i, way in enumerate(WAYS)],
    [[PROMPTS[0], GREEDY | PENALTIES], [PROMPTS[1], GREEDY | {"min_tokens": 3}]],
]
"""Each way of sampling alone, then all together."""
ADD: list[Any] = ["12+34=", {"temperature": 0.0, "max_tokens": 8}]
SUM = "46"


def options(model: Path | str, device: torch.device, level: int, store: Path) -> dict[str, Any]:
    """Options of a cold start."""
    given = {
        "model": str(model),
        "device": device.type,
        "optimization_level": level,
        "compile_cache_dir": [str(store)],
        "max_num_seqs": 4,
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
    }
    return given | (capturing(1, 2, 4) if device.type == "cuda" else {})


def other_limits(device: torch.device) -> dict[str, Any]:
    """Limits that compiled code is not bound to, such that requests meet the same graphs."""
    given = {"max_num_seqs": 16, "num_gpu_blocks_override": 99}
    if device.type == "cuda":
        # max_model_len stays: it decides into how many parts attention splits a context.
        return given | capturing(1, 2, 4, 8)
    return given | {"max_model_len": 160}


def capturing(*sizes: int) -> dict[str, Any]:
    return {"cudagraph_capture_sizes": list(sizes)}


# Equal bits


@dataclass(frozen=True)
class Cold:
    """The reports of one model's cold starts, by level, and the store that they filled."""

    model: str
    store: Path
    told: dict[int, Any]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


# -O3 is -O2 where there is no GPU to measure kernels on.
LEVELS_OF: dict[str, tuple[int, ...]] = (
    {"abacus": (1, 2), "llama_gqa": (3,), "qwen3_moe": (3,)}
    if torch.cuda.is_available()
    else {"abacus": (2,), "llama_gqa": (1,)}
)
MEASURED = {"qwen3_moe": ["tiles: 16 experts of 32, bfloat16, tokens"]}
DUMMY = {
    "llama_gqa": {"load_format": "dummy"},
    # Tiles of float32 are not measured.
    "qwen3_moe": {"load_format": "dummy", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def colds(folder: Path, device: torch.device) -> dict[str, Cold]:
    """By model; one process compiles all."""
    starts, colds = [], {}
    for name, levels in LEVELS_OF.items():
        store, model = folder / name / "cold", name
        store.parent.mkdir()
        if name in DUMMY:
            model = str(store.parent / "model")
            BY_NAME[name].config().save_pretrained(model)
        starts += [options(model, device, level, store) | DUMMY.get(name, {}) for level in levels]
    told = run("start_all", env=environment(folder), starts=starts, batches=BATCHES)["told"]
    for name, levels in LEVELS_OF.items():
        moved = folder / name / "moved" / "far"
        moved.parent.mkdir()
        (folder / name / "cold").rename(moved)
        writable(moved, False)
        count = len(levels)
        start, of_levels = starts[0], dict(zip(levels, told[:count], strict=True))
        starts, told = starts[count:], told[count:]
        colds[name] = Cold(start["model"], moved, of_levels)
    return colds


@pytest.mark.parametrize("name", LEVELS_OF)
def test_a_moved_read_only_store_starts_without_compilers_and_with_equal_bits(
    name: str, colds: dict[str, Cold], device: torch.device
) -> None:
    """No way of sampling compiles anything either."""
    cold = colds[name]
    more = {"require_cache": True} | other_limits(device) | DUMMY.get(name, {})
    starts = [options(cold.model, device, level, cold.store) | more for level in cold.told]
    with open_folder() as folder:
        sandbox = Sandbox(folder)
        done = run(
            "start_all",
            env=sandbox.env(),
            before=unprivileged(),
            guard=True,
            starts=starts,
            batches=BATCHES + OF_SAMPLING,
        )
        assert sandbox.traces() == []
    for warm, first in zip(done["told"], cold.told.values(), strict=True):
        assert first["artifact"]["built"]
        counts = [[len(c["token_ids"]) for c in batch] for batch in warm["outputs"]]
        assert counts[len(BATCHES) :] == [[5]] * 16 + [[5] * 16, [9, 9]]
        assert warm["outputs"][: len(BATCHES)] == first["outputs"]
        assert warm["artifact"] == {"key": first["artifact"]["key"], "built": False}
        assert (warm["sealed"], warm["late"]) == (True, [])
        assert (first["passes"], warm["passes"]) == (True, False), "they take time to import"
        assert not warm["captured"], "no captured model is loaded"
        assert warm["kv_blocks"] != first["kv_blocks"]
        assert warm["tuned_experts"] == first["tuned_experts"] == MEASURED.get(name, [])
    assert done["loaded"] == []
    assert set(done["executed"]) <= {"uname"}, "platform.processor() asks it"


def test_a_start_that_compiles_does_not_get_past_the_guard(device: torch.device) -> None:
    with open_folder() as folder:
        start = options("abacus", device, 2, folder / "store")
        env = Sandbox(folder).env()
        process = begin("start_all", env=env, guard=True, starts=[start], batches=BATCHES)
        _, err = process.communicate()
    assert process.returncode != 0
    assert "AssertionError: sympy is imported" in err, "which torch.fx imports before Dynamo"


# One store of abacus at -O2, for all that follows


@dataclass(frozen=True)
class Made:
    folder: Path
    store: Path
    key: str
    device: str

    def options(self, **more: Any) -> dict[str, Any]:
        return options("abacus", torch.device(self.device), 2, self.store) | more

    def argv(self, *more: str, store: Path | None = None) -> list[str]:
        """A command line that answers a sum, from the store or another one."""
        words = ["run", "abacus", "-p", ADD[0], "--temperature", "0", "--json"]
        words += ["--device", self.device, "--num-gpu-blocks-override", "64"]
        words += ["--cudagraph-capture-sizes", "1,2"] if self.device == "cuda" else []
        return [*words, "--compile-cache-dir", str(store or self.store), *more]


@pytest.fixture(scope="module")
def made(folder: Path, colds: dict[str, Cold], device: torch.device) -> Made:
    abacus = colds["abacus"]
    store, key = folder / "made", abacus.told[2]["artifact"]["key"]
    subprocess.run(["cp", "-a", abacus.store, store], check=True)
    writable(store, True)
    for artifact in (store / "artifacts").iterdir():
        if artifact.name != key:
            shutil.rmtree(artifact)
    return Made(folder, store, key, device.type)


def answer(out: str) -> str:
    return str(json.loads(out)["outputs"][0]["text"])


REFUSED = {
    ("-O1",): ["config.compile.level: 2 -> 1", "config.compile.hand_kernels: True -> False"],
    ("--block-size", "32"): ["config.cache.block_size: 16 -> 32"],
    ("--require-fusion", "fuse_act:999"): ["fuse_act"],
}


def test_a_start_that_would_compile_or_miss_a_fusion_is_refused_in_one_line(made: Made) -> None:
    with open_folder() as folder:
        sandbox = Sandbox(folder)
        argvs = [made.argv("--require-cache", *flags) for flags in REFUSED]
        done = run("commands", env=sandbox.env(), guard=True, argvs=argvs)
        assert sandbox.traces() == []
    assert done["loaded"] == []
    for (flags, expected), (code, out, err) in zip(REFUSED.items(), done["told"], strict=True):
        assert (code, out, without_progress(err).count("\n")) == (2, "", 1), (flags, err)
        assert without_progress(err).startswith("error: ")
        for words in expected:
            assert words in err
        if "--require-fusion" not in flags:
            assert f" is {made.key} (LlamaForCausalLM, 5 layers, " in err


# Damage


@pytest.fixture(scope="module")
def damaged(made: Made, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """For each damage that a test of this run has: a start that must not compile, one that may, and
    again one that must not, all from a copy of the store with that damage."""
    asked = [item for item in request.session.items if item.path == request.path]
    names = [name for name in DAMAGES if any(f"[{name}]" in item.nodeid for item in asked)]
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    trusted = made.folder / "trusted.pem"
    trusted.write_bytes(public)
    trusted.chmod(0o644)
    argvs = []
    for name in names:
        damage = DAMAGES[name]
        store = made.folder / "damaged" / name.replace(" ", "-")
        store.parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-a", made.store, store], check=True)
        if name != "foreign owner" or made.store.owner() == "root":
            damage.harm(store / "artifacts" / made.key)
        flags = [word for flag in damage.flags for word in (flag, str(trusted))]
        strict = made.argv("--require-cache", *flags, store=store)
        argvs += [strict, made.argv(*flags, store=store), strict]
    told = run("commands", env=environment(made.folder), argvs=argvs)["told"]
    return {name: told[3 * i : 3 * i + 3] for i, name in enumerate(names)}


@pytest.mark.product(6)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_under_require_cache_and_else_repaired(
    damaged: dict[str, list[Any]], name: str, made: Made
) -> None:
    if name == "foreign owner" and made.store.owner() != "root":
        pytest.skip("only root can give files away")
    (code, out, err), (built_code, built_out, warning), (again, again_out, _) = damaged[name]
    assert (code, out, without_progress(err).count("\n")) == (2, "", 1), err
    assert without_progress(err).startswith("error: no artifact of key ")
    assert DAMAGES[name].reason in err
    assert (built_code, answer(built_out)) == (0, SUM)
    if name == "unsigned":
        assert again == 2, "what is built here is not signed"
    else:
        assert (again, answer(again_out)) == (0, SUM)
    if name != "other torch":
        assert "compiling anew" in warning


# Caches that are not wanted or cannot be written


@dataclass(frozen=True)
class Unkept:
    """Starts that could keep nothing: what they said, by test, and what lay about behind them."""

    told: dict[str, Any]
    scratch: list[Path]
    at_home: list[Path]
    read_only: list[Path]
    full: list[list[Path]]


@pytest.fixture(scope="module")
def unkept(made: Made, request: pytest.FixtureRequest) -> Iterator[Unkept]:
    """One process starts without a cache, with one that it cannot write, and on a full disk: as
    this run has the tests of it."""
    of_run = {item.name for item in request.session.items if item.path == request.path}
    top = made.folder / "unkept"
    scratch, home, read_only = top / "scratch", top / "absent" / "home", top / "read-only"
    scratch.mkdir(parents=True)
    read_only.mkdir()
    link = scratch / inductor_folder().name
    inductor_folder().mkdir(exist_ok=True)
    link.symlink_to(inductor_folder())  # torch's own, not ours
    writable(read_only, False)
    without = ["--no-cache" if w == "--compile-cache-dir" else w for w in made.argv()[:-1]]
    with small_disk(top / "disk", 64) as disk:
        starts = {
            test_no_cache_leaves_nothing_behind.__name__: without,
            test_a_cache_that_cannot_be_written_is_a_warning.__name__: made.argv(
                store=read_only / "store"
            ),
            test_a_cache_whose_disk_is_full_is_a_warning.__name__: made.argv(store=disk / "store"),
        }
        asked = [name for name in starts if name in of_run]
        done = run(
            "commands",
            env=environment(top) | {"TMPDIR": str(scratch)},
            before=bound_by_modes(),
            argvs=[[*starts[name], "-O1"] for name in asked],  # compiles least
        )
        full = [list((disk / "store").glob(f"{name}/*")) for name in ("artifacts", "tmp")]
    at_home = [*home.parent.rglob("*")] if home.parent.exists() else []
    yield Unkept(
        dict(zip(asked, done["told"], strict=True)),
        [path for path in scratch.iterdir() if path != link],
        [p for p in at_home if p != home and home / ".nv" not in (p, *p.parents)],
        list(read_only.iterdir()),
        full,
    )
    writable(top, True)


@pytest.mark.product(2, of="caches that keep nothing")
def test_no_cache_leaves_nothing_behind(unkept: Unkept) -> None:
    code, out, err = unkept.told[test_no_cache_leaves_nothing_behind.__name__]
    assert (code, answer(out), without_progress(err)) == (0, SUM, "")
    assert not unkept.scratch
    assert not unkept.at_home, "HOME, but for what NVIDIA's driver keeps there, and stores"


@pytest.mark.product(2, of="caches that keep nothing")
def test_a_cache_that_cannot_be_written_is_a_warning(made: Made, unkept: Unkept) -> None:
    code, out, err = unkept.told[test_a_cache_that_cannot_be_written_is_a_warning.__name__]
    assert unkept.read_only == []
    assert (code, answer(out), without_progress(err).count("\n")) == (0, SUM, 1)
    store = made.folder / "unkept" / "read-only" / "store"
    assert f"{store} cannot be written: what is compiled now will be compiled again" in err


@pytest.mark.thorough  # tests/compiler/test_store_faults.py fills a disk below a store
def test_a_cache_whose_disk_is_full_is_a_warning(made: Made, unkept: Unkept) -> None:
    code, out, err = unkept.told[test_a_cache_whose_disk_is_full_is_a_warning.__name__]
    assert (code, answer(out), without_progress(err).count("\n")) == (0, SUM, 1), err
    store = made.folder / "unkept" / "disk" / "store"
    assert f"{store} cannot be written: what is compiled now will be compiled again" in err
    assert "No space left on device; free space" in err
    assert unkept.full == [[], []]
