"""``CapturedHead``: a layer that predicts further tokens (MTP), of a model of ``transformers``.

The library's model of a single layer is the head: what joins the token's embedding with a hidden
state of the target stands behind its embedding, and takes its place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ... import ops
from ..attention import AttentionInputs, HeadInputs
from ..captured.interfaces import PagedAttention
from ..captured.model import CapturedModel, run
from ..models.draft_head import Join, feed
from ..spec import ModelSpec
from .forms import FORMS


class CapturedHead(CapturedModel):
    """A draft head of a captured model; see ``DraftHead``."""

    fc = target_ids = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert spec.head is not None
        config: Any = self.library.config
        self.form, eps = FORMS[spec.head.form], config.rms_norm_eps
        self.join = Join(spec.hidden_size, float(eps), hidden_first=self.form.hidden_first)
        for module in self.join.modules():  # ``Module.to`` does not replace fake tensors
            for name, param in module.named_parameters(recurse=False):
                typed = nn.Parameter(param.to(spec.dtype), requires_grad=False)
                setattr(module, name, typed)

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
            return self.join(embedded[0], beside.hidden)[None]  # type: ignore[no-any-return]

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
