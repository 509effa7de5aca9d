"""gpt-oss through the engine: windows, sinks, yarn, biases, clamped gates, experts in MXFP4."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, Hardware, ModelLimits, UserError
from fusewright.config.resolve import resolve
from fusewright.config.weight_format import StoredFormat
from fusewright.engine.worker.proof import rewritten_program
from fusewright.model_executor.abacus import BUNDLED
from fusewright.model_executor.captured.twin import Twin, compare
from fusewright.model_executor.experts import ExpertLinear
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.parallel import GROUP
from fusewright.model_executor.spec import quantize_online
from fusewright.ops.linear.formats import dequantize
from tests.model_executor.captured.gpt_oss import save_mxfp4, small_model, write_mxfp4
from tests.ranks import in_ranks, name_world

LENGTHS, NUM_TOKENS = (23, 17, 41, 30), 16


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(3)
    return [torch.randint(2, 200, (n,), generator=gen).tolist() for n in LENGTHS]


def expected(model: Any) -> list[list[int]]:
    """Greedy tokens of ``generate`` in float32."""
    tokens = []
    for prompt in prompts():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def generated(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts(), params)]


def start(folder: Path, **options: Any) -> LLM:
    usual: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "dtype": "float32"}
    usual["optimization_level"] = 0
    return LLM(str(folder), **usual | options)


@pytest.mark.product(2)
@pytest.mark.parametrize("stored", ["float32", "mxfp4"])
def test_tokens_equal_transformers_in_chunks_and_preempted(stored: str, tmp_path: Path) -> None:
    model = small_model()
    if stored == "mxfp4":
        save_mxfp4(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    sizes = {"block_size": 8, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 8}
    llm = start(tmp_path, **sizes)
    assert generated(llm) == expected(model)
    assert llm.engine.core.scheduler.num_preemptions > 0


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_answers_as_the_stored_numbers_do(tmp_path: Path) -> None:
    """Compiled, from graphs, in bfloat16, whose rounding may choose another expert here and there:
    four tokens in five are about the likeliest in float32.  On a CPU 61 of 64 are."""
    model = small_model()
    save_mxfp4(model, tmp_path)
    how = {"device": "cuda", "optimization_level": 2, "kv_cache_memory_bytes": 2**26}
    llm = start(tmp_path, dtype="bfloat16", **how)
    behind: list[float] = []
    for prompt, ids in zip(prompts(), generated(llm), strict=True):
        logits = model(torch.tensor([[*prompt, *ids][:-1]])).logits[0, -NUM_TOKENS:]
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        behind += (logits.amax(-1) - chosen).tolist()
    assert sum(each < 0.1 for each in behind) >= 0.8 * len(behind), behind


def test_quantized_online_experts_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = small_model(num_hidden_layers=2)
    model.save_pretrained(tmp_path / "whole")
    save_mxfp4(model, tmp_path / "stored")
    whole, stored = (read_spec(tmp_path / name) for name in ("whole", "stored"))
    online = load_model(quantize_online(whole, "mxfp4"), tmp_path / "whole", "cpu").state_dict()
    checked = 0
    for name, tensor in load_model(stored, tmp_path / "stored", "cpu").state_dict().items():
        if "experts" in name and "bias" not in name:
            assert torch.equal(tensor.view(torch.uint8), online[name].view(torch.uint8)), name
            checked += 1
    assert checked == 2 * 2 * 2  # layers, weights, their tensors


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"),
            "lacks .*down_proj_scales",
        ),
        (lambda t: t["model.layers.0.mlp.experts.down_proj_scales"].fill_(255), "holds NaN"),
        (
            lambda t: t.update(
                {(n := "model.layers.0.mlp.experts.gate_up_proj_blocks"): t[n][:, :64]}
            ),
            "gate_up_proj_scales in .* have shapes",
        ),
        (
            lambda t: t.update(
                {(n := "model.layers.0.mlp.experts.down_proj_scales"): t[n].float()}
            ),
            "is of type F32, expected U8",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(damage: Any, message: str, tmp_path: Path) -> None:
    model = small_model(num_hidden_layers=2)
    tensors = save_mxfp4(model, tmp_path)
    damage(tensors)
    write_mxfp4(model, {n: t.contiguous() for n, t in tensors.items()}, tmp_path)
    with pytest.raises(UserError, match=message):
        start(tmp_path)


@pytest.mark.parametrize("quantization", ["mxfp4", "int4_zero_g32"])
def test_experts_that_are_quantized_online_answer(quantization: str) -> None:
    """The bundled mixture of experts, which an adapter reads."""
    llm = LLM("abacus-moe", optimization_level=0, quantization=quantization)
    sums = [(37, 58), (12, 99), (8, 7), (81, 19)]
    params = SamplingParams(max_tokens=6, temperature=0)
    outs = llm.generate([f"{one}+{other}=" for one, other in sums], params)
    assert [int(out.outputs[0].text) for out in outs] == [one + other for one, other in sums]


def test_random_weights_of_stored_experts_have_the_size_of_others(tmp_path: Path) -> None:
    """A captured model's are drawn in their format, an adapter's quantized."""
    write_mxfp4(small_model(num_hidden_layers=1), {"x": torch.zeros(1)}, tmp_path)
    models = [(read_spec(tmp_path), tmp_path)]
    bundled = BUNDLED["abacus-moe"]
    models.append((quantize_online(read_spec(bundled), "int4_zero_g32"), bundled))
    for spec, folder in models:
        model = load_model(spec, folder, "cpu", load_format="dummy")
        layers = [m for m in model.modules() if isinstance(m, ExpertLinear)]
        assert layers
        for layer in layers:
            assert isinstance(layer.quant, StoredFormat)
            for one, other in pairwise(layer.shares()):
                held = (one.weight, one.weight_scale, one.weight_zero)
                assert 0.015 < dequantize(layer.quant, *held).std() < 0.03
                assert not torch.equal(one.weight, other.weight)


_prepared: list[Any] = []


def prepare(world: int) -> None:
    """Before the ranks are forked: the model of rank 0, whose tensors the rewritten program has."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    folder = Path(os.environ["FOLDER"])
    options = EngineOptions(optimization_level=2, device="cpu")
    config = resolve(options, Hardware("cpu", "cpu"), ModelLimits(4096, "float32")).compile
    spec = replace(
        read_spec(folder / "stored", "transformers", ranks=world),
        tensor_parallel_size=world,
        dtype_name="float32",
    )
    model = load_model(spec, folder / "stored", "cpu")
    whole = AutoModelForCausalLM.from_pretrained(folder / "whole", dtype=torch.float32).eval()
    _prepared[:] = [spec, model, whole, rewritten_program(spec, model, config)]


