"""Chooses the graph mode of a program, which may have a step that no CUDA graph can hold."""

from __future__ import annotations

import logging

from ... import ops
from ...compiler.run.program import Program
from ...config import CudagraphMode, Hardware

_log = logging.getLogger(__name__)


def graph_mode(mode: CudagraphMode, program: Program, hardware: Hardware) -> CudagraphMode:
    """``mode``, without FULL graphs if a step of ``program`` reads device values on the host;
    a warning says so.  Recorded graphs (CPU) hold any step."""
    if hardware.graphs != "cuda" or not mode.full_decode:
        return mode
    for step in program.steps:
        namespace, _, qualified = step.name.partition("::")
        op = ops.BY_NAME.get(qualified.partition(".")[0])
        if op is None or not namespace.startswith(f"{ops.NAMESPACE}_"):
            continue
        name = namespace.removeprefix(f"{ops.NAMESPACE}_")
        if op.implementation(name).on_host:
            _log.warning(
                "%s by %s reads lengths on the host, which no CUDA graph can hold: "
                "cudagraph_mode=%s becomes %s; choose another --attention-backend to keep it",
                op.name,
                name,
                mode.value,
                mode.without_full.value,
            )
            return mode.without_full
    return mode
