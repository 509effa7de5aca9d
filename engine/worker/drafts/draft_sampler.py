"""``DraftSampler`` draws the drafts of a model as the target will draw its tokens, by launches that
a CUDA graph may hold: they are the same for all requests that share a form of drawing.

What the target does by the host before each step (tokens that end a request too early, biases,
tokens that alone are allowed) are here a few changed logits a request.  A draft is a guess, so what
exceeds their number is left out: it costs drafts of that request, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from ....config import ResolvedConfig
from ....graph_capture import StepBuffers
from ...messages.sampling_params import SamplingParams
from ...messages.step import Batch, NewSequence
from ..sampler import Sampler
from ..sampling.op_table import OpTable
from ..sampling.requests import RowParameters
from .pass_sizes import Form

_MOST, _ALWAYS = 32, (1 << 31) - 1
"""Changed logits of a request; a length that none exceeds."""
_CHANGES = np.dtype(
    [
        ("until", np.int64),  # some change up to this length
        ("token_ids", np.int64, _MOST),
        ("biases", np.float32, _MOST),
        ("min_lens", np.int32, _MOST),  # the token may come from this length on
        ("alone", np.bool_),  # no other tokens may come
    ],
    align=True,
)
_FIELDS = ("token_ids", "biases", "min_lens", "alone")
_FILTERS = ("top_k", "top_p", "min_p")


class DraftSampler(Sampler):
    """``Sampler`` of a draft model."""

    def __init__(self, table: OpTable, config: ResolvedConfig, vocab_size: int) -> None:
        super().__init__(table, config, vocab_size)
        self._changes = np.zeros(config.scheduler.max_num_seqs, _CHANGES)

    def admit(self, sequence: NewSequence) -> None:
        super().admit(sequence)
        params, slot = sequence.sampling_params, sequence.slot
        min_len = int(self._slots["min_len"][slot])
        stops = dict.fromkeys(sorted(sequence.stop_ids), min_len) if params.min_tokens else {}
        _change(self._changes[slot], params, stops)

    def form(self, batch: Batch) -> Form:
        """How the drafts of a batch are drawn, which samples in all rows."""
        requests = self._slots[batch.slots]
        if requests["plain"].all():
            return Form.LIKELIEST
        is_filtered = (requests["top_k"] != 0) | (requests["top_p"] != 1) | (requests["min_p"] != 0)
        draws = ~requests["likeliest"]
        is_changed = batch.starts + 1 < self._changes["until"][batch.slots]
        if (draws & is_filtered).any() or is_changed.any():
            return Form.CHANGED
        return Form.DRAWN if draws.any() else Form.LIKELIEST

    def parameters(self, batch: Batch, form: Form) -> RowParameters | None:
        """Those by which ``draw_drafts`` draws a batch of a form, which says which there are."""
        if form is Form.LIKELIEST:
            return None
        rows = self._rows_of(batch)
        if form not in rows.of_drafts:
            columns: dict[str, Any] = dict.fromkeys(_FILTERS)
            if form is Form.CHANGED:
                changes = self._changes[batch.slots]
                columns |= {name: self._send(rows.requests[name].copy()) for name in _FILTERS}
                columns |= {name: self._send(changes[name].copy()) for name in _FIELDS}
            rows.of_drafts[form] = replace(self._upload(batch, rows), **columns)
        return rows.of_drafts[form]

    def spread(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary, of those of the model."""
        return logits

    def draw_drafts(
        self, logits: Tensor, parameters: RowParameters | None, buffers: StepBuffers
    ) -> Tensor:
        """[num_seqs] int32: drafts by the logits of the model, negative where it has none."""
        logits = self.spread(logits)
        if parameters is not None and parameters.token_ids is not None:
            logits = _changed(logits, parameters, buffers.view("seq_lens", len(logits)))
        return self.draw(logits, parameters, buffers)


class HeadSampler(DraftSampler):
    """Samples the target's tokens from logits of those that the head knows, by the noise with which
    the target will: the token is at the second position behind a row's."""

    _ahead = 1

    def __init__(
        self, table: OpTable, config: ResolvedConfig, vocab_size: int, ids: Tensor | None
    ) -> None:
        super().__init__(table, config, vocab_size)
        self._ids, self._most = ids, config.scheduler.max_num_seqs
        self._spread: Tensor | None = None

    def admit(self, sequence: NewSequence) -> None:
        super().admit(structs.replace(sequence, num_prompt_tokens=sequence.num_prompt_tokens - 1))

    def choose(self, logits: Tensor, batch: Batch, buffers: StepBuffers) -> Tensor:
        return super().choose(self.spread(logits), batch, buffers)

    def spread(self, logits: Tensor) -> Tensor:
        if self._ids is None:
            return logits
        if self._spread is None:
            # Other columns are never written.
            self._spread = logits.new_full((self._most, self.vocab_size), -torch.inf)
        return self._spread[: len(logits)].index_copy_(1, self._ids, logits)


def _change(row: np.void, params: SamplingParams, stops: Mapping[int, int]) -> None:
    """Write which logits of a request change.

    Args:
        row: of ``_CHANGES``.
        stops: tokens that may come from a length on.
    """
    biases, allowed = params.logit_bias or {}, params.allowed_token_ids
    largest = sorted(biases, key=lambda token_id: -abs(biases[token_id]))
    row["alone"] = allowed is not None and len(allowed) <= _MOST
    changed = allowed if allowed is not None and row["alone"] else [*stops, *largest]
    token_ids = [*dict.fromkeys(changed)][:_MOST]
    lasts = row["alone"] or bool(biases)
    row["until"] = _ALWAYS if lasts else max(stops.values(), default=0)
    # The others repeat the first, which changes nothing.
    token_ids += [token_ids[0] if token_ids else 0] * (_MOST - len(token_ids))
    row["token_ids"] = token_ids
    row["biases"] = [biases.get(token_id, 0.0) for token_id in token_ids]
    row["min_lens"] = [min(stops.get(token_id, 0), _ALWAYS) for token_id in token_ids]


def _changed(logits: Tensor, parameters: RowParameters, seq_lens: Tensor) -> Tensor:
    """A copy of logits [num_seqs, vocab] with the changes of each request."""
    token_ids, biases, min_lens = parameters.token_ids, parameters.biases, parameters.min_lens
    assert token_ids is not None and biases is not None
    assert min_lens is not None and parameters.alone is not None
    values = (logits.gather(1, token_ids) + biases).to(logits.dtype)
    values.masked_fill_(seq_lens[:, None] < min_lens, -torch.inf)
    others = logits.masked_fill(parameters.alone[:, None], -torch.inf)
    return others.scatter_(1, token_ids, values)
