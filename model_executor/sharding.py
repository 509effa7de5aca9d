"""Where the tensors of a checkpoint go: module and part, and the slice that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..config.weight_format import StoredTensor


class ModulePart(NamedTuple):
    """The module that holds a checkpoint tensor, its part when the parameter is fused, and its
    expert when the parameter holds those of all experts."""

    module: str
    part: str = ""
    expert: int | None = None

    @property
    def share(self) -> str:
        """Names one expert's share of a parameter, behind the parameter's name."""
        return "" if self.expert is None else f"[{self.expert}]"


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor inside a fused parameter.

    ``size`` is its length along the sharded dimension over all ranks, made of ``units`` that stay
    whole (heads).  With ``replicate``, more ranks than units share a unit (KV heads).
    """

    name: str
    size: int
    units: int
    replicate: bool = False


@dataclass(frozen=True)
class Placement:
    """``length`` rows (columns for ``dim`` 1) of a checkpoint tensor from ``source_start`` on go to
    the parameter from ``dest_start`` on."""

    dim: int
    source_start: int
    dest_start: int
    length: int


@dataclass(frozen=True)
class ShardRule:
    """A parameter is its parts joined along ``dim``; each part is split over the ranks, or, when
    ``split`` is false, held whole by every rank.  What is added ``once`` to a sum over the ranks is
    zeros on all but the first.  Sizes of parts count numbers of the weight, of which ``step`` share
    an element of the parameter."""

    dim: int
    parts: tuple[Part, ...]
    split: bool = True
    once: bool = False
    step: int = 1

    def place(self, part_name: str, rank: int, world: int) -> Placement:
        """The slice of one part that ``rank`` of ``world`` holds.

        Raises:
            ValueError: the part's units cannot be spread evenly over the ranks, or a rank's part
                begins or ends within an element.
        """
        dest_start = 0
        for part in self.parts:
            source_start, length = self._slice(part, rank, world)
            if part.name == part_name:
                numbers = (source_start, dest_start, length)
                return Placement(self.dim, *(self._elements(part, n) for n in numbers))
            dest_start += length
        raise KeyError(f"no part {part_name!r}; parts: {[p.name for p in self.parts]}")

    def local_size(self, world: int) -> int:
        """Length along ``dim`` of one rank's parameter."""
        return sum(self._elements(part, self._slice(part, 0, world)[1]) for part in self.parts)

    def size_of(self, part_name: str) -> int:
        """Length along ``dim`` of the checkpoint's tensor of a part."""
        part = next(part for part in self.parts if part.name == part_name)
        return self._elements(part, part.size)

    def _elements(self, part: Part, count: int) -> int:
        if count % self.step:
            raise ValueError(
                f"a part of {part.name or 'a weight'} has {count} numbers, of which {self.step} "
                "share an element: it cannot be cut there"
            )
        return count // self.step

    def _slice(self, part: Part, rank: int, world: int) -> tuple[int, int]:
        if not self.split:
            return 0, part.size
        unit_size = part.size // part.units
        if part.units % world == 0:
            length = part.size // world
            return rank * length, length
        if part.replicate and world % part.units == 0:
            return rank // (world // part.units) * unit_size, unit_size
        raise ValueError(
            f"{part.units} units of {part.name or 'a weight'} do not spread over {world} ranks"
        )


def stored_rule(rule: ShardRule, tensor: StoredTensor, rows: int) -> ShardRule:
    """The rule of one tensor of a stored weight.

    Args:
        rule: that of the weight as if it were not stored: ``dim`` 0 for rows, 1 for columns.
        rows: of the whole layer.
    """
    step = tensor.steps[rule.dim]
    if step:
        return replace(rule, dim=tensor.dim(rule.dim), step=step)
    # Columns that are split share what this tensor holds of a row, so every rank has all of it.
    whole = (Part("", rows, 1),)
    return ShardRule(tensor.dim(0), whole, split=False, step=tensor.steps[0])
