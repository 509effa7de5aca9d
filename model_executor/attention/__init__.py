"""What attention needs to know about a step, passed as an argument."""

from .inputs import AttentionInputs, CacheInputs

__all__ = ["AttentionInputs", "CacheInputs"]
