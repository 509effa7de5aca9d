"""Finds and caches full KV blocks by their keys.  A key covers its block's tokens and, through the
key before it, all earlier ones.

Blocks are hashed in a chain, as in vLLM's automatic prefix caching; prefixes are shared as in
RadixAttention (Zheng et al., 2023).  Keys have 128 bits of BLAKE2b and are not checked against
tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Container

from .kv_blocks import BlockPool, SequenceBlocks
from .request import Request

_KEY_BYTES = 16


def find_prefix(pool: BlockPool, request: Request, alone: bool) -> SequenceBlocks:
    """Blocks that hold the request's first tokens; the last token is always computed, since its
    hidden state gives the next.  For a request alone, keys are made as far as they are known: the
    others can wait until it is launched."""
    keys = extend_keys(request, pool.block_size, pool.keys_of_whole if alone else None)
    return pool.find(keys[: (request.num_tokens - 1) // pool.block_size])


def cache_full_blocks(pool: BlockPool, request: Request) -> None:
    """Let others find the blocks that are full of known tokens.  They may be found before they are
    written: whoever reads them runs in this step or later, and a step stores before it reads."""
    size, num_computed = pool.block_size, request.num_computed_tokens
    if num_computed < (request.num_cached_blocks + 1) * size:
        return
    full = min(num_computed, request.num_known_tokens) // size
    keys = extend_keys(request, size)
    cached = request.num_cached_blocks
    for table, freed in zip(request.blocks.tables, request.blocks.num_freed, strict=True):
        for index in range(max(cached, freed), full):
            pool.cache(table[index], keys[index])
    request.num_cached_blocks = full


def extend_keys(
    request: Request, block_size: int, known: Container[bytes] | None = None
) -> list[bytes]:
    """``request.block_keys``, with every block whose tokens the CPU knows, or up to the first key
    that is not ``known``.

    The first covers the request's salt.  Blocks never leave the engine, so its model needs no part
    in them.
    """
    keys = request.block_keys
    first, end = len(keys), request.num_known_tokens // block_size
    if first >= end or (keys and known is not None and keys[-1] not in known):
        return keys
    tokens = array("I", request.tokens(first * block_size, end * block_size))
    content, size = tokens.tobytes(), block_size * tokens.itemsize
    salt = request.cache_salt
    key = keys[-1] if keys else (_digest(salt.encode()) if salt else _UNSALTED)
    for start in range(0, len(content), size):
        key = _digest(key + content[start : start + size])
        keys.append(key)
        if known is not None and key not in known:
            break
    return keys


def salt_of(salt: str | None) -> int:
    """A number of 63 bits of a request's salt, 0 without one."""
    return int.from_bytes(_digest(salt.encode())[:8]) >> 1 | 1 if salt else 0


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_KEY_BYTES).digest()


_UNSALTED = _digest(b"")
