"""A run draws some tests of each product, and every test has its turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.draws import left_out


class Drawn:
    """An item with one mark or none."""

    def __init__(self, nodeid: str, *args: int, mark: str = "product", **kwargs: str) -> None:
        self.nodeid = nodeid
        self._mark = getattr(pytest.mark, mark)(*args, **kwargs).mark

    def get_closest_marker(self, name: str) -> Any:
        return self._mark if self._mark.name == name else None


def drawn(tests: list[Drawn], seed: int) -> set[str]:
    left: Any = left_out(tests, seed)  # type: ignore[arg-type]
    return {test.nodeid for test in tests if test not in left}


def test_one_in_so_many_of_a_product_runs_and_each_has_its_turn() -> None:
    cases = [Drawn(f"a.py::cases[{i}]", 3) for i in range(7)]
    kind = [Drawn(f"{name}.py::alone", 2, of="ranks") for name in "bcde"]
    others = [Drawn("f.py::always", mark="slow"), Drawn("f.py::never", mark="thorough")]
    runs = [drawn([*cases, *kind, *others], seed) for seed in range(40)]
    for run in runs:
        assert [len([n for n in run if n.endswith(end)]) for end in ("]", "::alone")] == [3, 2]
        assert "f.py::always" in run and "f.py::never" not in run
    assert len(set.union(*runs)) == 7 + 4 + 1
    assert len({*map(frozenset, runs)}) > 10


def test_a_test_that_is_alone_always_runs() -> None:
    assert drawn([Drawn("a.py::alone", 6)], 1) == {"a.py::alone"}
