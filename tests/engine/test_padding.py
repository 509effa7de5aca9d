"""In a mixture of experts, padding of a decode repeats the shortest sequence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusewright import SamplingParams
from fusewright.config import EngineOptions, Hardware
from fusewright.engine.engine import Engine
from fusewright.engine.llm import LLM
from fusewright.engine.messages.step import Batch
from fusewright.engine.worker.model_runner import ModelRunner
from fusewright.graph_capture import Dispatch, GraphKind
from tests.model_executor.tiny_models import BY_NAME

RECORDING = Hardware(device="cpu", name="recording", graphs="recording")
PROMPTS = [[3, 5, 7, 11, 2, 9], [4, 1, 6], [8, 8, 1, 2, 3, 4, 5, 6, 7, 9]]
TOKENS = ("input_ids", "positions", "slot_mapping")


@pytest.mark.parametrize("name", ["qwen3_moe", "llama_gqa"])
def test_padding_repeats_the_shortest_sequence_of_experts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BY_NAME[name].save(tmp_path)
    seen: list[tuple[int, int, dict[str, Tensor]]] = []
    real = ModelRunner._run

    def run(self: ModelRunner, dispatch: Dispatch, num_seqs: int) -> Tensor:
        if dispatch.kind is GraphKind.FULL and dispatch.query_len:
            views = self.buffers.views(num_tokens=dispatch.num_tokens, num_seqs=dispatch.num_seqs)
            seen.append((num_seqs, dispatch.num_seqs, {k: v.clone() for k, v in views.items()}))
        return real(self, dispatch, num_seqs)

    monkeypatch.setattr(ModelRunner, "_run", run)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)

    def generated(mode: str, **settings: Any) -> list[list[int]]:
        options = EngineOptions(
            model=str(tmp_path),
            cudagraph_mode=mode,
            max_num_seqs=8,
            max_model_len=64,
            dtype="float32",
            **settings,
        )
        with LLM.from_engine(Engine(options, RECORDING)) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
        return [output.outputs[0].token_ids for output in outputs]

    without = generated("NONE")
    assert generated("FULL_DECODE_ONLY", cudagraph_capture_sizes=(1, 8)) == without
    padded = [step for step in seen if step[0] < step[1]]
    assert padded
    for num_seqs, size, views in padded:
        lens = views["seq_lens"]
        shortest = int(lens[:num_seqs].argmin())
        table = next(value for key, value in views.items() if key.startswith("block_table"))
        for row in range(num_seqs, size):
            assert views["slot_mapping"][row] == -1, "it is stored nowhere"
            if name == "llama_gqa":
                assert (lens[row], views["input_ids"][row]) == (0, 0)
                continue
            assert lens[row] == lens[shortest] > 0
            assert torch.equal(table[row], table[shortest])
            for key in TOKENS[:2]:
                assert views[key][row] == views[key][shortest]


class Stage:
    """The last of two stages.  The stage before sends each token its number."""

    rank = stage = 1
    num_stages, tp_rank = 2, 0

    def receive(self, tensor: Tensor, stage: int) -> None:
        assert stage == 0
        tensor.copy_(torch.arange(len(tensor))[:, None].expand_as(tensor))

    def send(self, tensor: Tensor, stage: int) -> None:
        assert (len(tensor), stage) == (3, 0)


@pytest.mark.parametrize("repeats", [True, False])
def test_a_later_stage_repeats_what_the_stage_before_sent(
    repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.full((16, 4), 99.0)
    runner = object.__new__(ModelRunner)
    monkeypatch.setattr(runner, "_ranks", Stage(), raising=False)
    monkeypatch.setattr(runner, "_repeats", repeats, raising=False)
    buffers = SimpleNamespace(view=lambda name, size: hidden[:size])
    monkeypatch.setattr(runner, "buffers", buffers, raising=False)
    monkeypatch.setattr(runner, "_run", lambda dispatch, num_seqs: hidden)
    starts, lens = np.array([7, 2, 5], np.int32), np.full(3, 2, np.int32)
    none, feeds = np.zeros(0, np.int32), np.zeros(6, np.int32)
    batch = Batch(np.arange(3, dtype=np.int32), starts, lens, lens, feeds, feeds, [], [], 2, none)
    runner.run_stage(Dispatch(GraphKind.FULL, 10, 5, 2), batch)
    padding = [2.0, 3.0] * 2 if repeats else [99.0] * 4
    assert hidden[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, *padding, *[99.0] * 6]
