"""CUDA graphs of kernels, replayed beside the same launches by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusewright.ops import PAGED_ATTENTION


def check_replays(run: Callable[[Tensor], list[Tensor]], x: Tensor, what: str) -> None:
    """Replays over new values of ``x`` give the bits of ``run``."""
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        for got, want in zip(captured, run(x), strict=True):
            assert torch.equal(got, want), what


class AttentionReplays:
    """A graph of three calls of an attention kernel, and its arguments, ``out`` among them."""

    def __init__(self, kernel: Callable[..., None], args: tuple[Any, ...], out: int) -> None:
        self.kernel, self.args, self.out = kernel, args, out
        kernel(*args)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(3):
                kernel(*args)

    def check(self, what: str) -> None:
        """A replay over what the arguments hold gives the kernel's bits, near the reference's."""
        result = self.args[self.out]
        result.fill_(7.0)
        self.graph.replay()
        got = result.clone()
        result.fill_(7.0)
        self.kernel(*self.args)
        assert torch.equal(got, result), what
        want = torch.full_like(got, 7.0)
        PAGED_ATTENTION.overload()(*self.args[: self.out], want, *self.args[self.out + 1 :])
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)


def on_two_streams(
    launch: Callable[[int, int], object], count: int, first: torch.cuda.CUDAGraph | None
) -> None:
    """``launch(stream, number)`` so many times on two streams that begin at once; a graph, if
    given, is replayed on the first instead."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # 50 ms, in which all is enqueued
    if first is not None:
        with torch.cuda.stream(streams[0]):
            first.replay()
    for number in range(count):
        for which, stream in enumerate(streams):
            if which or first is None:
                with torch.cuda.stream(stream):
                    launch(which, number)
    torch.cuda.synchronize()
