"""Explains the same options once for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fusewright.config import EngineOptions
from fusewright.engine import explain


@pytest.fixture(scope="module")
def explained_once() -> Iterator[dict[str, Any]]:
    """Keeps each explanation by its options, which decide it together with the sources.  Clear it
    where a test changes a source."""
    real, known = explain.explain_model, dict[str, Any]()

    def once(options: EngineOptions, **how: Any) -> Any:
        key = repr((options, sorted(how.items())))
        if key not in known:
            known[key] = real(options, **how)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "explain_model", once)
        yield known
