"""Warns when a GPU that the kernels of csrc are for runs without them, and when a device table
names kernels that this build lacks."""

from __future__ import annotations

import logging

from ... import ops
from ...config import Hardware
from ...config.arch import why_csrc_has_no_code

_log = logging.getLogger(__name__)


def say_where_csrc_is_missing(hardware: Hardware) -> None:
    """Log a warning with the reason, recorded at installation, why csrc was not built."""
    if not why_csrc_has_no_code(hardware.sm) and ops.find_cuda_library() is None:
        _log.warning(
            "%s runs without the CUDA kernels of csrc, which is slower: %s",
            hardware.name,
            ops.why_csrc_is_not_built(),
        )


def say_what_tables_left_out() -> None:
    """Log a warning for each device table with rows of kernels that this build lacks."""
    for sentence in ops.left_out_of_tables():
        _log.warning("%s", sentence)
