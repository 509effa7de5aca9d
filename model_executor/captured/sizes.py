"""Small sizes for a configuration of ``transformers``, field by field.

A field is recognised by its name's pattern and by what its value is to the others: equal values
stay equal, a width that is a multiple of the hidden size stays one, and the ratio of query to KV
heads is kept.  Nothing here knows a model type or a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

HEAD_DIM, HIDDEN, OTHER_HIDDEN = 16, 64, 96
VOCAB, POSITIONS, STATE = 128, 256, 16
INTERMEDIATE = (96, 160, 224, 48, 112, 144)
"""Intermediate sizes, given to the distinct ones of a configuration in their order."""
RANKS, WINDOWS = (16, 24, 32, 40), (8, 12, 16, 20)
EXPERTS, MANY_EXPERTS, FEW = 8, 16, 2
ROPE_SWITCH, ROPE_BANDS = 16, 64
"""Positions for which a rope was trained before it was scaled. A scaling that starts behind them
starts within the first tokens; one by frequency has all its bands in a head of 16."""
SOFT_CAP, CLAMP = 4.0, 1.5

_NAMES = {
    "token": r"token_(id|index)s?$|_tokens$|(unk|mask|pad|bos|eos)_index$",
    "vocab": r"vocab_size|vocab$",
    "rank": r"rank$",
    "window": r"sliding_window(_size)?$|attention_window|^window_size|attention_chunk_size"
    r"|chunk_length$|^local_attention|^(mamba_)?chunk_size$|index_topk$|keep_window|compress_rate|floor_scale"
    r"|_n_floor$|^(index_)?block_size$",
    "position": r"max_position|n_positions|n_ctx|max_seq_len|max_length$|model_max"
    r"|(source|target)_positions|^context_length|max_distance|rel_extent",
    "topk_group": r"^topk_group$",
    "group": r"^n_group$|num_expert_group",
    "top_k": r"experts_per_tok|moe_?(top_?)?k$|top_k_experts",
    "expert": r"experts$|expert_num$",
    "head_dim": r"head_?dim|head_size|d_head$|dim_head|kv_channels|query_pre_attn_scalar"
    r"|rotary_dim$",
    "kv_head": r"(kv|key_value)_(n_)?heads$|query_groups$",
    "head": r"heads?(_per_layer)?$",
    "intermediate": r"intermediate_size|ffn_(dim|hidden)|n_inner$|d_inner$|dim_ff|^dff$"
    r"|feed_forward_size|mlp_dim$",
    "state": r"d_state$|state_size$",
    "width": r"hidden_size|d_model$|n_embd$|emb(ed|edding)?_(dim|size)|dim_model(_base)?$|lru_width"
    r"|proj_dim$|hidden_dim|(in|out|input|output)_(dim|size)$|latent_size|d_ssm$",
    "few": r"topk_blocks$",
}
_KINDS = {kind: re.compile(pattern) for kind, pattern in _NAMES.items()}
_NO_SIZE = re.compile(r"shared_experts$|window_layers|patch|image|audio|num_channels")


def kind_of(name: str) -> str:
    """Return what a field of that name counts; "" if it is no size that is known."""
    if _NO_SIZE.search(name) and not _KINDS["token"].search(name):
        return ""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "")


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of every entry, those of dicts and lists in it included."""
    for name, value in values.items():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Mapping):
                yield from flat({str(key): entry for key, entry in item.items()})
            else:
                yield name, item


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sizes:
    """The small size of every field of one configuration.

    ``values`` are its fields; ``hidden``, ``heads`` and ``kv_heads`` what the library's common
    names say of it, 0 where it has none.
    """

    values: Mapping[str, Any]
    hidden: int
    heads: int
    kv_heads: int
    widths: Mapping[int, int] = field(default_factory=dict)
    """Old -> new hidden size of the configurations beside this one."""

    @cached_property
    def by_kind(self) -> dict[str, list[tuple[str, int]]]:
        """Kind of size -> the fields of it, each with its value."""
        fields = [(name, value) for name, value in flat(self.values) if is_int(value) and value > 0]
        return {kind: [f for f in fields if kind_of(f[0]) == kind] for kind in _KINDS}

    def values_of(self, kind: str) -> list[int]:
        """The distinct values of a kind, in ascending order."""
        return sorted({value for _, value in self.by_kind[kind]})

    @cached_property
    def head_dim(self) -> int:
        """The dimension of the heads of attention; that which hidden size and heads imply if no
        field says one."""
        named = dict(reversed(self.by_kind["head_dim"]))  # of single layers' fields, the first
        plain = next((named[name] for name in named if "_nope_" in name), named.get("head_dim"))
        named.pop("rotary_dim", None)
        implied = self.hidden // self.heads if self.hidden and self.heads else HEAD_DIM
        return plain or max(named.values(), default=implied)

    @cached_property
    def new_heads(self) -> tuple[int, int]:
        """(query heads, KV heads): of the same ratio as long as that is at most eight."""
        heads, kv_heads = self.heads, min(self.kv_heads, self.heads)
        if heads == kv_heads or heads % kv_heads:
            return min(heads, 4), min(kv_heads, 4)
        if kv_heads == 1:
            return min(heads, 4), 1
        ratio = heads // kv_heads
        ratio = ratio if ratio <= 8 else 8 - ratio % 2
        return 2 * ratio, 2

    @cached_property
    def new_hidden(self) -> int:
        """The small hidden size: what all heads hold if it was that before, else another."""
        if any(name.endswith("_dim_factor") for name in self.values):
            return 2 * HIDDEN  # such models round their widths to 64
        heads_hold = self.new_heads[0] * HEAD_DIM if self.heads else HIDDEN
        if not self.heads or self.hidden == self.heads * self.head_dim:
            return heads_hold
        return HIDDEN if heads_hold != HIDDEN else OTHER_HIDDEN

    def new_head_dim(self, value: int) -> int:
        return max(4, 4 * round(value * HEAD_DIM / self.head_dim / 4))

    def new_head_count(self, name: str, value: int) -> int:
        """Heads of a recurrent layer, an indexer or such: they hold the same multiple of the
        hidden size as before, if they held one."""
        if value == self.heads:
            return self.new_heads[0]
        if value == self.kv_heads:
            return self.new_heads[1]
        family = _family(name)
        widths = self.values_of("width")
        for other, dim in self.by_kind["head_dim"]:
            if _family(other) != family:
                continue
            held = Fraction(value * dim, self.hidden or 1)
            if value * dim in widths or (held.denominator <= 2 and held <= 4):
                return max(1, self.new_width(value * dim) // self.new_head_dim(dim))
        kinds = [*self.by_kind["head"], *self.by_kind["kv_head"]]
        least = min((v for other, v in kinds if _family(other) == family), default=value)
        return min(value, min(least, 4) * max(1, value // least))

    def new_width(self, value: int) -> int:
        if value != self.hidden and value in self.widths:
            return self.widths[value]
        ratio = Fraction(value, self.hidden or value)
        if ratio.denominator <= 16 and ratio.numerator <= 16:
            return max(4, int(ratio * self.new_hidden))
        return max(4, 4 * round(value * self.new_hidden / (self.hidden or value) / 4))

    def new_intermediate(self, value: int) -> int:
        expand = next((v for k, v in self.values.items() if k.endswith("expand") and v), 0)
        if expand and value == expand * self.hidden:
            return int(expand * self.new_hidden)
        return _by_order(INTERMEDIATE, self.values_of("intermediate"), value)

    @cached_property
    def new_experts(self) -> int:
        experts = max(self.values_of("expert"), default=0)
        return min(experts, MANY_EXPERTS if experts >= 64 else EXPERTS)

    @cached_property
    def new_groups(self) -> int:
        return min(max(self.values_of("group"), default=1), self.new_experts // 2 or 1, 4)

    def new_routing(self, kind: str, value: int) -> int:
        """Counts of routers: experts, groups, and how many of each a token takes."""
        experts, groups = max(self.values_of("expert"), default=1), self.values_of("group") or [1]
        if kind == "expert":
            return self.new_experts if value == experts else max(2, min(value, 4))
        if kind == "group":
            return self.new_groups
        taken = max([1, *self.values_of("topk_group")])
        new_taken = max(1, taken * self.new_groups // max(groups))
        if kind == "topk_group":
            return new_taken
        if value >= experts:
            return self.new_experts
        return max(1, min(value, 3, new_taken * self.new_experts // self.new_groups - 1))

    def new_token(self, value: int) -> int:
        """Ids beyond the small vocabulary become its last ones, different ones different ones."""
        beyond = [token for token in self.values_of("token") if token >= VOCAB - 16]
        return VOCAB - 1 - beyond.index(value) % 16 if value in beyond else value

    def new_int(self, name: str, value: int, kind: str | None = None) -> int:
        """The small value of an integer field; the value itself if it counts nothing known."""
        kind = kind_of(name) if kind is None else kind
        if value <= 0:
            return value
        match kind:
            case "head_dim":
                return self.new_head_dim(value)
            case "head" | "kv_head":
                return self.new_head_count(name, value)
            case "width":
                return self.new_width(value)
            case "intermediate":
                return self.new_intermediate(value)
            case "expert" | "group" | "topk_group" | "top_k":
                return self.new_routing(kind, value)
            case "token":
                return self.new_token(value)
            case "rank":
                return min(value, _by_order(RANKS, self.values_of(kind), value))
            case "window":
                return min(value, _by_order(WINDOWS, self.values_of(kind), value))
            case "vocab":
                return min(value, VOCAB)
            case "position":
                return min(value, POSITIONS)
            case "few":
                return min(value, FEW)
            case "state":
                return min(value, STATE)
        return value


def _family(name: str) -> str:
    """Return the owner of a field of heads: ``mamba`` of ``mamba_n_heads``, "" of ``num_heads``."""
    first = name.split("_")[0]
    return "" if first in ("n", "num", "head", "headdim", "d", "dim") else first


def _by_order(sizes: tuple[int, ...], values: list[int], value: int) -> int:
    """The size that belongs to a value among the distinct values of its kind."""
    return sizes[values.index(value) % len(sizes)] if value in values else sizes[0]
