"""What a checkpoint says of its quantization is understood, or refused in a line that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusewright.config import EngineOptions, Hardware, UserError
from fusewright.config.options import option_specs
from fusewright.config.weight_format import ALIASES, STORED_FORMATS
from fusewright.engine.worker.source import artifact_key, artifact_label
from fusewright.engine.worker.startup import read_model
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.models.decoder import distinct_layers
from fusewright.model_executor.quant.scheme import KINDS, QuantScheme
from fusewright.model_executor.spec import ModelSpec
from tests.model_executor.quant_checkpoints import BY_NAME, DIALECTS, TINY, Dialect

CPU = Hardware("cpu", "a CPU")


def write(folder: Path, section: Any, **changes: Any) -> None:
    TINY.config().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


def quant(folder: Path, section: Any, **changes: Any) -> QuantScheme | None:
    write(folder, section, **changes)
    return read_spec(folder).quant


def refusal(folder: Path, section: Any, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        quant(folder, section, **changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_every_dialect_names_its_scheme(dialect: Dialect, tmp_path: Path) -> None:
    section = dialect.config([])
    if dialect.file == "config.json":
        found = quant(tmp_path, section)
    else:
        (tmp_path / dialect.file).write_text(json.dumps({"quantization": section}))
        found = quant(tmp_path, None)
        assert found == quant(tmp_path, {"quant_method": "modelopt"})
    assert found == QuantScheme(dialect.kind, ((), ()), online=False)  # type: ignore[arg-type]


def test_options_and_schemes_have_the_same_names() -> None:
    (spec,) = (s for s in option_specs() if s.name == "quantization")
    assert spec.choices == (*KINDS, *ALIASES, *STORED_FORMATS)


def test_without_a_word_nothing_is_quantized(tmp_path: Path) -> None:
    assert quant(tmp_path, None) is None
    assert quant(tmp_path, {}) is None


FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"bits": 4}, "has no quantization_config.quant_method"),
        (
            {"quant_method": "quark"},
            "quant_method is 'quark'; expected one of fp8, compressed-tensors, modelopt",
        ),
        (FP8 | {"activation_scheme": "none"}, "is 'none'; expected static or dynamic"),
        (FP8 | {"weight_block_size": [64, 64]}, "is [64, 64]; expected [128, 128] or null"),
        (
            FP8 | {"weight_block_size": [128, 128], "activation_scheme": "static"},
            "activation_scheme is 'static'; expected dynamic with weight_block_size",
        ),
        (
            FP8 | {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert is 'lm_head'; expected a list of module names",
        ),
        (
            FP8 | {"modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]},
            "leaves model.layers.0.self_attn.k_proj unquantized; expected all or none of model.",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo is 'W4A8_AWQ'; expected one of FP8, FP8_PER_CHANNEL_PER_TOKEN",
        ),
        ({"quant_method": "modelopt"}, "hf_quant_config.json: No such file or directory"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(
    section: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(tmp_path, section)


def channel(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    section: dict[str, Any] = json.loads(json.dumps(BY_NAME["compressed channel"].config([])))
    change(section)
    return section


def group(**changes: Any) -> dict[str, Any]:
    return channel(lambda section: section["config_groups"]["group_0"].update(changes))


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            channel(lambda s: s.update(format="pack-quantized")),
            "format is 'pack-quantized'; expected one of float-quantized, naive-quantized",
        ),
        (channel(lambda s: s.update(config_groups={})), "config_groups is {}; expected some"),
        (
            channel(lambda s: s["config_groups"].update(group_1={"weights": None})),
            "config_groups.group_1.weights is None; expected how weights are quantized",
        ),
        (
            channel(lambda s: s["config_groups"].update(group_1=3)),
            "config_groups.group_1 is 3; expected an object",
        ),
        (group(input_activations=None), "group_0.input_activations is None; expected FP8 weights"),
        (
            group(weights=WEIGHTS | {"num_bits": 4, "type": "int"}),
            "group_0.weights is '4 bits of int'; expected 8 bits of float",
        ),
        (
            group(weights=WEIGHTS | {"strategy": "block", "block_structure": [64, 64]}),
            "weights.block_structure is [64, 64]; expected [128, 128]",
        ),
        (
            group(input_activations=TOKEN | {"strategy": "group", "group_size": 32}),
            "input_activations.group_size is 32; expected 128",
        ),
        (
            group(input_activations=TOKEN | {"strategy": "tensor", "dynamic": False}),
            "'channel weights, static tensor activations'; expected tensor weights, static tensor",
        ),
        (channel(lambda s: s.update(ignore=["re:("])), "expected a regular expression (missing )"),
    ],
)
def test_unsupported_compressed_tensors_are_named(
    section: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(tmp_path, section)


def test_groups_quantize_what_they_target(tmp_path: Path) -> None:
    found = quant(tmp_path, group(targets=["re:.*self_attn", "model.layers.0.mlp.down_proj"]))
    assert found is not None
    assert found.unquantized == (("mlp.gate_up",), ("mlp.gate_up", "mlp.down"))


def test_an_invalid_file_beside_the_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert f"{tmp_path}/hf_quant_config.json has no quantization" in refusal(tmp_path, None)


def test_a_checkpoint_of_blocks_needs_whole_blocks_of_columns(tmp_path: Path) -> None:
    section = BY_NAME["fp8 block"].config([])
    message = refusal(tmp_path, section, intermediate_size=192)
    assert "mlp.down reads 192 features, expected a multiple of 128" in message
    left = section | {"modules_to_not_convert": ["down_proj"]}
    assert quant(tmp_path, left, intermediate_size=192) is not None


def test_layers_quantized_alike_are_traced_once(tmp_path: Path) -> None:
    section = FP8 | {"modules_to_not_convert": ["model.layers.1.mlp"]}
    write(tmp_path, section, num_hidden_layers=4)
    spec = read_spec(tmp_path)
    short, layers = distinct_layers(spec)
    assert layers == (0, 1, 0, 0)
    assert short.quant is not None
    assert short.quant.unquantized == ((), ("mlp.gate_up", "mlp.down"))
    assert distinct_layers(replace(spec, quant=None))[1] == (0, 0, 0, 0)


def read(**options: Any) -> tuple[ModelSpec, str, str]:
    _, spec, config = read_model(EngineOptions(**options), CPU)
    return spec, artifact_key(spec, config).digest, artifact_label(spec, config)


def test_the_scheme_is_in_the_key_and_where_it_comes_from_is_not(tmp_path: Path) -> None:
    TINY.config().save_pretrained(tmp_path)
    model = str(tmp_path)
    plain = read(model=model)
    online = {kind: read(model=model, quantization=kind) for kind in ("fp8", "fp8_block")}
    cache = read(model=model, kv_cache_dtype="fp8_e4m3")
    keys = {plain[1], cache[1], *(key for _, key, _ in online.values())}
    assert len(keys) == 4
    assert cache[0].fp8_kv_cache and cache[1] == read(model=model, kv_cache_dtype="fp8")[1]
    assert "float32, fp8 weights, -O2" in online["fp8"][2]
    assert "float32, fp8_e4m3 KV cache, -O2" in cache[2]
    write(tmp_path, FP8)
    loaded = read(model=model)
    assert loaded[0].quant is not None and not loaded[0].quant.online
    assert loaded[1] == online["fp8"][1] == read(model=model, quantization="fp8")[1]
    write(tmp_path, FP8 | {"modules_to_not_convert": ["down_proj"]})
    assert read(model=model)[1] != loaded[1]
