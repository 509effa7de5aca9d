"""``CapturedModel`` runs a model of the library over a ragged batch, as ``DecoderModel`` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...config.weight_format import StoredFormat
from ..attention import AttentionInputs
from ..experts import ExpertLinear
from ..heads.spec import BEHIND_NORM
from ..layers import Linear
from ..models.decoder import keep_hidden
from ..quant.quantize import draw_into, dummy_input_scale, quantize_into
from ..spec import ModelSpec
from .facts import CapturedFacts
from .interfaces import Attend, PagedAttention, Positions, attending, no_cache
from .layers.kept import keeping
from .layers.once import Mark, OneOfEachKind
from .library import build
from .linears import replace_linears, tensors_of
from .quantized.formats import formats_of, is_experts
from .ranks.held import SpreadParameters
from .ranks.spread import gathered, whole


class CapturedModel(nn.Module):
    """A causal language model of ``transformers``.  Made on the meta device: see
    ``loader.load_model``.

    Its linear layers are replaced by ours, which know formats and shards; the rest is the library's
    own, and runs as it is written.
    """

    first_id: Tensor | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.captured is not None
        self.spec = spec
        self.facts: CapturedFacts = spec.captured
        self.library = build(self.facts, spec.dtype)
        shards = {shard.name: shard for shard in self.facts.shards}
        ranks = self.facts.ranks
        replace_linears(self.library, self.facts.siblings, formats_of(spec), shards, ranks)
        for module in self.library.modules() if spec.quant and spec.quant.gathered else ():
            if isinstance(module, Linear) and module.quant is not None:
                module.gather_input()
        self.spread = SpreadParameters(self.library, shards, ranks)
        first = torch.zeros(1, dtype=torch.int32) if ranks > 1 else None
        self.register_buffer("first_id", first)
        self.one_of_each_kind: OneOfEachKind | None = None

    @contextmanager
    def running_once(self, kinds: Sequence[int], mark: Mark) -> Iterator[None]:
        """Let the first layer of each kind run alone, with ``mark`` where it begins."""
        layers: Any = self.library.get_submodule(self.facts.layers)
        self.one_of_each_kind = OneOfEachKind(list(layers), kinds, mark)
        try:
            yield
        finally:
            self.one_of_each_kind = None

    def gathered(self) -> list[Tensor]:
        """The tensors of which a step reads a few rows alone."""
        embedding = self.library.get_input_embeddings().weight  # type: ignore[operator]
        head = self.library.get_output_embeddings()  # type: ignore[operator]
        return [] if embedding is head.weight else [embedding]

    def library_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers under the library's names."""
        return tensors_of(self.library)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        attention: AttentionInputs,
        kv_caches: list[Tensor],
    ) -> Tensor:
        """One step, as of ``DecoderModel``: logits of each sequence's last token."""
        spec = self.spec
        groups = [spec.cache_group(call) for call in range(spec.num_layers)]
        attend = PagedAttention(attention, kv_caches, groups)
        # Bounds that show in the graph: what is computed of positions alone becomes a table.
        positions = positions.clamp(0, spec.max_position_embeddings - 1)
        short = self.one_of_each_kind

        def keep(hidden: Tensor) -> None:
            attend.after(spec.num_layers)
            keep_hidden(hidden, spec, BEHIND_NORM, attention)

        once = short.running(attend) if short else nullcontext()
        kept = keeping(spec, self.library, attend, attention)
        with self.spread.in_place(self.first_id), once, kept:
            loc = attention.query_start_loc
            return run(self.library, inputs, positions, attend, loc, keep)


def run(
    model: nn.Module,
    ids: Tensor,
    positions: Tensor,
    attend: Attend,
    query_start_loc: Tensor | None = None,
    keep: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Call a model of the library on tokens of several sequences.

    Args:
        ids, positions: [num_tokens].
        attend: computes attention.
        query_start_loc: [num_seqs + 1] int32; None keeps all tokens.
        keep: called with what the head of the vocabulary reads of them, [num_tokens, hidden_size].

    Returns:
        Logits of each sequence's last token, [num_seqs, vocab_size].
    """
    head = model.get_output_embeddings()  # type: ignore[operator]

    def last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        # Ahead of the head: it is the largest matrix, and most tokens of a prefill need no logits.
        assert query_start_loc is not None
        hidden = whole(args[0])[0]
        if keep is not None:
            keep(hidden)
        return (ops.gather_last_token(hidden, query_start_loc)[None],)

    hook = None if query_start_loc is None else head.register_forward_pre_hook(last)
    try:
        with attending(attend), Positions():
            out = model(
                input_ids=ids[None],
                past_key_values=no_cache(positions),
                use_cache=False,
                **position_arguments(model, positions),
            )
    finally:
        if hook is not None:
            hook.remove()
    return gathered(out.logits)


def position_arguments(model: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """Make the arguments that give a model's forward positions; none if it counts them itself."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes = any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters)
    return {"position_ids": positions[None]} if takes else {}


def fill_captured(model: CapturedModel, seed: int) -> None:
    """Random weights, on the parameters' device: the library's own initialization, and for linear
    layers a normal distribution with standard deviation 0.02, which is quantized where they are.
    Experts in a stored format have random integers."""
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        for held in [*model.modules(), *model.parameters(), *model.buffers()]:
            held.__dict__.pop("_is_hf_initialized", None)  # marks what it passes over
        for module in filter(is_experts, model.modules()):
            if any(isinstance(child, ExpertLinear) for child in module.children()):
                module._is_hf_initialized = True  # type: ignore[assignment]
                for tensor in module.parameters(recurse=False):
                    tensor.zero_()
        model.library.initialize_weights()  # type: ignore[operator]
        for module in model.modules():
            if isinstance(module, Linear | ExpertLinear):
                _fill(module, model.spec.dtype)


def _fill(layer: Linear | ExpertLinear, dtype: torch.dtype) -> None:
    if isinstance(layer, ExpertLinear) and isinstance(layer.quant, StoredFormat):
        zero = layer.weight_zero if layer.quant.zero is not None else None
        draw_into(layer.weight, layer.weight_scale, zero, layer.quant)
        return
    for share in layer.shares():
        numbers = share.weight
        if share.quant is not None:
            numbers = torch.empty(share.shape, dtype=dtype, device=share.weight.device)
        numbers.normal_(0.0, 0.02)
        quantize_into(share, numbers)
    if layer.quant is not None and layer.quant.static:
        layer.input_scale.fill_(dummy_input_scale(layer.quant))
    if isinstance(layer, Linear) and layer.bias is not None:
        layer.bias.zero_()
