"""Typed access to a Hugging Face ``config.json``; whatever is wrong with it is one clear line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.errors import UserError

_MISSING: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: the file cannot be read or holds no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, expected a JSON object")
    return data


@dataclass(frozen=True)
class HfConfig:
    """A parsed config with its path, or one nested object of it (``prefix`` says which)."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def integer(self, name: str, default: Any = _MISSING, *, least: int = 1) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, value, "an integer")
        if value < least:
            raise self.error(name, value, f"at least {least}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "a number")
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
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise UserError(
                f"{self.path} has no {self.prefix}{name}; use the model's complete config.json"
            )
        return default
