"""An EAGLE-3 head drafts what its definition says; outputs are those without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fusewright import LLM
from fusewright.compiler.emit.kernels import step_sizes
from fusewright.config import EngineOptions, Hardware, UserError
from fusewright.engine.core.request import Request
from fusewright.engine.messages.step import Batch, DraftPasses, NewSequence
from fusewright.engine.read_draft import read_draft_model
from fusewright.engine.worker.drafts.draft_sampler import HeadSampler
from fusewright.engine.worker.sampling.op_table import OpTable
from fusewright.engine.worker.startup import decode_buffers, read_model
from fusewright.engine.worker.step_arguments import example
from fusewright.model_executor.abacus.problems import held_out
from fusewright.model_executor.draft_checks import drafter_reader
from fusewright.model_executor.hf_config import model_folder, read_spec

from .eagle3_heads import DRAFT_VOCAB, HIDDEN, Reference, config_of, random_weights, save_head
from .test_speculative import KINDS, OPTIONS, PROMPTS, SETUPS, facts, generate, params

NAMES = ("greedy", "on and on", "sampled", "stop text", "one token", "bad words", "grammar")
FEW = {kind: KINDS[kind] for kind in NAMES}
BUNDLED = {
    "method": "eagle3",
    "model": "abacus-eagle3",
    "num_speculative_tokens": 4,
    "adaptive": False,
}


class Recorded:
    """The drafts that passes behind a step have made, with the tokens that they follow.

    Iterate over it when all requests have ended; drafts behind the end of one are left out.
    """

    def __init__(self, llm: LLM) -> None:
        self._runner: Any = llm.engine.runner  # type: ignore[attr-defined]
        self._running = llm.engine.core.scheduler.running  # type: ignore[attr-defined]
        self._draft, self._runner.draft = self._runner.draft, self._record
        self._records: list[tuple[Request, int, list[int]]] = []

    def _record(self, passes: DraftPasses) -> None:
        self._draft(passes)
        state = self._runner.sampler.drafts
        requests = {request.slot: request for request in self._running.values()}
        for slot in [] if passes.drafting is None else passes.drafting.slots.tolist():
            drafts = state.drafts[: passes.depth, slot].tolist()
            self._records.append((requests[slot], int(state.lengths[slot]), drafts))

    def __iter__(self) -> Iterator[tuple[list[int], list[int]]]:
        for request, length, drafts in self._records:
            if length <= request.num_known_tokens:
                yield request.tokens(0, length), drafts

    def __len__(self) -> int:
        return len(list(iter(self)))


FORMS: dict[str, dict[str, Any]] = {
    "SGLang": {},
    "of a captured model": {"model_impl": "transformers"},
    "norm before residual": {"norm_before_residual": True},
    "nested layer ids": {
        "eagle_aux_hidden_state_layer_ids": None,
        "max_position_embeddings": 16,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    },
}


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_a_head_drafts_what_its_definition_says(changes: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights()
    of_target = {name: changes[name] for name in changes.keys() & {"model_impl"}}
    head = save_head(tmp_path / "head", weights, config_of(**changes))
    reference = Reference(weights, norm_before_residual="norm_before_residual" in changes)
    options = OPTIONS | of_target | {"block_size": 8}
    llm = LLM("abacus", **options, speculative_config=BUNDLED | {"model": head})
    proposals = Recorded(llm)
    llm.generate(PROMPTS[2:4], params(ignore_eos=True, max_tokens=8), use_tqdm=False)
    assert len(proposals) >= 10
    for known, drafts in proposals:
        assert drafts == reference.drafts(known, len(drafts)), known
    assert llm.report()["drafts"]["error"] == ""


def test_a_trained_head_drafts_what_its_definition_says() -> None:
    """Also behind drafts that were accepted, which it reads again."""
    folder = model_folder("abacus-eagle3")
    stored = load_file(folder / "model.safetensors")
    reference = Reference({n: t if n in ("d2t", "t2d") else t.float() for n, t in stored.items()})
    llm = LLM("abacus", **OPTIONS, speculative_config=BUNDLED)
    proposals = Recorded(llm)
    prompts = [each.prompt for each in held_out(10, seed=7)]
    llm.generate(prompts, params(max_tokens=16, ignore_eos=True), use_tqdm=False)
    assert llm.report()["drafts"]["accepted"] > 10
    for known, drafts in proposals:
        assert drafts == reference.drafts(known, len(drafts)), known


def changed(weights: dict[str, Tensor], name: str, value: Tensor | None) -> dict[str, Tensor]:
    others = {key: tensor for key, tensor in weights.items() if key != name}
    return others if value is None else others | {name: value}


BAD: dict[str, tuple[dict[str, Any], tuple[str, Tensor | None] | None, str]] = {
    "vocabulary": ({"vocab_size": 300}, None, "vocab_size=300, and the model's is 272"),
    "hidden size": ({"hidden_size": 128}, None, "hidden_size=128, and the model's hidden_size is"),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        None,
        "expected different layers, 0 to 5: the model has 5 layers",
    ),
    "no layers": ({"eagle_aux_hidden_state_layer_ids": None}, None, "the layers that the head"),
    "other model": (
        {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}},
        None,
        "Qwen3ForCausalLM.* it is a head for another model",
    ),
    "older head": ({"architectures": ["LlamaForCausalLMEagle"]}, None, "EAGLE 1 or 2"),
    "no head": ({"architectures": ["LlamaForCausalLM"]}, None, "expected an EAGLE-3 head"),
    "no map": ({}, ("d2t", None), "has no tensor d2t"),
    "map beyond": ({}, ("d2t", torch.full((DRAFT_VOCAB,), 260)), "expected different ones of 0..2"),
    "other map": ({}, ("t2d", torch.zeros(272, dtype=torch.bool)), "name other tokens"),
    "shape": ({}, ("fc.weight", torch.zeros(HIDDEN, HIDDEN)), "fc.weight .* has shape"),
    "tensor": ({}, ("norm.weight", None), "lacks weight norm.weight"),
}


@pytest.mark.parametrize(("changes", "tensor", "said"), BAD.values(), ids=BAD)
def test_a_head_of_another_model_is_refused_by_name(
    changes: dict[str, Any], tensor: tuple[str, Tensor | None] | None, said: str, tmp_path: Path
) -> None:
    weights = random_weights()
    weights = changed(weights, *tensor) if tensor else weights
    head = save_head(tmp_path / "head", weights, config_of(**changes))
    with pytest.raises(UserError, match=said):
        LLM("abacus", **OPTIONS, speculative_config=BUNDLED | {"model": head})


def test_a_head_is_no_model_and_no_draft_model(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", random_weights(), config_of())
    with pytest.raises(UserError, match="is a draft head and no model"):
        LLM(head, **OPTIONS)
    wrong = BUNDLED | {"model": head, "method": "draft_model"}
    with pytest.raises(UserError, match="say method='eagle3'"):
        LLM("abacus", **OPTIONS, speculative_config=wrong)


def test_a_head_as_speculators_write_it_drafts_the_same(tmp_path: Path) -> None:
    """Its layer's configuration is nested, and its tensors have other names."""
    weights, config = random_weights(), config_of()
    own = {"architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"}
    nested = {name: value for name, value in config.items() if name not in own}
    outer = {name: config[name] for name in own} | {"transformer_layer_config": nested}
    outer |= {
        "architectures": ["Eagle3Speculator"],
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}},
    }
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in weights.items()}
    heads = [
        save_head(tmp_path / "SGLang", weights, config),
        save_head(tmp_path / "speculators", renamed, outer),
    ]
    drafts = []
    for head in heads:
        llm = LLM("abacus", **OPTIONS, speculative_config=BUNDLED | {"model": head})
        proposals = Recorded(llm)
        llm.generate(PROMPTS[:2], params(ignore_eos=True, max_tokens=8), use_tqdm=False)
        drafts.append(list(proposals))
    assert drafts[0] and drafts[0] == drafts[1]


