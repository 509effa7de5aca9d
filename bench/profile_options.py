"""What ``profiling`` records; checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import UserError
from ..config.numbers import MOST_REQUESTS, check_counts

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class ProfileOptions:
    """``batch_size`` equal requests; ``max_iterations`` steps recorded after
    ``delay_iterations`` steps of the phase.  The three flags are torch.profiler's."""

    phase: str
    batch_size: int = 1
    input_len: int = 128
    output_len: int = 128
    delay_iterations: int = 8
    max_iterations: int = 16
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

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
