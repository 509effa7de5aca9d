"""``CacheGroup``: what the worker tells the core at the start of each group of layers."""

from __future__ import annotations

from msgspec import Struct


class CacheGroup(Struct, frozen=True):
    """How the layers of a group, which share a block table, use blocks.

    Attributes:
        window: tokens that a query sees, itself included; 0: all.
        per_sequence: one block holds the state of a whole sequence, which cannot be shared.
    """

    window: int = 0
    per_sequence: bool = False

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Entries of the block table of a sequence of ``num_tokens`` tokens."""
        return min(num_tokens, 1) if self.per_sequence else -(-num_tokens // block_size)

    def num_behind(self, position: int, block_size: int) -> int:
        """Number of blocks, from the first on, that no query at ``position`` or later reads."""
        return max(0, position - self.window + 1) // block_size if self.window else 0

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Most blocks that a sequence holds at once while its ``num_tokens`` tokens are computed in
        chunks of up to ``chunk``."""
        whole = self.num_blocks(num_tokens, block_size)
        if not self.window:
            return whole
        seen = self.window - 1 + chunk  # they may begin and end within a block
        return min(whole, (seen + block_size - 2) // block_size + 1)
