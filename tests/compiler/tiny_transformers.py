"""Builds the unmodified models of transformers that the tests of the backend compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from fusewright.compiler.dynamo_backend import clear_reports

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}


def fresh_dynamo() -> Iterator[None]:
    """A fixture: nothing is compiled yet, and nothing reported."""
    torch._dynamo.reset()
    clear_reports()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def tiny_model(config: str, model: str, more: dict[str, Any]) -> Any:
    """A model of ``TINY`` sizes by the names of its classes, with random weights in bfloat16."""
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**TINY | more))
    for parameter in made.parameters():  # weights of norms are all ones, or zeros
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return made.bfloat16().eval()
