"""``StepBuffers`` holds the static inputs of a step, on the device at fixed addresses.

All are int32.  The host fills memory that is pinned for a GPU, ``ops.write_inputs`` unpacks it into
the device tensors, and captured graphs read prefixes of these; the rest of a captured size is
padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .backend import borrowed

PER_TOKEN = ("input_ids", "positions", "slot_mapping")
PER_SEQUENCE = ("seq_lens", "slots", "feed_slots")
NO_SLOT = -1
_IN_TURN = 3
"""The two steps that may be in flight when the next is written, and that one."""


@dataclass(frozen=True)
class HostInputs:
    """One step's inputs on the host: arrays of the step's sizes, one behind the other in pinned
    memory.  ``block_table`` is all the memory behind the others, for rows without gaps; ``packed``
    is the whole memory as the device sees it."""

    packed: Tensor
    arrays: dict[str, npt.NDArray[np.int32]]


class HostRing:
    """A ring of pinned int32 memories, one for each step in flight, as the host and as the device
    see them.

    The ring may be freed while a step is in flight: its memory is not handed out again before the
    streams that used it have finished what was enqueued by then.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        pinned = device.type == "cuda"
        host = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_IN_TURN)]
        self._ring = [(memory, borrowed(memory, device)) for memory in host]
        self._turn = 0
        self._streams: set[int] = set()

    def take(self) -> tuple[Tensor, Tensor]:
        """Take the next memory for a step on the current stream: (a tensor of the host, a tensor
        of the device over the same memory)."""
        seen = self._ring[0][1]
        if seen.is_cuda:
            self._hold_for(torch._C._cuda_getCurrentRawStream(seen.get_device()))
        self._turn = (self._turn + 1) % _IN_TURN
        return self._ring[self._turn]

    def _hold_for(self, stream: int) -> None:
        """Make torch's allocator wait for ``stream`` before it reuses the memory.  It only knows of
        streams that copy, not of kernels that use the host's address; so one element is copied."""
        if stream not in self._streams:
            for host, seen in self._ring:
                host[:1].to(seen.device, non_blocking=True)
            self._streams.add(stream)


class StepBuffers:
    """Device tensors input_ids, positions, slot_mapping [max_tokens]; seq_lens, slots (the row's
    request slot) [max_seqs]; query_start_loc [max_seqs + 1]; block_table [max_seqs, max_blocks].

    The host also sends feed_slots [max_seqs]: the row's slot where its input token is on the
    device, else -1.
    """

    def __init__(
        self, device: torch.device, *, max_tokens: int, max_seqs: int, max_blocks: int
    ) -> None:
        self.max_tokens, self.max_seqs, self.max_blocks = max_tokens, max_seqs, max_blocks

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.device = {name: zeros(max_tokens) for name in PER_TOKEN}
        self.device |= {name: zeros(max_seqs) for name in ("seq_lens", "slots")}
        self.device["query_start_loc"] = zeros(max_seqs + 1)
        self.device["block_table"] = zeros(max_seqs, max_blocks)
        size = 3 * max_tokens + 4 * max_seqs + 1 + max_seqs * max_blocks
        self._host = HostRing(device, size)

    def next_host(self, *, num_tokens: int, num_seqs: int) -> HostInputs:
        """Host arrays to fill for the next step, while the device may still read the last ones."""
        host, packed = self._host.take()
        memory: npt.NDArray[np.int32] = host.numpy()
        sizes = dict.fromkeys(PER_TOKEN, num_tokens) | dict.fromkeys(PER_SEQUENCE, num_seqs)
        sizes["query_start_loc"] = num_seqs + 1
        arrays, start = {}, 0
        for name, size in sizes.items():
            arrays[name] = memory[start : start + size]
            start += size
        return HostInputs(packed, arrays | {"block_table": memory[start:]})

    def filled(self, host: HostInputs, num_blocks: int) -> Tensor:
        """The filled memory in one piece, as ``ops.write_inputs`` takes it.  The device reads it in
        place: a copy ahead of that kernel would take longer than the kernel reads.

        Args:
            num_blocks: filled columns of the block table.
        """
        table, num_seqs = host.arrays["block_table"], len(host.arrays["seq_lens"])
        return host.packed[: len(host.packed) - len(table) + num_seqs * num_blocks]

    def views(self, *, num_tokens: int, num_seqs: int) -> dict[str, Tensor]:
        """The step inputs of a program, at these sizes."""
        views = {name: self.device[name][:num_tokens] for name in PER_TOKEN}
        views["seq_lens"] = self.device["seq_lens"][:num_seqs]
        views["query_start_loc"] = self.device["query_start_loc"][: num_seqs + 1]
        views["block_table"] = self.device["block_table"][:num_seqs]
        return views

    def dummy(self, *, num_tokens: int, num_seqs: int) -> dict[str, Tensor]:
        """Views filled with a harmless step, for warm-up and capture: each sequence attends to
        its own query tokens in block 0, and nothing is stored in the cache."""
        views = self.views(num_tokens=num_tokens, num_seqs=num_seqs)
        views["input_ids"].zero_()
        views["positions"].zero_()
        views["slot_mapping"].fill_(NO_SLOT)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_tokens // num_seqs
        views["query_start_loc"].copy_(starts)
        views["seq_lens"].copy_(starts.diff())
        views["block_table"].zero_()
        return views
