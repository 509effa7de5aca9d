"""``Owners``: which frontend has asked for each request that an engine runs."""

from __future__ import annotations

from collections.abc import Iterable

from ..messages.open_outputs import OpenOutputs
from ..messages.requests import AddRequest, NewTokens, StepOutputs


class Owners:
    """Splits what a step brought by the frontends that wait for it.

    Args:
        count: number of frontends; with one there is nothing to split.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._of = OpenOutputs[int]()

    def add(self, request: AddRequest, frontend: int) -> None:
        if self._count > 1:
            n, indices = request.sampling_params.n, request.indices
            self._of.add(request.request_id, frontend, n, indices)

    def forget(self, names: Iterable[str]) -> None:
        """Forget who asked for these requests or outputs, because they have ended."""
        for name in names:
            self._of.close(name)

    def split(self, outputs: StepOutputs) -> list[tuple[int, StepOutputs]]:
        """(frontend, its part of the outputs) of those that have one."""
        if self._count == 1:
            return [(0, outputs)]
        parts = [(i, self._part(outputs, i)) for i in range(self._count)]
        self.forget(finished.request_id for finished in outputs.finished)
        return [(i, part) for i, part in parts if not part.is_empty]

    def _part(self, outputs: StepOutputs, frontend: int) -> StepOutputs:
        owner = self._of.get
        return StepOutputs(
            None if outputs.tokens is None else self._tokens(outputs.tokens, frontend),
            [each for each in outputs.finished if owner(each.request_id) == frontend],
            [each for each in outputs.preempted if owner(each) == frontend],
            [each for each in outputs.scored if owner(each.request_id) == frontend],
            {k: n for k, n in outputs.cached_tokens.items() if owner(k) == frontend},
            {k: s for k, s in outputs.started.items() if owner(k) == frontend},
        )

    def _tokens(self, tokens: NewTokens, frontend: int) -> NewTokens | None:
        names, logprobs = tokens.request_ids, tokens.logprobs
        rows = [row for row, name in enumerate(names) if self._of.get(name) == frontend]
        if len(rows) in (0, len(names)):
            return tokens if rows else None
        return NewTokens(
            [names[row] for row in rows],
            tokens.token_ids[rows],
            None if logprobs is None else logprobs.of(rows),
        )
