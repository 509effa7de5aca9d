"""Checkpoints arrive whole and cast, in one file or many; a damaged one is refused by name."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusewright.config.errors import UserError
from fusewright.model_executor.checkpoint import read_headers
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.kv_cache import allocate_kv_caches, kv_cache_bytes_per_block
from fusewright.model_executor.loader import load_model, stream
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.parallel import TensorParallelRank
from fusewright.model_executor.slots import plan_reads, slots
from tests.model_executor.tiny_models import BY_NAME, TINY_MODELS, TinyModel

Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BY_NAME["llama_gqa"].save(tmp_path)
    return tmp_path


@pytest.fixture
def several_files(tmp_path: Path) -> Path:
    BY_NAME["llama_gqa"].save(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(read_spec(folder), folder, "cpu")
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> str:
    """Change the tensors of a single-file checkpoint and load it; returns the refusal."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return refusal(folder)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize("name", ["llama_bias", "qwen2_bias_tied", "qwen3_qk_norm"])
def test_every_tensor_lands_in_its_place(
    name: str, max_shard_size: str, tmp_path: Path, device: torch.device
) -> None:
    saved = BY_NAME[name].save(tmp_path, max_shard_size=max_shard_size).state_dict()
    model = load_model(read_spec(tmp_path), tmp_path, device)
    params = {n: p.cpu() for n, p in model.named_parameters()}
    assert all(p.device.type == device.type for p in model.parameters())
    for layer in range(2):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            if f"{theirs}self_attn.q_proj.{kind}" in saved:
                parts = [saved[f"{theirs}self_attn.{p}_proj.{kind}"] for p in "qkv"]
                assert torch.equal(params[f"{ours}attention.qkv.{kind}"], torch.cat(parts))
        parts = [saved[f"{theirs}mlp.{p}_proj.weight"] for p in ("gate", "up")]
        assert torch.equal(params[f"{ours}mlp.gate_up.weight"], torch.cat(parts))
    assert torch.equal(model.lm_head.weight.cpu(), saved["lm_head.weight"])


def test_weights_are_cast_to_the_spec_s_dtype(folder: Path, device: torch.device) -> None:
    saved = load_file(folder / "model.safetensors")
    spec = replace(read_spec(folder), dtype_name="bfloat16")
    model = load_model(spec, folder, device)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.norm.weight.cpu(), saved["model.norm.weight"].bfloat16())
    assert model.cos_sin_cache.dtype == torch.float32


def test_tied_weights_stay_one_parameter(tmp_path: Path, device: torch.device) -> None:
    BY_NAME["llama_mha_tied"].save(tmp_path)
    model = load_model(read_spec(tmp_path), tmp_path, device)
    assert model.lm_head.weight is model.embed.weight


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_read_only_their_slices(folder: Path, world: int) -> None:
    """The loader's own copy loop, with each rank's parameters made by hand."""
    saved = load_file(folder / "model.safetensors")
    spec = read_spec(folder)
    halves = []
    for rank in range(world):
        reads = plan_reads(
            slots(DecoderModel(spec), TensorParallelRank(rank, world)), read_headers(folder), spec
        )
        heads = 64 // world + 2 * 16 * max(1, 2 // world)
        params = {
            "layers.1.attention.qkv.weight": torch.zeros(heads, 64),
            "layers.1.attention.o.weight": torch.zeros(64, 64 // world),
        }
        stream(params, [r for r in reads if r.slot.parameter in params], lambda nbytes: None)
        q = params["layers.1.attention.qkv.weight"][: 64 // world]
        halves.append((q, params["layers.1.attention.o.weight"]))
    theirs = "model.layers.1.self_attn."
    assert torch.equal(torch.cat([q for q, _ in halves]), saved[f"{theirs}q_proj.weight"])
    assert torch.equal(torch.cat([o for _, o in halves], 1), saved[f"{theirs}o_proj.weight"])


def test_a_missing_checkpoint_file_is_named(several_files: Path) -> None:
    file = sorted(several_files.glob("*.safetensors"))[1]
    file.unlink()
    assert f"checkpoint file {file}" in (message := refusal(several_files)) and "missing" in message


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_truncated_checkpoint_file_is_named(several_files: Path, keep: int) -> None:
    file = sorted(several_files.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} is truncated or damaged" in refusal(several_files)


def test_a_damaged_header_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:12] = b"!!!!"
    file.write_bytes(data)
    assert f"{file} is truncated or damaged" in refusal(folder)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "checkpoint files must lie beside the index"),
    ],
)
def test_a_bad_index_is_refused(several_files: Path, index: str, expected: str) -> None:
    (several_files / "model.safetensors.index.json").write_text(index)
    assert expected in refusal(several_files)


def test_a_folder_without_weights_says_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert pytorch_model.bin to safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "--load-format dummy" in refusal(folder)


def test_a_wrong_shape_names_tensor_got_and_expected(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    message = rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(16, 64)}))
    assert f"tensor {name}" in message and "shape [16, 64], expected [32, 64]" in message


