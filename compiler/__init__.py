"""Model in, program out: ``compile()`` is the ordered list of what happens between.

A captured graph is rewritten by the passes, split at attention, lowered to implementations, and
its distinct pieces are compiled once; the plan says which piece runs with which values.
"""

from .compile import Compiled, Example, compile
from .lower import LoweringError, check_kernels
from .plan import OpStep, PieceStep, Plan
from .program import Environment, Program, Step, eager_program
from .trace import WEIGHTS, TraceError

__all__ = [
    "WEIGHTS",
    "Compiled",
    "Environment",
    "Example",
    "LoweringError",
    "OpStep",
    "PieceStep",
    "Plan",
    "Program",
    "Step",
    "TraceError",
    "check_kernels",
    "compile",
    "eager_program",
]
