"""``Key`` names an artifact by every fact that the compiled code depends on, by name and value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Key:
    """``factors`` name what the code depends on, such as ``config.compile.level`` -> ``2``.

    Two keys name the same artifact if all factors are equal; ``digest`` names its folder.
    """

    factors: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits of the factors' SHA-256."""
        text = json.dumps(dict(sorted(self.factors.items())), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Wanted:
    """The artifact that a start looks for, or builds.

    Attributes:
        key: names everything that the compiled code depends on.
        as_good: keys of other artifacts that serve as well, if the store has them.
        label: what the artifact is, for people.
        device: "cpu" or "cuda".
        sm: compute capability of the target GPU, such as 90; 0 for none.
    """

    key: Key
    as_good: Sequence[Key] = ()
    label: str = ""
    device: str = "cpu"
    sm: int = 0

    @property
    def keys(self) -> tuple[Key, ...]:
        return (self.key, *self.as_good)


@dataclass(frozen=True)
class Difference:
    """One factor in which two keys differ; None where a key lacks it."""

    name: str
    left: str | None
    right: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.left or '(none)'} -> {self.right or '(none)'}"


def differences(left: Mapping[str, str], right: Mapping[str, str]) -> list[Difference]:
    """The factors in which two keys differ, by name."""
    return [
        Difference(name, left.get(name), right.get(name))
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]


def tell_apart(keys: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """For each key, the few factors that tell it from the others; digests of sources count as one
    factor, ``sources``.  Factors are chosen one by one, each time the one that separates most keys.
    Equal keys stay equal."""
    facts = [_readable(factors) for factors in keys]
    names = sorted({name for fact in facts for name in fact}, key=lambda n: (n == "sources", n))
    chosen: list[str] = []

    def classes(*more: str) -> int:
        return len({tuple(fact.get(name) for name in (*chosen, *more)) for fact in facts})

    while classes() < classes(*names):
        chosen.append(max(names, key=classes))
    return [{name: fact.get(name, "(none)") for name in sorted(chosen)} for fact in facts]


def _readable(factors: Mapping[str, str]) -> dict[str, str]:
    sources = {name: value for name, value in factors.items() if name.startswith("source.")}
    others = {name: value for name, value in factors.items() if name not in sources}
    return others | {"sources": Key(sources).digest[:8]}
