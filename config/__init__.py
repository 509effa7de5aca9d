"""Options in, one frozen ``ResolvedConfig`` out; nothing changes it afterwards.

``EngineOptions`` is what a user may set (Python keyword or command-line flag of the same name),
``levels`` is the ``-O`` table, ``resolve()`` combines both with hardware and model limits.
"""

from .capture_sizes import capture_sizes
from .errors import BusyError, EngineDeadError, MachineError, UserError, VerificationError
from .folders import make_output_folder
from .key_factors import key_factors, outside_fields, outside_key
from .levels import LEVELS, PASSES, CudagraphMode, Level
from .options import EngineOptions, OptionSpec, option_specs
from .ports import engine_options
from .process.garbage import collect_rarely, collecting_rarely, leave
from .resolve import resolve
from .resolved import (
    CompileConfig,
    Hardware,
    ModelLimits,
    ResolvedConfig,
    StoreConfig,
)
from .step_fields import (
    FED_SLOTS,
    FEED,
    HIDDEN,
    NO_SLOT,
    STEP,
    TOKEN_IDS,
    Per,
    StepField,
    StepSchema,
    block_table_of,
    slot_mapping_of,
    step_schema,
)

__all__ = [
    "FED_SLOTS",
    "FEED",
    "HIDDEN",
    "LEVELS",
    "NO_SLOT",
    "PASSES",
    "STEP",
    "TOKEN_IDS",
    "BusyError",
    "CompileConfig",
    "CudagraphMode",
    "EngineDeadError",
    "EngineOptions",
    "Hardware",
    "Level",
    "MachineError",
    "ModelLimits",
    "OptionSpec",
    "Per",
    "ResolvedConfig",
    "StepField",
    "StepSchema",
    "StoreConfig",
    "UserError",
    "VerificationError",
    "block_table_of",
    "capture_sizes",
    "collect_rarely",
    "collecting_rarely",
    "engine_options",
    "key_factors",
    "leave",
    "make_output_folder",
    "option_specs",
    "outside_fields",
    "outside_key",
    "resolve",
    "slot_mapping_of",
    "step_schema",
]
