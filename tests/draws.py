"""Which tests a run of all tests draws by its seed; ``--fw-cases 2`` has all of them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest


def left_out(items: Iterable[pytest.Item], seed: int) -> set[pytest.Item]:
    """A run of all tests leaves these out: tests marked ``thorough``, and those of a product that
    the seed does not draw: three quarters, of ``product(6)`` five sixths, and never all.

    The cases of a test are a product, and so are the tests that name the same one: costly ones
    that prove the same of several models or starts, ``product(2, of="ranks")``.
    """
    found = set()
    products: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough"):
            found.add(item)
        elif mark := item.get_closest_marker("product"):
            (one_of,) = mark.args or (4,)
            of = mark.kwargs.get("of", item.nodeid.partition("[")[0])
            products.setdefault((of, one_of), []).append(item)
    for (_, one_of), tests in products.items():
        tests.sort(key=lambda item: random.Random(f"{seed} {item.nodeid}").random())
        found.update(tests[-(-len(tests) // one_of) :])
    return found
