"""``ModelSpec``: everything that tells one decoder from another, checked and frozen.

``hf_config`` makes it from a Hugging Face folder, options then set ``dtype_name``, ``quant``
and ``fp8_kv_cache``; modules, loader and KV cache read nothing else.  It is made without torch, so
that a bad config is refused before torch is imported, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import UserError, outside_key
from ..config.rope import RopeParameters
from ..config.routing import Routing
from ..config.weight_format import StoredFormat, why_not_experts
from .cache_spec import (
    KV_PAIRS,
    KVCacheSpec,
    LayerGroup,
    group_layers,
    hidden_cache_spec,
    stage_layers,
    torch_dtype,
)
from .captured.facts import CapturedFacts, LinearFacts
from .heads.spec import HeadSpec
from .quant.scheme import BLOCK, FORMATS, LINEARS, MOE_LINEARS, QuantKind, QuantScheme

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The experts of a model.

    Attributes:
        layers: for each layer, whether it has experts; the others have a dense feed-forward.
        num_experts: of each such layer.
        intermediate_size: of an expert.
        routing: how a token's experts are chosen.
        shared_intermediate_size: of the expert that all tokens have; 0: there is none.
        shared_gate: the shared expert's result is multiplied by the sigmoid of a linear layer.
        record_load: every layer counts how many tokens chose each expert.
    """

    layers: tuple[bool, ...]
    num_experts: int
    intermediate_size: int
    routing: Routing
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    record_load: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model.

    ``max_position_embeddings`` counts the positions that rope scaling reaches;
    ``sliding_windows`` has one entry a layer, tokens including the current one, 0 for none;
    ``dtype_name`` is the ``dtype`` of activations and of weights that ``quant`` leaves as they
    are; ``layers_of_groups`` has the layers of each cache group, if not as ``group_layers`` would;
    ``moe`` describes experts, None for a dense model; ``tensor_parallel_size`` ranks hold it
    together, with ``expert_parallel`` each of them whole experts.  Sizes are those of the whole
    model; ``local_`` ones are a rank's.

    A model of several pipeline stages is several smaller ones, see ``stage_of``: ``first_layer`` is
    the model's number of a stage's layer 0; only the first stage ``has_embedding``, and only the
    last ``has_head``, which are the last norm and ``lm_head``.

    ``captured`` describes a model without an adapter, whose code is its library's: fields that say
    how adapters' layers compute are neutral then.

    ``kept`` are the places whose hidden states a draft head reads: the number of the layer ahead of
    which the residual stream is stored, ``num_layers`` for what the last layer makes, and
    ``BEHIND_NORM`` for what the head of the vocabulary reads.  ``head`` describes a model that is
    such a draft head.

    ``notes`` says where the folder's files contradict each other and what was decided.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeParameters
    hidden_act: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int, ...]
    dtype_name: str
    quant: QuantScheme | None = None
    fp8_kv_cache: bool = False
    layers_of_groups: tuple[tuple[int, ...], ...] = ()
    moe: MoESpec | None = None
    captured: CapturedFacts | None = None
    kept: tuple[int, ...] = ()
    head: HeadSpec | None = None
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    pipeline_parallel_size: int = 1
    first_layer: int = field(
        default=0, metadata=outside_key("stages that differ in weights alone run the same code")
    )
    has_embedding: bool = True
    has_head: bool = True
    notes: tuple[str, ...] = field(
        default=(), compare=False, metadata=outside_key("what a start says of the folder")
    )

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype_name)

    @property
    def local_heads(self) -> int:
        return self.num_heads // self.tensor_parallel_size

    @property
    def local_kv_heads(self) -> int:
        """KV heads of a rank; several ranks hold the same one where there are more of them."""
        return max(1, self.num_kv_heads // self.tensor_parallel_size)

    @cached_property
    def cache_groups(self) -> tuple[LayerGroup, ...]:
        """Layers by the KV cache that they share.  Every stage has the groups of the whole model,
        since a step brings a block table for each; of some it may have no layer."""
        dtype_name = "float8_e4m3fn" if self.fp8_kv_cache else self.dtype_name
        heads = [(self.local_kv_heads, self.head_dim)] * self.num_layers
        if self.captured:
            heads = [(call.local_kv_heads, call.head_dim) for call in self.captured.attention]
        specs = [
            KVCacheSpec(KV_PAIRS, num_heads, (width,), dtype_name, window)
            for (num_heads, width), window in zip(heads, self.sliding_windows, strict=True)
        ]
        if not self.layers_of_groups:
            return group_layers(specs, self.pipeline_parallel_size)
        return tuple(LayerGroup(specs[(*layers, 0)[0]], layers) for layers in self.layers_of_groups)

    def cache_group(self, layer: int) -> int:
        """Number of the group that a layer belongs to."""
        return next(i for i, group in enumerate(self.cache_groups) if layer in group.layers)

    @property
    def hidden_cache(self) -> KVCacheSpec:
        """The cache of each of the ``kept`` hidden states."""
        return hidden_cache_spec(self.hidden_size, self.dtype_name)

    @property
    def whole_group(self) -> int | None:
        """The number of the first cache group that keeps all tokens of a sequence; None if none
        does."""
        for number, group in enumerate(self.cache_groups):
            if not (group.spec.window or group.spec.kind.per_sequence):
                return number
        return None

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts if self.moe else 0

    @property
    def local_experts(self) -> int:
        """Experts of which a rank holds all or a part."""
        return self.num_experts // (self.tensor_parallel_size if self.expert_parallel else 1)

    @property
    def ranks_an_expert(self) -> int:
        """Ranks that hold an expert together."""
        return 1 if self.expert_parallel else self.tensor_parallel_size

    @property
    def expert_shape(self) -> tuple[int, int, str] | None:
        """The key of the experts' tuned tiles: the number of experts on a rank, its part of
        their intermediate size, and the kind of weights; None for a dense model, and for formats
        of which no tiles are tuned."""
        if self.moe is None:
            return None
        kind = self.quant_of(self.moe.layers.index(True), "mlp.experts.gate_up")
        if isinstance(FORMATS.get(kind or ""), StoredFormat):
            return None
        kinds = {None: "bfloat16", "fp8_block": "fp8 block"}
        inner = self.moe.intermediate_size // self.ranks_an_expert
        return self.local_experts, inner, kinds.get(kind, "fp8")

    @property
    def layer_params(self) -> float:
        """The number of weights of linear layers that one token meets in a layer, on average over
        the layers; of experts, those that it chooses."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        inner, moe = float(self.intermediate_size), self.moe
        if moe is not None:
            chosen = moe.routing.top_k * moe.intermediate_size + moe.shared_intermediate_size
            share = sum(moe.layers) / self.num_layers
            inner += share * (chosen - inner)
        return self.hidden_size * (attention + 3 * inner)

    @property
    def linears(self) -> tuple[str, ...]:
        """The names in ``LINEARS`` and ``MOE_LINEARS`` of the layers that the model has; of a
        captured model, its library's names."""
        if self.captured:
            return tuple(linear.name for linear in self.captured.linears)
        if self.moe is None:
            return LINEARS
        dense = LINEARS[: 2 if all(self.moe.layers) else 4]
        return dense + MOE_LINEARS[: 4 if self.moe.shared_intermediate_size else 2]

    def quant_of(self, layer: int, linear: str) -> QuantKind | None:
        """How one of ``linears`` is quantized; None: not at all."""
        return self.quant.kind_of(layer, linear) if self.quant else None

    def part_rows(self, linear: str) -> tuple[int, ...]:
        """Rows of the checkpoint tensors of which a rank's weight of one of ``linears`` is made."""
        if self.captured:
            return (self._captured_size(linear, "column"),)
        if linear == "attention.qkv":
            return self.local_heads * self.head_dim, self.local_kv_heads * self.head_dim
        if linear.endswith("gate_up"):
            return (self.in_features(linear.replace("gate_up", "down")),)
        return (self.hidden_size,)

    @property
    def quantized_kinds(self) -> list[tuple[str, QuantKind]]:
        """Those of ``linears`` that are quantized in some layer, each with every kind that it has
        there."""
        layers = range(self.num_layers)
        pairs = ((name, self.quant_of(i, name)) for name in self.linears for i in layers)
        return [(name, kind) for name, kind in dict.fromkeys(pairs) if kind]

    @cached_property
    def _captured_linears(self) -> dict[str, LinearFacts]:
        return {each.name: each for each in self.captured.linears} if self.captured else {}

    def _captured_size(self, linear: str, kind: str) -> int:
        """Rows (kind "column") or columns (kind "row") of what a rank holds of a captured model's
        weight; those of a whole one where its other side is split, or nothing is."""
        assert self.captured is not None
        each = self._captured_linears[linear]
        names = (each.name, f"{each.name}.weight")
        shards = (s for s in self.captured.shards if s.name in names and s.kind == kind)
        whole = each.rows if kind == "column" else each.columns
        return next((shard.rule.local_size(self.captured.ranks) for shard in shards), whole)

    def of_experts(self, linear: str) -> bool:
        """Whether one of ``linears`` is a weight of several experts."""
        if self.captured:
            return self._captured_linears[linear].experts > 0
        return linear.startswith("mlp.experts.")

    def why_not_stored(self, linear: str, form: StoredFormat) -> str:
        """Why a rank's weight of one of ``linears``, and the parts that are merged in it, are not
        made of whole elements and units of a format; "" if they are."""
        if self.of_experts(linear) and (why := why_not_experts(form)):
            return f"{linear} would be {form.name!r}, which kernels of experts do not read: {why}"
        for name, tensor in form.tensors.items():
            for rows in self.part_rows(linear):
                if why := tensor.why_not((rows, self.in_features(linear))):
                    return f"{name} of {linear} would have {why} in the format {form.name!r}"
        return ""

    def in_features(self, linear: str) -> int:
        """Columns of a rank's weight of one of ``linears``."""
        if self.captured:
            return self._captured_size(linear, "row")
        if linear == "attention.o":
            return self.local_heads * self.head_dim
        if not linear.endswith("down"):
            return self.hidden_size
        sizes = {"mlp.down": self.intermediate_size}
        if self.moe:
            sizes["mlp.experts.down"] = self.moe.intermediate_size
            sizes["mlp.shared.down"] = self.moe.shared_intermediate_size
        of_experts = linear == "mlp.experts.down"
        return sizes[linear] // (self.ranks_an_expert if of_experts else self.tensor_parallel_size)


def stage_of(spec: ModelSpec, number: int) -> ModelSpec:
    """One of the ``pipeline_parallel_size`` stages of a model, as a model of its layers alone.

    It reads and gives hidden states where the whole model has other stages.  Its layers are counted
    from 0, so that stages of the middle that are alike have one key, and share an artifact.
    """
    if spec.pipeline_parallel_size == 1:
        return spec
    layers = stage_layers(spec.num_layers, spec.pipeline_parallel_size)[number]
    first, end = layers.start, layers.stop
    moe, quant = spec.moe, spec.quant
    if moe is not None:
        moe = replace(moe, layers=moe.layers[first:end]) if any(moe.layers[first:end]) else None
    return replace(
        spec,
        num_layers=len(layers),
        first_layer=first,
        sliding_windows=spec.sliding_windows[first:end],
        layers_of_groups=tuple(
            tuple(layer - first for layer in group.layers if layer in layers)
            for group in spec.cache_groups
        ),
        quant=quant.of_layers(layers) if quant else None,
        moe=moe,
        has_embedding=first == 0,
        has_head=end == spec.num_layers,
    )


def quantize_online(spec: ModelSpec, kind: QuantKind) -> ModelSpec:
    """``spec`` with weights that are quantized while they are loaded: all of ``spec.linears``, but
    by blocks only those that whole blocks read, and in admitted formats only whole units.

    Raises:
        UserError: there are none.
    """
    check_online_kind(spec, kind)
    left = _left_by_blocks(spec, kind)
    scheme = QuantScheme(kind, (left,) * spec.num_layers, online=True)
    notes = (_say_left(spec, kind, left),) if left else ()
    return replace(spec, quant=scheme, notes=(*spec.notes, *notes))


def _say_left(spec: ModelSpec, kind: str, left: tuple[str, ...]) -> str:
    """Which layers a kind of quantization leaves out, and why the first of them."""
    form, first = FORMATS[kind], left[0]
    if spec.of_experts(first):
        why = "weights of experts are FP8 alone"
    elif isinstance(form, StoredFormat):
        why = spec.why_not_stored(first, form)
    else:
        why = f"{first} reads {spec.in_features(first)} features, no multiple of {form.columns}"
    more = f" and {len(left) - 4} more" if len(left) > 4 else ""
    return f"quantization={kind} leaves {', '.join(left[:4])}{more} in {spec.dtype_name}: {why}"


def check_online_kind(spec: ModelSpec, kind: str) -> None:
    """Refuse a kind of quantization that fits none of ``spec.linears``.

    Raises:
        UserError: names another kind.
    """
    if _left_by_blocks(spec, kind) == spec.linears:
        form = FORMATS[kind]
        columns = form.step(1) if isinstance(form, StoredFormat) else BLOCK
        raise UserError(
            f"quantization={kind}: no linear layer of the model reads a multiple of {columns} "
            "features; use fp8"
        )


def _left_by_blocks(spec: ModelSpec, kind: str) -> tuple[str, ...]:
    """The layers of ``spec.linears`` whose inputs are not made of whole blocks, or which an
    admitted format cannot store."""
    form = FORMATS[kind]
    if isinstance(form, StoredFormat):
        return tuple(n for n in spec.linears if spec.why_not_stored(n, form))
    return tuple(n for n in spec.linears if form.columns and spec.in_features(n) % form.columns)


def check_blocks(path: Path, spec: ModelSpec, quant: QuantScheme | None) -> None:
    """Refuse a checkpoint's quantization that does not fit the sizes of the model's linear layers.

    Raises:
        UserError: names ``path``, the layer and what fits.
    """
    for linear, kind in replace(spec, quant=quant).quantized_kinds if quant else ():
        form = FORMATS[kind]
        if isinstance(form, StoredFormat):
            if reason := spec.why_not_stored(linear, form):
                of_experts = " (experts: int4, int8, MXFP4 or FP8)" * spec.of_experts(linear)
                other = f"use another format{of_experts}"
                raise UserError(f"{path}: {reason}; leave it unquantized, or {other}")
            continue
        size = spec.in_features(linear)
        if form.blocks and size % BLOCK:
            raise UserError(
                f"{path}: {linear} reads {size} features, expected a multiple of {BLOCK} for a "
                "scale of every so many; use weights with a scale for each channel"
            )
