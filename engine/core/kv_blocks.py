"""Accounts for the KV cache's blocks: which requests hold them, and which hold a known prefix.

Only ids pass through here: the scheduler takes them and gives them back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Ids 0..num_blocks-1 of KV blocks; each block is free, or held by some requests.

    A block may be cached under the key of its content (see ``prefix_cache``).  Then others may
    share it, even after it was freed, until it is handed out anew.  Blocks without a key are handed
    out first, then the block that was freed longest ago.

    A freed block may be handed out at once although a step in flight still reads it: steps run in
    launch order, so its next writer comes later.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks=}, {block_size=}: expected at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._kept: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Number of blocks that are found by key."""
        return len(self._kept)

    def holders(self, block_id: int) -> int:
        """Number of requests that hold a block."""
        return self._holders[block_id]

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks; their earlier content is no longer found.

        Raises:
            RuntimeError: fewer are free; callers compare with ``num_free`` first.
        """
        if not 0 <= count <= len(self._free):
            raise RuntimeError(
                f"allocate({count}): {len(self._free)} of {self.num_blocks} are free"
            )
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._forget(block_id)
            self._holders[block_id] = 1
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one hold of each block.  The first blocks of a sequence stay cached longest.

        Raises:
            RuntimeError: a block does not exist or is free already: two requests would share it.
        """
        for block_id in reversed(block_ids):
            if not (0 <= block_id < self.num_blocks and self._holders[block_id]):
                raise RuntimeError(f"free({block_id}): not an allocated block of {self.num_blocks}")
            self._holders[block_id] -= 1
            if self._holders[block_id] == 0:
                self._free[block_id] = None
                if self._keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def keep(self, block_id: int, key: bytes) -> None:
        """Let the content of a held block be found under ``key``, unless another block with the
        same key is known already."""
        if self._kept.setdefault(key, block_id) == block_id:
            self._keys[block_id] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of known keys, from the first key on."""
        found: list[int] = []
        for key in keys:
            block_id = self._kept.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free: sharing them leaves that many fewer to allocate."""
        return sum(self._holders[block_id] == 0 for block_id in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that ``find`` returned, together with those who hold them already."""
        for block_id in block_ids:
            if self._holders[block_id] == 0:
                del self._free[block_id]
            self._holders[block_id] += 1

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these keys: nothing is found by them any more."""
        for key in keys:
            block_id = self._kept.get(key)
            if block_id is not None:
                self._forget(block_id)

    def forget_all(self) -> None:
        """Drop all keys, for when blocks may not hold what they should."""
        for block_id in list(self._kept.values()):
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._kept[key]
            self._keys[block_id] = None
