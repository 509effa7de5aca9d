"""``Router`` chooses the replica of the engine that serves a request.

It looks at the replicas that are about as free as the freest one, and takes that which has most of
the prompt in its prefix cache.  To know this, it remembers which blocks of prompts it has sent
where, and forgets the oldest once a replica's cache could not hold them.  Ties go to the replica
with fewer open requests, then to the one that has had fewer, so that the caches fill evenly.
"""

from __future__ import annotations

from collections import OrderedDict

from ..messages.requests import AddRequest

_SLACK = 2
_SLACK_SHARE = 0.1
"""A replica is about as free as the freest one if it has at most this many more open requests: a
number, plus a share."""


class Router:
    """Chooses among replicas by what one frontend has sent them.

    Args:
        num_blocks: KV blocks of a replica.
        block_size: tokens a block.
    """

    def __init__(self, num_replicas: int, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._num_open = [0] * num_replicas
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._num_sent = [0] * num_replicas
        self._replica_of: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._replica_of)

    def choose(self, request: AddRequest) -> int:
        """Choose the replica for a request, and count the request as open there."""
        replica = 0
        if len(self._num_open) > 1:
            least = min(self._num_open)
            most = least + _SLACK + int(least * _SLACK_SHARE)
            near = [i for i, count in enumerate(self._num_open) if count <= most]
            keys = self._keys(request)
            replica = max(near, key=lambda i: self._merit(i, keys))
            self._remember(self._known[replica], keys)
        self._num_open[replica] += 1
        self._num_sent[replica] += 1
        self._replica_of[request.request_id] = replica
        return replica

    def close(self, request_id: str) -> int | None:
        """Note that a request has ended; returns its replica, or None if it was not open."""
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            self._num_open[replica] -= 1
        return replica

    def clear(self) -> None:
        """Forget all open requests."""
        self._replica_of.clear()
        self._num_open = [0] * len(self._num_open)

    def _merit(self, replica: int, keys: list[int]) -> tuple[int, int, int]:
        known = self._known[replica]
        num_cached = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        return num_cached, -self._num_open[replica], -self._num_sent[replica]

    def _keys(self, request: AddRequest) -> list[int]:
        """A key for each full block of the prompt, which covers the blocks before it too."""
        ids, size = request.prompt_token_ids, self._block_size
        key, keys = hash(request.cache_salt), []
        for end in range(size, len(ids) + 1, size):
            key = hash((key, *ids[end - size : end]))
            keys.append(key)
        return keys

    def _remember(self, known: OrderedDict[int, None], keys: list[int]) -> None:
        for key in keys:
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._num_blocks:
            known.popitem(last=False)
