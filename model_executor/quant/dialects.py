"""How each project that quantizes says so in ``quantization_config``: one row of ``_METHODS`` each.

``stored`` names a format of ``STORED_FORMATS``, whoever wrote the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...config.errors import UserError
from ...config.weight_format import STORED_FORMATS
from ..hf_json import HfConfig, read_json
from . import layouts
from .compressed import compressed_tensors
from .dialect import IN_16_BITS, MODELOPT_FILE, Dialect, group_size, num_bits, of_one_kind
from .module_lists import matcher
from .scheme import BLOCK, QuantKind

_MODELOPT_FP8: Mapping[str, QuantKind] = {
    "FP8": "fp8_static",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}
_MODELOPT_INT4 = ("W4A16", "W4A16_AWQ")


def read_dialect(config: HfConfig) -> Dialect:
    """What the config of a model, or ModelOpt's file beside it, says; one of them must
    (``says_quantized``).

    Raises:
        UserError: a field is missing, or asks for what is not supported.
    """
    section = config.section("quantization_config")
    beside = config.path.parent / MODELOPT_FILE
    method = "modelopt" if section is None else section.text("quant_method")
    if method not in _METHODS:
        assert section is not None
        raise section.error("quant_method", method, f"one of {', '.join(_METHODS)}")
    if method == "modelopt" and (section is None or not section.has("quant_algo")):
        section = _modelopt_section(beside)
    assert section is not None
    return replace(_METHODS[method](section), where=f"{section.path}: {section.prefix}")


def _fp8(section: HfConfig) -> Dialect:
    activations = section.text("activation_scheme", "dynamic")
    if activations not in ("static", "dynamic"):
        raise section.error("activation_scheme", activations, "static or dynamic")
    skipped = matcher(section, "modules_to_not_convert", "ignored_layers")
    block = section.values.get("weight_block_size")
    if block is None:
        kind: QuantKind = "fp8_static" if activations == "static" else "fp8"
    elif block != [BLOCK, BLOCK]:
        raise section.error("weight_block_size", block, f"[{BLOCK}, {BLOCK}] or null")
    elif activations == "static":
        raise section.error("activation_scheme", activations, "dynamic with weight_block_size")
    else:
        kind = "fp8_block"
    return of_one_kind(kind, skipped)


def _awq(section: HfConfig) -> Dialect:
    version = section.text("version", "gemm").lower()
    if version != "gemm":
        raise section.error("version", version, "gemm; AutoAWQ converts to it")
    num_bits(section, "bits" if section.has("bits") else "w_bit", 4)
    if not section.flag("zero_point", True):
        raise section.error("zero_point", False, "true, as AutoAWQ's gemm has it")
    size = group_size(section, "group_size" if section.has("group_size") else "q_group_size")
    layout = layouts.awq(size)
    return of_one_kind(layout.target, matcher(section, "modules_to_not_convert"), layout)


_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 2}


def _gptq(section: HfConfig) -> Dialect:
    version = section.text("checkpoint_format", "gptq")
    if version not in _GPTQ_VERSIONS:
        raise section.error("checkpoint_format", version, " or ".join(_GPTQ_VERSIONS))
    if section.flag("lm_head", False):
        raise section.error("lm_head", True, "false: lm_head stays in 16 bits")
    bits = num_bits(section, "bits", 4, 8)
    symmetric, ordered = section.flag("sym", True), section.flag("desc_act", False)
    size = group_size(section, "group_size")
    layout = layouts.gptq(
        bits,
        size,
        symmetric=symmetric,
        version=_GPTQ_VERSIONS[version],
        ordered=ordered and size > 0,  # with one group for all columns their order is free
    )
    listed, named = matcher(section, "modules_to_not_convert"), _left_by_name(section)
    dialect = of_one_kind(layout.target, lambda name: listed(name) or named(name), layout)
    return replace(dialect, ordered=layout.order is not None)


def _left_by_name(section: HfConfig) -> Callable[[str], bool]:
    """The modules that GPTQModel's ``dynamic`` leaves out, by ``-:`` and an expression."""
    rules: Any = section.values.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(rule.startswith("-:") for rule in rules):
        expected = "rules that leave modules out (-:): one number of bits and one group size"
        raise section.error("dynamic", rules, expected)
    patterns = [f"re:{rule.removeprefix('-:')}" for rule in rules]
    return matcher(HfConfig(section.path, {"dynamic": patterns}, section.prefix), "dynamic")


def _modelopt(section: HfConfig) -> Dialect:
    algorithm = section.text("quant_algo")
    excluded = matcher(section, "exclude_modules", "ignore")
    if algorithm in _MODELOPT_FP8:
        return of_one_kind(_MODELOPT_FP8[algorithm], excluded)
    if algorithm == "NVFP4":
        if (size := section.integer("group_size", 16)) != 16:
            raise section.error("group_size", size, "16 with NVFP4")
        layout = layouts.nvfp4("ModelOpt")
        dialect = of_one_kind(layout.target, excluded, layout)
        return replace(dialect, notes=(IN_16_BITS.format("NVFP4 is a format of weights alone"),))
    if algorithm in _MODELOPT_INT4:
        size = 128 if not section.has("group_size") else group_size(section, "group_size")
        layout = layouts.modelopt_int4(size)
        return of_one_kind(layout.target, excluded, layout)
    known = ", ".join((*_MODELOPT_FP8, *_MODELOPT_INT4, "NVFP4"))
    raise section.error("quant_algo", algorithm, f"one of {known}")


def _modelopt_section(file: Path) -> HfConfig:
    section = HfConfig(file, read_json(file)).section("quantization")
    if section is None:
        raise UserError(f"{file} has no quantization; download it again")
    return section


def _mxfp4(section: HfConfig) -> Dialect:
    layout = layouts.mxfp4("gpt-oss")
    return of_one_kind(layout.target, matcher(section, "modules_to_not_convert"), layout)


def _stored(section: HfConfig) -> Dialect:
    name = _stored_name(section, "format", section.text("format"))
    skipped = matcher(section, "modules_to_not_convert", "ignore")
    modules: Any = section.values.get("modules") or {}
    if not isinstance(modules, dict):
        raise section.error("modules", modules, "an object of module names and formats")
    others = {module: _stored_name(section, "modules", form) for module, form in modules.items()}
    notes: Any = section.values.get("notes") or []
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise section.error("notes", notes, "a list of sentences")
    dialect = Dialect(name, lambda module: None if skipped(module) else others.get(module, name))
    return replace(dialect, notes=tuple(notes))


def _stored_name(section: HfConfig, field: str, name: Any) -> str:
    if not isinstance(name, str) or name not in STORED_FORMATS:
        known = ", ".join(STORED_FORMATS)
        raise section.error(field, name, f"one of {known}; admit_weight_format admits another")
    return name


_METHODS: Mapping[str, Callable[[HfConfig], Dialect]] = {
    "fp8": _fp8,
    "compressed-tensors": compressed_tensors,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "stored": _stored,
}
