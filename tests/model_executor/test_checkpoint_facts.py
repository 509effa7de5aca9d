"""Where config.json and the checkpoint contradict each other, the tensors decide as in
transformers; what a checkpoint has beyond its model is known to be unneeded, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusewright.config.errors import UserError
from fusewright.engine.worker import startup
from fusewright.model_executor import checkpoint_facts
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.spec import ModelSpec, quantize_online
from tests.model_executor.paged_steps import PagedSteps, random_tokens
from tests.model_executor.tiny_models import BY_NAME

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ANOTHER = torch.randn(128, 64, generator=torch.Generator().manual_seed(5))


def publish(folder: Path, tie: bool, change: Callable[[dict[str, Tensor]], object]) -> None:
    """A Llama whose config says ``tie``, with its tensors changed."""
    BY_NAME["llama_mha_tied"].save(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert HEAD not in tensors
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tie}))


def own_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = ANOTHER


def equal_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[EMBED].clone()


def only_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors.pop(EMBED)


def nothing(tensors: dict[str, Tensor]) -> None:
    pass


# tie_word_embeddings, the tensors, whether the two are tied, what the log says.
CASES = {
    "own head": (True, own_head, False, "lm_head.weight differs from model.embed_tokens"),
    "equal head": (True, equal_head, True, ""),
    "only the head": (True, only_head, True, ""),
    "only the embedding": (True, nothing, True, ""),
    "untied, own head": (False, own_head, False, ""),
    "untied, equal head": (False, equal_head, False, ""),
}
every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_ties_are_those_that_transformers_finds(case: str, tmp_path: Path) -> None:
    tie, change, tied, said = CASES[case]
    publish(tmp_path, tie, change)
    spec = read_spec(tmp_path)
    assert spec.tie_word_embeddings is tied
    assert [said in note for note in spec.notes] == [True] * bool(said)
    model = load_model(spec, tmp_path, "cpu")
    assert (model.lm_head.weight is model.embed.weight) is tied
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) is tied
    (tokens,) = random_tokens(30)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[:, -1]
    got = PagedSteps(model, [tokens]).step({0: 30})
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def fp8(spec: ModelSpec) -> ModelSpec:
    return quantize_online(spec, "fp8")


@pytest.mark.product
@pytest.mark.parametrize("change", [replace, lambda spec, **ranks: fp8(replace(spec, **ranks))])
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
@every_case
def test_every_rank_has_the_tensors_that_the_whole_model_has(
    case: str, ranks: str, change: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    tie, tensors, tied, _ = CASES[case]
    publish(tmp_path, tie, tensors)
    whole = load_model(read_spec(tmp_path), tmp_path, "cpu")
    spec = change(read_spec(tmp_path), **{ranks: 2})
    first, last = (load_model(spec, tmp_path, "cpu", rank=rank) for rank in range(2))
    if ranks == "pipeline_parallel_size":
        assert torch.equal(first.embed.weight, whole.embed.weight)
        assert torch.equal(last.lm_head.weight, whole.lm_head.weight)
        return
    for name in ("embed", "lm_head"):
        parts = [getattr(rank, name).weight for rank in (first, last)]
        assert torch.equal(torch.cat(parts), getattr(whole, name).weight)
    assert (first.lm_head.weight is first.embed.weight) is tied


def test_an_untied_model_without_a_head_is_tied_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, False, nothing)
    model = load_model(read_spec(tmp_path), tmp_path, "cpu")
    assert model.lm_head.weight is model.embed.weight
    options = startup.EngineOptions(model=str(tmp_path), max_model_len=64)
    startup.read_model(options, startup.Hardware(device="cpu", name="cpu"))
    assert "the checkpoint has no lm_head.weight" in capsys.readouterr().err


def test_heads_that_differ_late_or_in_dtype_alone_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_facts, "_CHUNK_BYTES", 1000)  # no divisor of 128 * 64 * 4

    def late(tensors: dict[str, Tensor]) -> None:
        equal_head(tensors)
        tensors[HEAD][-1, -1] += 1

    def half(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBED].half()

    for change, tied in ((late, False), (half, False), (equal_head, True)):
        publish(tmp_path, True, change)
        assert read_spec(tmp_path).tie_word_embeddings is tied


def test_a_damaged_checkpoint_leaves_the_word_of_the_config(tmp_path: Path) -> None:
    publish(tmp_path, True, own_head)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    offsets = data.index(b"data_offsets")
    for damaged in (
        b"",
        data[:5],
        data[:100],
        b"\xff" * 8 + data[8:],
        data[:8] + b"[1]" + data[9:],
    ):
        file.write_bytes(damaged)
        assert read_spec(tmp_path).tie_word_embeddings
        with pytest.raises(UserError, match="truncated or damaged"):
            load_model(read_spec(tmp_path), tmp_path, "cpu")
    file.write_bytes(data[:offsets] + b"data_0ffsets" + data[offsets + 12 :])
    assert read_spec(tmp_path).tie_word_embeddings


UNNEEDED = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    "model.rotary_emb.inv_freq": torch.zeros(8),
    "model.rotary_emb.original_inv_freq": torch.zeros(8),
    "model.layers.1.self_attn.rotary_emb.cos_cached": torch.zeros(1, 1, 4, 8),
    "model.layers.1.self_attn.rotary_emb.sin_cached": torch.zeros(1, 1, 4, 8),
    "model.layers.0.self_attn.masked_bias": torch.tensor(-1e4),
    "model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    "model.position_ids": torch.arange(8)[None],
    "model.layers.0.self_attn.k_scale": torch.ones(1),
}


def test_tensors_that_are_known_to_be_unneeded_are_left_out(tmp_path: Path) -> None:
    BY_NAME["llama_gqa"].save(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_model(read_spec(tmp_path), tmp_path, "cpu").state_dict()
    tensors = load_file(file)
    save_file(tensors | UNNEEDED, file)
    with_more = load_model(read_spec(tmp_path), tmp_path, "cpu").state_dict()
    assert all(torch.equal(whole[name], with_more[name]) for name in whole)
    for unknown in ("model.layers.0.self_attn.q_proj.bias", "model.attn.bias_", "visual.inv_freq"):
        save_file(tensors | {unknown: torch.zeros(64)}, file)
        with pytest.raises(UserError, match=f"the checkpoint has weight {unknown}"):
            load_model(read_spec(tmp_path), tmp_path, "cpu")


@pytest.mark.parametrize("names", [["model.safetensors"], ["model-00001-of-00002.safetensors"]])
def test_a_whole_file_goes_before_a_stale_index(names: list[str], tmp_path: Path) -> None:
    saved = BY_NAME["llama_gqa"].save(tmp_path).state_dict()
    index = {"weight_map": dict.fromkeys(("model.norm.weight", "gone.weight"), names[0])}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load_model(read_spec(tmp_path), tmp_path, "cpu")
    assert torch.equal(model.lm_head.weight, saved[HEAD])


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_config_without_dtype_takes_that_of_the_checkpoint(
    dtype: str, shard_size: str, tmp_path: Path
) -> None:
    model = BY_NAME["llama_gqa"].model(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).dtype_name == dtype
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path).dtype == getattr(torch, dtype)
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert read_spec(tmp_path).dtype_name == "float32"


def test_a_model_is_read_without_its_notes_in_its_key(tmp_path: Path) -> None:
    publish(tmp_path, False, nothing)
    spec = read_spec(tmp_path)
    assert spec.notes
    assert spec == replace(spec, notes=())
    assert isinstance(load_model(spec, tmp_path, "cpu"), DecoderModel)
