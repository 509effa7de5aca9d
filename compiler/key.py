"""The key of an artifact: every fact that the compiled code depends on, by name and value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Key:
    """``factors`` name what the code depends on: ``config.compile.level`` -> ``2``.

    Two keys are the same artifact when all factors are equal; ``digest`` names its folder.
    """

    factors: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits of the factors' SHA-256."""
        text = json.dumps(dict(sorted(self.factors.items())), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


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
