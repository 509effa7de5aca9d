"""Captures a function once and replays it: CUDA graphs on a GPU, a recorder on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

Function = Callable[[], Sequence[Any]]
Replay = Callable[[], None]
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class CaptureError(RuntimeError):
    """A step cannot be captured: CUDA has invalidated the capture."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch's allocator, CUDA or one of its libraries ran out of memory; only the allocator
    has an error type of its own for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def borrowed(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of ``device`` over the memory of ``tensor``, which it does not own: ``tensor`` must
    outlive it.

    A GPU reads and writes pinned memory at the host's address.  What its kernels write there, the
    host may read once an event behind them has passed.
    """
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=device)  # its device has a number
    same = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), empty.device, storage.nbytes()
    )
    return empty.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


class GraphBackend(Protocol):
    """Captures and replays functions that read and write fixed addresses."""

    def capture(self, fn: Function) -> tuple[Sequence[Any], Replay]:
        """Run ``fn`` once under capture.  Returns its outputs, and a function that repeats it on
        the same memory."""

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory that does not own it, so that the pool may reuse the
        memory for later captures."""

    def pool_bytes(self) -> int:
        """Device memory of the pool that all captures share."""

    def renew(self) -> None:
        """Take another pool for what is captured from now on: nothing of this one is replayed any
        more."""


class CudaGraphs:
    """CUDA graphs from one memory pool, captured on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools = [torch.cuda.graph_pool_handle()]
        self._stream = torch.cuda.Stream(device)

    def capture(self, fn: Function) -> tuple[Sequence[Any], Replay]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pools[-1])
            try:
                outputs = fn()
                graph.capture_end()
            except BaseException as error:
                spoiled = self._abandon(graph)
                if spoiled and isinstance(error, RuntimeError) and not is_out_of_memory(error):
                    raise CaptureError(
                        f"{str(error).partition(chr(10))[0]}: a step waited for the device, or did "
                        "something else that no CUDA graph can hold, while its graph was captured; "
                        "without graphs it runs: --cudagraph-mode NONE"
                    ) from error
                raise
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return outputs, graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> bool:
        """End a capture in which something failed; returns whether CUDA had invalidated it."""
        try:
            graph.capture_end()
        except RuntimeError:
            # A forbidden call has invalidated the capture.  Up to 2.11, torch then leaves its
            # allocators in capture (pytorch#180395), and no later capture can use the pool.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pools[-1])
            self._pools.append(torch.cuda.graph_pool_handle())
            return True
        return False

    def alias(self, tensor: Tensor) -> Tensor:
        return borrowed(tensor, tensor.device)

    def renew(self) -> None:
        self._pools = [torch.cuda.graph_pool_handle()]

    def pool_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        ours = {tuple(pool) for pool in self._pools}
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in ours)


class RecordingGraphs:
    """Replays by running the captured function again and copying its results into the outputs of
    the capture.  So a step that reads anything but its static inputs gives the same stale answer as
    with a real graph.  Captures and replays are counted."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def capture(self, fn: Function) -> tuple[Sequence[Any], Replay]:
        self.captures += 1
        outputs = list(fn())

        def replay() -> None:
            self.replays += 1
            for static, fresh in zip(outputs, fn(), strict=True):
                if isinstance(static, Tensor):  # else a size
                    static.copy_(fresh)

        return outputs, replay

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor

    def pool_bytes(self) -> int:
        return 0

    def renew(self) -> None:
        """There is no pool."""


def make_backend(graphs: str, device: torch.device) -> GraphBackend:
    """The backend that ``Hardware.graphs`` names: "cuda" or "recording".

    Raises:
        ValueError: another name.
    """
    if graphs == "cuda":
        return CudaGraphs(device)
    if graphs == "recording":
        return RecordingGraphs()
    raise ValueError(f"no graph backend {graphs!r}; expected cuda or recording")
