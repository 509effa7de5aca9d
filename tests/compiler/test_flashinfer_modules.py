"""Building FlashInfer's modules: what is missing is said in a line; what nvcc makes is a module."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from fusewright.compiler.emit import flashinfer_modules as modules
from fusewright.config import UserError
from fusewright.ops import PAGED_ATTENTION


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``flashinfer`` with no headers in its folders."""
    (tmp_path / "flashinfer" / "data" / "include").mkdir(parents=True)
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise ImportError('seconds of imports')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def refusal() -> str:
    with pytest.raises(UserError) as caught:
        modules.build_module(128)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install fusewright[gpu]" in refusal()


def test_without_nvcc_it_says_so(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(headers))
    monkeypatch.setattr(modules, "_CUDA", headers / "nvcc")
    assert "install the CUDA toolkit" in refusal()


def test_headers_that_do_not_fit_are_refused_with_nvcc_s_first_error(
    headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("nvcc") is None and not modules._CUDA.is_file():
        pytest.skip("needs nvcc")
    message = refusal()
    assert "nvcc cannot compile prefill_sm90.cu with flashinfer-python" in message
    assert "fatal error" in message


def test_what_a_graph_needs_is_what_it_calls() -> None:
    graph = fx.Graph()
    for head_dim, name in [(64, "flashinfer"), (128, "flashinfer"), (64, "flashinfer"), (80, "")]:
        q = graph.placeholder(f"q{len(graph.nodes)}")
        q.meta["example_value"] = torch.empty(4, 8, head_dim, device="meta")
        graph.call_function(PAGED_ATTENTION.overload(name), (q,))
    assert modules.needed(fx.GraphModule(torch.nn.Module(), graph)) == [64, 128]


@pytest.mark.slow
def test_the_package_s_headers_make_a_module(tmp_path: Path) -> None:
    if importlib.util.find_spec("flashinfer") is None or shutil.which("nvcc") is None:
        pytest.skip("needs flashinfer-python and nvcc")
    path = tmp_path / "module.so"
    path.write_bytes(modules.build_module(64))
    assert ctypes.CDLL(str(path)).fw_prefill
