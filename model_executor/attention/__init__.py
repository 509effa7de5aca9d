"""The facts of a step that attention reads, passed as an argument."""

from .inputs import AttentionInputs, CacheInputs, HeadInputs

__all__ = ["AttentionInputs", "CacheInputs", "HeadInputs"]
