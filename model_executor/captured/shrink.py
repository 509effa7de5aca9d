"""Twins: small copies of a model's configuration.

``shrunk`` keeps the class, the flags and every kind of layer of a configuration and makes its sizes
small.  It first makes the sizes small at full depth, builds that model without memory to see which
layers are alike, and then keeps few layers of each kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fusewright.model_executor.captured.layer_kinds import (
    Chosen,
    counts_layers,
    few_layers,
    kinds_of_layers,
    lists_layers,
    on_meta,
)
from fusewright.model_executor.captured.random_weights import randomize
from fusewright.model_executor.captured.sizes import (
    CLAMP,
    POSITIONS,
    ROPE_BANDS,
    ROPE_SWITCH,
    SOFT_CAP,
    Sizes,
    flat,
    is_int,
    kind_of,
)

__all__ = ["randomize", "shrunk"]

_LEFT_OUT = {"transformers_version", "architectures", "quantization_config", "id2label", "label2id"}
_PER_LAYER, _ORIGINAL = "per_layer_config", "original_max_position_embeddings"
_BY_FREQUENCY = ("yarn", "llama3")
_FROM_START = re.compile(r"dense_(replace|layers)|window_layers$|layer_(start|end)_index$")
_FROM_END = re.compile(r"kv_shared_layers$")
_SOFT_CAP = re.compile(r"soft_?cap")
_CLAMP = re.compile(r"^clip_qkv$|_limit$")
_DROPOUT = re.compile(r"drop(out)?($|_)|dropout|pdrop|layerdrop")


def shrunk(config: Any) -> Any:
    """A configuration of the same class, flags and kinds of layers, with small sizes.

    ``config`` is a ``PretrainedConfig`` of a causal language model; those nested in it are shrunk
    too.  It is not changed.
    """
    whole = _scaled(config, {})
    kinds = kinds_of_layers(on_meta(whole), per_layer_lists(whole))
    for chosen in few_layers(kinds):
        twin = _scaled(config, chosen)
        try:
            kept = kinds_of_layers(on_meta(twin), per_layer_lists(twin))
        except ValueError:  # such as weights to share that only one layer has
            continue
        depths = {depth: len(layers) for depth, layers in chosen.items()}
        if all(len({*kept[depths[depth]]}) >= len({*kinds[depth]}) for depth in depths):
            return twin
    return whole


def is_config(value: Any) -> bool:
    return hasattr(type(value), "sub_configs_defaults")


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a configuration under its own names, and what else was set on it."""
    mapped = config.attribute_map
    names = [mapped.get(field.name, field.name) for field in fields(config) if field.init]
    others = [name for name in vars(config) if name not in names and not name.startswith("_")]
    own = {name: vars(config)[name] for name in (*names, *others) if name in vars(config)}
    if config.is_heterogeneous:
        own[_PER_LAYER] = config.to_dict()[_PER_LAYER]
    return {name: value for name, value in own.items() if name not in _LEFT_OUT}


def common_int(config: Any, name: str, default: int = 0) -> int:
    """An integer that the library knows by a common name, such as ``num_hidden_layers``."""
    value = vars(config).get(config.attribute_map.get(name, name))
    return value if is_int(value) else default


def depths_of(config: Any) -> list[int]:
    """The depths of a configuration's stacks of layers."""
    own = fields_of(config).items()
    return sorted({value for name, value in own if is_int(value) and counts_layers(name)})


def per_layer_lists(config: Any) -> dict[int, list[Sequence[Any]]]:
    """Depth -> the lists with an entry for each layer, in a configuration and those in it."""
    lists: dict[int, list[Sequence[Any]]] = {depth: [] for depth in depths_of(config)}
    for name, value in fields_of(config).items():
        if is_config(value):
            for depth, inner in per_layer_lists(value).items():
                lists.setdefault(depth, []).extend(inner)
        elif isinstance(value, (list, tuple)) and len(value) in depths_of(config):
            if not lists_layers(name, value, len(value)):
                lists[len(value)].append(value)
            else:
                lists[len(value)].append([index in value for index in range(len(value))])
    return lists


def _sizes_of(config: Any, widths: Mapping[int, int]) -> Sizes:
    heads = common_int(config, "num_attention_heads")
    kv_heads = common_int(config, "num_key_value_heads", heads)
    return Sizes(fields_of(config), common_int(config, "hidden_size"), heads, kv_heads, widths)


def _widths(config: Any) -> dict[int, int]:
    """Old -> new hidden size of a configuration and those in it."""
    widths = dict[int, int]()
    for inner in filter(is_config, fields_of(config).values()):
        widths |= _widths(inner)
    sizes = _sizes_of(config, {})
    return {**widths, sizes.hidden: sizes.new_hidden} if sizes.hidden else widths


def _scaled(config: Any, chosen: Chosen, widths: Mapping[int, int] | None = None) -> Any:
    """A configuration with small sizes, and of its stacks those layers that are chosen."""
    widths = _widths(config) if widths is None else widths
    own = fields_of(config)
    scaling = _Scaling(_sizes_of(config, widths), chosen, depths_of(config))
    scaled = {name: scaling.field(name, value) for name, value in own.items()}
    names = {
        config.attribute_map.get(field.name, field.name): field.name for field in fields(config)
    }
    names |= {_PER_LAYER: _PER_LAYER}
    twin = type(config)(**{names[name]: value for name, value in scaled.items() if name in names})
    twin.architectures = config.architectures
    for name, value in scaled.items():
        if name not in vars(twin) and name != _PER_LAYER:
            setattr(twin, name, value)
    return twin


