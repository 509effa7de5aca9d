"""What changes an artifact's key, and what does not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright.compiler.artifacts.factors import PACKAGE, source_factors
from fusewright.compiler.artifacts.key import Key, Wanted, differences
from fusewright.compiler.artifacts.store import Store
from fusewright.config import (
    EngineOptions,
    Hardware,
    ModelLimits,
    ResolvedConfig,
    outside_fields,
    resolve,
)
from fusewright.engine.worker import source
from fusewright.engine.worker.source import artifact_key
from fusewright.engine.worker.startup import read_model
from fusewright.model_executor.spec import ModelSpec
from fusewright.ops.core.cuda import LIBRARY_NAME, find_cuda_library

GPU = Hardware("cuda", "a GPU", sm=90, num_sms=132, graphs="cuda")


def resolved(**options: Any) -> tuple[ModelSpec, ResolvedConfig]:
    _, spec, config = read_model(EngineOptions(**options), GPU)
    return spec, config


SPEC, CONFIG = resolved()
BASE = artifact_key(SPEC, CONFIG).digest


def flipped(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, torch.dtype):
        return torch.float16
    if isinstance(value, (int, float)):
        return value + 1
    if value == "default":  # rope
        return "linear"
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value, value[0] if value else "x")
    assert value is None
    return 1


def flips(value: Any, path: str) -> Iterator[tuple[str, bool, Any]]:
    """(path, whether it is outside of the key, value with that one field flipped)."""
    outside = outside_fields(type(value), path)
    for f in fields(value):
        name, member = f"{path}.{f.name}", getattr(value, f.name)
        if is_dataclass(member):
            for inner, is_outside, changed in flips(member, name):
                yield inner, is_outside, replace(value, **{f.name: changed})
            continue
        if name in outside:
            assert len(outside[name]) > 10, f"{name} is outside of the key without a reason"
        other = 0.5 if f.name == "partial_rotary_factor" else flipped(member)
        yield name, name in outside, replace(value, **{f.name: other})


def test_flipping_any_field_changes_the_key_or_is_opted_out_with_a_reason() -> None:
    seen = {"in": 0, "out": 0}
    for name, outside, config in flips(CONFIG, "config"):
        same = artifact_key(SPEC, config).digest == BASE
        assert same == outside, name
        seen["out" if outside else "in"] += 1
    for name, outside, spec in flips(SPEC, "model"):
        same = artifact_key(spec, CONFIG).digest == BASE
        assert same == outside, name
        seen["out" if outside else "in"] += 1
    assert seen["in"] >= 35 and seen["out"] >= 20, seen


OUTSIDE_OPTIONS = {
    "tokenizer": "/elsewhere",
    "load_format": "dummy",
    "max_model_len": 100,
    "seed": 7,
    "compile_cache": False,
    "require_cache": True,
    "compile_cache_dir": ("/elsewhere",),
    "compile_cache_limit_gb": 1.0,
    "trusted_keys": ("/key.pem",),
    "generation_config": "none",
    "chat_template": "{{ messages }}",
    "max_logprobs": 3,
    "tune_seconds": 5.0,
    "tuned_config_dir": str(Path(__file__).parent),  # its tables count: test_expert_tables.py
    "require_fusion": ("fuse_act",),
    "cudagraph_mode": "PIECEWISE",
    "cudagraph_capture_sizes": (1, 2, 4),
    "lazy_capture": False,
    "max_num_seqs": 17,
    "max_num_batched_tokens": 1024,
    "enable_chunked_prefill": False,
    "long_prefill_token_threshold": 64,
    "max_num_mixed_tokens": 100,
    "scheduling_policy": "priority",
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 1 << 30,
    "num_gpu_blocks_override": 99,
    "max_step_ms": 20.0,
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}',
}
INSIDE_OPTIONS = {
    "dtype": "float16",
    "optimization_level": 3,
    "passes": ("cleanup",),
    "disable_passes": ("fuse_act",),
    "kernels": ("rms_norm=native",),
    "attention_backend": "triton",
    "batch_invariant": True,
    "verify": True,
    "proof": False,
    "block_size": 32,
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
}


def test_every_option_is_in_the_key_or_known_to_be_outside() -> None:
    # The model itself and whose code it is; the target; -O0: no key.
    elsewhere = {"model", "hf_overrides", "model_impl", "device", "enforce_eager"}
    # Their fields are flipped above.
    needs_experts = {"record_expert_load", "enable_expert_parallel"}
    needs_ranks = {"distributed_executor"}
    known = {*OUTSIDE_OPTIONS, *INSIDE_OPTIONS, *elsewhere, *needs_experts, *needs_ranks}
    assert known == {f.name for f in fields(EngineOptions)}
    for name, value in OUTSIDE_OPTIONS.items():
        assert artifact_key(*resolved(**{name: value})).digest == BASE, name
    for name, value in INSIDE_OPTIONS.items():
        assert artifact_key(*resolved(**{name: value})).digest != BASE, name


def test_who_starts_the_ranks_is_not_in_the_key() -> None:
    spawned, placed = (
        artifact_key(*resolved(tensor_parallel_size=2, distributed_executor=name)).digest
        for name in ("mp", "ray")
    )
    assert spawned == placed


def test_the_models_place_is_not_in_the_key(tmp_path: Path) -> None:
    from fusewright.model_executor.abacus import FOLDER

    copy = shutil.copytree(FOLDER, tmp_path / "a model elsewhere")
    assert artifact_key(*resolved(model=str(copy))).digest == BASE


def test_measured_choices_belong_to_the_gpu_they_were_measured_on() -> None:
    limits = ModelLimits(SPEC.max_position_embeddings, "bfloat16")
    for level, same in ((2, True), (3, False)):
        options = EngineOptions(optimization_level=level)
        keys = {
            artifact_key(SPEC, resolve(options, replace(GPU, name=name), limits)).digest
            for name in ("H100", "H200")
        }
        assert (len(keys) == 1) == same


def test_sources_of_drafts_are_in_the_key_of_their_kernels_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model's program serves with and without drafts, by one key."""
    asked = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    alone = artifact_key(*resolved(model="abacus"))
    spec, config = resolved(model="abacus", speculative_config=asked)
    wanted: list[Wanted] = []
    monkeypatch.setattr(source, "compile_kernels", lambda *args, **_: wanted.append(args[2]))
    options: dict[str, Any] = {"require": False, "on_phase": print}
    source.find_or_compile_drafts(spec, config, Store(()), **options)
    (drafts,) = wanted
    assert artifact_key(spec, config) == alone
    changed = {each.name for each in differences(alone.factors, drafts.key.factors)}
    assert changed == {"kernels", *(f"source.{name}" for name in source._DRAFT_SOURCES)}
    assert source._DRAFT_SOURCES


