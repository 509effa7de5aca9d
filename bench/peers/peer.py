"""What an adapter offers: an engine that takes token ids and says how many it generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..workloads import Work


@dataclass(frozen=True)
class PeerOptions:
    """What every engine is told; all else is its own default."""

    model: str
    max_model_len: int
    load_format: str
    quantization: str | None
    kv_cache_dtype: str
    gpu_memory_utilization: float = 0.85


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of every request, under vLLM's names."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1


class Peer(Protocol):
    """An engine that has started; prefix caching is off."""

    name: str

    def generate(self, works: Sequence[Work], sampling: Sampling) -> list[int]:
        """Generate for all at once; the number of tokens that each gave."""
