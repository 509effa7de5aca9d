"""The layer of a checkpoint that predicts further tokens drafts what its definition says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, Hardware, UserError
from fusewright.engine.read_draft import read_draft_model
from fusewright.engine.worker.startup import read_model
from fusewright.model_executor.loader import fake_model

from .test_eagle3 import Recorded
from .test_speculative import facts

LAYERS, SIZE, VOCAB = 2, 32, 96
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "optimization_level": 0,
    "dtype": "float32",
    "max_model_len": 64,
    "skip_tokenizer_init": True,
}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 64,
}
FORMS: dict[str, dict[str, Any]] = {
    "Glm4Moe": {"num_key_value_heads": 1, "head_dim": 16, "use_qk_norm": True},
    "DeepseekV3": {
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
    },
}
"""Model family -> its own sizes."""


def small(form: str, seed: int, **sizes: Any) -> Any:
    """The library's model of a family, with weights so wide that tokens differ."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{form}Config")(**SHAPE, **FORMS[form], **sizes)
    model = getattr(transformers, f"{form}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data *= 5 if parameter.dim() > 1 else 1
    return model


def one_layer(form: str, seed: int) -> Any:
    """One layer with experts, whose norms are not all ones."""
    model = small(form, seed, num_hidden_layers=1, first_k_dense_replace=0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(form: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model, and the same checkpoint with the layer that predicts further tokens."""
    base = tmp_path_factory.mktemp("mtp") / "base"
    layers = {"num_hidden_layers": LAYERS, "first_k_dense_replace": 1}
    small(form, 1, **layers, num_nextn_predict_layers=1).save_pretrained(base)
    prefix, layer = f"model.layers.{LAYERS}.", "model.layers.0."
    one_layer(form, 2).save_pretrained(own := base.with_name("own"))
    tensors = load_file(own / "model.safetensors")
    extra = {
        name.replace(layer, prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    extra[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"]
    extra[f"{prefix}eh_proj.weight"] = torch.randn(SIZE, 2 * SIZE) * 0.2
    for name in ("enorm", "hnorm"):
        extra[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(SIZE)
    whole = base.with_name("whole")
    whole.mkdir()
    (whole / "config.json").write_text((base / "config.json").read_text())
    save_file(
        load_file(base / "model.safetensors") | extra,
        whole / "model.safetensors",
        metadata={"format": "pt"},
    )
    return base, whole


class Reference:
    """The layer over the library's implementation of the model, without a cache."""

    def __init__(self, form: str, base: Path, whole: Path) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        stored = load_file(whole / "model.safetensors")
        prefix = f"model.layers.{LAYERS}."
        self.own = {name.removeprefix(prefix): t for name, t in stored.items() if prefix in name}
        self.model = one_layer(form, 2)
        for part in ("embed_tokens", "norm"):  # it joins by itself, and its norm is ours to apply
            setattr(self.model.model, part, torch.nn.Identity())
        self.head, self.embedding = stored["lm_head.weight"], stored["model.embed_tokens.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (SIZE,), self.own[name], self.model.config.rms_norm_eps)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        states = self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        ids, drafts = tokens[1:], list[int]()
        for _ in range(count):
            embedded = self.norm(self.embedding[ids], "enorm.weight")
            both = torch.cat((embedded, self.norm(states, "hnorm.weight")), -1)
            x = F.linear(both, self.own["eh_proj.weight"])
            out = self.model.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1:]
            logits = F.linear(self.norm(out, "shared_head.norm.weight"), self.head)
            drafts.append(int(logits.argmax()))
            ids = [*ids, drafts[-1]]
            states = torch.cat((states, out))
        return drafts


def test_a_layer_drafts_what_its_definition_says(form: str, folders: tuple[Path, Path]) -> None:
    base, whole = folders
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])]
    kind = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, detokenize=False)
    alone = LLM(str(base), **OPTIONS).generate(prompts, kind, use_tqdm=False)
    llm = LLM(str(base), **OPTIONS, speculative_config=MTP | {"model": str(whole)})
    proposals, reference = Recorded(llm), Reference(form, base, whole)
    assert facts(llm.generate(prompts, kind, use_tqdm=False)) == facts(alone)
    assert llm.report()["drafts"]["error"] == "" and len(proposals) > 10
    for known, drafts in proposals:
        assert drafts == reference.drafts(known, len(drafts)), known


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_traced_of_a_layer_is_of_the_targets_dtype(
    folders: tuple[Path, Path], dtype: str
) -> None:
    asked = json.dumps(MTP | {"model": str(folders[1])})
    options = EngineOptions(
        model=str(folders[0]), device="cpu", dtype=dtype, speculative_config=asked
    )
    hardware = Hardware("cpu", "any", graphs="none")
    _, spec, config = read_model(options, hardware)
    parts = read_draft_model(options, config, spec, hardware, weights=False)
    assert parts is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = fake_model(parts.spec, torch.device("cpu"))
    found = {name: param.dtype for name, param in model.library.join.named_parameters()}
    assert len(found) == 3 and {*found.values()} == {getattr(torch, dtype)}, found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0: expected .* has none"),
        ({"num_nextn_predict_layers": 2}, "has 2"),
        ({"hidden_size": 64}, "another model's checkpoint"),
        ({"num_hidden_layers": 1}, "no tensors model.layers.1|another model's checkpoint"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
            "would have 16 columns, of which 32 share an element of weight_scale",
        ),
    ],
)
def test_a_checkpoint_that_cannot_draft_is_refused_by_name(
    changes: dict[str, Any], said: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, whole = folders
    config = json.loads((whole / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(whole / "model.safetensors")
    with pytest.raises(UserError, match=f"speculative_config: .*({said})"):
        LLM(str(base), **OPTIONS, speculative_config=MTP | {"model": str(tmp_path)})


def test_models_without_such_a_layer_are_refused_by_name() -> None:
    options = OPTIONS | {"skip_tokenizer_init": False}
    with pytest.raises(UserError, match="layers of LlamaForCausalLM that predict further tokens"):
        LLM("abacus", **options, speculative_config=MTP)
