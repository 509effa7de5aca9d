"""Counts which lines of the package the tests run, under ``--fw-coverage``: pyproject.toml says
where and what, ``make coverage`` reports.

Counting makes a test take twice as long, so the tests are left out that take long for the lines
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
_LEFT_OUT = {
    "compiler": """
        artifact compile dynamo_backend dynamo_backend_models dynamo_backend_rotary
        dynamo_sizes explain_ranks key probes runtime spellings unroll
    """,
    "engine": """
        abacus bad_words batch_invariant cache_groups capture_modes chunks detokenizer
        engine_random faults fp8 grammar messages nan padding parity prompt_logprobs
        scheduler step_clock tensor_parallel threads
    """,
    "model_executor": """
        abacus_problems defaults loader parity
    """,
    "ops": """
        all_reduce batch_invariance conformance kv_store launches linear_fp8 oracles_on_cpu
        paged_attention quant_fp8 rope_kv_store sampling
    """,
    "passes": """
        canonicalize_rope cleanup cuts fuse_all_reduce_norm fuse_gated_linear fuse_moe
        fuse_norm_linear fuse_norm_moe fuse_quant fuse_rope_store mutations norm_facts
        verify_inputs
    """,
    "serve": """
        call_reader golden help run_prompts server server_faults server_input server_storm
        several_processes tool_calls
    """,
}
"""Files of tests, by folder, that are not: counting would cost a second of theirs for every two or
three lines that they alone run, or for none."""
_NOT_COUNTED = {
    (folder, f"test_{name}.py") for folder, names in _LEFT_OUT.items() for name in names.split()
}


def _is_counted(item: pytest.Item) -> bool:
    where = item.path.relative_to(_TESTS).parts
    slow = item.get_closest_marker("slow") is not None
    return where[0] in _FOLDERS and where not in _NOT_COUNTED and not slow


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
