"""Options as scripts for vLLM give them, and values of the wrong type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusewright.config import EngineOptions, UserError, engine_options


def test_options_that_mean_nothing_here_are_accepted() -> None:
    given = {
        "tensor_parallel_size": 1,
        "trust_remote_code": True,
        "swap_space": 4,
        "seed": None,
        "distributed_executor_backend": "mp",
        "compilation_config": {"mode": 3},
        "cpu_offload_gb": 0.0,
        "enable_lora": False,
        "tokenizer_mode": "auto",
        "revision": None,
        "enforce_eager": True,
    }
    assert engine_options("abacus", given) == EngineOptions(enforce_eager=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("data_parallel_size", 2, "=2: an engine is one replica; `fusewright serve"),
        ("distributed_executor_backend", "external_launcher", "=.*: expected mp, uni or ray"),
        ("compilation_config", {"pass_config": {}}, ": pass_config={} has no counterpart"),
        ("compilation_config", "{", "='{': not JSON"),
        ("compilation_config", "[" * 9999 + "]" * 9999, "=.*: nested too deeply"),
        ("enable_lora", True, "=True: LoRA adapters are not served"),
        ("revision", "main", "='main': expected a .* of a model on the Hub, and model='abacus'"),
    ],
)
def test_another_value_says_what_is_missing(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{name}{message}") as error:
        engine_options("abacus", {name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("half", "float16"),
        ("float", "float32"),
        (torch.bfloat16, "bfloat16"),
        ("auto", "auto"),
    ],
)
def test_dtypes_have_vllms_other_names(given: Any, dtype: str) -> None:
    assert engine_options("abacus", {"dtype": given}).dtype == dtype


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_num_seqs", "64", "an integer or None"),
        ("max_num_seqs", 1.5, "an integer or None"),
        ("max_num_seqs", True, "an integer or None"),
        ("block_size", None, "an integer"),
        ("seed", "1", "an integer"),
        ("enforce_eager", 1, "True or False"),
        ("gpu_memory_utilization", "0.9", "a number"),
        ("gpu_memory_utilization", True, "a number"),
        ("model", 5, "text"),
        ("tokenizer", ["x"], "text or None"),
        ("kernels", 5, "a list of texts"),
        ("passes", [1], "a list of texts or None"),
        ("cudagraph_capture_sizes", "1,2", "a list of integers or None"),
        ("cudagraph_capture_sizes", [1.5], "a list of integers or None"),
    ],
)
def test_a_value_of_the_wrong_type_is_one_error(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError, match=f"^{name}=.*: expected {expected}$"):
        EngineOptions(**{name: value})


def test_what_stands_for_a_type_is_taken_as_it() -> None:
    given: dict[str, Any] = {
        "model": Path("/m"),
        "max_num_seqs": np.int64(4),
        "gpu_memory_utilization": 1,
        "kernels": "silu_mul=native, rms_norm=triton",
        "passes": ["cleanup"],
        "compile_cache_dir": Path("/a"),
        "cudagraph_capture_sizes": range(1, 3),
    }
    options = EngineOptions(**given)
    assert options == EngineOptions(
        model="/m",
        max_num_seqs=4,
        gpu_memory_utilization=1.0,
        kernels=("silu_mul=native", "rms_norm=triton"),
        passes=("cleanup",),
        compile_cache_dir=("/a",),
        cudagraph_capture_sizes=(1, 2),
    )
    assert type(options.max_num_seqs) is int


def test_a_revision_is_part_of_a_name_on_the_hub() -> None:
    assert engine_options("org/name", {"revision": "v1"}).model == "org/name@v1"
    for model, value in (("org/name@v1", "v2"), ("/tmp", "v1"), ("org/name", ""), ("org/name", 1)):
        with pytest.raises(UserError, match=r"^revision=.*expected a branch, tag or commit"):
            engine_options(model, {"revision": value})


def test_a_compilation_config_means_options_of_ours() -> None:
    for given, expected in (
        (0, {"optimization_level": 0}),
        (
            {"level": 3, "cudagraph_mode": "NONE"},
            {"optimization_level": 3, "cudagraph_mode": "NONE"},
        ),
        ('{"mode": "NONE"}', {"optimization_level": 0}),
        ({"cudagraph_capture_sizes": [1, 2]}, {"cudagraph_capture_sizes": (1, 2)}),
    ):
        assert engine_options("abacus", {"compilation_config": given}) == EngineOptions(**expected)
