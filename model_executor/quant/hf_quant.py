"""A checkpoint's own word on how it is quantized -> ``QuantScheme``.

Three dialects: ``fp8`` of transformers, ``compressed-tensors`` of llm-compressor, and ``modelopt``
of NVIDIA, whose word may also lie in a file beside ``config.json``.  ``stored`` names a format that
is admitted, whoever wrote the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ...config.errors import UserError
from ...config.weight_format import STORED_FORMATS
from ..hf_json import HfConfig, read_json
from ..sharding import ModulePart
from .scheme import BLOCK, LINEARS, MOE_LINEARS, QuantKind, QuantScheme

_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_KINDS: Mapping[str, QuantKind] = {
    "FP8": "fp8_static",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}
# (strategy of weights, "static" or "dynamic", strategy of activations).
_GROUP_KINDS: Mapping[tuple[str, str, str], QuantKind] = {
    ("tensor", "static", "tensor"): "fp8_static",
    ("tensor", "dynamic", "token"): "fp8",
    ("channel", "dynamic", "token"): "fp8",
    ("block", "dynamic", "group"): "fp8_block",
}


def read_quantization(
    config: HfConfig, names: Iterable[tuple[str, ModulePart]], num_layers: int
) -> QuantScheme | None:
    """How the checkpoint of a ``config.json`` is quantized; None: not at all.

    Args:
        names: checkpoint names of the model's modules, and their targets.

    Raises:
        UserError: in another way than is supported, or not alike where it must be.
    """
    if (method := _method(config)) is None:
        return None
    kind, quantized = method
    parts = quantized((name, target.module) for name, target in names)
    every = (*LINEARS, *MOE_LINEARS)
    unquantized = tuple(
        tuple(n for n in every if parts.get(f"layers.{layer}.{n}") is False)
        for layer in range(num_layers)
    )
    return QuantScheme(kind, unquantized, online=False)


def read_captured_quantization(
    config: HfConfig, names: Callable[[], Iterable[tuple[str, str]]], num_layers: int
) -> QuantScheme | None:
    """The same for a captured model; errors are those of ``read_quantization``.

    Args:
        names: gives checkpoint names of modules, and the linear layer of ``ModelSpec.linears`` that
            each is a part of.
    """
    if (method := _method(config)) is None:
        return None
    kind, quantized = method
    left = tuple(linear for linear, is_quantized in quantized(names()).items() if not is_quantized)
    return QuantScheme(kind, (left,) * num_layers, online=False)


_ByModule: TypeAlias = Callable[[Iterable[tuple[str, str]]], dict[str, bool]]
"""Whether each module is quantized, of (checkpoint name, module of which it is a part)."""


def _method(config: HfConfig) -> tuple[QuantKind, _ByModule] | None:
    section = config.section("quantization_config")
    beside = config.path.parent / _MODELOPT_FILE
    if section is None and not beside.is_file():
        return None
    method = "modelopt" if section is None else section.text("quant_method")
    if method not in _METHODS:
        assert section is not None
        raise section.error("quant_method", method, f"one of {', '.join(_METHODS)}")
    if method == "modelopt" and (section is None or not section.has("quant_algo")):
        section = _modelopt_section(beside)
    assert section is not None
    kind, quantizes = _METHODS[method](section)
    return kind, partial(_quantized, section, quantizes)


def _fp8(section: HfConfig) -> tuple[QuantKind, Callable[[str], bool]]:
    activations = section.text("activation_scheme", "dynamic")
    if activations not in ("static", "dynamic"):
        raise section.error("activation_scheme", activations, "static or dynamic")
    skipped = _matcher(section, "modules_to_not_convert", "ignored_layers")
    block = section.values.get("weight_block_size")
    if block is None:
        kind: QuantKind = "fp8_static" if activations == "static" else "fp8"
    elif block != [BLOCK, BLOCK]:
        raise section.error("weight_block_size", block, f"[{BLOCK}, {BLOCK}] or null")
    elif activations == "static":
        raise section.error("activation_scheme", activations, "dynamic with weight_block_size")
    else:
        kind = "fp8_block"
    return kind, lambda name: not skipped(name)


def _compressed_tensors(section: HfConfig) -> tuple[QuantKind, Callable[[str], bool]]:
    if (form := section.text("format")) != "float-quantized":
        raise section.error("format", form, "float-quantized")
    groups = section.section("config_groups")
    if groups is None:
        raise section.error("config_groups", section.values.get("config_groups"), "some groups")
    kinds: dict[QuantKind, None] = {}
    targets: list[Callable[[str], bool]] = []
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            raise groups.error(name, groups.values[name], "an object")
        kinds[_group_kind(group)] = None
        targets.append(_matcher(group, "targets"))
    if len(kinds) > 1:
        raise section.error("config_groups", list(groups.values), "groups that are all alike")
    ignored = _matcher(section, "ignore")
    return next(iter(kinds)), lambda name: any(t(name) for t in targets) and not ignored(name)


def _group_kind(group: HfConfig) -> QuantKind:
    weights, activations = group.section("weights"), group.section("input_activations")
    if weights is None or activations is None:
        what = "weights" if weights is None else "input_activations"
        raise group.error(what, None, "FP8 weights and activations")
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
    if found_kind not in _GROUP_KINDS:
        known = "; ".join(f"{w} weights, {d} {a} activations" for w, d, a in _GROUP_KINDS)
        weight, when, activation = found_kind
        raise group.error("strategy", f"{weight} weights, {when} {activation} activations", known)
    return _GROUP_KINDS[found_kind]


def _modelopt(section: HfConfig) -> tuple[QuantKind, Callable[[str], bool]]:
    algorithm = section.text("quant_algo")
    if algorithm not in _MODELOPT_KINDS:
        raise section.error("quant_algo", algorithm, f"one of {', '.join(_MODELOPT_KINDS)}")
    excluded = _matcher(section, "exclude_modules", "ignore")
    return _MODELOPT_KINDS[algorithm], lambda name: not excluded(name)


def _modelopt_section(file: Path) -> HfConfig:
    section = HfConfig(file, read_json(file)).section("quantization")
    if section is None:
        raise UserError(f"{file} has no quantization; download it again")
    return section


def _stored(section: HfConfig) -> tuple[QuantKind, Callable[[str], bool]]:
    name = section.text("format")
    if name not in STORED_FORMATS:
        known = ", ".join(STORED_FORMATS)
        expected = f"one of {known}; admit_weight_format admits another"
        raise section.error("format", name, expected)
    skipped = _matcher(section, "modules_to_not_convert", "ignore")
    return name, lambda module: not skipped(module)


_METHODS: Mapping[str, Callable[[HfConfig], tuple[QuantKind, Callable[[str], bool]]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "stored": _stored,
}


def _matcher(section: HfConfig, *fields: str) -> Callable[[str], bool]:
    """Whether a name is in the list of the first of ``fields`` that is there."""
    field = next((name for name in fields if section.has(name)), fields[0])
    patterns: Any = section.values.get(field)
    patterns = [] if patterns is None else patterns
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise section.error(field, patterns, "a list of module names")
    tests = [_pattern(section, field, pattern) for pattern in patterns]
    return lambda name: any(test(name) for test in tests)


def _pattern(section: HfConfig, field: str, pattern: str) -> Callable[[str], bool]:
    """``re:`` and an expression for the name's beginning, a name with ``*``, the class
    ``Linear``, or a name: whole, or one end of it up to a dot."""
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise section.error(field, pattern, f"a regular expression ({error})") from error
        return lambda name: expression.match(name) is not None
    if "*" in pattern:
        return lambda name: fnmatchcase(name, pattern)
    if pattern == "Linear":
        return lambda name: True
    return lambda name: f".{pattern}." in f".{name}."


def _quantized(
    section: HfConfig, quantizes: Callable[[str], bool], names: Iterable[tuple[str, str]]
) -> dict[str, bool]:
    parts: dict[str, dict[str, bool]] = {}
    for name, module in names:
        parts.setdefault(module, {})[name] = quantizes(name)
    for of_module in parts.values():
        if len(set(of_module.values())) > 1:
            left = [name for name, is_quantized in of_module.items() if not is_quantized]
            raise UserError(
                f"{section.path}: {section.prefix}* leaves {', '.join(left)} unquantized; expected "
                f"all or none of {', '.join(of_module)}, which are one matrix here"
            )
    return {module: all(of_module.values()) for module, of_module in parts.items()}
