"""The semantic ops: what models call, passes rewrite and kernels implement.

One file an op.  ``ALL_OPS`` is the visible list; conformance tests, benchmarks, costs and
lowering all run over it.
"""

from ._op import (
    NAMESPACE,
    Case,
    Choice,
    Cost,
    Implementation,
    Launch,
    OpDesc,
    SemanticOp,
    TensorDesc,
    choose,
)
from .add_rms_norm import OP as ADD_RMS_NORM
from .add_rms_norm import add_rms_norm
from .apply_penalties import OP as APPLY_PENALTIES
from .apply_penalties import apply_penalties
from .argmax import OP as ARGMAX
from .argmax import argmax
from .count_tokens import OP as COUNT_TOKENS
from .count_tokens import count_tokens
from .rms_norm import OP as RMS_NORM
from .rms_norm import rms_norm
from .sample import OP as SAMPLE
from .sample import sample
from .token_logprobs import OP as TOKEN_LOGPROBS
from .token_logprobs import token_logprobs

ALL_OPS: tuple[SemanticOp, ...] = (
    RMS_NORM,
    APPLY_PENALTIES,
    ARGMAX,
    COUNT_TOKENS,
    SAMPLE,
    TOKEN_LOGPROBS,
    ADD_RMS_NORM,
)
BY_NAME: dict[str, SemanticOp] = {op.name: op for op in ALL_OPS}

__all__ = [
    "ALL_OPS",
    "BY_NAME",
    "Case",
    "Choice",
    "Cost",
    "Implementation",
    "Launch",
    "OpDesc",
    "SemanticOp",
    "TensorDesc",
    "add_rms_norm",
    "apply_penalties",
    "argmax",
    "choose",
    "count_tokens",
    "rms_norm",
    "sample",
    "token_logprobs",
]