SOURCES = ("config/arch.py", "ops", "passes", "compiler", "csrc", *source._MODEL_SOURCES)


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """The sources elsewhere, to be edited."""
    package = tmp_path / "fusewright"
    for name in dict.fromkeys(part.split("/")[0] for part in SOURCES):
        shutil.copytree(PACKAGE / name, package / name, ignore=shutil.ignore_patterns("*.so"))
    return package


def changed_factors(package: Path, files: Iterable[str], before: dict[str, str]) -> set[str]:
    """The names of the factors that another line in these sources changes."""
    texts = {package / file: (package / file).read_text() for file in files}
    for path, text in texts.items():
        path.write_text(text + "# another line\n")
    after = source_factors(source._MODEL_SOURCES, package)
    for path, text in texts.items():
        path.write_text(text)
    return {difference.name for difference in differences(before, after)}


def test_editing_a_line_of_any_source_changes_the_key(copied_package: Path) -> None:
    """Its own factor and no other.  Half of the sources are edited at a time, such that of any two
    each is once edited without the other: by the digits of their numbers."""
    before = source_factors(source._MODEL_SOURCES, copied_package)
    must = {"source.passes/fuse_act.py", "source.ops/norm/norm.py", "source.csrc/gemm/skinny.cu"}
    must |= {"source.ops/triton_kernels/paged_attention.py"}
    must |= {"source.model_executor/models/decoder.py", "source.ops/launches/norm.py"}
    line = (path.relative_to(PACKAGE) for path in (PACKAGE / "compiler").rglob("*.py"))
    must |= {f"source.{p.as_posix()}" for p in line if p.parts[1] != "inspect"}
    assert must <= {*before}, must - {*before}
    assert before == source_factors(source._MODEL_SOURCES), "the package's place is a factor"
    for bit in range(len(before).bit_length()):
        for digit in (0, 1):
            names = {name for i, name in enumerate(before) if i >> bit & 1 == digit}
            files = (name.removeprefix("source.") for name in names)
            assert changed_factors(copied_package, files, before) == names


