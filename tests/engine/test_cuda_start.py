"""CUDA's driver starts in a thread while torch is imported, in processes that have not done so."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fusewright.config import EngineOptions
from fusewright.engine.ranks.cuda_start import start_cuda
from fusewright.engine.ranks.executor import started_ranks


class Driver:
    """Notes the driver's calls, of which ``cuInit`` returns ``status``."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[str] = []
        self._status = status

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.calls.append(name)
            return self._status

        return call


def start(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any], *, alone: bool) -> None:
    """Start the driver that ``load`` loads, as where torch has not been imported, to the end."""
    monkeypatch.setattr(ctypes, "CDLL", load)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch")
        before = {*threading.enumerate()}
        start_cuda(alone=alone)
        for thread in {*threading.enumerate()} - before:
            thread.join()


def calls(monkeypatch: pytest.MonkeyPatch, driver: Driver, *, alone: bool) -> list[str]:
    """The calls that a start makes of a driver, in order."""
    start(monkeypatch, lambda name: driver, alone=alone)
    return driver.calls


def test_the_only_rank_gets_the_context_of_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch, Driver(), alone=True)
    assert made == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_one_rank_of_several_has_not_chosen_its_gpu_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(monkeypatch, Driver(), alone=False) == ["cuInit"]


def test_a_driver_without_a_gpu_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(monkeypatch, Driver(status=100), alone=True) == ["cuInit"]


def test_a_machine_without_a_driver_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    start(monkeypatch, missing, alone=True)
    assert not failures


def test_a_process_that_has_torch_may_have_chosen_another_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert "torch" in sys.modules
    start_cuda(alone=True)
    assert not driver.calls


@pytest.mark.parametrize(("device", "starts"), [("auto", [True]), ("cuda", [True]), ("cpu", [])])
def test_only_a_start_that_may_mean_a_gpu_loads_the_driver(
    monkeypatch: pytest.MonkeyPatch, device: str, starts: list[bool]
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(
        "fusewright.engine.ranks.executor.start_cuda", lambda *, alone: started.append(alone)
    )
    with started_ranks(EngineOptions(model="abacus", device=device)) as others:
        assert others is None and started == starts
