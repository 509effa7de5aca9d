"""The semantic ops: what models call, passes rewrite and kernels implement.

One file an op.  ``ALL_OPS`` is the visible list; conformance tests, benchmarks, costs and
lowering all run over it.
"""

from ._cuda import find_cuda_library, load_cuda_library
from ._kernel_table import KERNELS, KernelMissingError, KernelTable
from ._launch import Launch, representative_sizes, variants_of
from ._op import (
    NAMESPACE,
    Case,
    Choice,
    Cost,
    Implementation,
    OpDesc,
    SemanticOp,
    TensorDesc,
    choose,
    runs_on,
)
from ._variant import Binary, Variant
from .add_rms_norm import OP as ADD_RMS_NORM
from .add_rms_norm import add_rms_norm
from .apply_penalties import OP as APPLY_PENALTIES
from .apply_penalties import apply_penalties
from .argmax import OP as ARGMAX
from .argmax import argmax
from .count_tokens import OP as COUNT_TOKENS
from .count_tokens import count_tokens
from .embedding import OP as EMBEDDING
from .embedding import embedding
from .feed_tokens import OP as FEED_TOKENS
from .feed_tokens import feed_tokens
from .gather_last_token import OP as GATHER_LAST_TOKEN
from .gather_last_token import gather_last_token
from .gelu_tanh_mul import OP as GELU_TANH_MUL
from .gelu_tanh_mul import gelu_tanh_mul
from .keep_tokens import OP as KEEP_TOKENS
from .keep_tokens import keep_tokens
from .kv_store import OP as KV_STORE
from .kv_store import kv_store
from .linear import OP as LINEAR
from .linear import linear
from .paged_attention import OP as PAGED_ATTENTION
from .paged_attention import paged_attention
from .rms_norm import OP as RMS_NORM
from .rms_norm import rms_norm
from .rope_kv_store import OP as ROPE_KV_STORE
from .rope_kv_store import rope_kv_store
from .rotary_embedding import OP as ROTARY_EMBEDDING
from .rotary_embedding import rotary_embedding
from .sample import OP as SAMPLE
from .sample import sample
from .silu_mul import OP as SILU_MUL
from .silu_mul import silu_mul
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
    FEED_TOKENS,
    KEEP_TOKENS,
    SILU_MUL,
    GELU_TANH_MUL,
    ROTARY_EMBEDDING,
    KV_STORE,
    ROPE_KV_STORE,
    PAGED_ATTENTION,
    LINEAR,
    EMBEDDING,
    GATHER_LAST_TOKEN,
)
BY_NAME: dict[str, SemanticOp] = {op.name: op for op in ALL_OPS}

__all__ = [
    "ALL_OPS",
    "BY_NAME",
    "KERNELS",
    "NAMESPACE",
    "Binary",
    "Case",
    "Choice",
    "Cost",
    "Implementation",
    "KernelMissingError",
    "KernelTable",
    "Launch",
    "OpDesc",
    "SemanticOp",
    "TensorDesc",
    "Variant",
    "add_rms_norm",
    "apply_penalties",
    "argmax",
    "choose",
    "count_tokens",
    "embedding",
    "feed_tokens",
    "find_cuda_library",
    "gather_last_token",
    "gelu_tanh_mul",
    "keep_tokens",
    "kv_store",
    "linear",
    "load_cuda_library",
    "paged_attention",
    "representative_sizes",
    "rms_norm",
    "rope_kv_store",
    "rotary_embedding",
    "runs_on",
    "sample",
    "silu_mul",
    "token_logprobs",
    "variants_of",
]
