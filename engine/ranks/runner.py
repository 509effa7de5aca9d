"""``RanksRunner`` runs every batch on all ranks."""

from __future__ import annotations

from msgspec import structs

from ..messages.step import Batch, PendingStep, Runner, StepResult
from .leader import Leader
from .link import Kind


class StepOfRanks:
    """A launched step, whose result is rank 0's."""

    def __init__(self, leader: Leader, step: PendingStep) -> None:
        self._leader, self._step = leader, step

    @property
    def has_run(self) -> bool:
        """Whether the launch has run the step on rank 0, which has its result."""
        return self._step.has_run

    def result(self) -> StepResult:
        """Wait for the step; raises what ended a rank, if one has."""
        with self._leader.guard():
            result = self._step.result()
        self._leader.check()
        return result


class RanksRunner:
    """A ``Runner`` over rank 0's and the other ranks'.

    A step that the others have begun and rank 0 has not finished launching leaves them apart, so an
    error there ends the engine, where one rank alone would serve on.
    """

    def __init__(self, leader: Leader, runner: Runner) -> None:
        self._leader, self._runner = leader, runner

    def launch(self, batch: Batch) -> StepOfRanks:
        # Rank 0 alone has a draft model.
        self._leader.send(Kind.STEP, structs.replace(batch, passes=None) if batch.passes else batch)
        try:
            with self._leader.guard():
                return StepOfRanks(self._leader, self._runner.launch(batch))
        except BaseException as error:
            self._leader.lose(
                f"a step that other ranks had begun failed on rank 0 ({type(error).__name__}: "
                f"{error}); restart the engine"
            )
            raise

    def check(self) -> None:
        """Raise what ended a rank, or what ended this one's device."""
        self._leader.check()
        self._runner.check()
