"""What sets one family's config apart: one adapter each, ``HfConfig -> ModelSpec``.

Where a config leaves a field out, ``defaults`` has the number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config.routing import Routing
from ..hf_json import HfConfig
from ..spec import ModelSpec, MoESpec
from . import defaults
from .rope import effective_positions, rope_notes, rope_parameters

DTYPES = ("float32", "bfloat16", "float16")
SILU_NAMES = ("silu", "swish")

# Far above any model, and small enough that a damaged config does not take all memory.
_MOST_LAYERS, _MOST_HEADS, _MOST_HEAD_DIM, _MOST_EXPERTS = 10_000, 2**16, 2**13, 2**16


def llama(config: HfConfig, architecture: str) -> ModelSpec:
    """Llama 2 and 3.x: one ``attention_bias`` flag for all four projections."""
    config = config.with_defaults(defaults.LLAMA)
    return _dense(
        config,
        architecture,
        **_attention_bias(config),
        mlp_bias=config.flag("mlp_bias"),
        sliding_windows=(0,) * _num_layers(config),
    )


def mistral(config: HfConfig, architecture: str) -> ModelSpec:
    """Mistral: one sliding window for every layer, or null."""
    config = config.with_defaults(defaults.MISTRAL)
    return _dense(config, architecture, sliding_windows=_uniform_windows(config))


def qwen2(config: HfConfig, architecture: str) -> ModelSpec:
    """Qwen2 and Qwen2.5: biases on query, key and value."""
    config = config.with_defaults(defaults.QWEN2)
    return _dense(config, architecture, qkv_bias=True, sliding_windows=_qwen_windows(config))


def qwen3(config: HfConfig, architecture: str) -> ModelSpec:
    """Qwen3 dense: query and key are normalized by head; heads of 128 unless stated."""
    config = config.with_defaults(defaults.QWEN3)
    return _dense(
        config,
        architecture,
        **_attention_bias(config),
        qk_norm=True,
        sliding_windows=_qwen_windows(config),
    )


def mixtral(config: HfConfig, architecture: str) -> ModelSpec:
    """Mixtral: every layer has experts of ``intermediate_size``."""
    config = config.with_defaults(defaults.MIXTRAL)
    moe = MoESpec(
        layers=(True,) * _num_layers(config),
        num_experts=_num_experts(config, "num_local_experts", alias="num_experts"),
        intermediate_size=config.integer("intermediate_size"),
        routing=Routing(config.integer("num_experts_per_tok")),
    )
    spec = _dense(config, architecture, sliding_windows=_uniform_windows(config))
    return _with_experts(config, spec, moe)


def qwen2_moe(config: HfConfig, architecture: str) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert with a gate beside the chosen ones."""
    config = config.with_defaults(defaults.QWEN2_MOE)
    windows = _qwen_windows(config)
    if config.values.get("layer_types") is None:  # every second of the lower layers
        lower = config.integer("max_window_layers", least=0)
        window = _window(config)
        windows = tuple(
            window if i % 2 == 0 and i < lower else 0 for i in range(_num_layers(config))
        )
    spec = _dense(config, architecture, qkv_bias=config.flag("qkv_bias"), sliding_windows=windows)
    moe = replace(
        _qwen_experts(config, _num_experts(config, "num_experts", least=0)),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _with_experts(config, spec, moe)


def qwen3_moe(config: HfConfig, architecture: str) -> ModelSpec:
    """Qwen3-MoE: query and key are normalized by head, and no expert is shared."""
    config = config.with_defaults(defaults.QWEN3_MOE)
    spec = _dense(
        config,
        architecture,
        **_attention_bias(config),
        qk_norm=True,
        sliding_windows=(_window(config),) * _num_layers(config),
    )
    num_experts = _num_experts(config, "num_experts", alias="num_local_experts", least=0)
    return _with_experts(config, spec, _qwen_experts(config, num_experts))


def _num_experts(config: HfConfig, name: str, *, alias: str = "", least: int = 1) -> int:
    """The number of experts; the ``alias`` that transformers knows is read first, as there."""
    field = alias if alias and config.values.get(alias) is not None else name
    return config.integer(field, least=least, most=_MOST_EXPERTS)


def _qwen_experts(config: HfConfig, num_experts: int) -> MoESpec:
    layers = _num_layers(config)
    dense: Any = config.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise config.error("mlp_only_layers", dense, f"a list of layers, 0 to {layers - 1}")
    step = config.integer("decoder_sparse_step")
    return MoESpec(
        layers=tuple(
            num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(layers)
        ),
        num_experts=num_experts,
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=Routing(
            config.integer("num_experts_per_tok"), renormalize=config.flag("norm_topk_prob")
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
    bias = config.flag("attention_bias")
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
) -> ModelSpec:
    hidden_act = config.text("hidden_act")
    if hidden_act not in SILU_NAMES:
        raise config.error("hidden_act", hidden_act, "'silu' or 'swish', which are one")
    num_heads = config.integer("num_attention_heads", most=_MOST_HEADS)
    num_kv_heads = num_heads
    if config.value("num_key_value_heads") is not None:
        num_kv_heads = config.integer("num_key_value_heads", most=_MOST_HEADS)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}"
        )
    hidden_size = config.integer("hidden_size")
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
        rms_norm_eps=config.number("rms_norm_eps", least=0, most=1),
        rope=rope,
        hidden_act="silu",
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=sliding_windows,
        dtype_name=_dtype(config),
        notes=rope_notes(config, rope),
    )


def _num_layers(config: HfConfig) -> int:
    return config.integer("num_hidden_layers", most=_MOST_LAYERS)


def _qwen_windows(config: HfConfig) -> tuple[int, ...]:
    """``layer_types`` decides when given, else ``max_window_layers``: full attention below it."""
    layers, window = _num_layers(config), _window(config)
    types = config.values.get("layer_types")
    if types is None:
        first = config.integer("max_window_layers", least=0)
        return tuple(window if i >= first else 0 for i in range(layers))
    known = {"full_attention": 0, "sliding_attention": window}
    fits = isinstance(types, list) and len(types) == layers
    if not fits or not all(isinstance(kind, str) and kind in known for kind in types):
        raise config.error("layer_types", types, f"{layers} of: {', '.join(known)}")
    return tuple(known[kind] for kind in types)


def _window(config: HfConfig) -> int:
    """The window of a Qwen model's layers that have one; 0: none has."""
    return _stated_window(config) if config.flag("use_sliding_window") else 0


def _uniform_windows(config: HfConfig) -> tuple[int, ...]:
    """The same window in every layer, or none."""
    return (_stated_window(config),) * _num_layers(config)


def _stated_window(config: HfConfig) -> int:
    """``sliding_window``; 0 where it is null."""
    return 0 if config.value("sliding_window") is None else config.integer("sliding_window")


def _dtype(config: HfConfig) -> str:
    """``dtype`` (transformers 5) or ``torch_dtype`` (4); float32 when neither is there."""
    field = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(field, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise config.error(field, name, f"one of {', '.join(DTYPES)}")
    return name
