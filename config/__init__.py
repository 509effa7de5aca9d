"""Options in, one frozen ``ResolvedConfig`` out; nothing changes it afterwards.

``EngineOptions`` is what a user may set (Python keyword or command-line flag of the same name),
``levels`` is the ``-O`` table, ``resolve()`` combines both with hardware and model limits.
"""

from .errors import UserError
from .levels import LEVELS, PASSES, CudagraphMode, Level
from .options import EngineOptions, OptionSpec, option_specs
from .resolve import (
    CacheConfig,
    CaptureConfig,
    CompileConfig,
    Hardware,
    ModelConfig,
    ModelLimits,
    ResolvedConfig,
    SchedulerConfig,
    capture_sizes,
    resolve,
)

__all__ = [
    "LEVELS",
    "PASSES",
    "CacheConfig",
    "CaptureConfig",
    "CompileConfig",
    "CudagraphMode",
    "EngineOptions",
    "Hardware",
    "Level",
    "ModelConfig",
    "ModelLimits",
    "OptionSpec",
    "ResolvedConfig",
    "SchedulerConfig",
    "UserError",
    "capture_sizes",
    "option_specs",
    "resolve",
]
