"""What an adapter offers: an engine that takes token ids and says how many it generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ...bench.workloads import Work


@dataclass(frozen=True)
class PeerOptions:
    """What every engine is told; all else is its own default."""

    model: str
    max_model_len: int
    load_format: str
    quantization: str | None
    kv_cache_dtype: str
    gpu_memory_utilization: float = 0.85

    def for_llm(self) -> dict[str, Any]:
        """Arguments of the class ``LLM``, which vLLM and this package name alike."""
        return {**asdict(self), "enable_prefix_caching": False}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of every request, under vLLM's names."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1

    def for_request(self, work: Work) -> dict[str, Any]:
        """Arguments of the class ``SamplingParams``, likewise: as many tokens as the work says."""
        return {**asdict(self), "max_tokens": work.output_len, "ignore_eos": True}


class Peer(Protocol):
    """An engine that has started; prefix caching is off."""

    name: str

    def generate(self, works: Sequence[Work], sampling: Sampling) -> list[int]:
        """Generate for all at once; the number of tokens that each gave."""
