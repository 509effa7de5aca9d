"""Warns when a GPU that the kernels of csrc are for runs without them."""

from __future__ import annotations

import logging

from ... import ops
from ...config import Hardware

_log = logging.getLogger(__name__)
_SM = 90  # csrc holds machine code for this architecture alone


def say_where_csrc_is_missing(hardware: Hardware) -> None:
    """Log a warning with the reason, recorded at installation, why csrc was not built."""
    if hardware.sm == _SM and ops.find_cuda_library() is None:
        _log.warning(
            "%s runs without the CUDA kernels of csrc, which is slower: %s",
            hardware.name,
            ops.why_csrc_is_not_built(),
        )
