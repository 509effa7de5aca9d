"""``CapturedHead``: a layer that predicts further tokens (MTP), of a model of ``transformers``.

The library's model of a single layer is the head: what joins the token's embedding with a hidden
state of the target stands behind its embedding, and takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ..attention import AttentionInputs, HeadInputs
from ..captured.interfaces import PagedAttention
from ..captured.model import CapturedModel, run
from ..captured.quantized.formats import formats_of
from ..captured.text_decoder import Stored, stored_model
from ..checkpoint import TensorInfo
from ..models.draft_head import Join, feed
from ..quant.scheme import QuantKind
from ..spec import ModelSpec
from .forms import FORMS, JOIN, JOIN_LINEAR, nextn_names


def add_join(library: Any, spec: ModelSpec, quant: QuantKind | None = None) -> None:
    """Add what joins an embedding and a hidden state to the library's model of the layer."""
    assert spec.head is not None
    eps, form = float(library.config.rms_norm_eps), FORMS[spec.head.form]
    join = Join(spec.hidden_size, eps, hidden_first=form.hidden_first, quant=quant)
    for part in (join.embedding_norm, join.hidden_norm, *([] if quant else [join.linear])):
        # ``Module.to`` fails among fake tensors.
        weight: Any = part.weight
        weight.data = torch.empty_like(weight, dtype=spec.dtype)
    library.add_module(JOIN, join)


def stored_head(spec: ModelSpec) -> Stored:
    """The layer as the checkpoint of its model has it; errors are those of ``stored_model``."""
    assert spec.captured is not None and spec.head is not None
    stored, layer = stored_model(spec.captured, spec.dtype), spec.head.layer
    add_join(stored.model, spec)

    def here(found: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        return {ours: found[theirs] for ours, theirs in nextn_names(found, layer).items()}

    return replace(stored, here=here)


class CapturedHead(CapturedModel):
    """A draft head of a captured model; see ``DraftHead``."""

    fc = target_ids = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert spec.head is not None
        self.form = FORMS[spec.head.form]
        add_join(self.library, spec, formats_of(spec).get(JOIN_LINEAR))

    def forward(  # type: ignore[override]
        self,
        inputs: Tensor,
        positions: Tensor,
        attention: AttentionInputs,
        kv_caches: list[Tensor],
        beside: HeadInputs,
    ) -> Tensor:
        """One step, as of ``DraftHead``."""
        attend = PagedAttention(attention, kv_caches, [0] * self.spec.num_layers)
        positions = positions.clamp(0, self.spec.max_position_embeddings - 1)
        library: Any = self.library

        def joined(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
            return library.join(embedded[0], beside.hidden)[None]  # type: ignore[no-any-return]

        def fed(hidden: Tensor) -> None:
            feed(ops.gather_last_token(hidden, attention.query_start_loc), beside)

        def before_norm(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            fed(args[0][0])

        hooks = [library.get_input_embeddings().register_forward_hook(joined)]
        if not self.form.feeds_normed:
            hooks.append(library.model.norm.register_forward_pre_hook(before_norm))
        try:
            keep = fed if self.form.feeds_normed else None
            loc = attention.query_start_loc
            return run(library, inputs, positions, attend, loc, keep)
        finally:
            for hook in hooks:
                hook.remove()
