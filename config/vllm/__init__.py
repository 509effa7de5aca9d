"""vLLM's arguments, as tables."""

from .argument import Argument, Port
from .bench import BENCH
from .calls import CALLS, METHODS, SAMPLING
from .engine import ENGINE
from .serve import SERVE

__all__ = ["BENCH", "CALLS", "ENGINE", "METHODS", "SAMPLING", "SERVE", "Argument", "Port"]