@dataclass(frozen=True)
class _Scaling:
    """How the fields of one configuration become small."""

    sizes: Sizes
    chosen: Chosen
    depths: Sequence[int]

    def field(self, name: str, value: Any, outer: str = "") -> Any:
        """The new value of a field; ``outer`` names the dict that holds it."""
        if is_config(value):
            return _scaled(value, self.chosen, self.sizes.widths)
        if name == _PER_LAYER:
            return self.overrides(value)
        if isinstance(value, Mapping):
            if "rope" in name or "rope_theta" in value or "rope_type" in value:
                return self.rope(value)
            return {key: self.field(str(key), item, name) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return self.entries(name, value)
        if isinstance(value, float):
            return self.number(name, value)
        if not is_int(value):
            return value
        if _DROPOUT.search(name):
            return 0
        if name == _ORIGINAL:
            return self.rope_parameter(name, value)
        if counts_layers(name):
            return self.depth(value)
        if _FROM_START.search(name) or _FROM_END.search(name):
            return self.count(name, value)
        return self.sizes.new_int(name, value, kind_of(name) or kind_of(outer))

    def depth(self, value: int) -> int:
        """How many layers are kept of a stack, or of several passes over one."""
        for depth, layers in self.chosen.items():
            if value % depth == 0 and (value == depth or value not in self.chosen):
                return len(layers) * (value // depth)
        return value

    def count(self, name: str, value: int) -> int:
        """A number of first or last layers becomes that of those which are kept."""
        for depth in self.depths:
            if depth in self.chosen:
                if _FROM_END.search(name):
                    return sum(index >= depth - value for index in self.chosen[depth])
                return sum(index < value for index in self.chosen[depth])
        return value

    def number(self, name: str, value: float) -> float:
        if _DROPOUT.search(name):
            return 0.0
        if _SOFT_CAP.search(name) and value > 0:
            return min(value, SOFT_CAP)
        if _CLAMP.search(name) and 0 < value < math.inf:
            return min(value, CLAMP)
        head_dim = self.sizes.head_dim
        for power in (-1, -0.5):
            if name.startswith("attention") and math.isclose(value, head_dim**power, rel_tol=1e-3):
                return float(self.sizes.new_head_dim(head_dim) ** power)
        return value

    def overrides(self, value: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Fields of single layers, by the number of the layer."""
        fields_by_layer = {int(index): layer for index, layer in value.items()}
        depth = max(self.depths, default=0)
        chosen = self.chosen.get(depth, range(depth))
        return {
            new: {name: self.field(name, item) for name, item in fields_by_layer[old].items()}
            for new, old in enumerate(chosen)
            if old in fields_by_layer
        }

    def entries(self, name: str, value: Sequence[Any]) -> list[Any]:
        """A list: with an entry a layer, of layers, or of sizes."""
        for depth in self.depths:
            chosen = self.chosen.get(depth, range(depth))
            if lists_layers(name, value, depth) and value:
                return [new for new, old in enumerate(chosen) if old in value]
            if len(value) == depth:
                return [self.field(name, value[index]) for index in chosen]
            if sum(len(kinds) * times for kinds, times in _runs(value)) == depth:
                kinds = [kind for kinds, times in _runs(value) for kind in kinds * times]
                return [[[kinds[index] for index in chosen], 1]]
        ints = len(value) > 1 and all(is_int(item) for item in value)
        if ints and sum(value) == self.sizes.hidden:
            return _parts(value, self.sizes.new_hidden)
        if ints and math.prod(value) in self.sizes.values_of("position"):
            return [math.isqrt(POSITIONS)] * 2 if len(value) == 2 else [*value]
        return [self.field(name, item) for item in value]

    def rope(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of rotary positions, for all layers or by kind of layer: the part of a head
        that turns keeps its fraction, and a scaling starts within the first positions."""
        if not ("rope_theta" in rope or "rope_type" in rope or "type" in rope):
            return {
                key: self.rope(value) if isinstance(value, Mapping) else value
                for key, value in rope.items()
            }
        return {key: self.rope_parameter(key, value) for key, value in rope.items()}

    @property
    def scales_by_frequency(self) -> bool:
        """Whether a rope scaling depends on wavelengths alone, and not on the position."""
        facts = [*flat(self.sizes.values)]
        by_frequency = any(k in ("rope_type", "type") and v in _BY_FREQUENCY for k, v in facts)
        return by_frequency and not any(name == "llama_4_scaling_beta" for name, _ in facts)

    def rope_parameter(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self.rope(value)
        head_dim = self.sizes.new_head_dim(self.sizes.head_dim)
        if name == "partial_rotary_factor" and value:
            return max(2, 2 * round(value * head_dim / 2)) / head_dim
        if name == _ORIGINAL and is_int(value):
            return min(value, ROPE_BANDS if self.scales_by_frequency else ROPE_SWITCH)
        if isinstance(value, (list, tuple)):
            length = max(1, round(len(value) * head_dim / self.sizes.head_dim))
            if all(is_int(item) for item in value):
                return _parts(value, max(1, sum(value) * head_dim // self.sizes.head_dim))
            return [value[index * len(value) // length] for index in range(length)]
        return self.sizes.new_int(name, value) if is_int(value) else value


def _runs(value: Sequence[Any]) -> list[tuple[list[Any], int]]:
    """The entries of a list such as ``[[["global", "local"], 12]]``: patterns and how often."""
    runs = [item for item in value if isinstance(item, (list, tuple)) and len(item) == 2]
    patterns = [(kinds, times) for kinds, times in runs if isinstance(kinds, list)]
    return patterns if len(patterns) == len(value) and all(is_int(t) for _, t in patterns) else []


def _parts(values: Sequence[int], total: int) -> list[int]:
    """Parts of a smaller total in about the same ratio, none of them zero."""
    parts = [max(1, value * total // sum(values)) for value in values]
    parts[0] += total - sum(parts)
    return parts
