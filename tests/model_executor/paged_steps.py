"""Runs a model over ragged steps with a paged KV cache, as the engine would, in a few lines."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from fusewright.model_executor.attention import AttentionInputs
from fusewright.model_executor.kv_cache import allocate_kv_caches
from fusewright.model_executor.models.decoder import DecoderModel


class PagedSteps:
    """Sequences of token ids that advance step by step; blocks are handed out in random order."""

    def __init__(
        self, model: DecoderModel, tokens: list[list[int]], *, block_size: int = 16
    ) -> None:
        self.forward: Callable[..., Tensor] = model
        self.tokens, self.block_size = tokens, block_size
        self.device = model.embed.weight.device
        self.done = [0] * len(tokens)
        blocks_each = [-(-len(t) // block_size) for t in tokens]
        free = list(range(sum(blocks_each) + 3))
        random.Random(0).shuffle(free)
        self.blocks = [[free.pop() for _ in range(n)] for n in blocks_each]
        self.kv_caches = allocate_kv_caches(
            model.spec, sum(blocks_each) + 3, block_size, model.spec.kv_cache_dtype, self.device
        )

    def step(self, advance: dict[int, int], *, padding: int = 0, skipped_rows: int = 0) -> Tensor:
        """Run the next ``advance[i]`` tokens of each sequence i, in the order given.

        ``padding`` appends token rows that no sequence owns, ``skipped_rows`` sequences of no
        length.  Returns logits [len(advance), vocab], float32 on the CPU.
        """
        ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        starts, lens, table = [0], [], []
        width = max(map(len, self.blocks))
        for i, count in advance.items():
            for position in range(self.done[i], self.done[i] + count):
                ids.append(self.tokens[i][position])
                positions.append(position)
                block = self.blocks[i][position // self.block_size]
                slot_mapping.append(block * self.block_size + position % self.block_size)
            self.done[i] += count
            starts.append(len(ids))
            lens.append(self.done[i])
            table.append(self.blocks[i] + [0] * (width - len(self.blocks[i])))
        ids += [7] * padding
        positions += [3] * padding
        slot_mapping += [-1] * padding
        starts += [starts[-1]] * skipped_rows
        lens += [0] * skipped_rows
        table += [[0] * width] * skipped_rows
        inputs = AttentionInputs(self._int32(table), self._int32(lens), self._int32(starts))
        with torch.inference_mode():
            logits = self.forward(
                self._int32(ids),
                self._int32(positions),
                self._int32(slot_mapping),
                inputs,
                self.kv_caches,
            )
        return logits[: len(advance)].float().cpu()

    def _int32(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def random_tokens(*lengths: int, vocab_size: int = 128) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
