"""Claims about what ``CudaGraphs`` asks of torch, held on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.graph_capture.backend import CaptureError, CudaGraphs, borrowed

STEP = RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors …")
MEMORY = RuntimeError("CUDA error: out of memory")
INTERRUPT = KeyboardInterrupt()


class Cuda:
    """Stands for ``torch.cuda``: logs calls; ``invalidated`` captures cannot end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.invalidated = False
        self.log: list[tuple[Any, ...]] = []
        self.pools = 0
        for name in ("graph_pool_handle", "Stream", "stream", "current_stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        ended = lambda device, pool: self.log.append(("end", device, pool))  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    def _stream(self, name: str) -> SimpleNamespace:
        def wait_stream(other: SimpleNamespace) -> None:
            self.log.append((name, "waits for", other.name))

        return SimpleNamespace(name=name, device_index=3, wait_stream=wait_stream)

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream("own")

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream("current")

    def stream(self, stream: SimpleNamespace) -> nullcontext[None]:
        self.log.append(("on", stream.name))
        return nullcontext()

    def CUDAGraph(self) -> SimpleNamespace:
        def capture_begin(*, pool: tuple[int, int]) -> None:
            self.log.append(("begin", pool))

        def capture_end() -> None:
            if self.invalidated:
                raise RuntimeError("operation failed due to a previous error during capture")

        return SimpleNamespace(
            capture_begin=capture_begin, capture_end=capture_end, replay=lambda: None
        )


def captured(graphs: CudaGraphs, error: BaseException | None = None) -> Sequence[Any]:
    def fn() -> Sequence[Any]:
        if error is not None:
            raise error
        return [7]

    return graphs.capture(fn)[0]


def test_a_capture_is_ordered_behind_the_current_stream_and_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    assert captured(CudaGraphs(torch.device("cuda"))) == [7]
    assert cuda.log == [
        ("own", "waits for", "current"),
        ("on", "own"),
        ("begin", (0, 1)),
        ("current", "waits for", "own"),
    ]


@pytest.mark.parametrize(
    ("error", "invalidated", "raised"),
    [
        (STEP, True, CaptureError),
        (STEP, False, RuntimeError),
        (MEMORY, True, RuntimeError),
        (INTERRUPT, True, KeyboardInterrupt),
    ],
    ids=["a forbidden call", "an error of the step's own", "no memory", "an interrupt"],
)
def test_a_capture_that_fails_says_why_and_spoils_no_later_one(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, invalidated: bool, raised: type
) -> None:
    cuda = Cuda(monkeypatch)
    graphs = CudaGraphs(torch.device("cuda"))
    cuda.invalidated = invalidated
    with pytest.raises(raised) as failed:
        captured(graphs, error)
    assert type(failed.value) is raised
    if raised is CaptureError:
        assert failed.value.__cause__ is error
        assert str(failed.value).startswith("operation not permitted when stream is capturing: a")
    else:
        assert failed.value is error
    # torch is told that the pool of an invalidated capture is in no capture, and none uses it.
    assert [entry for entry in cuda.log if entry[0] == "end"] == [("end", 3, (0, 1))] * invalidated
    cuda.invalidated = False
    assert captured(graphs) == [7]
    assert cuda.log[-2] == ("begin", (0, 2) if invalidated else (0, 1))
    segments = [{"segment_pool_id": [0, n], "total_size": 10**n} for n in range(4)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert graphs.pool_bytes() == (110 if invalidated else 10)


def test_an_alias_reads_and_writes_the_tensors_memory_and_does_not_own_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Cuda(monkeypatch)
    tensor = torch.arange(12.0).reshape(3, 4)[1:, ::2]
    alias = CudaGraphs(torch.device("cuda")).alias(tensor)
    assert (alias.shape, alias.stride(), alias.device) == (
        tensor.shape,
        tensor.stride(),
        tensor.device,
    )
    alias += 1
    assert torch.equal(tensor, alias) and tensor.tolist() == [[5.0, 7.0], [9.0, 11.0]]
    assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_borrowed_memory_is_of_the_dtype_and_the_offset_of_its_owner() -> None:
    owner: Tensor = torch.arange(6, dtype=torch.int32)[2:]
    assert borrowed(owner, torch.device("cpu")).tolist() == [2, 3, 4, 5]
