"""The layer of a quantized checkpoint that predicts further tokens drafts as its twin does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig

from fusewright import LLM, SamplingParams
from fusewright.model_executor.experts import ExpertLinear
from fusewright.model_executor.heads.load import load_head
from fusewright.model_executor.heads.mtp import read_mtp
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.layers import Linear
from fusewright.model_executor.loader import fake_model
from tests.model_executor.low_bit_checkpoints import awq
from tests.model_executor.quant_checkpoints import BY_NAME, E4M3, Dialect, requantize, spread

from .test_eagle3 import Recorded
from .test_mtp import MTP, OPTIONS
from .test_speculative import facts

LAYERS, SIZE, VOCAB = 2, 128, 16
PREFIX = f"model.layers.{LAYERS}."
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Any] = {
    "glm": (Glm4MoeConfig, {"num_key_value_heads": 1, "head_dim": 128, "use_qk_norm": True}),
    "deepseek": (
        DeepseekV3Config,
        {
            "num_key_value_heads": 2,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
EH_PROJ = {"eh_proj": "eh_proj"}
KINDS = [
    ("glm", "fp8 block", EH_PROJ),
    ("deepseek", "fp8 block", EH_PROJ),
    ("glm", "compressed channel", EH_PROJ),
    ("deepseek", "compressed channel", {}),
    ("glm", "fp8 static", {}),
    ("deepseek", "compressed tensor", EH_PROJ),
]
"""Form, dialect, and what its list leaves out; that of an FP8 block checkpoint, which is often
empty, leaves nothing out here either."""


def random_model(form: str, num_layers: int, dense: int, seed: int) -> Any:
    """A model whose residual stream is the embedding for the most part, so that the next token
    follows from the last one: drafts can be right without training."""
    torch.manual_seed(seed)
    kind, shape = CONFIGS[form]
    config = kind(**SHAPE, **shape, num_hidden_layers=num_layers, first_k_dense_replace=dense)
    config.num_nextn_predict_layers = 1
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    model.get_input_embeddings().weight.data *= 10
    return model


class Folders(NamedTuple):
    """A quantized model and its values in float32; and both with the layer."""

    base: Path
    plain: Path
    quantized: Path
    twin: Path


def dequantized(dialect: Dialect, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in float32, without scales."""
    scale, kept = f".{dialect.weight_scale}", dict[str, Tensor]()
    for name, tensor in tensors.items():
        if (of := name.removesuffix(".weight") + scale) in tensors:
            kept[name] = tensor.float() * spread(tensors[of], tensor)
        elif not name.endswith((scale, ".input_scale")):
            kept[name] = tensor
    return kept


def saved(form: str, dialect: Dialect, ignore: dict[str, str], folder: Path) -> Folders:
    """Write the four; the list of an FP8 block checkpoint does not name ``eh_proj``."""
    base, plain, quantized, twin = (folder / name for name in Folders._fields)
    random_model(form, LAYERS, 1, 1).save_pretrained(base)
    random_model(form, 1, 0, 2).save_pretrained(own := folder / "own")
    layer = load_file(own / "model.safetensors")
    first = "model.layers.0."
    extra = {n.replace(first, PREFIX): t for n, t in layer.items() if n.startswith(first)}
    extra[f"{PREFIX}shared_head.norm.weight"] = layer["model.norm.weight"]
    of_embedding = torch.eye(SIZE, 2 * SIZE)
    extra[f"{PREFIX}eh_proj.weight"] = of_embedding + 0.02 * torch.randn(SIZE, 2 * SIZE)
    for name in ("enorm", "hnorm"):
        extra[f"{PREFIX}{name}.weight"] = 1 + 0.1 * torch.randn(SIZE)
    for other in (plain, quantized, twin):
        shutil.copytree(base, other)
    tensors = load_file(base / "model.safetensors") | extra
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    written = requantize(dialect, quantized, ignore=ignore)
    if dialect.name == "fp8 block":
        config = json.loads((quantized / "config.json").read_text())
        del config["quantization_config"]["modules_to_not_convert"]
        (quantized / "config.json").write_text(json.dumps(config))
    rest = {name: t for name, t in written.items() if not name.startswith(PREFIX)}
    for other, held in ((plain, dequantized(dialect, rest)), (twin, dequantized(dialect, written))):
        save_file(held, other / "model.safetensors", {"format": "pt"})
    shutil.copyfile(quantized / "config.json", base / "config.json")
    save_file(rest, base / "model.safetensors", {"format": "pt"})
    return Folders(base, plain, quantized, twin)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}, {kind[1]}")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Folders]:
    form, name, ignore = request.param
    folder = tmp_path_factory.mktemp("mtp")
    yield saved(form, BY_NAME[name], ignore, folder)
    shutil.rmtree(folder)


