"""``ResolvedConfig``: what the engine runs with; nothing changes it once ``resolve()`` made it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .device_table import DeviceTable
from .key_factors import outside_key
from .levels import CudagraphMode
from .speculative import SpeculativeConfig

_EACH_START = "decided and applied anew at every start"


@dataclass(frozen=True)
class Hardware:
    """What the engine runs on; ``graphs`` is "cuda", "recording" (tests) or "none"."""

    device: str
    name: str = field(
        metadata=outside_key("only measured choices depend on it: -O3 adds it to the key")
    )
    sm: int = 0
    num_sms: int = field(default=0, metadata=outside_key("grids are computed at every launch"))
    graphs: str = field(default="none", metadata=outside_key(_EACH_START))
    memory_bytes: int = field(default=0, metadata=outside_key("limits default by it at each start"))
    num_devices: int = field(
        default=1, metadata=outside_key("how many GPUs like this one there are; checked at a start")
    )


@dataclass(frozen=True)
class ModelLimits:
    """The facts of a model that options are checked against; ``quantization`` is "none" or how
    the checkpoint is quantized, ``layer_params`` as of ``ModelSpec``, 0: not known;
    ``why_no_longer`` says why a model that has more positions serves these alone."""

    max_position_embeddings: int
    dtype: str
    quantization: str = "none"
    layer_params: float = 0.0
    why_no_longer: str = ""


@dataclass(frozen=True)
class Precision:
    """The dtype of activations and unquantized weights; how weights are quantized, or "none"; the
    dtype of K and V."""

    dtype: str
    quantization: str
    kv_cache_dtype: str

    @property
    def weights(self) -> str:
        """The dtype of the linear layers' weights, or how they are quantized."""
        return self.dtype if self.quantization == "none" else self.quantization


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks that serve one model together, under vLLM's names.  The same on every rank."""

    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    pipeline_parallel_size: int = 1


@dataclass(frozen=True)
class ModelConfig:
    path: str = field(
        metadata=outside_key("the model's own fields are in the key, its place is not")
    )
    load_format: str = field(metadata=outside_key("values of weights never enter the code"))
    max_model_len: int = field(
        metadata=outside_key("block tables are of any width in compiled code")
    )
    seed: int = field(metadata=outside_key("values of weights never enter the code"))
    hf_overrides: str = field(
        default="", metadata=outside_key("the model's own fields, in the key, have them")
    )


@dataclass(frozen=True)
class CompileConfig:
    level: int
    trace: bool
    passes: tuple[str, ...]
    required: tuple[tuple[str, int], ...] = field(
        metadata=outside_key("checked against the artifact's report")
    )
    hand_kernels: bool
    tune: bool
    kernels: tuple[tuple[str, str], ...]
    verify: bool
    proof: bool = True
    """A captured model's twin is compared with its unmodified implementation before a build."""
    record_expert_load: bool = False
    """The traced model counts the tokens of each expert."""
    named_kernels: tuple[str, ...] = field(
        default=(), metadata=outside_key("checked against the artifact's report")
    )
    """The ops of ``kernels`` that the user named: each must be called."""
    tables: tuple[DeviceTable, ...] = ()
    """The tables that were measured on this GPU, besides those that are shipped."""
    ignored_tables: tuple[tuple[str, str], ...] = field(
        default=(), metadata=outside_key("only reported")
    )
    """Files of such tables that cannot serve, and why."""
    tune_seconds: float = field(
        default=0.0,
        metadata=outside_key("only measured choices depend on it: -O3 adds it to the key"),
    )


@dataclass(frozen=True)
class StoreConfig:
    """Where compiled artifacts are kept: ``search`` in order, the default folders when empty; new
    ones go to its first folder.  With ``trusted_keys``, only what they signed is loaded."""

    enabled: bool = field(metadata=outside_key(_EACH_START))
    require: bool = field(metadata=outside_key(_EACH_START))
    search: tuple[str, ...] = field(metadata=outside_key(_EACH_START))
    trusted_keys: tuple[str, ...] = field(metadata=outside_key(_EACH_START))
    size_limit_bytes: int = field(metadata=outside_key(_EACH_START))


@dataclass(frozen=True)
class CaptureConfig:
    mode: CudagraphMode = field(metadata=outside_key(_EACH_START))
    sizes: tuple[int, ...] = field(metadata=outside_key(_EACH_START))
    lazy: bool = field(metadata=outside_key(_EACH_START))


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = field(metadata=outside_key("compiled code serves any number of sequences"))
    max_num_rows: int = field(metadata=outside_key("compiled code serves any number of sequences"))
    """Most sequences of a step, of which a decode with drafts is several."""
    max_num_batched_tokens: int = field(
        metadata=outside_key("compiled code serves any number of tokens")
    )
    enable_chunked_prefill: bool = field(metadata=outside_key(_EACH_START))
    long_prefill_token_threshold: int = field(metadata=outside_key(_EACH_START))
    max_num_mixed_tokens: int = field(metadata=outside_key(_EACH_START))
    max_step_ms: float = field(metadata=outside_key(_EACH_START))
    policy: str = field(metadata=outside_key(_EACH_START))
    prefix_caching: bool = field(metadata=outside_key("blocks are looked up before a step"))
    async_scheduling: bool = field(metadata=outside_key(_EACH_START))
    speculative: SpeculativeConfig | None = field(
        default=None, metadata=outside_key("a draft is a row of one token, as a decode is")
    )
    is_drafter: bool = field(
        default=False, metadata=outside_key("kernels of drafts are an artifact of their own")
    )
    """Whether the model drafts for another one."""


@dataclass(frozen=True)
class CacheConfig:
    block_size: int
    gpu_memory_utilization: float = field(metadata=outside_key(_EACH_START))
    kv_cache_memory_bytes: int | None = field(metadata=outside_key(_EACH_START))
    num_blocks: int | None = field(
        metadata=outside_key("compiled code serves any number of KV blocks")
    )


@dataclass(frozen=True)
class ResolvedConfig:
    hardware: Hardware
    model: ModelConfig
    precision: Precision
    parallel: ParallelConfig
    compile: CompileConfig
    store: StoreConfig
    capture: CaptureConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
