"""The supported architectures.  To add one: an adapter, its weight names, a line here, a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..hf_json import HfConfig
from ..spec import ModelSpec
from .families import llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from .weight_names import DENSE_DECODER, MIXTRAL, QWEN_MOE, ModulePart


@dataclass(frozen=True)
class Architecture:
    """How a checkpoint of one architecture is read: its config and its tensor names."""

    spec: Callable[[HfConfig, str], ModelSpec]
    weights: Mapping[str, ModulePart]


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(llama, DENSE_DECODER),
    "MistralForCausalLM": Architecture(mistral, DENSE_DECODER),
    "Qwen2ForCausalLM": Architecture(qwen2, DENSE_DECODER),
    "Qwen3ForCausalLM": Architecture(qwen3, DENSE_DECODER),
    "MixtralForCausalLM": Architecture(mixtral, MIXTRAL),
    "Qwen2MoeForCausalLM": Architecture(qwen2_moe, QWEN_MOE),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe, QWEN_MOE),
}