def numbers(folder: Path, target: Path) -> dict[str, Tensor]:
    """All weights of the layer as they are loaded, in float32."""
    spec = read_mtp(folder, target=read_spec(target))
    head: Any = load_head(spec, folder, "cpu", target=cast(Any, None), target_folder=target)
    of_linears = {}
    for name, module in head.library.named_modules():
        if isinstance(module, Linear | ExpertLinear) and module.quant:
            parts = [s.weight.float() * spread(s.weight_scale, s.weight) for s in module.shares()]
            whole = torch.stack(parts) if isinstance(module, ExpertLinear) else parts[0]
            of_linears[name if isinstance(module, ExpertLinear) else f"{name}.weight"] = whole
    kept = {n: p.detach() for n, p in head.library.named_parameters() if p.dtype != E4M3}
    return kept | of_linears


def test_a_quantized_layer_has_the_weights_of_the_checkpoint(folders: Folders) -> None:
    quantized, twin = (numbers(f, folders.base) for f in (folders.quantized, folders.twin))
    names = {name.removesuffix(".weight") for name in twin}
    assert {name.removesuffix(".weight") for name in quantized} == names
    static = 'activation_scheme": "static' in (folders.quantized / "config.json").read_text()
    for name, tensor in twin.items():
        # Parts of one matrix share the largest of their scales where a weight has one alone.
        most = tensor.abs().max().item() / 16 if static else 0.0
        torch.testing.assert_close(quantized[name], tensor, rtol=0.0, atol=most)


def test_a_layer_is_traced_without_data(folders: Folders) -> None:
    """As a build of its program does, at any level above -O0."""
    for folder in (folders.quantized, folders.twin):
        spec = replace(read_mtp(folder, target=read_spec(folders.base)), dtype_name="bfloat16")
        with FakeTensorMode(allow_non_fake_inputs=True):
            join: Any = fake_model(spec, torch.device("cpu")).library.join
        assert join.embedding_norm.weight.dtype == torch.bfloat16
        assert join.linear.weight.dtype == (E4M3 if join.linear.quant else torch.bfloat16)


def check_drafts(base: Path, quantized: Path, twin: Path) -> None:
    """Both layers change no output, have right drafts, and mostly the same."""
    alone = LLM(str(base), **OPTIONS).generate(PROMPTS, GREEDY, use_tqdm=False)
    drafts: list[dict[tuple[int, ...], int]] = []
    for whole in (quantized, twin):
        llm = LLM(str(base), **OPTIONS, speculative_config=MTP | {"model": str(whole)})
        proposals = Recorded(llm)
        assert facts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == facts(alone)
        report = llm.report()["drafts"]
        assert report["error"] == "" and report["accepted"] > 0, report
        drafts.append({tuple(known): made[0] for known, made in proposals})
    both = drafts[0].keys() & drafts[1].keys()
    equal = sum(drafts[0][known] == drafts[1][known] for known in both)
    assert len(both) > 10 and equal >= 0.8 * len(both), (equal, len(both))


@pytest.mark.product(6)
def test_a_quantized_layer_drafts_and_changes_no_output(folders: Folders) -> None:
    check_drafts(folders.base, folders.quantized, folders.twin)


@pytest.mark.product(2)
@pytest.mark.parametrize(
    ("quantized_parts", "whole"),
    [(("self_attn", "eh_proj"), ["mlp"]), (("self_attn", "eh_proj", "mlp"), [])],
    ids=["experts in more", "experts too"],
)
def test_a_layer_in_four_bits_drafts(
    quantized_parts: tuple[str, ...], whole: list[str], tmp_path: Path
) -> None:
    _, plain, quantized, twin = saved("glm", BY_NAME["fp8 block"], EH_PROJ, tmp_path)
    tensors, exact = load_file(twin / "model.safetensors"), dict[str, Tensor]()
    for name in list(tensors):
        if name.startswith(tuple(PREFIX + part for part in quantized_parts)) and "_proj" in name:
            stored, exact[name] = awq(tensors.pop(name).float(), 32)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{suffix}": t.contiguous() for suffix, t in stored.items()}
    config = json.loads((twin / "config.json").read_text())
    section = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    config["quantization_config"] = section | {"modules_to_not_convert": whole}
    (quantized / "config.json").write_text(json.dumps(config))
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    others = load_file(twin / "model.safetensors") | exact
    save_file(others, twin / "model.safetensors", {"format": "pt"})
    check_drafts(plain, quantized, twin)


@pytest.mark.thorough
@pytest.mark.usefixtures("no_engine_is_left")
def test_a_quantized_layer_drafts_for_two_ranks(tmp_path: Path) -> None:
    """The layer runs whole on rank 0.  Of the model the ranks hold parts, so that it is in 16 bits
    or more: FP8 layers of captured models do not spread."""
    folders = saved("glm", BY_NAME["fp8 block"], EH_PROJ, tmp_path)
    alone = LLM(str(folders.plain), **OPTIONS).generate(PROMPTS, GREEDY, use_tqdm=False)
    mtp = MTP | {"model": str(folders.quantized)}
    with LLM(str(folders.plain), **OPTIONS, tensor_parallel_size=2, speculative_config=mtp) as llm:
        assert facts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == facts(alone)
        report = llm.report()["drafts"]
    assert report["error"] == "" and report["accepted"] > 0, report
