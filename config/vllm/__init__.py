"""vLLM's arguments, and the fields of requests, as tables."""

from .argument import Argument, Port
from .bench import BENCH
from .calls import CALLS, METHODS, SAMPLING
from .engine import ENGINE
from .requests import COMPLETIONS, GENERATION, MESSAGES, PATHS, RESPONSES, TOKENIZE
from .serve import SERVE
from .speculative import NO_METHODS, SPECULATIVE

__all__ = [
    "BENCH",
    "CALLS",
    "COMPLETIONS",
    "ENGINE",
    "GENERATION",
    "MESSAGES",
    "METHODS",
    "NO_METHODS",
    "PATHS",
    "RESPONSES",
    "SAMPLING",
    "SERVE",
    "SPECULATIVE",
    "TOKENIZE",
    "Argument",
    "Port",
]
