"""``DraftingRunner`` tells a draft model which requests begin in the batches of its target."""

from __future__ import annotations

from ..messages.step import Batch, PendingStep, Runner
from .draft_model import DraftModel


class DraftingRunner:
    """A ``Runner`` of a target that has a draft model.  An error of the latter reaches whoever asks
    it for drafts, and no step of the target.

    Args:
        runner: the target's, on all ranks.
        draft: runs on this rank alone.
    """

    def __init__(self, runner: Runner, draft: DraftModel) -> None:
        self._runner, self._draft = runner, draft

    def launch(self, batch: Batch) -> PendingStep:
        for sequence in batch.new:
            self._draft.admit(sequence)
        return self._runner.launch(batch)

    def check(self) -> None:
        self._runner.check()
