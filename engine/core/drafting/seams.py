"""What ``Drafts`` calls: who guesses tokens, and who chooses how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...messages.step import DraftPasses
from ..request import Request
from .parts import Part


class Drafter(Protocol):
    """Guesses tokens.  Whatever it raises switches it off; no request ends for that."""

    method: str
    """Its name, as in ``speculative_config``."""
    stores_drafts: bool
    """Whether it stores what it drafts in the request's blocks, so that these must be there first;
    it drafts no more then than they have room for."""

    def wants(self, request: Request) -> bool:
        """Whether it will have drafts for the request when its token in flight is known.  If not,
        the request does not wait for that."""

    def propose(self, requests: Sequence[Request], most: int) -> Sequence[Sequence[int]]:
        """Up to ``most`` drafts for each request, whose tokens are all known; they follow its last
        token.  Fewer of them may be tried."""

    def settle(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Of ``num_drafts`` drafts that were tried, the first ``num_accepted`` were right; the
        request has these tokens and one more by now, or has ended."""

    def forget(self, request: Request) -> None:
        """The request has ended; it may be one that it was never asked about."""


class Planner(Protocol):
    """A drafter whose drafts the worker makes in passes behind each step."""

    def follows(self, request: Request) -> bool:
        """Whether passes behind the steps in flight read all that these compute of a request."""

    def needs(self, request: Request, depth: int) -> int:
        """Tokens that a request which is not followed must have room for, so that it may have
        ``depth`` drafts behind the step of its last token; more than it may ever have, if it may
        not."""

    def num_made(self, request: Request) -> int:
        """Drafts that the device has for the next step of a request."""

    def reach(self, part: Part, depth: int) -> int:
        """Tokens that a request must have room for, so that it may have ``depth`` drafts behind a
        step."""

    def plan(self, parts: Sequence[Part], depth: int) -> DraftPasses | None:
        """The passes behind a step that computes ``parts``.  Raises if earlier ones have failed."""


class Policy(Protocol):
    """Chooses how many tokens are drafted.  Classes of requests are as of ``class_of``."""

    def choose(self, requests: Mapping[str, int], other_rows: int) -> Mapping[str, int]:
        """Most drafts for a request of each class, of which the next step has so many."""

    def observe_step(self, rows: int, depth: int, seconds: float, tokens: int) -> None:
        """A step of decodes took ``seconds``, had ``depth`` drafts a request at most, and brought
        ``tokens``."""

    def observe_drafts(self, name: str, asked: int, num_drafts: int, num_accepted: int) -> None:
        """Of a request of class ``name`` that might have ``asked`` drafts, ``num_drafts`` were
        tried and the first ``num_accepted`` were right."""

    def report(self) -> dict[str, Any]:
        """Plain data."""


class Always:
    """The policy of so many drafts whatever they bring."""

    def __init__(self, most: int) -> None:
        self._most = most

    def choose(self, requests: Mapping[str, int], other_rows: int) -> Mapping[str, int]:
        return dict.fromkeys(requests, self._most)

    def observe_step(self, rows: int, depth: int, seconds: float, tokens: int) -> None:
        pass

    def observe_drafts(self, name: str, asked: int, num_drafts: int, num_accepted: int) -> None:
        pass

    def report(self) -> dict[str, Any]:
        return {}
