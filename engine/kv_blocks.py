"""The free list of KV-cache blocks."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Ids 0..num_blocks-1 of KV blocks, each free or owned by one request.

    A freed block may be handed out at once although a step in flight still reads it: steps run in
    launch order, so its next writer comes later.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks=}, {block_size=}: expected at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks.

        Raises:
            RuntimeError: fewer are free; callers compare with ``num_free`` first.
        """
        if not 0 <= count <= len(self._free):
            raise RuntimeError(
                f"allocate({count}): {len(self._free)} of {self.num_blocks} are free"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._owned[block_id] = 1
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back.

        Raises:
            RuntimeError: a block does not exist or is free already: two requests would share it.
        """
        for block_id in block_ids:
            if not (0 <= block_id < self.num_blocks and self._owned[block_id]):
                raise RuntimeError(f"free({block_id}): not an allocated block of {self.num_blocks}")
            self._owned[block_id] = 0
            self._free.append(block_id)
