"""``compressed-tensors`` of llm-compressor: groups of modules, each quantized in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...config.weight_format import W8A8, W8A8_STATIC, integer_format
from ..hf_json import HfConfig
from . import layouts
from .dialect import IN_16_BITS, Dialect, group_size, num_bits
from .layouts import Layout, Stored
from .module_lists import matcher
from .scheme import BLOCK, QuantKind

_STORED: Mapping[str, Stored] = {
    "pack-quantized": "packed",
    "naive-quantized": "bytes",
    "int-quantized": "bytes",
}
_FP8 = ("float-quantized", "naive-quantized")
_MXFP4, _NVFP4, _MIXED = "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mixed-precision"
_FORMATS = (*dict.fromkeys((*_FP8, *_STORED)), _MXFP4, _NVFP4, _MIXED)
# (strategy of weights, "static" or "dynamic", strategy of activations).
_FP8_KINDS: Mapping[tuple[str, str, str], QuantKind] = {
    ("tensor", "static", "tensor"): "fp8_static",
    ("tensor", "dynamic", "token"): "fp8",
    ("channel", "dynamic", "token"): "fp8",
    ("block", "dynamic", "group"): "fp8_block",
}
# ("static" or "dynamic", strategy of activations), of weights with a scale a channel or for all.
_INT8_KINDS: Mapping[tuple[str, str], QuantKind] = {
    ("static", "tensor"): W8A8_STATIC,
    ("dynamic", "token"): W8A8,
}
_IN_ORDER = (None, "weight", "static")
"""Values of ``actorder`` with which the columns of a group lie together."""


@dataclass(frozen=True)
class _Group:
    """One of ``config_groups``."""

    kind: QuantKind
    by_name: Callable[[str], bool]
    every: bool
    layout: Layout | None = None
    note: str = ""


def compressed_tensors(section: HfConfig) -> Dialect:
    """What a section says.

    Raises:
        UserError: a field is missing, or asks for what is not supported.
    """
    form = section.text("format")
    if form not in _FORMATS:
        raise section.error("format", form, f"one of {', '.join(_FORMATS)}")
    groups = list(_groups(section, form))
    if not groups:
        raise section.error("config_groups", section.values.get("config_groups"), "some groups")
    laid: dict[QuantKind, Layout] = {}
    for group in groups:
        if group.layout and laid.setdefault(group.kind, group.layout) != group.layout:
            raise section.error(
                "config_groups", group.kind, f"one layout of all groups in the format {group.kind}"
            )
    ignored = matcher(section, "ignore")

    def kind_of(name: str) -> QuantKind | None:
        if ignored(name):
            return None
        named = [group for group in groups if group.by_name(name)]
        chosen = named or [group for group in groups if group.every]
        return chosen[0].kind if chosen else None

    return Dialect(
        groups[0].kind,
        kind_of,
        tuple(laid.values()),
        ordered=any(layout.order for layout in laid.values()),
        notes=tuple(dict.fromkeys(group.note for group in groups if group.note)),
    )


def _groups(section: HfConfig, form: str) -> Iterator[_Group]:
    groups = section.section("config_groups")
    for name in groups.values if groups else ():
        assert groups is not None
        group = groups.section(name)
        if group is None:
            raise groups.error(name, groups.values[name], "an object")
        yield _group(group, group.text("format", form))


def _group(group: HfConfig, form: str) -> _Group:
    weights = group.section("weights")
    if weights is None:
        raise group.error("weights", None, "how weights are quantized")
    targets = group.values.get("targets")
    every = isinstance(targets, list) and "Linear" in targets
    others = [t for t in targets if t != "Linear"] if isinstance(targets, list) else targets
    by_name = matcher(HfConfig(group.path, {"targets": others}, group.prefix), "targets")
    bits, kind = weights.integer("num_bits"), weights.text("type")
    if form in (_MXFP4, _NVFP4):
        if (bits, kind) != (4, "float"):
            raise group.error("weights", f"{bits} bits of {kind}", f"4 bits of float in {form}")
        of = layouts.mxfp4 if form == _MXFP4 else layouts.nvfp4
        layout = of("compressed-tensors")
        return _Group(layout.target, by_name, every, layout, _note(group, layout.target))
    if kind == "int" and form in _STORED:
        layout, reason = _integers(group, weights, _STORED[form])
        return _Group(layout.target, by_name, every, layout, reason)
    if form not in _FP8:
        raise group.error(
            "format", form, f"one of {', '.join(f for f in _FORMATS if f != _MIXED)} for {bits} "
            f"bits of {kind}"
        )  # fmt: skip
    return _Group(_fp8_kind(group, weights), by_name, every)


def _int8_activations(
    group: HfConfig, bits: int, unit: tuple[int, int], symmetric: bool
) -> tuple[str, str]:
    """The format of weights and activations of int8, and why activations stay in 16 bits: one of
    the two, or neither where the checkpoint does not quantize activations."""
    activations = group.section("input_activations")
    if activations is None:
        return "", ""
    when = "dynamic" if activations.flag("dynamic", False) else "static"
    how = (activations.integer("num_bits"), activations.text("type"))
    if how != (8, "int") or not activations.flag("symmetric", True):
        zero = "" if activations.flag("symmetric", True) else " with zero points"
        return "", f"of {how[0]} bits of {how[1]}{zero}"
    if (target := _INT8_KINDS.get((when, activations.text("strategy")))) is None:
        return "", f"with {when} scales by {activations.text('strategy')}"
    if bits != 8 or unit[1] or not symmetric:
        return "", f"of int8 beside weights of {integer_format(bits, unit[1], zero=not symmetric)}"
    return target, ""


def _note(group: HfConfig, target: str) -> str:
    """What a start says of activations that the checkpoint would have quantized."""
    there = group.section("input_activations") is not None
    return IN_16_BITS.format(f"{target} is a format of weights alone") if there else ""


def _integers(group: HfConfig, weights: HfConfig, stored: Stored) -> tuple[Layout, str]:
    """The layout of a group's integers, and what a start says of its activations."""
    bits, strategy = num_bits(weights, "num_bits", 4, 8), weights.text("strategy")
    units = {"tensor": (0, 0), "channel": (1, 0)}
    if strategy == "group":
        units["group"] = (1, group_size(weights, "group_size"))
    if strategy not in units:
        raise weights.error("strategy", strategy, "tensor, channel or group")
    order, symmetric = weights.value("actorder"), weights.flag("symmetric", True)
    target, reason = _int8_activations(group, bits, units[strategy], symmetric)
    layout = layouts.compressed(
        bits,
        units[strategy],
        stored,
        symmetric=symmetric,
        ordered=order not in _IN_ORDER and order is not False,
        target=target,
    )
    return layout, reason and IN_16_BITS.format(f"they are {reason}, for which there is no format")


