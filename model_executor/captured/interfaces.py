"""Stands in for attention and masks of ``transformers``: both arrive as semantic ops.

The library calls an attention function by the name that a model was built with, and asks a mask
function of the same name what the function may see.  A mask is data here, ``Mask``; a kind that
``paged_attention`` does not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ... import ops
from ..attention import AttentionInputs
from ..experts import ExpertLinear
from .facts import AttentionFacts
from .ranks.heads import heads_of_rank

NAME = "fusewright"
"""The implementation of attention, masks and experts that models are built with."""


class Refused(Exception):
    """A model asks for what the engine does not have; the text says what, and where."""


@dataclass(frozen=True)
class Mask:
    """Says what a query sees of the positions up to its own: all, a window or a chunk of them.

    ``refused`` names a kind that the engine lacks; only the attention that is called with it is
    refused, since models also make masks that they do not use.
    """

    window: int = 0
    chunk: int = 0
    refused: str = ""

    def __getattr__(self, name: str) -> Any:
        raise Refused(WRITTEN_OUT)

    def _written_out(self, *others: Any) -> Any:
        raise Refused(WRITTEN_OUT)

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = _written_out


RECURRENT = "it has recurrent layers, whose states the engine does not keep yet"
WRITTEN_OUT = (
    "its attention does not go through the library's attention interface: it computes with the "
    "mask itself"
)


@dataclass(frozen=True)
class AttentionCall:
    """Holds one call of attention; q, k and v are [num_tokens, heads, head_dim].

    Attributes:
        scale: multiplies q k.
        soft_cap: of logits; 0: none.
        sinks: [num_heads], a logit a head that takes part in no value; None: none.
    """

    facts: AttentionFacts
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    soft_cap: float
    sinks: Tensor | None


Attend: TypeAlias = Callable[[AttentionCall], Tensor]
"""Computes one call of attention: [num_tokens, heads, head_dim]."""

_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let ``attend`` compute the attention of models that are called in the block."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


class Recorder:
    """Records what a model asks of attention; its results are empty."""

    def __init__(self, on_call: Callable[[AttentionCall], None]) -> None:
        self.calls: list[AttentionFacts] = []
        self._on_call = on_call

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call.facts)
        self._on_call(call)
        return torch.empty_like(call.q)


@dataclass
class PagedAttention:
    """Attention over the paged KV caches of one step: one for each call, in the order of the calls.
    ``groups`` has the number of each one's cache group; ``after`` is called with the number of each
    call that has been computed."""

    inputs: AttentionInputs
    kv_caches: list[Tensor]
    groups: Sequence[int]
    calls: int = 0
    after: Callable[[int], None] = lambda number: None

    def __call__(self, call: AttentionCall) -> Tensor:
        kv_cache, cache = self.kv_caches[self.calls], self.inputs.groups[self.groups[self.calls]]
        self.calls += 1
        ops.kv_store(call.k, call.v, kv_cache, cache.slot_mapping, None)
        out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
        ops.paged_attention(
            call.q,
            kv_cache,
            cache.block_table,
            self.inputs.seq_lens,
            self.inputs.query_start_loc,
            out,
            call.scale,
            call.facts.window,
            call.soft_cap,
            None,
            None,
            call.sinks,
            call.facts.chunk,
        )
        self.after(self.calls - 1)
        return out


_PASSED_ON = (
    *("position_ids", "use_cache", "output_attentions", "cache_position", "is_causal"),
    "logits_to_keep",
)
"""Arguments that models hand to attention and that say nothing of its result, as far as masks and
positions are those of a step."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function: [1, heads, tokens, width] each -> [1, tokens, heads, width].

    ``sliding_window`` is what libraries of kernels are told; the mask has the same.
    """
    mask = _mask_of(module, attention_mask)
    asked = sorted(n for n, value in others.items() if n not in _PASSED_ON and _says(value))
    if asked:
        raise Refused(f"attention is called with {', '.join(asked)}, which it does not take")
    if query.shape[0] != 1:
        raise Refused(f"attention is called with a batch of {query.shape[0]}, expected 1")
    width = query.shape[-1]
    if key.shape[-1] != width or value.shape[-1] > width:
        raise Refused(
            f"attention is called with heads of {width}, {key.shape[-1]} and {value.shape[-1]} for "
            "queries, keys and values; values may be narrower, keys may not differ"
        )
    facts = AttentionFacts(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=width,
        value_dim=value.shape[-1],
        window=mask.window,
        chunk=mask.chunk,
    )
    (query, key, value, s_aux), place = heads_of_rank(query, key, value, s_aux)
    facts = replace(facts, ranks=place.ranks)
    padded = value
    if facts.value_dim < width:  # a block has keys and values of one width
        zeros = value.new_zeros((*value.shape[:-1], width - facts.value_dim))
        padded = torch.cat([value, zeros], dim=-1)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, padded))
    q = q.contiguous()  # keys and values are copied into their cache, from any strides
    scale = width**-0.5 if scaling is None else scaling
    out = _attend.get()(AttentionCall(facts, q, k, v, scale, softcap or 0.0, s_aux))
    return place.spread(out[None, ..., : facts.value_dim]), None


def _says(value: Any) -> bool:
    return value is not None and value is not False


def _mask_of(module: nn.Module, mask: Any) -> Mask:
    if mask is None:
        if not getattr(module, "is_causal", True):
            raise Refused(f"{type(module).__name__} looks at later positions too (no causal mask)")
        return Mask()
    if isinstance(mask, Mask) and mask.refused:
        raise Refused(f"its attention has a mask of kind {mask.refused}, which is not supported")
    if not isinstance(mask, Mask):
        raise Refused(
            f"{type(module).__name__} calls attention with a mask of its own making, a "
            f"{type(mask).__name__}; expected one of the library's masking_utils"
        )
    return mask


def make_mask(*, mask_function: Any, **others: Any) -> Mask:
    """The mask function: says what kind of mask the library describes."""
    window = chunk = 0
    causal = False
    for part in _parts(mask_function):
        name = getattr(part, "__qualname__", repr(part)).partition(".")[0]
        held = _closure(part)
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = _least(window, int(held["sliding_window"]))
        elif name == "chunked_overlay":
            chunk = _least(chunk, int(held["chunk_size"]))
        else:
            return Mask(refused=name)
    return Mask(window, chunk, "" if causal else "bidirectional")


def _least(one: int, other: int) -> int:
    return min(one, other) if one else other


def _parts(function: Any) -> Iterator[Any]:
    """The functions of which ``and_masks`` made one."""
    if getattr(function, "__qualname__", "").startswith("and_masks."):
        for part in _closure(function)["mask_functions"]:
            yield from _parts(part)
    else:
        yield function


def _closure(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = code.co_freevars if code else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The function of experts: [num_tokens, hidden], [num_tokens, top_k] twice -> as ``x``."""
    if getattr(module, "has_post_expert_norm", False):  # which transformers 5.23 does not have
        raise Refused("its experts' results are normed one by one, which is not supported")
    ids = ids.to(torch.int32)

    def layer(name: str, rows: Tensor) -> Tensor:
        weight = getattr(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        made: Tensor
        if isinstance(weight, ExpertLinear):
            made = weight(rows, ids, None, bias)
            return made
        matrices = weight.transpose(1, 2) if module.is_transposed else weight
        return ops.expert_linear(rows, matrices, ids, bias=bias)

    if module.has_gate:
        inner = module._apply_gate(layer("gate_up_proj", x))
    else:
        inner = module.act_fn(layer("up_proj", x))
    return ops.combine_experts(layer("down_proj", inner), weights.float())


def register() -> None:
    """Make the functions known to the library, under ``NAME``."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


class _Earlier(int):
    """How many tokens came before: a number of its own for each token, and 0 for what measures
    tensors by it, as all of them are of this step."""

    each: Tensor

    @classmethod
    def of(cls, positions: Tensor) -> _Earlier:
        made = cls(0)
        made.each = positions - torch.arange(positions.shape[0], device=positions.device)
        return made

    def __add__(self, other: Any) -> Any:  # symbolic sizes take no class that is derived from int
        return int(self) + other

    __radd__ = __add__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        values = [arg.each if isinstance(arg, cls) else arg for arg in args]
        return function(*values, **(kwargs or {}))


class Positions(TorchFunctionMode):
    """Lets ``torch.arange`` that starts at the number of earlier tokens give their positions."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        how = kwargs or {}
        if function is torch.arange and args and isinstance(args[0], _Earlier):
            earlier, stop, *rest = args
            return earlier.each + function(int(earlier), stop, *rest, **how)
        return function(*args, **how)


class _NoLayers(list[Any]):
    """The layers of a cache that has none."""

    def __getitem__(self, index: Any) -> Any:
        raise Refused(
            "it reads a layer of its cache itself, as compressed and indexed attention does; the "
            "engine's KV cache has no such state"
        )


def no_cache(positions: Tensor) -> Any:
    """A cache for a model's forward that keeps nothing: what a layer gives it comes back.

    Args:
        positions: [num_tokens].  The number of earlier tokens, to which models add 0, 1, 2, ... for
            positions, is one for each token here.
    """
    from transformers.cache_utils import Cache

    class NoCache(Cache):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(layers=[])
            self.layers = _NoLayers()

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            return key_states, value_states

        def refuse(self, *rest: Any, **how: Any) -> Any:
            raise Refused(RECURRENT)

        update_conv_state = update_recurrent_state = update_indexer = refuse
        get_conv_state = get_recurrent_state = refuse

        def has_previous_state(self, *rest: Any, **how: Any) -> bool:
            return False

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
            return getattr(query_length, "shape", [query_length])[0], 0

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return _Earlier.of(positions)

        def __len__(self) -> int:
            return 0

        def __getattr__(self, name: str) -> Any:
            raise Refused(f"it asks its cache for {name}, which the engine's has not")

    return NoCache()
