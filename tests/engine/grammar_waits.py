"""Steps of a test's engine that do not depend on how fast the grammars' process is."""

from __future__ import annotations

from fusewright import LLM

_LOOK_S = 1.0


def wait_for_grammars(llm: LLM) -> None:
    """Have every step of ``llm`` wait for all that the process of its grammars owes.

    Without this, the speed of that process decides which requests share a step, and with the batch
    the last bits of the log probabilities and the number of steps change.
    """
    grammars = llm.engine.grammars
    settle = grammars.settle

    def settle_all() -> None:
        while grammars.process.is_owed:
            grammars.wait(_LOOK_S)
        settle()

    grammars.settle = settle_all  # type: ignore[method-assign]
