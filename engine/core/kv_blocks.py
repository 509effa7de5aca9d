"""Accounts for the KV cache's blocks: which requests hold them, and which hold a known prefix.

Only ids pass through here: the scheduler takes them and gives them back.  Layers that share a block
table are a group; all groups take their blocks from one pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..messages.cache_group import CacheGroup


@dataclass(slots=True)
class SequenceBlocks:
    """The block table of a sequence in each group; empty while it holds no blocks.

    A table only grows: entries of blocks that were given up behind the window stay, and nobody
    reads what is there.
    """

    tables: list[list[int]] = field(default_factory=list)
    num_freed: list[int] = field(default_factory=list)
    """Blocks of each table, from the first on, that the sequence holds no more."""
    num_slots: int = 0
    """Tokens that all tables have room for."""
    num_entries: int = 0
    """Entries of all tables."""
    num_sent: int = 0
    """Entries that the worker has been told of."""
    sent: list[int] = field(default_factory=list)
    """The blocks of each table."""

    def take_unsent(self, group: int) -> list[int]:
        """The entries of a table that the worker has not been told of; it is told now."""
        gained = self.tables[group][self.sent[group] :]
        self.sent[group] += len(gained)
        self.num_sent += len(gained)
        return gained

    def cut(self, group: int, count: int) -> list[int]:
        """Shorten a table to ``count`` entries; returns the blocks that were behind."""
        table = self.tables[group]
        behind = table[count:]
        del table[count:]
        self.num_entries -= len(behind)
        unsent = max(0, self.sent[group] - count)
        self.sent[group] -= unsent
        self.num_sent -= unsent
        return behind

    def held(self) -> list[int]:
        """The blocks that the sequence holds, those of its beginning first."""
        tables, freed = self.tables, self.num_freed
        if len(tables) == 1:
            return tables[0][freed[0] :]
        return [
            table[i]
            for i in range(max(map(len, tables)))
            for table, behind in zip(tables, freed, strict=True)
            if behind <= i < len(table)
        ]


class BlockPool:
    """Ids 0..num_blocks-1 of KV blocks; each block is free, or held by some requests.

    A block may be cached under its group and the key of its content (see ``prefix_cache``).  Then
    others may share it, even after it was freed, until it is handed out anew.  Blocks without a key
    are handed out first, then the block that was freed longest ago.

    A freed block may be handed out at once although a step in flight still reads it: steps run in
    launch order, so its next writer comes later.

    Args:
        groups: how each group of layers uses blocks; every block is of one group while it is held.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: Sequence[CacheGroup] = (CacheGroup(),)
    ) -> None:
        if num_blocks < 1 or block_size < 1 or not groups:
            raise ValueError(f"{num_blocks=}, {block_size=}, {groups=}: expected at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = tuple(groups)
        self.has_windows = any(group.window for group in groups)
        self.has_states = any(group.per_sequence for group in groups)
        self._paged = [i for i, group in enumerate(groups) if not group.per_sequence]
        self.num_held = [0] * len(groups)
        """Number of blocks that requests hold, by group."""
        self.peak_held = [0] * len(groups)
        """The largest each of ``num_held`` ever was."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._group_of = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: list[dict[bytes, int]] = [{} for _ in groups]
        whole = [c for c, group in zip(self._cached, groups, strict=True) if not group.window]
        self.keys_of_whole: Container[bytes] | None = whole[0] if whole else None
        """Cached keys of a group without a window, which knows every block of what ``find`` finds;
        None without such a group."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks that are found by key."""
        return sum(map(len, self._cached))

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` tokens holds at once, see
        ``CacheGroup.most_blocks``."""
        size = self.block_size
        return sum([group.most_blocks(num_tokens, chunk, size) for group in self.groups])

    def num_missing(self, blocks: SequenceBlocks, end: int, total: int) -> list[int]:
        """Blocks that each group needs so that tokens up to ``end`` can be stored.  A group without
        a window gets those of all ``total`` tokens, so that a prompt that has begun can go on."""
        size = self.block_size
        return [
            max(0, group.num_blocks(end if group.window else total, size) - len(table))
            for group, table in zip(self.groups, blocks.tables, strict=True)
        ]

    def extend(self, blocks: SequenceBlocks, missing: Sequence[int]) -> None:
        """Allocate ``missing`` blocks at the end of each table.

        Raises:
            RuntimeError: fewer are free.
        """
        tables = blocks.tables
        for group, (table, count) in enumerate(zip(tables, missing, strict=True)):
            if count:
                table += self.allocate(count, group)
                blocks.num_entries += count
        rooms = [len(tables[group]) for group in self._paged]
        blocks.num_slots = min(rooms) * self.block_size if rooms else 1 << 60

    def shorten(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Give up the blocks that a sequence of ``num_tokens`` tokens has no use for yet."""
        for number, group in enumerate(self.groups):
            count = group.num_blocks(num_tokens, self.block_size)
            if len(blocks.tables[number]) > count:
                self.free(blocks.cut(number, count))
        self.extend(blocks, [0] * len(self.groups))

    def free_behind(self, blocks: SequenceBlocks, position: int) -> None:
        """Give up the blocks that no query at ``position`` or later reads."""
        for number, group in enumerate(self.groups):
            behind, freed = group.num_behind(position, self.block_size), blocks.num_freed[number]
            if behind > freed:
                self.free(blocks.tables[number][freed:behind])
                blocks.num_freed[number] = behind

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Take ``count`` free blocks for a group; their earlier content is no longer found.

        Raises:
            RuntimeError: fewer are free; callers compare with ``num_free`` first.
        """
        if not 0 <= count <= len(self._free):
            raise RuntimeError(
                f"allocate({count}): {len(self._free)} of {self.num_blocks} are free"
            )
        free = self._free
        taken = [free.popitem(last=False)[0] for _ in range(count)]
        ref_counts, group_of, keys = self._ref_counts, self._group_of, self._keys
        for block_id in taken:
            if keys[block_id] is not None:
                self._forget(block_id)
            ref_counts[block_id], group_of[block_id] = 1, group
        self._count(group, count)
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one hold of each block.  The first blocks of a sequence stay cached longest.

        Raises:
            RuntimeError: a block does not exist or is free already: two requests would share it.
        """
        free, keys, ref_counts = self._free, self._keys, self._ref_counts
        for block_id in reversed(block_ids):
            if not (0 <= block_id < self.num_blocks and ref_counts[block_id]):
                raise RuntimeError(f"free({block_id}): not an allocated block of {self.num_blocks}")
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                self.num_held[self._group_of[block_id]] -= 1
                free[block_id] = None
                if keys[block_id] is None:
                    free.move_to_end(block_id, last=False)

    def cache(self, block_id: int, key: bytes) -> None:
        """Let the content of a held block be found under its group and ``key``, unless another
        block is known by these already."""
        if self._cached[self._group_of[block_id]].setdefault(key, block_id) == block_id:
            self._keys[block_id] = key

    def find(self, keys: Sequence[bytes]) -> SequenceBlocks:
        """The blocks of the longest run of keys, from the first on, behind which a sequence can
        start: every group knows each block of it that is not behind the window.

        Returns:
            Their tables, not held yet: see ``share``.
        """
        num_groups = len(self.groups)
        if not keys:
            empty: list[list[int]] = [[] for _ in self.groups]
            return SequenceBlocks(empty, [0] * num_groups, sent=[0] * num_groups)
        num_found = len(keys)
        for group, cached in zip(self.groups, self._cached, strict=True):
            if not group.window:
                count = 0
                for key in keys[:num_found]:
                    if key not in cached:
                        break
                    count += 1
                num_found = count
        before = -1 if self.has_windows else num_found
        while num_found != before:  # a shorter run has other blocks in each window
            before = num_found
            for group, cached in zip(self.groups, self._cached, strict=True):
                if group.window:
                    num_found = self._behind_known(group, cached, keys, num_found)
        start, size = num_found * self.block_size, self.block_size
        behind = [group.num_behind(start, size) for group in self.groups]
        tables = [
            [0] * count + [cached[key] for key in keys[count:num_found]]
            for count, cached in zip(behind, self._cached, strict=True)
        ]
        num_entries = num_found * num_groups
        return SequenceBlocks(tables, behind, num_entries=num_entries, sent=[0] * num_groups)

    def _behind_known(
        self, group: CacheGroup, cached: dict[bytes, int], keys: Sequence[bytes], count: int
    ) -> int:
        """The most leading keys, up to ``count``, for which all blocks of the window are cached."""
        index = count - 1
        while index >= group.num_behind(count * self.block_size, self.block_size):
            if keys[index] not in cached:
                count = index
            index -= 1
        return count

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Number of these cached blocks that nobody holds; sharing one takes it from the free."""
        ref_counts = self._ref_counts
        return [ref_counts[block_id] for block_id in block_ids].count(0)

    def share(self, block_ids: Iterable[int]) -> None:
        """Take a reference to blocks that ``find`` returned; other requests may hold them too."""
        ref_counts, group_of, num_held = self._ref_counts, self._group_of, self.num_held
        for block_id in block_ids:
            if ref_counts[block_id] == 0:
                del self._free[block_id]
                num_held[group_of[block_id]] += 1
            ref_counts[block_id] += 1
        self.peak_held = [*map(max, self.peak_held, num_held)]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these keys: nothing is found by them any more."""
        for key in keys:
            for cached in self._cached:
                block_id = cached.get(key)
                if block_id is not None:
                    self._forget(block_id)

    def forget_all(self) -> None:
        """Drop all keys, for when blocks may not hold what they should."""
        for block_id in list(chain.from_iterable(cached.values() for cached in self._cached)):
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._cached[self._group_of[block_id]][key]
            self._keys[block_id] = None

    def _count(self, group: int, count: int) -> None:
        self.num_held[group] += count
        self.peak_held[group] = max(self.peak_held[group], self.num_held[group])
