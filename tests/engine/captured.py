"""Folders of small models without an adapter, as their library saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fusewright.model_executor.captured.default_configs import default_config
from fusewright.model_executor.captured.random_weights import randomize
from fusewright.model_executor.captured.shrink import shrunk


def save(model_type: str, folder: Path) -> Any:
    """Write a small model of a type of the library; returns the unmodified model, in float32."""
    config = shrunk(default_config(model_type))
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomize(model)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return model
