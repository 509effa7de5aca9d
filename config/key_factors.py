"""Lists the configuration that decides what code is compiled.

Every dataclass field is part of an artifact's key, unless its metadata, ``outside_key(reason)``,
says why its value cannot change the code.  A field that is forgotten here is therefore in the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

_REASON = "outside_key"


def outside_key(reason: str) -> dict[str, str]:
    """Metadata of a dataclass field that does not change what is compiled; ``reason`` is for
    people."""
    return {_REASON: reason}


def key_factors(value: Any, prefix: str) -> dict[str, str]:
    """Name -> value, as text, of every field of a dataclass that is part of the key."""
    return dict(_factors(value, prefix))


def outside_fields(cls: type, prefix: str) -> dict[str, str]:
    """Name -> reason of the fields that are not."""
    return {f"{prefix}.{f.name}": f.metadata[_REASON] for f in fields(cls) if _REASON in f.metadata}


def _factors(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for f in fields(value):
        if _REASON in f.metadata:
            continue
        name, member = f"{prefix}.{f.name}", getattr(value, f.name)
        if is_dataclass(member):
            yield from _factors(member, name)
        else:
            yield name, str(member)