DRAFTERS: dict[str, dict[str, Any]] = {
    "abacus-eagle3": BUNDLED,
    "abacus-draft": BUNDLED | {"method": "draft_model", "model": "abacus-draft"},
}


@cache
def without_drafts(model: str) -> list[Any]:
    return facts(generate(LLM(model, **OPTIONS), FEW))


@pytest.mark.product(11)
@pytest.mark.parametrize(
    ("model", "drafter"),
    [("abacus", "abacus-eagle3"), ("abacus", "abacus-draft"), ("abacus-moe", "abacus-draft")],
)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_outputs_are_those_without_drafts(setup: dict[str, Any], model: str, drafter: str) -> None:
    """Through preemption, chunks, priorities and steps of their own."""
    llm = LLM(model, **OPTIONS | setup, speculative_config=DRAFTERS[drafter])
    assert facts(generate(llm, FEW)) == without_drafts(model)
    report = llm.report()["drafts"]
    assert report["error"] == "" and report["accepted"] > 20, report
    assert (llm.report()["num_preemptions"] > 0) == ("num_gpu_blocks_override" in setup)
    pool = llm.engine.core.scheduler.pool  # type: ignore[attr-defined]
    assert pool.num_free == pool.num_blocks, "a block was lost"


@pytest.mark.parametrize(("name", "least"), [("abacus-eagle3", 0.75), ("abacus-draft", 0.7)])
def test_a_trained_drafter_is_mostly_right(name: str, least: float) -> None:
    """Twice: behind cached prefixes it is as right, for what it has stored is there too.  A draft
    that is the last token counts as none."""
    problems = held_out(36, seed=5)
    kind = params(max_tokens=12)
    llm = LLM("abacus", **OPTIONS, block_size=8, speculative_config=DRAFTERS[name])
    for _ in range(2):
        outputs = llm.generate([each.prompt for each in problems], kind, use_tqdm=False)
        assert [o.outputs[0].text for o in outputs] == [each.answer for each in problems]
        report = llm.report()["drafts"]
        assert report["accepted_by_position"][0] > least * report["drafted_by_position"][0]
    assert report["drafted"] > 100


