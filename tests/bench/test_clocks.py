"""``bench.limits.clocks``: what a benchmark says of clock and power, by an NVML of this test."""

from __future__ import annotations

import sys
import time
import types
from typing import Any

import pytest
import torch

from fusewright.bench.limits import clocks
from fusewright.bench.limits.clocks import Clocks, power_text, watch_clocks


class NvmlError(Exception):
    """NVML refuses a call by raising this."""


def install(monkeypatch: pytest.MonkeyPatch, readings: list[tuple[int, int, int]]) -> list[str]:
    """Make NVML give readings (MHz, milliwatts, reasons), the last one again and again; returns
    what was called to open and to close it."""
    called: list[str] = []

    def reading(place: int) -> int:
        if not readings:
            raise NvmlError("the GPU is lost")
        value = readings[0][place]
        if place == 0 and len(readings) > 1:  # the clock is read last
            readings.pop(0)
        return value

    def of_uuid(uuid: str) -> str:
        called.append(uuid)
        return "handle"

    nvml: dict[str, Any] = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: called.append("init"),
        "nvmlShutdown": lambda: called.append("shutdown"),
        "nvmlDeviceGetHandleByUUID": of_uuid,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetClockInfo": lambda handle, kind: reading(0),
        "nvmlDeviceGetPowerUsage": lambda handle: reading(1),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: reading(2),
    }
    module = types.ModuleType("pynvml")
    module.__dict__.update(nvml)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    about = types.SimpleNamespace(uuid="0123")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(clocks, "_EVERY_S", 0.001)
    return called


def watched(count: int) -> Clocks:
    with watch_clocks() as found:
        end = time.monotonic() + 10
        while len(found.samples) < count and time.monotonic() < end:
            time.sleep(0.001)
    return found


def test_a_gpu_at_its_power_limit_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    called = install(monkeypatch, [(1980, 300_000, 0), (1470, 691_000, 4), (1500, 692_500, 4)])
    found = watched(9)
    assert called == ["init", "GPU-0123", "shutdown"]
    assert found.samples[:3] == [(1980, 300.0, False), (1470, 691.0, True), (1500, 692.5, True)]
    told = found.to_json()
    assert (told["sm_mhz"], told["most_sm_mhz"], told["power_w"]) == (1500, 1980, 692.5)
    assert 0.5 < told["at_power_limit"] < 1.0
    assert power_text(told) == ", at the power limit: 692 W, multiprocessors at 1500 of 1980 MHz"


def test_nothing_is_said_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [(1980, 300_000, 1)])  # 1: the GPU is idle, which limits nothing
    told = watched(3).to_json()
    assert told["at_power_limit"] == 0.0 and power_text(told) == ""


def test_without_nvml_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with watch_clocks() as found:
        pass
    assert found.to_json() == {} and power_text({}) == ""


def test_a_driver_that_refuses_ends_the_samples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    called = install(monkeypatch, [])
    with watch_clocks() as found:
        time.sleep(0.02)
    assert found.samples == [] and called[-1] == "shutdown"
