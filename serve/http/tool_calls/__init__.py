"""Finds the calls of tools in what a model writes, in every form in which models write them."""

from .call_reader import FORMATS, CallReader

__all__ = ["FORMATS", "CallReader"]
