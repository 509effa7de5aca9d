"""``Router`` chooses the replica of the engine that serves a request.

It looks at the replicas that are about as free as the freest one, and takes that which has most of
the prompt in its prefix cache.  To know this, it remembers which blocks of prompts it has sent
where, and forgets the oldest once a replica's cache could not hold them.  Ties go to the replica
with fewer open requests, then to the one that has had fewer, so that the caches fill evenly.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from ..messages.open_outputs import OpenOutputs
from ..messages.requests import AddRequest

_SLACK = 2
_SLACK_SHARE = 0.1
"""A replica counts as free as the freest one if it has at most ``_SLACK`` more open requests, plus
this share of them."""
_PARTS_EACH = 8
"""Parts for each replica into which a request's outputs are divided, as one by one is slow."""


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
        self._open = OpenOutputs[bytes]()  # the replica of each output of a request

    def __len__(self) -> int:
        return len(self._open)

    def num_open(self, replica: int) -> int:
        return self._num_open[replica]

    def choose(self, request: AddRequest) -> dict[int, range]:
        """Choose the replicas for the outputs of a request, and count them as open there.

        Returns the indices that each of them gets: all are one's own unless there are many.
        """
        n = request.sampling_params.n
        counts = [0] * len(self._num_open)
        if len(counts) == 1:
            counts[0] = n
            self._num_open[0] += n
        else:
            keys = self._keys(request)
            for count in _parts(n, len(counts) * _PARTS_EACH):
                replica = self._choose(keys)
                counts[replica] += count
                self._num_open[replica] += count
                self._num_sent[replica] += count
        chosen, first = {}, 0
        for replica, count in enumerate(counts):
            if count:
                chosen[replica] = range(first, first + count)
                first += count
        replicas = b"".join(bytes([replica]) * len(each) for replica, each in chosen.items())
        self._open.add(request.request_id, replicas, n)
        return chosen

    def _choose(self, keys: list[int]) -> int:
        least = min(self._num_open)
        most = least + _SLACK + int(least * _SLACK_SHARE)
        near = [i for i, count in enumerate(self._num_open) if count <= most]
        replica = max(near, key=lambda i: self._merit(i, keys))
        self._remember(self._known[replica], keys)
        return replica

    def close(self, name: str) -> list[int]:
        """Note that a request has ended, or one of its outputs; returns the replicas that had open
        ones."""
        closed = self._open.close(name)
        if closed is None:
            return []
        replicas = Counter(closed[0][index] for index in closed[1])
        for replica, count in replicas.items():
            self._num_open[replica] -= count
        return list(replicas)

    def clear(self) -> None:
        self._open.clear()
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


def _parts(n: int, most: int) -> Iterator[int]:
    """``n`` in parts of about the same size, ``most`` at most."""
    size = -(-n // most)
    for first in range(0, n, size):
        yield min(size, n - first)
