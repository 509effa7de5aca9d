"""``DraftHead``: a few decoder layers that draft for a larger model from its hidden states.

EAGLE-3 (Li et al., 2025) widens the first layer's attention, which reads the token's embedding and
the hidden state that it follows.  A layer that predicts further tokens (MTP; DeepSeek-AI, 2024,
section 2.2) is a decoder layer over a linear layer of both.  The row of a token is at the position
of the token before it, whose hidden state it reads.

Shape suffixes: T tokens, S sequences, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import ops
from ..attention import AttentionInputs, HeadInputs
from ..heads.forms import FORMS
from ..layers import LMHead, RMSNorm, qkv_linear, replicated_linear
from ..quant.scheme import QuantKind
from ..spec import ModelSpec
from .decoder import DecoderLayer, DecoderModel


class WidenedLayer(DecoderLayer):
    """A decoder layer whose attention reads an embedding and a hidden state, side by side."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        assert spec.head is not None
        self.norm_before_residual = spec.head.norm_before_residual
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention.qkv = qkv_linear(
            2 * spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            bias=spec.qkv_bias,
        )

    def join(self, embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what attention reads."""
        normed_TD = self.hidden_norm(hidden_TD)
        x = torch.cat((self.attention_norm(embedded_TD), normed_TD), dim=-1)
        return normed_TD if self.norm_before_residual else hidden_TD, x


class Join(nn.Module):
    """Makes one hidden state of an embedding and a hidden state; ``quant`` is that of its linear
    layer."""

    def __init__(
        self, size: int, eps: float, *, hidden_first: bool, quant: QuantKind | None = None
    ) -> None:
        super().__init__()
        self.hidden_first = hidden_first
        self.embedding_norm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.linear = replicated_linear(2 * size, size, quant)

    def forward(self, embedded_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        both = self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TD)
        return self.linear(torch.cat(both[::-1] if self.hidden_first else both, dim=-1))  # type: ignore[no-any-return]


def feed(hidden_SD: Tensor, beside: HeadInputs) -> None:
    """Store a head's own hidden state of each sequence, which its next draft follows."""
    # An index would ask for the GPU, which is elsewhere where a head is compiled ahead of time.
    slots = beside.slots.narrow(0, 0, beside.slots.shape[0] - 1)
    low, high = hidden_SD.view(-1, 2, *beside.fed.shape[3:]).unbind(1)
    ops.kv_store(low, high, beside.fed, slots)


class DraftHead(DecoderModel):
    """A draft head.  ``fc``, if there is one, makes a hidden state of those that the target keeps;
    ``target_ids`` [draft_vocab_size] int64, if there is one, has the target's token of each logit.
    Neither is a part of ``forward``: ``HeadRunner`` calls them around it."""

    target_ids: Tensor | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        head = spec.head
        assert head is not None
        self.form, size = FORMS[head.form], spec.hidden_size
        self.fc = self.join = None
        if self.form.widens:
            self.fc = replicated_linear(len(head.kept) * head.target_hidden_size, size)
            self.layers[0] = WidenedLayer(spec, 0)
        else:
            self.join = Join(size, spec.rms_norm_eps, hidden_first=self.form.hidden_first)
        self.lm_head = LMHead(head.draft_vocab_size, size)
        ids = torch.zeros(head.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("target_ids", ids if head.maps_vocabulary else None)

    def forward(  # type: ignore[override]
        self,
        inputs: Tensor,
        positions: Tensor,
        attention: AttentionInputs,
        kv_caches: list[Tensor],
        beside: HeadInputs,
    ) -> Tensor:
        """One step over a ragged batch.  Arguments are those of ``DecoderModel.forward``; see
        ``HeadInputs``.

        Returns:
            Logits of the token behind each sequence's last, [num_seqs, draft_vocab_size].
        """
        assert self.embed is not None and self.norm is not None and self.lm_head is not None
        embedded_TD = self.embed(inputs)
        if self.join is not None:
            residual_TD = self.join(embedded_TD, beside.hidden)
        for number, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            step = positions, attention, kv_cache, self.cos_sin_cache
            if isinstance(layer, WidenedLayer) and number == 0:
                residual_TD, x_TD = layer.join(embedded_TD, beside.hidden)
                residual_TD = layer.mix(residual_TD, x_TD, *step)
            else:
                residual_TD = layer(residual_TD, *step)
        hidden_TD = self.norm(residual_TD)
        last_SD = ops.gather_last_token(hidden_TD, attention.query_start_loc)
        fed_SD = last_SD
        if not self.form.feeds_normed:
            fed_SD = ops.gather_last_token(residual_TD, attention.query_start_loc)
        feed(fed_SD, beside)
        return self.lm_head(last_SD)  # type: ignore[no-any-return]
