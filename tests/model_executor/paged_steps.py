"""Runs a model over ragged steps with a paged KV cache, as the engine would, in a few lines."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from fusewright.model_executor.attention import AttentionInputs, CacheInputs
from fusewright.model_executor.kv_cache import allocate_kv_caches
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.spec import ModelSpec


class PagedSteps:
    """Sequences of token ids that advance step by step; blocks are handed out in random order."""

    def __init__(
        self,
        model: DecoderModel | Callable[..., Tensor],
        tokens: list[list[int]],
        *,
        block_size: int = 16,
        spec: ModelSpec | None = None,
    ) -> None:
        """``spec``: of a ``model`` on the CPU that does not have it."""
        self.forward = model
        self.tokens, self.block_size = tokens, block_size
        self.device = torch.device("cpu")
        if isinstance(model, DecoderModel):
            self.device, spec = model.cos_sin_cache.device, model.spec
        assert spec is not None
        self.done = [0] * len(tokens)
        blocks_each = [-(-len(t) // block_size) for t in tokens]
        groups = spec.cache_groups
        free = list(range(len(groups) * sum(blocks_each) + 3))
        self.kv_caches = allocate_kv_caches(groups, len(free), block_size, self.device)
        random.Random(0).shuffle(free)
        self.blocks = [[[free.pop() for _ in range(n)] for n in blocks_each] for _ in groups]

    def step(self, advance: dict[int, int], *, padding: int = 0, skipped_rows: int = 0) -> Tensor:
        """Run the next ``advance[i]`` tokens of each sequence i, in the order given.

        ``padding`` appends token rows that no sequence owns, ``skipped_rows`` sequences of no
        length.  Returns logits [len(advance), vocab], float32 on the CPU.
        """
        ids: list[int] = []
        positions: list[int] = []
        starts, lens = [0], []
        for i, count in advance.items():
            for position in range(self.done[i], self.done[i] + count):
                ids.append(self.tokens[i][position])
                positions.append(position)
            self.done[i] += count
            starts.append(len(ids))
            lens.append(self.done[i])
        ids += [7] * padding
        positions += [3] * padding
        starts += [starts[-1]] * skipped_rows
        lens += [0] * skipped_rows
        groups = tuple(
            self._cache_inputs(blocks, advance, positions, padding, skipped_rows)
            for blocks in self.blocks
        )
        inputs = AttentionInputs(groups, self._int32(lens), self._int32(starts))
        with torch.inference_mode():
            logits = self.forward(
                self._int32(ids),
                self._int32(positions),
                inputs,
                self.kv_caches,
            )
        return logits[: len(advance)].float().cpu()

    def _cache_inputs(
        self,
        blocks: list[list[int]],
        advance: dict[int, int],
        positions: list[int],
        padding: int,
        skipped_rows: int,
    ) -> CacheInputs:
        size, width = self.block_size, max(map(len, blocks))
        rows = [blocks[i] for i, count in advance.items() for _ in range(count)]
        stored = zip(rows, positions[: len(rows)], strict=True)
        slots = [row[at // size] * size + at % size for row, at in stored]
        table = [blocks[i] + [0] * (width - len(blocks[i])) for i in advance]
        table += [[0] * width] * skipped_rows
        return CacheInputs(self._int32(slots + [-1] * padding), self._int32(table))

    def _int32(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def random_tokens(*lengths: int, vocab_size: int = 128) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
