"""The facts of a step that attention reads, passed as an argument."""

from .inputs import AttentionInputs, CacheInputs

__all__ = ["AttentionInputs", "CacheInputs"]
