"""vLLM's arguments, as tables."""

from .argument import Argument, Port
from .calls import CALLS, METHODS, SAMPLING
from .engine import ENGINE
from .serve import SERVE

__all__ = ["CALLS", "ENGINE", "METHODS", "SAMPLING", "SERVE", "Argument", "Port"]
