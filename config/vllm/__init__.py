"""vLLM's arguments as tables.

Those of ``bench``, of requests and of ``speculative_config`` are imported from their modules, where
one is read: a start needs none of them.
"""

from .argument import Argument, Port
from .calls import CALLS, METHODS, SAMPLING
from .engine import ENGINE
from .serve import SERVE

__all__ = ["CALLS", "ENGINE", "METHODS", "SAMPLING", "SERVE", "Argument", "Port"]
