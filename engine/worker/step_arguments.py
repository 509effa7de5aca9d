"""Names a step's values, and makes the arguments of a model's forward and examples of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...compiler.capture.source import Example
from ...config import HIDDEN, TOKEN_IDS, Per, block_table_of, slot_mapping_of, step_schema
from ...model_executor.attention import AttentionInputs, CacheInputs
from ...model_executor.spec import ModelSpec

KV_CACHE = "kv_cache/{}"


def kv_cache_name(layer: int) -> str:
    return KV_CACHE.format(layer)


def module_arguments(values: Mapping[str, Any], spec: ModelSpec) -> tuple[Any, ...]:
    """The arguments of ``DecoderModel.forward``, from values by name."""
    groups = tuple(
        CacheInputs(values[slot_mapping_of(group)], values[block_table_of(group)])
        for group in range(len(spec.cache_groups))
    )
    attention = AttentionInputs(groups, values["seq_lens"], values["query_start_loc"])
    kv_caches = [values[kv_cache_name(i)] for i in range(spec.num_layers)]
    return values[first_input(spec)], values["positions"], attention, kv_caches


def first_input(spec: ModelSpec) -> str:
    """The step input of a row a token that the model begins with: token ids, or in a later stage
    what the stage before gives."""
    return TOKEN_IDS if spec.has_embedding else HIDDEN


def example(
    spec: ModelSpec, block_size: int, device: torch.device, num_tokens: int = 37
) -> Example:
    """Example inputs, in which sizes that count different things differ."""
    num_seqs, num_blocks, max_blocks = 3, 5, 11
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
    for field in step_schema(len(spec.cache_groups)).program:
        add(field.name, getattr(torch, field.dtype), sizes[field.per], *field.per.dims)
    if not spec.has_embedding:
        add(HIDDEN, spec.dtype, (num_tokens, spec.hidden_size), *Per.TOKEN.dims)
    for layer in range(spec.num_layers):
        cache = spec.cache_groups[spec.cache_group(layer)].spec
        shape = (num_blocks, *cache.block_shape(block_size))
        add(kv_cache_name(layer), cache.dtype, shape, "num_blocks")
    return Example(module_arguments(named, spec), named, dynamic)
