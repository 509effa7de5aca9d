"""``StepBuffers`` holds the static inputs of a step, on the device at fixed addresses.

A ``StepSchema`` says which there are.  The host fills memory that is pinned for a GPU,
``ops.write_inputs`` unpacks it into the device tensors, and captured graphs read prefixes of these;
the rest of a captured size is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..config import HIDDEN, STEP, Per, StepSchema, block_table_of, slot_mapping_of
from .backend import borrowed

_ALIGNED = 32
"""The device's rows of fields begin at multiples of so many words, 128 bytes."""
IN_TURN = 3
"""The two steps that may be in flight when the next is written, and that one."""
_MOST_LAYOUTS = 1024
"""Sizes of steps are few where graphs are captured, and any elsewhere."""


@dataclass(frozen=True)
class HostInputs:
    """One step's inputs on the host, one behind the other in pinned memory.

    Attributes:
        packed: the whole memory as the device sees it.
        arrays: the fields of tokens and rows, of the step's sizes.
        cells: the memory behind them, for the filled columns of the tables.
        targets: where tokens, rows and tables go on the device.
        size: length of ``arrays`` in ``packed``.
    """

    packed: Tensor
    arrays: dict[str, npt.NDArray[Any]]
    cells: npt.NDArray[np.int32]
    targets: tuple[Tensor, Tensor, Tensor]
    size: int

    def filled(self, num_cells: int) -> Tensor:
        """The memory that is filled, with so many cells.  The device reads it in place: a copy
        ahead of ``ops.write_inputs`` would take longer than that reads."""
        return self.packed[: self.size + num_cells]


class HostRing:
    """A ring of ``in_turn`` pinned int32 memories, one for each step in flight, as the host and as
    the device see them.

    The ring may be freed while a step is in flight: its memory is not handed out again before the
    streams that used it have finished what was enqueued by then.
    """

    def __init__(self, device: torch.device, size: int, in_turn: int = IN_TURN) -> None:
        pinned = device.type == "cuda"
        host = [
            torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
            for _ in range(in_turn)
        ]
        self._ring = [(memory, borrowed(memory, device)) for memory in host]
        self._turn = 0
        self._streams: set[int] = set()

    def take(self) -> tuple[Tensor, Tensor]:
        """Take the next memory for a step on the current stream: (a tensor of the host, a tensor
        of the device over the same memory)."""
        seen = self._ring[0][1]
        if seen.is_cuda:
            self._hold_for(torch._C._cuda_getCurrentRawStream(seen.get_device()))
        self._turn = (self._turn + 1) % len(self._ring)
        return self._ring[self._turn]

    def _hold_for(self, stream: int) -> None:
        """Make torch's allocator wait for ``stream`` before it reuses the memory.  It only knows of
        streams that copy, not of kernels that use the host's address; so one element is copied."""
        if stream not in self._streams:
            for host, seen in self._ring:
                host[:1].to(seen.device, non_blocking=True)
            self._streams.add(stream)


class StepBuffers:
    """The static inputs on the device, and the ring of memories that the host fills.

    On the device, fields lie as rows of three int32 tensors: of tokens (without ``FEED``), of
    sequences and boundaries, and tables [max_seqs, number of tables, max_blocks].  ``hidden``
    [max_tokens, hidden_size] is filled by the pipeline stage before, where there is one.
    ``in_turn`` steps may have been written and not begun.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        schema: StepSchema = STEP,
        hidden: Tensor | None = None,
        in_turn: int = IN_TURN,
    ) -> None:
        self.max_tokens, self.max_seqs, self.max_blocks = max_tokens, max_seqs, max_blocks
        self.schema = schema

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._tokens = zeros(len(schema.tokens) - 1, _aligned(max_tokens))
        self._rows = zeros(len(schema.rows), _aligned(max_seqs + 1))
        # Each table is contiguous, as programs want it.
        self._tables = zeros(len(schema.tables), max_seqs, max_blocks).transpose(0, 1)
        self._views: dict[str, Tensor] = {}
        for number, field in enumerate(schema.tokens[:-1]):
            self._views[field.name] = self._tokens[number].view(getattr(torch, field.dtype))
        for number, field in enumerate(schema.rows):
            self._views[field.name] = self._rows[number].view(getattr(torch, field.dtype))
        for number, field in enumerate(schema.tables):
            self._views[field.name] = self._tables[:, number]
        self._carried = {} if hidden is None else {HIDDEN: hidden}
        self._views |= self._carried
        self._host = HostRing(device, schema.packed_size(max_tokens, max_seqs, max_blocks), in_turn)
        self._layouts: dict[tuple[int, int, int], HostInputs] = {}

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    def next_host(self, *, num_tokens: int, num_seqs: int) -> HostInputs:
        """Host arrays to fill for the next step, while the device may still read the last ones.
        Views are made once for equal sizes."""
        host, packed = self._host.take()
        key = (host.data_ptr(), num_tokens, num_seqs)
        if key not in self._layouts:
            if len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._lay_out(host, packed, num_tokens, num_seqs)
        return self._layouts[key]

    def _lay_out(self, host: Tensor, packed: Tensor, num_tokens: int, num_seqs: int) -> HostInputs:
        memory: npt.NDArray[np.int32] = host.numpy()
        arrays, start = {}, 0
        for field in self.schema.tokens:
            arrays[field.name] = memory[start : start + num_tokens].view(field.dtype)
            start += num_tokens
        for field in self.schema.rows:
            size = num_seqs + (field.per is Per.BOUNDARY)
            arrays[field.name] = memory[start : start + size].view(field.dtype)
            start += num_seqs + 1
        targets = (
            self._tokens[:, :num_tokens],
            self._rows[:, : num_seqs + 1],
            self._tables[:num_seqs],
        )
        return HostInputs(packed, arrays, memory[start:], targets, start)

    def view(self, name: str, size: int) -> Tensor:
        """The first ``size`` values, or rows of a table, of one field."""
        return self._views[name][:size]

    def of_groups(self, num_groups: int, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Block tables [num_seqs, groups, max_blocks], and where the groups store the first
        ``num_seqs`` tokens [groups, num_seqs]; a schema has those of the groups side by side."""
        table = [field.name for field in self.schema.tables].index(block_table_of(0))
        mapping = [field.name for field in self.schema.tokens].index(slot_mapping_of(0))
        return (
            self._tables[:num_seqs, table : table + num_groups],
            self._tokens[mapping : mapping + num_groups, :num_seqs],
        )

    def views(self, *, num_tokens: int, num_seqs: int) -> dict[str, Tensor]:
        """The step inputs of a program, at these sizes."""
        sizes = {
            Per.TOKEN: num_tokens,
            Per.SEQUENCE: num_seqs,
            Per.BOUNDARY: num_seqs + 1,
            Per.TABLE: num_seqs,
        }
        views = self._views
        fields = {field.name: sizes[field.per] for field in self.schema.program}
        fields |= dict.fromkeys(self._carried, num_tokens)
        return {name: views[name][:size] for name, size in fields.items()}

    def dummy(self, *, num_tokens: int, num_seqs: int) -> dict[str, Tensor]:
        """Views filled with a harmless step, for warm-up and capture: each sequence attends to
        its own query tokens in block 0, and nothing is stored in the cache."""
        views = self.views(num_tokens=num_tokens, num_seqs=num_seqs)
        for field in self.schema.program:
            views[field.name].fill_(field.padding)
        for name in self._carried:
            views[name].zero_()
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_tokens // num_seqs
        views["query_start_loc"].copy_(starts)
        views["seq_lens"].copy_(starts.diff())
        return views


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
