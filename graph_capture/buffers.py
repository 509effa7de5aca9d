"""The static inputs of a step, on the device at fixed addresses, and their pinned host copies.

All are int32.  Captured graphs read prefixes of these tensors, so a step writes its values here and
pads the rest of the captured size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PER_TOKEN = ("input_ids", "positions", "slot_mapping")
PER_SEQUENCE = ("seq_lens", "slots", "feed_slots")
NO_SLOT = -1
_HOST_COPIES = 3
"""Steps whose host values may still be on their way to the device when the next is written."""


@dataclass
class HostInputs:
    """One step's inputs on the host; the arrays share pinned memory with ``tensors``."""

    arrays: dict[str, npt.NDArray[np.int32]]
    tensors: dict[str, Tensor]


class StepBuffers:
    """Device tensors input_ids, positions, slot_mapping [max_tokens]; seq_lens, slots (the row's
    request slot), feed_slots (the same where the input token is on the device, else -1)
    [max_seqs]; query_start_loc [max_seqs + 1]; block_table [max_seqs, max_blocks]."""

    def __init__(
        self, device: torch.device, *, max_tokens: int, max_seqs: int, max_blocks: int
    ) -> None:
        self.max_tokens, self.max_seqs, self.max_blocks = max_tokens, max_seqs, max_blocks
        sizes = dict.fromkeys(PER_TOKEN, max_tokens)
        sizes |= dict.fromkeys(PER_SEQUENCE, max_seqs) | {"query_start_loc": max_seqs + 1}
        self._device = device
        self.device = {
            name: torch.zeros(size, dtype=torch.int32, device=device)
            for name, size in sizes.items()
        }
        self.device["block_table"] = torch.zeros(
            (max_seqs, max_blocks), dtype=torch.int32, device=device
        )
        sizes["block_table"] = max_seqs * max_blocks
        self._host = [_host_inputs(sizes, device) for _ in range(_HOST_COPIES)]
        self._turn = 0

    def next_host(self) -> HostInputs:
        """Host arrays to fill for the next step; the previous ones may still be in transfer."""
        self._turn = (self._turn + 1) % _HOST_COPIES
        return self._host[self._turn]

    def upload(self, host: HostInputs, *, num_tokens: int, num_seqs: int, num_blocks: int) -> None:
        """Copy filled prefixes to the device without waiting.

        Args:
            num_blocks: filled columns of the block table, which the host keeps densely packed as
                [num_seqs, num_blocks].
        """
        for name in PER_TOKEN:
            self._copy(host, name, num_tokens)
        for name in PER_SEQUENCE:
            self._copy(host, name, num_seqs)
        self._copy(host, "query_start_loc", num_seqs + 1)
        packed = host.tensors["block_table"][: num_seqs * num_blocks].view(num_seqs, num_blocks)
        table = packed.to(self._device, non_blocking=True)
        self.device["block_table"][:num_seqs, :num_blocks].copy_(table, non_blocking=True)

    def _copy(self, host: HostInputs, name: str, count: int) -> None:
        self.device[name][:count].copy_(host.tensors[name][:count], non_blocking=True)

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


def _host_inputs(sizes: dict[str, int], device: torch.device) -> HostInputs:
    pinned = device.type == "cuda"
    tensors = {
        name: torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        for name, size in sizes.items()
    }
    return HostInputs({name: tensor.numpy() for name, tensor in tensors.items()}, tensors)
