"""Tells a model's thinking from its answer, in every form in which models mark it."""

from .parsers import PARSERS, detect

__all__ = ["PARSERS", "detect"]
