"""Detects what this process can run on."""

from __future__ import annotations

import platform

import torch

from ...config import Hardware, UserError


def detect_hardware(device: str) -> Hardware:
    """Describe the device that ``device`` ("auto", "cpu" or "cuda") means here.

    Raises:
        UserError: a GPU is asked for and there is none that PyTorch can use.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        built = torch.version.cuda
        why = (
            f"PyTorch {torch.__version__} sees no GPU"
            if built
            else (f"PyTorch {torch.__version__} is a CPU build")
        )
        raise UserError(f"device=cuda: {why}; use --device cpu, or a machine with an NVIDIA GPU")
    if device == "cpu" or not has_gpu:
        return Hardware(device="cpu", name=platform.processor() or platform.machine())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Hardware(
        device="cuda",
        name=properties.name,
        sm=properties.major * 10 + properties.minor,
        num_sms=properties.multi_processor_count,
        graphs="cuda",
        memory_bytes=properties.total_memory,
        num_devices=torch.cuda.device_count(),
    )