def test_values_of_config_that_kernels_hold_are_in_the_key() -> None:
    factors = source_factors(source._MODEL_SOURCES)
    for folder in ("triton_kernels", "launches"):
        for path in (PACKAGE / "ops" / folder).glob("*.py"):
            found = re.findall(r"^from \.{3}config(\.\w+)? import (.+)", path.read_text(), re.M)
            names = {
                module.removeprefix(".") or each.split(" as ")[0]
                for module, imported in found
                for each in imported.split(", ")
            }
            # The routing of experts is a part of the model, whose fields are in the key.
            held = {f"source.config/{name}.py" for name in names - {"routing"}}
            assert held <= {*factors}, path


def test_editing_what_only_inspects_leaves_the_key_as_it_is(copied_package: Path) -> None:
    before = source_factors(source._MODEL_SOURCES, copied_package)
    files = {path.name for path in (copied_package / "compiler" / "inspect").glob("*.py")}
    assert {"explain.py", "diff.py", "bisect.py", "dump.py"} <= files
    for file in files:
        assert not changed_factors(copied_package, [f"compiler/inspect/{file}"], before), file


def test_no_source_in_the_key_imports_one_that_only_inspects() -> None:
    names = [name.removeprefix("source.") for name in source_factors(source._MODEL_SOURCES)]
    texts = {name: (PACKAGE / name).read_text() for name in names}
    assert not [name for name in names if re.search(r"\.inspect\b", texts[name])]


def test_host_home_checkout_and_log_level_are_not_in_the_key(tmp_path: Path) -> None:
    """Another checkout, run by another user's settings, asks for the same artifact."""
    checkout = tmp_path / "elsewhere"
    for entry in (*PACKAGE.glob("*/__init__.py"), PACKAGE / "csrc" / "x"):
        folder = entry.parent
        shutil.copytree(folder, checkout / "fusewright" / folder.name)
    shutil.copy(PACKAGE / "__init__.py", checkout / "fusewright" / "__init__.py")
    library = checkout / "fusewright" / "ops" / LIBRARY_NAME
    library.unlink(missing_ok=True)
    if (built := find_cuda_library()) is not None:  # an editable install keeps it elsewhere
        shutil.copy(built, library)
    program = (
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]\n"
        "from fusewright.config import EngineOptions, Hardware\n"
        "from fusewright.engine.worker.source import artifact_key\n"
        "from fusewright.engine.worker.startup import read_model\n"
        "import fusewright\n"
        "gpu = Hardware('cuda', 'a GPU', sm=90, num_sms=1, graphs='none')\n"
        "_, spec, config = read_model(EngineOptions(), gpu)\n"
        "import json\n"
        "print(fusewright.__file__)\n"
        "print(json.dumps(artifact_key(spec, config).factors))\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "HOME": str(tmp_path),
        "HOSTNAME": "another",
        "PORT": "1234",
        "TORCH_LOGS": "-dynamo",
        "LOGLEVEL": "DEBUG",
        "USER": "somebody",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    place, factors = done.stdout.splitlines()
    assert place.startswith(str(checkout))
    assert differences(artifact_key(SPEC, CONFIG).factors, json.loads(factors)) == []


def test_a_difference_names_both_values() -> None:
    left, right = Key({"a": "1", "b": "2"}), Key({"a": "1", "b": "3", "c": "4"})
    assert left.digest != right.digest and len(left.digest) == 32
    assert list(map(str, differences(left.factors, right.factors))) == [
        "b: 2 -> 3",
        "c: (none) -> 4",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_toolchain_is_in_the_key(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusewright.compiler.artifacts.factors import toolchain_factors

    before = toolchain_factors(device)
    assert before["toolchain.torch"] == torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    changed = differences(before, toolchain_factors(device))
    assert [d.name for d in changed] == ["toolchain.torch"]
