"""Typed access to a Hugging Face ``config.json``; whatever is wrong with it is one clear line."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.errors import UserError

_MISSING: Any = object()
_MOST_BYTES = 2**27
"""The index of the largest checkpoints has a few million."""
_MOST_INT = 2**31 - 1
_MOST_NUMBER = 3.4e38
"""About the largest float32, the dtype in which numbers are used."""
_KINDS = {
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def read_bytes(path: Path) -> bytes:
    """What a regular file of bounded size holds.

    Raises:
        UserError: it cannot be read, or is no such file.
    """
    try:
        # A FIFO would be waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{path} is no regular file; put the model's own there")
            if found.st_size > _MOST_BYTES:
                raise UserError(
                    f"{path} has {found.st_size} bytes, expected at most {_MOST_BYTES}; download "
                    "it again"
                )
            return file.read()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: the file cannot be read or holds no JSON object.
    """
    try:
        data = json.loads(read_bytes(path).decode("utf-8"))
    except RecursionError:
        raise UserError(f"{path} is nested too deeply; download it again") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        kind = _KINDS.get(type(data), "null")
        raise UserError(f"{path} holds {kind}, expected a JSON object; download it again")
    return data


def read_json_if_there(path: Path) -> dict[str, Any]:
    """``read_json``, or an empty object where nothing has that name."""
    return read_json(path) if os.path.lexists(path) else {}


@dataclass(frozen=True)
class HfConfig:
    """A parsed config with its path, or one nested object of it (``prefix`` says which).

    A field that is absent or null is its ``defaults`` entry, then the reader's own default; a field
    with neither is an error.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def with_defaults(self, defaults: Mapping[str, Any]) -> HfConfig:
        """This config with further defaults; those that it has stay."""
        return replace(self, defaults={**defaults, **self.defaults})

    def value(self, name: str) -> Any:
        """The field as it is written, null included, or its default where it is absent."""
        return self.values[name] if name in self.values else self.defaults.get(name)

    def integer(
        self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = _MOST_INT
    ) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, value, "an integer")
        if value < least:
            raise self.error(name, value, f"at least {least}")
        if value > most:
            raise self.error(name, value, f"at most {most}")
        return value

    def number(
        self,
        name: str,
        default: Any = _MISSING,
        *,
        least: float = -_MOST_NUMBER,
        most: float = _MOST_NUMBER,
    ) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "a number")
        if not least <= value <= most:  # NaN is not either
            raise self.error(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = _MISSING) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or, absent or null, none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(name, value, "a token id or a list of them")
        return tuple(ids)

    def section(self, name: str) -> HfConfig | None:
        """A nested object; None when absent, null or empty."""
        value = self.values.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return HfConfig(self.path, value, f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def error(self, name: str, value: Any, expected: str) -> UserError:
        return UserError(f"{self.path}: {self.prefix}{name} is {value!r}; expected {expected}")

    def _get(self, name: str, default: Any) -> Any:
        """null counts as absent, as many configs write it for 'the default'."""
        for values in (self.values, self.defaults):
            value = values.get(name)
            if value is not None:
                return value
        if default is _MISSING:
            raise UserError(
                f"{self.path} has no {self.prefix}{name}; use the model's complete config.json"
            )
        return default