def run(rank: int, world: int) -> list[float]:
    """The largest differences from the dequantized model: as the model is, and rewritten."""
    name_world(GROUP)
    spec, model, whole, program = _prepared
    own = load_model(spec, Path(os.environ["FOLDER"]) / "stored", "cpu", rank=rank)
    for name, tensor in model.state_dict().items():
        tensor.copy_(own.state_dict()[name])
    held = own.get_submodule("library.model.layers.0.mlp.experts.down_proj").weight
    assert tuple(held.shape) == (8, 64, 32 // 2)  # type: ignore[arg-type]
    twin = Twin(spec, model, whole)
    return [compare(twin, step, "gpt_oss").error for step in (model, program.step)]


@pytest.mark.thorough
def test_two_ranks_hold_a_part_of_each_stored_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(num_hidden_layers=2)
    save_mxfp4(model, tmp_path / "stored")
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "ranks").mkdir()
    monkeypatch.setenv("FOLDER", str(tmp_path))
    for errors in in_ranks(run, 2, tmp_path / "ranks"):
        assert max(errors) < 1e-4


def test_a_part_of_a_rank_is_whole_groups_of_scales(tmp_path: Path) -> None:
    save_mxfp4(small_model(num_hidden_layers=2), tmp_path)
    with pytest.raises(UserError, match="down_proj would have 16 columns, of which 32 share"):
        read_spec(tmp_path, ranks=4)
