"""``OpenOutputs`` knows requests by the ids of their outputs, as long as these are open.

A request for one output gives it its own id; the outputs of one for several have a number behind
that.  Ids of outputs are made and read here alone, so that thousands of outputs of one request are
an entry and a byte each wherever they wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

_MARK = "#"
_MOST_DIGITS = 9

_T = TypeVar("_T")


def output_id(request_id: str, index: int, n: int) -> str:
    """The id of output ``index`` of ``n``."""
    return request_id if n == 1 else f"{request_id}{_MARK}{index}"


def request_and_index(name: str) -> tuple[str, int] | None:
    """The request's id and the index that are in an output's; None if it has no index."""
    request_id, _, index = name.rpartition(_MARK)
    if not index.isdecimal() or len(index) > _MOST_DIGITS or not request_id:
        return None
    return request_id, int(index)


@dataclass(slots=True)
class _Several(Generic[_T]):
    value: _T
    is_open: bytearray
    num_open: int


class OpenOutputs(Generic[_T]):
    """Maps the id of an open request, or of one of its outputs, to a value that is not None."""

    def __init__(self) -> None:
        self._one: dict[str, _T] = {}
        self._several: dict[str, _Several[_T]] = {}
        self._num_marked = 0  # of ``_one``, which could be taken for one of several outputs
        self._num_several = 0

    def __len__(self) -> int:
        return len(self._one) + self._num_several

    def add(self, request_id: str, value: _T, n: int, outputs: range | None = None) -> None:
        """Open the ``n`` outputs of a request, or those of ``outputs`` alone."""
        if n == 1:
            self._one[request_id] = value
            self._num_marked += _MARK in request_id
            return
        outputs = range(n) if outputs is None else outputs
        is_open = bytearray(n)
        is_open[outputs.start : outputs.stop] = b"\1" * len(outputs)
        self._several[request_id] = _Several(value, is_open, len(outputs))
        self._num_several += len(outputs)

    def clashes(self, request_id: str, n: int) -> bool:
        """Whether a request of this id, for ``n`` outputs, would share an id with one that is
        open."""
        if request_id in self._several or self.get(request_id) is not None:
            return True
        if n == 1 or not self._num_marked:
            return False
        return any(output_id(request_id, index, n) in self._one for index in range(n))

    def get(self, name: str) -> _T | None:
        """The value of an open output, or of a request that has one; None for other ids."""
        value = self._one.get(name)
        if value is not None or not self._several:
            return value
        if (whole := self._several.get(name)) is not None:
            return whole.value
        output = self._find(name)
        return None if output is None else output[0].value

    def close(self, name: str) -> tuple[_T, list[int]] | None:
        """Close an output, or all of a request that are open.

        Returns what was known of the request, and the indices that were open; None if none was.
        """
        value = self._one.pop(name, None)
        if value is not None:
            self._num_marked -= _MARK in name
            return value, [0]
        if (several := self._several.get(name)) is not None:
            request_id = name
            closed = [index for index, is_open in enumerate(several.is_open) if is_open]
        elif (output := self._find(name)) is not None:
            several, request_id, index = output
            closed = [index]
        else:
            return None
        for index in closed:
            several.is_open[index] = 0
        several.num_open -= len(closed)
        self._num_several -= len(closed)
        if not several.num_open:
            del self._several[request_id]
        return several.value, closed

    def clear(self) -> None:
        self._one.clear()
        self._several.clear()
        self._num_marked = self._num_several = 0

    def _find(self, name: str) -> tuple[_Several[_T], str, int] | None:
        if not self._several or (read := request_and_index(name)) is None:
            return None
        request_id, index = read
        several = self._several.get(request_id)
        if several is None or index >= len(several.is_open) or not several.is_open[index]:
            return None
        return several, request_id, index