def _fp8_kind(group: HfConfig, weights: HfConfig) -> QuantKind:
    activations = group.section("input_activations")
    if activations is None:
        raise group.error("input_activations", None, "FP8 weights and activations")
    for args in (weights, activations):
        if (args.integer("num_bits"), args.text("type")) != (8, "float"):
            found = f"{args.values['num_bits']} bits of {args.values['type']}"
            raise group.error(args.prefix.split(".")[-2], found, "8 bits of float")
    block = weights.values.get("block_structure")
    if weights.text("strategy") == "block" and block not in (None, [BLOCK, BLOCK]):
        raise weights.error("block_structure", block, f"[{BLOCK}, {BLOCK}]")
    size = activations.values.get("group_size")
    if activations.text("strategy") == "group" and size != BLOCK:
        raise activations.error("group_size", size, str(BLOCK))
    when = "dynamic" if activations.flag("dynamic", False) else "static"
    found_kind = (weights.text("strategy"), when, activations.text("strategy"))
    if found_kind not in _FP8_KINDS:
        known = "; ".join(f"{w} weights, {d} {a} activations" for w, d, a in _FP8_KINDS)
        weight, when, activation = found_kind
        raise group.error("strategy", f"{weight} weights, {when} {activation} activations", known)
    return _FP8_KINDS[found_kind]
