"""Names a step's values, and makes the arguments of a model's forward and examples of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...compiler.capture.source import Example
from ...config import (
    FED_SLOTS,
    HIDDEN,
    TOKEN_IDS,
    Per,
    StepSchema,
    block_table_of,
    slot_mapping_of,
    step_schema,
)
from ...model_executor.attention import AttentionInputs, CacheInputs, HeadInputs
from ...model_executor.spec import ModelSpec

KV_CACHE = "kv_cache/{}"
_HIDDEN_CACHE = "hidden_cache/{}"
FED = "fed_hidden"
"""Of a draft head: its own last hidden state of each slot."""


def kv_cache_name(layer: int) -> str:
    return KV_CACHE.format(layer)


def hidden_cache_names(spec: ModelSpec) -> list[str]:
    """The caches of the hidden states that are kept."""
    return [_HIDDEN_CACHE.format(number) for number in range(len(spec.kept))]


def cache_names(spec: ModelSpec) -> list[str]:
    """All caches whose blocks a model writes, those of its layers first."""
    return [*map(kv_cache_name, range(spec.num_layers)), *hidden_cache_names(spec)]


def schema_of(spec: ModelSpec) -> StepSchema:
    """The fields of a step of a model."""
    return step_schema(len(spec.cache_groups), is_head=spec.head is not None)


def value_names(spec: ModelSpec) -> list[str]:
    """Every value that ``module_arguments`` reads."""
    names = [first_input(spec), *(field.name for field in schema_of(spec).program)]
    names += [HIDDEN, FED] if spec.head else []
    return list(dict.fromkeys([*names, *cache_names(spec)]))


def module_arguments(values: Mapping[str, Any], spec: ModelSpec) -> tuple[Any, ...]:
    """The arguments of ``DecoderModel.forward``, from values by name."""
    groups = tuple(
        CacheInputs(values[slot_mapping_of(group)], values[block_table_of(group)])
        for group in range(len(spec.cache_groups))
    )
    hidden = tuple(values[name] for name in hidden_cache_names(spec))
    attention = AttentionInputs(groups, values["seq_lens"], values["query_start_loc"], hidden)
    kv_caches = [values[kv_cache_name(i)] for i in range(spec.num_layers)]
    arguments = values[first_input(spec)], values["positions"], attention, kv_caches
    if spec.head is None:
        return arguments
    return *arguments, HeadInputs(values[HIDDEN], values[FED_SLOTS], values[FED])


def first_input(spec: ModelSpec) -> str:
    """The step input of a row a token that the model begins with: token ids, or in a later stage
    what the stage before gives."""
    return TOKEN_IDS if spec.has_embedding else HIDDEN


def example(
    spec: ModelSpec, block_size: int, device: torch.device, num_tokens: int = 37
) -> Example:
    """Example inputs, in which sizes that count different things differ."""
    num_seqs, num_blocks, max_blocks, num_slots = 3, 5, 11, 13
    named: dict[str, Tensor] = {}
    dynamic: dict[str, dict[int, str]] = {}

    def add(name: str, dtype: torch.dtype, shape: tuple[int, ...], *counts: str) -> None:
        named[name] = torch.empty(shape, dtype=dtype, device=device)
        dynamic[name] = dict(enumerate(counts))

    sizes = {
        Per.TOKEN: (num_tokens,),
        Per.SEQUENCE: (num_seqs,),
        Per.BOUNDARY: (num_seqs + 1,),
        Per.TABLE: (num_seqs, max_blocks),
    }
    for field in schema_of(spec).program:
        add(field.name, getattr(torch, field.dtype), sizes[field.per], *field.per.dims)
    if not spec.has_embedding or spec.head:
        add(HIDDEN, spec.dtype, (num_tokens, spec.hidden_size), *Per.TOKEN.dims)
    for layer in range(spec.num_layers):
        cache = spec.cache_groups[spec.cache_group(layer)].spec
        shape = (num_blocks, *cache.block_shape(block_size))
        add(kv_cache_name(layer), cache.dtype, shape, "num_blocks")
    hidden = spec.hidden_cache
    for name in hidden_cache_names(spec):
        add(name, hidden.dtype, (num_blocks, *hidden.block_shape(block_size)), "num_blocks")
    if spec.head:
        add(FED, hidden.dtype, (num_slots, *hidden.block_shape(1)), "num_slots")
    return Example(module_arguments(named, spec), named, dynamic)
