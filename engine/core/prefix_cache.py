"""Computes the keys of full KV blocks.  A key covers its block's tokens and, through the key before
it, all earlier ones.

Blocks are hashed in a chain, as in vLLM's automatic prefix caching; prefixes are shared as in
RadixAttention (Zheng et al., 2023).  Keys have 128 bits of BLAKE2b and are not checked against
tokens.
"""

from __future__ import annotations

import hashlib
from array import array

from .request import Request

_KEY_BYTES = 16


def extend_keys(request: Request, block_size: int) -> list[bytes]:
    """``request.block_keys``, with every block whose tokens the CPU knows.

    The first covers the request's salt.  Blocks never leave the engine, so its model needs no part
    in them.
    """
    keys = request.block_keys
    for index in range(len(keys), request.num_known_tokens // block_size):
        tokens = array("I", request.tokens(index * block_size, (index + 1) * block_size))
        before = keys[-1] if keys else _digest(b"", (request.cache_salt or "").encode())
        keys.append(_digest(before, tokens.tobytes()))
    return keys


def _digest(before: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + content, digest_size=_KEY_BYTES).digest()
