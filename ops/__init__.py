"""The semantic ops: models call them, passes rewrite them, and kernels implement them.

There is one file an op.  ``ALL_OPS`` is the visible list; conformance tests, benchmarks, costs and
lowering all run over it.
"""

from ._cuda import find_cuda_library, load_cuda_library, why_csrc_is_not_built
from ._kernel_table import KERNELS, KernelMissingError, KernelTable
from ._launch import Launch, representative_sizes, variants_of
from ._op import (
    NAMESPACE,
    Case,
    Choice,
    Cost,
    Implementation,
    NoImplementationError,
    OpDesc,
    SemanticOp,
    TensorDesc,
    choose,
    runs_on,
)
from ._variant import Binary, Variant
from .add_rms_norm import OP as ADD_RMS_NORM
from .add_rms_norm import add_rms_norm
from .all_reduce import OP as ALL_REDUCE
from .all_reduce import all_reduce
from .all_reduce_norm import OPS as ALL_REDUCE_NORMS
from .apply_penalties import OP as APPLY_PENALTIES
from .apply_penalties import apply_penalties
from .argmax import OP as ARGMAX
from .argmax import argmax
from .count_tokens import OP as COUNT_TOKENS
from .count_tokens import count_tokens
from .embedding import OP as EMBEDDING
from .embedding import embedding
from .gated_linear import OP as GATED_LINEAR
from .gated_linear import gated_linear
from .gated_linear_fp8 import OP as GATED_LINEAR_FP8
from .gated_linear_fp8 import gated_linear_fp8
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
from .linear_add_norm_linear import OP as LINEAR_ADD_NORM_LINEAR
from .linear_add_norm_linear import linear_add_norm_linear
from .linear_fp8 import OP as LINEAR_FP8
from .linear_fp8 import linear_fp8
from .paged_attention import OP as PAGED_ATTENTION
from .paged_attention import paged_attention
from .quant_act import GELU_TANH_DYNAMIC as GELU_TANH_MUL_QUANT_DYNAMIC
from .quant_act import GELU_TANH_STATIC as GELU_TANH_MUL_QUANT_STATIC
from .quant_act import SILU_DYNAMIC as SILU_MUL_QUANT_DYNAMIC
from .quant_act import SILU_STATIC as SILU_MUL_QUANT_STATIC
from .quant_act import (
    gelu_tanh_mul_quant_dynamic,
    gelu_tanh_mul_quant_static,
    silu_mul_quant_dynamic,
    silu_mul_quant_static,
)
from .quant_fp8 import DYNAMIC as QUANT_FP8_DYNAMIC
from .quant_fp8 import STATIC as QUANT_FP8_STATIC
from .quant_fp8 import quant_fp8_dynamic, quant_fp8_static
from .quant_norm import ADD_DYNAMIC as ADD_RMS_NORM_QUANT_DYNAMIC
from .quant_norm import ADD_STATIC as ADD_RMS_NORM_QUANT_STATIC
from .quant_norm import DYNAMIC as RMS_NORM_QUANT_DYNAMIC
from .quant_norm import STATIC as RMS_NORM_QUANT_STATIC
from .quant_norm import (
    add_rms_norm_quant_dynamic,
    add_rms_norm_quant_static,
    rms_norm_quant_dynamic,
    rms_norm_quant_static,
)
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
from .write_inputs import OP as WRITE_INPUTS
from .write_inputs import write_inputs

ALL_OPS: tuple[SemanticOp, ...] = (
    RMS_NORM,
    APPLY_PENALTIES,
    ARGMAX,
    COUNT_TOKENS,
    SAMPLE,
    TOKEN_LOGPROBS,
    ADD_RMS_NORM,
    WRITE_INPUTS,
    KEEP_TOKENS,
    SILU_MUL,
    GELU_TANH_MUL,
    ROTARY_EMBEDDING,
    KV_STORE,
    ROPE_KV_STORE,
    PAGED_ATTENTION,
    LINEAR,
    LINEAR_FP8,
    GATED_LINEAR,
    GATED_LINEAR_FP8,
    LINEAR_ADD_NORM_LINEAR,
    EMBEDDING,
    GATHER_LAST_TOKEN,
    QUANT_FP8_STATIC,
    QUANT_FP8_DYNAMIC,
    RMS_NORM_QUANT_STATIC,
    RMS_NORM_QUANT_DYNAMIC,
    ADD_RMS_NORM_QUANT_STATIC,
    ADD_RMS_NORM_QUANT_DYNAMIC,
    SILU_MUL_QUANT_STATIC,
    SILU_MUL_QUANT_DYNAMIC,
    GELU_TANH_MUL_QUANT_STATIC,
    GELU_TANH_MUL_QUANT_DYNAMIC,
    ALL_REDUCE,
    *ALL_REDUCE_NORMS,
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
    "NoImplementationError",
    "OpDesc",
    "SemanticOp",
    "TensorDesc",
    "Variant",
    "add_rms_norm",
    "add_rms_norm_quant_dynamic",
    "add_rms_norm_quant_static",
    "all_reduce",
    "apply_penalties",
    "argmax",
    "choose",
    "count_tokens",
    "embedding",
    "find_cuda_library",
    "gated_linear",
    "gated_linear_fp8",
    "gather_last_token",
    "gelu_tanh_mul",
    "gelu_tanh_mul_quant_dynamic",
    "gelu_tanh_mul_quant_static",
    "keep_tokens",
    "kv_store",
    "linear",
    "linear_add_norm_linear",
    "linear_fp8",
    "load_cuda_library",
    "paged_attention",
    "quant_fp8_dynamic",
    "quant_fp8_static",
    "representative_sizes",
    "rms_norm",
    "rms_norm_quant_dynamic",
    "rms_norm_quant_static",
    "rope_kv_store",
    "rotary_embedding",
    "runs_on",
    "sample",
    "silu_mul",
    "silu_mul_quant_dynamic",
    "silu_mul_quant_static",
    "token_logprobs",
    "variants_of",
    "why_csrc_is_not_built",
    "write_inputs",
]
