"""The semantic ops: models call them, passes rewrite them, and kernels implement them.

There is one file an op, or a family of ops with one for each combination of axes: norms, gated
activations and quantization.  ``ALL_OPS`` is the visible list; conformance tests, benchmarks, costs
and lowering all run over it.
"""

from .attention.kv_store import OP as KV_STORE, kv_store
from .attention.paged_attention import OP as PAGED_ATTENTION, paged_attention
from .attention.rope_kv_store import OP as ROPE_KV_STORE, rope_kv_store
from .attention.rotary_embedding import OP as ROTARY_EMBEDDING, rotary_embedding
from .chain.chain import CHAIN, CHAIN_OVER_RANKS
from .collective.all_gather import OP as ALL_GATHER, all_gather
from .collective.all_reduce import OP as ALL_REDUCE, all_reduce
from .core.cublaslt import installed as installed_cublaslt
from .core.cuda import find_cuda_library, load_cuda_library, why_csrc_is_not_built
from .core.desc import Case, OpDesc, TensorDesc
from .core.device_table import (
    expert_table,
    left_out as left_out_of_tables,
    notes as table_notes,
    report as report_tables,
    take as take_table,
    take_all as take_tables,
)
from .core.kernel_table import KERNELS, KernelMissingError, KernelTable
from .core.launch import Launch, representative_sizes, variants_of
from .core.op import NAMESPACE, Implementation, NoImplementationError, SemanticOp, choose
from .core.variant import Binary, Variant
from .experts.combine_experts import OP as COMBINE_EXPERTS, combine_experts
from .experts.expert_linear import OP as EXPERT_LINEAR, expert_linear
from .experts.fused_moe import OP as FUSED_MOE
from .experts.route import OP as ROUTE, route
from .linear.embedding import OP as EMBEDDING, embedding
from .linear.kernels import LinearKernel, admit_weight_format, format_factors
from .linear.linear import OP as LINEAR, linear
from .norm.gated_act import GATED_ACTS, gelu_tanh_mul, silu_mul
from .norm.norm import NORMS, rms_norm
from .norm.quantize import QUANTIZE, quant_fp8_dynamic, quant_fp8_static, quantize_operand
from .sampling.accept_tokens import OP as ACCEPT_TOKENS, accept_tokens
from .sampling.apply_penalties import OP as APPLY_PENALTIES, apply_penalties
from .sampling.argmax import OP as ARGMAX, argmax
from .sampling.count_tokens import OP as COUNT_TOKENS, count_tokens
from .sampling.gather_last_token import OP as GATHER_LAST_TOKEN, gather_last_token
from .sampling.keep_tokens import OP as KEEP_TOKENS, keep_tokens
from .sampling.place_rows import OP as PLACE_ROWS, place_rows
from .sampling.propose_ngrams import OP as PROPOSE_NGRAMS, propose_ngrams
from .sampling.propose_suffix import OP as PROPOSE_SUFFIX, propose_suffix
from .sampling.sample import OP as SAMPLE, sample
from .sampling.token_logprobs import OP as TOKEN_LOGPROBS, token_logprobs
from .sampling.write_inputs import OP as WRITE_INPUTS, write_inputs

ALL_OPS: tuple[SemanticOp, ...] = (
    APPLY_PENALTIES,
    ARGMAX,
    COUNT_TOKENS,
    SAMPLE,
    TOKEN_LOGPROBS,
    WRITE_INPUTS,
    KEEP_TOKENS,
    ACCEPT_TOKENS,
    PLACE_ROWS,
    PROPOSE_NGRAMS,
    PROPOSE_SUFFIX,
    ROTARY_EMBEDDING,
    KV_STORE,
    ROPE_KV_STORE,
    PAGED_ATTENTION,
    LINEAR,
    ROUTE,
    EXPERT_LINEAR,
    COMBINE_EXPERTS,
    FUSED_MOE,
    CHAIN,
    CHAIN_OVER_RANKS,
    EMBEDDING,
    GATHER_LAST_TOKEN,
    ALL_REDUCE,
    ALL_GATHER,
    *NORMS.values(),
    *GATED_ACTS.values(),
    *QUANTIZE.values(),
)
BY_NAME: dict[str, SemanticOp] = {op.name: op for op in ALL_OPS}

__all__ = [
    "ALL_OPS",
    "BY_NAME",
    "KERNELS",
    "NAMESPACE",
    "Binary",
    "Case",
    "Implementation",
    "KernelMissingError",
    "KernelTable",
    "Launch",
    "LinearKernel",
    "NoImplementationError",
    "OpDesc",
    "SemanticOp",
    "TensorDesc",
    "Variant",
    "accept_tokens",
    "admit_weight_format",
    "all_gather",
    "all_reduce",
    "apply_penalties",
    "argmax",
    "choose",
    "combine_experts",
    "count_tokens",
    "embedding",
    "expert_linear",
    "expert_table",
    "find_cuda_library",
    "format_factors",
    "gather_last_token",
    "gelu_tanh_mul",
    "installed_cublaslt",
    "keep_tokens",
    "kv_store",
    "left_out_of_tables",
    "linear",
    "load_cuda_library",
    "paged_attention",
    "place_rows",
    "propose_ngrams",
    "propose_suffix",
    "quant_fp8_dynamic",
    "quant_fp8_static",
    "quantize_operand",
    "report_tables",
    "representative_sizes",
    "rms_norm",
    "rope_kv_store",
    "rotary_embedding",
    "route",
    "sample",
    "silu_mul",
    "table_notes",
    "take_table",
    "take_tables",
    "token_logprobs",
    "variants_of",
    "why_csrc_is_not_built",
    "write_inputs",
]