def test_missing_weights_are_named(folder: Path) -> None:
    message = rewrite(folder, lambda tensors: tensors.__delitem__("model.norm.weight"))
    assert "lacks weight model.norm.weight" in message

    def drop_layer(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".layers.1." in n]:
            del tensors[name]

    message = rewrite(folder, drop_layer)
    assert "lacks 10 weights: model.layers.1.input_layernorm.weight" in message
    assert "and 7 more" in message


def test_unexpected_weights_are_named(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    message = rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert f"the checkpoint has weight {name}, unknown to LlamaForCausalLM" in message


def test_quantized_tensors_are_refused(folder: Path) -> None:
    name = "model.norm.weight"
    message = rewrite(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    assert f"tensor {name}" in message and "F8_E4M3" in message


def test_an_unknown_load_format_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="load_format='gguf': expected auto"):
        load_model(read_spec(folder), folder, "cpu", load_format="gguf")


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mha_tied", "qwen2_window"])
def test_dummy_weights_need_only_the_config(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    BY_NAME[name].config().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    spec = read_spec(tmp_path)
    first, again, other = (
        load_model(spec, tmp_path, device, load_format="dummy", seed=seed) for seed in (3, 3, 4)
    )
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert torch.equal(first.norm.weight, torch.ones_like(first.norm.weight))
    assert first.layers[0].mlp.down.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (first.lm_head.weight is first.embed.weight) == spec.tie_word_embeddings
    assert first.embed.weight.dtype == torch.bfloat16


MEASURE = """
import re, sys
from pathlib import Path
import torch
from fusewright.model_executor.checkpoint import read_headers
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import materialize, stream
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.parallel import TensorParallelRank
from fusewright.model_executor.slots import plan_reads, slots

def anonymous_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

folder = Path(sys.argv[1])
spec = read_spec(folder)
model = DecoderModel(spec)
reads = plan_reads(slots(model, TensorParallelRank()), read_headers(folder), spec)
materialize(model, spec.dtype, "cpu")
before, peak = anonymous_bytes(), 0

def advance(nbytes):
    global peak
    peak = max(peak, anonymous_bytes())

stream(dict(model.named_parameters()), reads, advance)
sizes = [read.source.nbytes for read in reads]
print(peak - before, sum(sizes), max(sizes))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_holds_no_second_copy(tmp_path: Path) -> None:
    """Anonymous memory grows by the parameters written, not by what was read as well."""
    wide = {"hidden_size": 512, "intermediate_size": 4096, "vocab_size": 8192}
    TinyModel("wide", "Llama", wide).save(tmp_path, max_shard_size="30MB")
    # A process of its own: memory that earlier tests freed would hide growth here.
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    growth, total, largest = map(int, output.split())
    assert 0.9 * total < growth < total + largest + 4e6


def test_progress_counts_every_byte(folder: Path) -> None:
    shown: list[tuple[str, int]] = []
    counted: list[int] = []

    @contextmanager
    def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
        shown.append((label, total))
        yield counted.append

    load_model(read_spec(folder), folder, "cpu", progress=bar)
    # 90,432 parameters of 4 bytes, a tensor at a time.
    assert shown == [("Loading weights", 361_728)]
    assert sum(counted) == 361_728 and len(counted) > 10


@pytest.mark.gpu
def test_a_gpu_without_room_says_how_much_is_needed(folder: Path) -> None:
    spec = replace(read_spec(folder), vocab_size=2**31)
    with pytest.raises(UserError, match=r"cuda has no room for 1099\.\d GB of weights"):
        load_model(spec, folder, "cuda", load_format="dummy")


def test_kv_cache_bytes_are_those_allocated(tmp_path: Path, device: torch.device) -> None:
    for tiny in TINY_MODELS:
        tiny.config().save_pretrained(tmp_path)
        spec = read_spec(tmp_path)
        caches = allocate_kv_caches(spec.cache_groups, 3, 8, device)
        assert len(caches) == spec.num_layers
        shape = (3, 2, 8, spec.num_kv_heads, spec.head_dim)
        assert {tuple(c.shape) for c in caches} == {shape}
        memory = {c.data_ptr(): c.nbytes for c in caches}  # groups share it
        assert sum(memory.values()) == 3 * kv_cache_bytes_per_block(spec.cache_groups, 8)
        assert not any(c.any() for c in caches)


def test_kv_blocks_take_memory_when_they_are_written(tmp_path: Path) -> None:
    TINY_MODELS[0].config().save_pretrained(tmp_path)
    groups = read_spec(tmp_path).cache_groups
    gigabyte = 2**30 // kv_cache_bytes_per_block(groups, 8)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    caches = allocate_kv_caches(groups, gigabyte, 8, "cpu")
    assert resident() - before < 2**27
    caches[0][-1].fill_(1.0)
    assert caches[0][-1].all() and not caches[0][-2].any()
    with pytest.raises(MemoryError, match=r"^\d+ bytes: "):
        allocate_kv_caches(groups, 2**60, 8, "cpu")
