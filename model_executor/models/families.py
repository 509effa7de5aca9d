"""What sets one family's config apart: one adapter each, ``HfConfig -> ModelSpec``.

Where a config leaves a field out, the default is that of the family's class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config.routing import Routing
from ..hf_json import HfConfig
from ..spec import ModelSpec, MoESpec
from .rope import effective_positions, rope_parameters

DTYPES = ("float32", "bfloat16", "float16")

# Far above any model, and small enough that a damaged config does not take all memory.
_MOST_LAYERS, _MOST_HEADS, _MOST_HEAD_DIM, _MOST_EXPERTS = 10_000, 2**16, 2**13, 2**16


def llama(config: HfConfig, architecture: str) -> ModelSpec:
    """Llama 2 and 3.x: one ``attention_bias`` flag for all four projections."""
    return _dense(
        config,
        architecture,
        **_attention_bias(config),
        mlp_bias=config.flag("mlp_bias", False),
        sliding_windows=(0,) * _num_layers(config),
    )


def mistral(config: HfConfig, architecture: str) -> ModelSpec:
    """Mistral: one sliding window for every layer, or null."""
    layers = _num_layers(config)
    windowed = config.values.get("sliding_window", 4096) is not None
    window = config.integer("sliding_window", 4096) if windowed else 0
    return _dense(config, architecture, sliding_windows=(window,) * layers)


def qwen2(config: HfConfig, architecture: str) -> ModelSpec:
    """Qwen2 and Qwen2.5: biases on query, key and value."""
    return _dense(config, architecture, qkv_bias=True, sliding_windows=_qwen_windows(config))


def qwen3(config: HfConfig, architecture: str) -> ModelSpec:
    """Qwen3 dense: query and key are normalized by head; heads of 128 unless stated."""
    return _dense(
        config,
        architecture,
        **_attention_bias(config),
        qk_norm=True,
        head_dim=config.integer("head_dim", 128, most=_MOST_HEAD_DIM),
        sliding_windows=_qwen_windows(config),
    )


def mixtral(config: HfConfig, architecture: str) -> ModelSpec:
    """Mixtral: every layer has experts of ``intermediate_size``."""
    layers = _num_layers(config)
    windowed = config.values.get("sliding_window") is not None
    window = config.integer("sliding_window") if windowed else 0
    moe = MoESpec(
        layers=(True,) * layers,
        num_experts=config.integer("num_local_experts", 8, most=_MOST_EXPERTS),
        intermediate_size=config.integer("intermediate_size"),
        routing=Routing(config.integer("num_experts_per_tok", 2)),
    )
    spec = _dense(config, architecture, sliding_windows=(window,) * layers, eps=1e-5)
    return _with_experts(config, spec, moe)


def qwen2_moe(config: HfConfig, architecture: str) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert with a gate beside the chosen ones."""
    moe = _qwen_experts(config, num_experts=60, top_k=4, intermediate_size=1408)
    shared = config.integer("shared_expert_intermediate_size", 5632)
    windows = _qwen_windows(config)
    if config.values.get("layer_types") is None:  # every second of the lower layers
        lower = config.integer("max_window_layers", 28, least=0)
        window = _window(config)
        windows = tuple(
            window if i % 2 == 0 and i < lower else 0 for i in range(_num_layers(config))
        )
    spec = _dense(
        config, architecture, qkv_bias=config.flag("qkv_bias", True), sliding_windows=windows
    )
    moe = replace(moe, shared_intermediate_size=shared, shared_gate=True)
    return _with_experts(config, spec, moe)


def qwen3_moe(config: HfConfig, architecture: str) -> ModelSpec:
    """Qwen3-MoE: query and key are normalized by head, and no expert is shared."""
    layers = _num_layers(config)
    spec = _dense(
        config,
        architecture,
        **_attention_bias(config),
        qk_norm=True,
        sliding_windows=(_window(config),) * layers,
    )
    moe = _qwen_experts(config, num_experts=128, top_k=8, intermediate_size=768)
    return _with_experts(config, spec, moe)


def _qwen_experts(
    config: HfConfig, *, num_experts: int, top_k: int, intermediate_size: int
) -> MoESpec:
    """The experts of Qwen models, by default as many as these."""
    layers = _num_layers(config)
    dense: Any = config.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise config.error("mlp_only_layers", dense, f"a list of layers, 0 to {layers - 1}")
    step = config.integer("decoder_sparse_step", 1)
    field = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    return MoESpec(
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        num_experts=config.integer(field, num_experts, most=_MOST_EXPERTS),
        intermediate_size=config.integer("moe_intermediate_size", intermediate_size),
        routing=Routing(
            config.integer("num_experts_per_tok", top_k),
            renormalize=config.flag("norm_topk_prob", False),
        ),
    )


def _with_experts(config: HfConfig, spec: ModelSpec, moe: MoESpec) -> ModelSpec:
    """``spec`` with experts, or without if no layer has them."""
    if not any(moe.layers):
        return spec
    if reason := moe.routing.why_not(moe.num_experts):
        raise config.error(
            "num_experts_per_tok", moe.routing.top_k, f"a router that can choose ({reason})"
        )
    return replace(spec, moe=moe)


def _attention_bias(config: HfConfig) -> dict[str, bool]:
    """Which projections have a bias, where the config has one flag for all four."""
    bias = config.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def _dense(
    config: HfConfig,
    architecture: str,
    *,
    sliding_windows: tuple[int, ...],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    eps: float = 1e-6,
) -> ModelSpec:
    hidden_act = config.text("hidden_act", "silu")
    if hidden_act != "silu":
        raise config.error("hidden_act", hidden_act, "'silu', the only one supported")
    num_heads = config.integer("num_attention_heads", most=_MOST_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", num_heads, most=_MOST_HEADS)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}"
        )
    hidden_size = config.integer("hidden_size")
    if head_dim is None:
        head_dim = config.integer("head_dim", hidden_size // num_heads, most=_MOST_HEAD_DIM)
    rope = rope_parameters(config, head_dim)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=_num_layers(config),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=effective_positions(config, rope),
        rms_norm_eps=config.number("rms_norm_eps", eps, least=0, most=1),
        rope=rope,
        hidden_act=hidden_act,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=sliding_windows,
        dtype_name=_dtype(config),
    )


def _num_layers(config: HfConfig) -> int:
    return config.integer("num_hidden_layers", most=_MOST_LAYERS)


def _qwen_windows(config: HfConfig) -> tuple[int, ...]:
    """``layer_types`` decides when given, else ``max_window_layers``: full attention below it."""
    layers, window = _num_layers(config), _window(config)
    types = config.values.get("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28, least=0)
        return tuple(window if i >= first else 0 for i in range(layers))
    known = {"full_attention": 0, "sliding_attention": window}
    fits = isinstance(types, list) and len(types) == layers
    if not fits or not all(isinstance(kind, str) and kind in known for kind in types):
        raise config.error("layer_types", types, f"{layers} of: {', '.join(known)}")
    return tuple(known[kind] for kind in types)


def _window(config: HfConfig) -> int:
    """The window of a Qwen model's layers that have one; 0: none has."""
    used = config.flag("use_sliding_window", False)
    if not used or config.values.get("sliding_window", 0) is None:
        return 0
    return config.integer("sliding_window", 4096)


def _dtype(config: HfConfig) -> str:
    """``dtype`` (transformers 5) or ``torch_dtype`` (4); float32 when neither is there."""
    field = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(field, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise config.error(field, name, f"one of {', '.join(DTYPES)}")
    return name
