"""Captured CUDA graphs: which sizes, how they are captured, and which one a step replays.

Works over any program of steps (``protocol.Step``); a recording backend runs the same code on a
machine without a GPU.
"""

from .backend import CudaGraphs, GraphBackend, RecordingGraphs, make_backend
from .buffers import StepBuffers
from .capture import CapturedGraphs, capture_all
from .dispatch import Dispatch, Dispatcher, GraphKind
from .memory import MemoryReport

__all__ = [
    "CapturedGraphs",
    "CudaGraphs",
    "Dispatch",
    "Dispatcher",
    "GraphBackend",
    "GraphKind",
    "MemoryReport",
    "RecordingGraphs",
    "StepBuffers",
    "capture_all",
    "make_backend",
]