@pytest.mark.parametrize(("length", "token"), [(13, 4), (14, 4), (15, 3)])
def test_a_head_drafts_no_end_before_min_tokens(length: int, token: int) -> None:
    """The 15th token is the first that may end a prompt of 10 with 5 tokens; a row of a head is at
    the position before that of its token."""
    asked = EngineOptions(
        model="abacus",
        device="cpu",
        optimization_level=0,
        dtype="float32",
        max_model_len=128,
        speculative_config=json.dumps(BUNDLED),
    )
    hardware = Hardware("cpu", "any", graphs="none")
    _, spec, config = read_model(asked, hardware)
    parts = read_draft_model(asked, config, spec, hardware, weights=False)
    assert parts is not None
    sampler = HeadSampler(OpTable(parts.config.compile, 0), parts.config, 8, None)
    kind = params(min_tokens=5)
    sampler.admit(NewSequence(0, kind, 0, 10, frozenset({3}), [], []))
    zeros, ones = np.zeros(1, np.int32), np.ones(1, np.int32)
    starts = np.array([length - 4], np.int32)  # two drafts are in flight
    batch = Batch(zeros, starts, ones, ones, zeros, zeros, [], [], 1, ahead=2 * ones)
    buffers = decode_buffers(parts.spec, parts.config)
    buffers.view("seq_lens", 1).fill_(length - 1)
    logits = torch.tensor([[0.0, 0, 0, 2, 1, 0, 0, 0]])
    assert sampler.choose(logits, batch, buffers).tolist() == [token]


def test_a_head_drafts_again_after_a_sleep(tmp_path: Path) -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=BUNDLED)
    prompts, kind = ["37+58=", "reverse kcmoq="], params(max_tokens=12)
    before = facts(llm.generate(prompts, kind, use_tqdm=False))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        counts = llm.report()["drafts"]["accepted"]
        assert facts(llm.generate(prompts, kind, use_tqdm=False)) == before
        assert llm.report()["drafts"]["accepted"] > counts
        assert llm.report()["drafts"]["error"] == ""


@pytest.mark.thorough
@pytest.mark.usefixtures("no_engine_is_left")
def test_a_head_drafts_for_two_ranks() -> None:
    """Both keep hidden states; the head runs on rank 0, with an embedding of its own."""
    with LLM("abacus", **OPTIONS, tensor_parallel_size=2, speculative_config=BUNDLED) as llm:
        assert facts(generate(llm, FEW)) == without_drafts("abacus")
        report = llm.report()["drafts"]
    assert report["error"] == "" and report["accepted"] > 20, report


def test_a_head_drafts_for_no_pipeline() -> None:
    with pytest.raises(UserError, match="hidden states of layers that other stages have"):
        LLM("abacus", **OPTIONS, pipeline_parallel_size=2, speculative_config=BUNDLED)


def test_the_memory_of_hidden_states_is_accounted_for() -> None:
    alone = LLM("abacus", **OPTIONS, num_gpu_blocks_override=32).report()
    both = LLM("abacus", **OPTIONS, num_gpu_blocks_override=32, speculative_config=BUNDLED).report()
    tokens, size = 32 * both["kv_cache"]["block_size"], 4
    more = both["kv_cache"]["bytes"] - alone["kv_cache"]["bytes"]
    assert more == tokens * size * (3 * HIDDEN + 2 * 64)  # three states, and the head's own K and V


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_trained_drafter_drafts_on_a_gpu(name: str) -> None:
    """Compiled, in bfloat16, with graphs: the answers are right, and most drafts too."""
    problems = held_out(32, seed=5)
    options: dict[str, Any] = {"device": "cuda", "max_model_len": 128, "max_num_seqs": 256}
    options["kv_cache_memory_bytes"] = 2**28
    llm = LLM("abacus", **options, speculative_config=DRAFTERS[name])
    outputs = llm.generate([p.prompt for p in problems], params(max_tokens=12), use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [each.answer for each in problems]
    report = llm.report()["drafts"]
    assert report["error"] == ""
    assert report["accepted_by_position"][0] > 0.7 * report["drafted_by_position"][0], report


def test_whatever_a_heads_dimensions_count_has_a_size_for_its_kernels() -> None:
    target = read_spec(model_folder("abacus"))
    head = drafter_reader("eagle3", target)(model_folder("abacus-eagle3"))
    made = example(head, 16, torch.device("meta"))
    counts = {count for dims in made.dynamic.values() for count in dims.values()}
    assert "num_slots" in counts
    assert counts <= {*step_sizes(num_tokens=1, num_seqs=1)}
