"""The options of ``profiling``, which are checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ..config import UserError
from ..config.numbers import MOST_REQUESTS, check_counts

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class ProfileOptions:
    """Which steps of equal requests are recorded; ``fusewright profile`` makes its flags of these.
    The last three are torch.profiler's."""

    phase: Annotated[
        str, typer.Option(help="prefill, decode, or both: then a folder of DIR each.")
    ] = "decode"
    batch_size: Annotated[int, typer.Option(help="Equal requests at a time.")] = 1
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128
    output_len: Annotated[int, typer.Option(help="Output tokens; decode steps end there.")] = 128
    delay_iterations: Annotated[
        int, typer.Option(help="Steps of the phase before the first recorded one.")
    ] = 8
    max_iterations: Annotated[int, typer.Option(help="Most steps to record.")] = 16
    record_shapes: Annotated[
        bool, typer.Option("--record-shapes", help="Rows by operator shapes, kernel grids.")
    ] = False
    profile_memory: Annotated[
        bool, typer.Option("--profile-memory", help="Allocations in the trace.")
    ] = False
    with_stack: Annotated[
        bool, typer.Option("--with-stack", help="Python frames in the trace.")
    ] = False

    def check(self) -> None:
        """Raises UserError: a value that profiles nothing."""
        check_counts(1, MOST_REQUESTS, batch_size=self.batch_size)
        check_counts(1, input_len=self.input_len, max_iterations=self.max_iterations)
        check_counts(2, output_len=self.output_len)
        check_counts(0, delay_iterations=self.delay_iterations)
        if self.phase not in PHASES:
            raise UserError(f"phase={self.phase!r}: expected one of {', '.join(PHASES)}")
        if self.phase == "decode" and self.delay_iterations > self.output_len - 2:
            raise UserError(
                f"delay_iterations={self.delay_iterations}: skips all decode steps of "
                f"output_len={self.output_len}; raise output_len or delay less"
            )
