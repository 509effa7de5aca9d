"""Two kinds of cache that the package does not have, under its scheduler, blocks and runner: a
latent of two widths for each token, and a state of fixed size for each sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.compiler.run.program import eager_program
from fusewright.config import (
    EngineOptions,
    Hardware,
    block_table_of,
    slot_mapping_of,
    step_schema,
)
from fusewright.engine.core.chunks import StepLimits
from fusewright.engine.core.kv_blocks import BlockPool
from fusewright.engine.core.request import Request
from fusewright.engine.core.scheduler import Scheduler
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.worker.model_runner import ModelRunner
from fusewright.engine.worker.sampler import Sampler
from fusewright.engine.worker.sampling.op_table import OpTable
from fusewright.engine.worker.startup import block_groups, read_model
from fusewright.graph_capture import Dispatcher, Graphs, StepBuffers
from fusewright.model_executor.cache_spec import CacheKind, KVCacheSpec, group_layers
from fusewright.model_executor.kv_cache import allocate_kv_caches

LATENT = CacheKind("latent", lambda spec, block_size: (block_size, sum(spec.head_dims)))
STATE = CacheKind("state", lambda spec, block_size: spec.head_dims, per_sequence=True)
WINDOW, VOCAB_SIZE, BLOCK_SIZE, MAX_LEN = 6, 97, 4, 48
LATENT_SPEC = KVCacheSpec(LATENT, 1, (2, 1), "int64")
SPECS = (
    LATENT_SPEC,
    KVCacheSpec(STATE, 1, (1,), "int64"),
    KVCacheSpec(LATENT, 1, (2, 1), "int64", window=WINDOW),
)
GROUPS = group_layers(SPECS)


def answer_of(latent: int, state: int, windowed: int) -> int:
    return (latent + 13 * state + 31 * windowed) % VOCAB_SIZE


class ToyModel(nn.Module):
    """Sums what its latent layers hold of the tokens that they see, and folds each token into its
    state; the next token follows from the three numbers.  All in whole numbers."""

    def forward(self, values: Mapping[str, Tensor], caches: list[Tensor]) -> Tensor:
        ids, positions = values["input_ids"].long(), values["positions"].long()
        starts, lens = values["query_start_loc"].tolist(), values["seq_lens"].tolist()
        for group in (0, 2):
            stored = caches[group].flatten(0, 1)
            content = torch.stack([ids * 7, ids + positions, positions], 1)
            stored[values[slot_mapping_of(group)].long()] = content
        logits = torch.zeros(len(lens), VOCAB_SIZE)
        for row, length in enumerate(lens):
            query = ids[starts[row] : starts[row + 1]]
            found = [self._seen(values, caches, group, row, length) for group in (0, 2)]
            block = values[block_table_of(1)][row, 0]
            assert set(values[slot_mapping_of(1)][starts[row] : starts[row + 1]].tolist()) == {
                int(block)
            }
            state = caches[1][block]
            if length == len(query):
                state.zero_()  # what an earlier sequence left in the block
            for token in query:
                state.copy_((31 * state + token) % 1009)
            logits[row, answer_of(found[0], int(state), found[1])] = 1
        return logits

    def _seen(self, values: Any, caches: list[Tensor], group: int, row: int, length: int) -> int:
        window = SPECS[group].window or length
        at = torch.arange(max(0, length - window), length)
        blocks = values[block_table_of(group)][row, at // BLOCK_SIZE].long()
        latent = caches[group][blocks, at % BLOCK_SIZE]
        assert latent[:, 2].tolist() == at.tolist(), "the latent of another token"
        return int(latent.prod(1).sum())


def solo(prompt: list[int], num_tokens: int) -> list[int]:
    """What the model says, with no cache at all."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        state = 0
        for token in tokens:
            state = (31 * state + token) % 1009
        terms = [token * 7 * (token + i) * i for i, token in enumerate(tokens)]
        tokens.append(answer_of(sum(terms), state, sum(terms[-WINDOW:])))
    return tokens[len(prompt) :]


def make_runner(scheduler: Scheduler, chunk: int) -> ModelRunner:
    """The package's runner over the toy model, with as many caches as ``SPECS`` says."""
    options = EngineOptions(
        device="cpu", optimization_level=0, max_num_seqs=4, max_model_len=MAX_LEN
    )
    _, _, config = read_model(options, Hardware(device="cpu", name="cpu"))
    model, schema = ToyModel(), step_schema(len(GROUPS))
    caches = allocate_kv_caches(GROUPS, scheduler.pool.num_blocks, BLOCK_SIZE, "cpu")
    assert len({cache.data_ptr() for cache in caches}) == 1, "the groups share memory"
    names = [field.name for field in schema.program]
    program = eager_program(model, lambda values: (values, caches), names)
    dispatcher = Dispatcher(config.capture.mode, config.capture.sizes, 4)
    columns = MAX_LEN // BLOCK_SIZE
    buffers = StepBuffers(
        torch.device("cpu"), max_tokens=chunk, max_seqs=4, max_blocks=columns, schema=schema
    )
    table = OpTable(config.compile, 0)
    return ModelRunner(
        Graphs(program, buffers, dispatcher, None),
        Sampler(table, config, VOCAB_SIZE),
        table,
        block_size=BLOCK_SIZE,
        groups=scheduler.pool.groups,
    )


@pytest.mark.parametrize(("num_blocks", "chunk"), [(100, 16), (28, 5)])
def test_new_kinds_need_no_change_of_scheduler_or_runner(num_blocks: int, chunk: int) -> None:
    """Through chunks, blocks that go back, and preemption; with a step in flight."""
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE, block_groups(GROUPS)),
        StepLimits(4, chunk, MAX_LEN),
        prefix_caching=True,
    )
    assert not scheduler.prefix_caching, "a state is not that of a prefix"
    runner = make_runner(scheduler, chunk)
    prompts = [[(5 * i + j) % VOCAB_SIZE for j in range(3 + 9 * i)] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    requests = [Request(str(i), p, params, len(p) + 20) for i, p in enumerate(prompts[:3])]
    requests.append(Request("3", prompts[3][:20], params, 40))
    for request in requests:
        scheduler.add(request)
    in_flight: list[Any] = []
    while scheduler.num_unfinished or in_flight:
        if (step := scheduler.schedule()) is not None:
            in_flight.append((step, runner.launch(step.batch)))
        if len(in_flight) > 1 or step is None:
            launched, pending = in_flight.pop(0)
            scheduler.update(launched, pending.result())
    for request in requests:
        assert request.output_token_ids == solo(request.prompt_token_ids, 20)
    assert (scheduler.num_preemptions > 0) == (num_blocks == 28)
    assert scheduler.pool.num_free == num_blocks
    held = dict(zip(("latent", "state", "window"), scheduler.pool.peak_held, strict=True))
    assert held["state"] <= 4 and held["window"] < held["latent"]
