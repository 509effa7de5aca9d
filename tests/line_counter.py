"""Counts which lines of the package the tests run, under ``--fw-coverage``: pyproject.toml says
where and what, ``make coverage`` reports.

Counting makes a test half as slow again, so the tests are left out that take long for the lines
that they alone run.  Every module is imported first: else a line would count or not by which worker
imports it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent
_FOLDERS = (
    "config",
    "passes",
    "model_executor",
    "graph_capture",
    "compiler",
    "engine",
    "serve",
    "ops",
)
"""Folders of tests that are counted, but for those marked slow and these:"""
_LEFT_OUT = frozenset(
    {
        "compiler/test_compile.py",
        "compiler/test_dynamo_backend_models.py",
        "compiler/test_dynamo_backend_rotary.py",
        "compiler/test_key.py",
        "compiler/test_runtime.py",
        "compiler/test_spellings.py",
        "compiler/test_unroll.py",
        "engine/test_abacus.py",
        "engine/test_capture_modes.py",
        "engine/test_detokenizer.py",
        "engine/test_engine_random.py",
        "engine/test_faults.py",
        "engine/test_fp8.py",
        "engine/test_parity.py",
        "engine/test_prompt_logprobs.py",
        "engine/test_tensor_parallel.py",
        "engine/test_threads.py",
        "model_executor/test_parity.py",
        "ops/test_all_reduce.py",
        "ops/test_batch_invariance.py",
        "ops/test_conformance.py",
        "ops/test_launches.py",
        "ops/test_linear_fp8.py",
        "ops/test_paged_attention.py",
        "ops/test_quant_fp8.py",
        "ops/test_rope_kv_store.py",
        "ops/test_sampling.py",
        "passes/test_canonicalize_rope.py",
        "passes/test_fuse_all_reduce_norm.py",
        "passes/test_fuse_norm_linear.py",
        "passes/test_fuse_norm_moe.py",
        "passes/test_fuse_rope_store.py",
        "passes/test_mutations.py",
        "serve/test_golden.py",
        "serve/test_run_prompts.py",
        "serve/test_server.py",
        "serve/test_server_storm.py",
    }
)


def _is_counted(item: pytest.Item) -> bool:
    where = item.path.relative_to(_TESTS)
    slow = item.get_closest_marker("slow") is not None
    return where.parts[0] in _FOLDERS and where.as_posix() not in _LEFT_OUT and not slow


class LineCounter:
    """A plugin of a process that runs tests."""

    def __init__(self) -> None:
        from coverage import Coverage

        self._coverage: Any = Coverage(data_suffix=True)
        self._counting = False
        self._count(True)
        _import_every_module()
        self._count(False)

    def _count(self, on: bool) -> None:
        if on != self._counting:
            (self._coverage.start if on else self._coverage.stop)()
            self._counting = on

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._count(_is_counted(item))
        return (yield)

    def pytest_sessionfinish(self) -> None:
        self._count(False)
        self._coverage.save()


def _import_every_module() -> None:
    import fusewright

    for module in pkgutil.walk_packages(fusewright.__path__, "fusewright."):
        if module.name.startswith(("fusewright.bench", "fusewright.tests")):
            continue
        if not module.name.endswith("._fw_cuda"):  # csrc, which a torch without CUDA cannot load
            import_module(module.name)
