"""Captures CUDA graphs of a program and replays them.

``Dispatcher`` says which sizes there are and which one a step replays, ``StepBuffers`` holds the
static inputs, and ``Graphs`` captures and replays any ``CapturableProgram`` (``protocol.py``).  A
recording backend runs the same code on a machine without a GPU.
"""

from .backend import CudaGraphs, GraphBackend, RecordingGraphs, make_backend
from .buffers import IN_TURN, HostRing, StepBuffers
from .capture import Graphs
from .dispatch import Dispatch, Dispatcher, GraphKind
from .memory import CaptureMemoryError, MemoryReport, say_free

__all__ = [
    "IN_TURN",
    "CaptureMemoryError",
    "CudaGraphs",
    "Dispatch",
    "Dispatcher",
    "GraphBackend",
    "GraphKind",
    "Graphs",
    "HostRing",
    "MemoryReport",
    "RecordingGraphs",
    "StepBuffers",
    "make_backend",
    "say_free",
]
