"""``FieldNotes``: what becomes of fields that a request has and the server does not read.

A field that the tables of ``config/vllm/`` refuse is a 400 that says what to use instead.  Any
other is accepted, and the log tells of each kind once: clients and gateways send many that mean
nothing here.  With ``--strict-fields`` a field that no table knows is a 400, as it may be a
misspelled one.
"""

from __future__ import annotations

import logging

from ....config.ports import nearest
from ....config.vllm import Port
from ....config.vllm.requests import PATHS
from .errors import ApiError
from .protocol import Fields

_log = logging.getLogger(__name__)
_MOST_NOTES = 100
"""Kinds of fields that the log tells of: whoever asks may invent any number of names."""
_MOST_NAME = 80


class FieldNotes:
    """Checks the fields of requests, and remembers which the log has told of.

    Args:
        strict: refuse fields that no table knows.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._told: set[str] = set()

    def check(self, body: Fields) -> None:
        """Check the fields that a body has beside the declared ones.

        Raises:
            ApiError: one asks for what is not there, or is not known and the server is strict.
        """
        for name, value in (body.model_extra or {}).items():
            argument = body.table.get(name)
            if argument is None or argument.port is Port.SAME:
                self._check_unknown(name, body)
            elif value is None or argument.asks_nothing(value):
                continue
            elif argument.port is Port.REFUSED:
                raise ApiError(400, f"{name}: {argument.says}", param=name)
            else:
                self.note(name, argument.says)

    def _check_unknown(self, name: str, body: Fields) -> None:
        if not self.strict and shown(name) in self._told:
            return
        close = nearest(name[:_MOST_NAME], type(body).model_fields)
        hint = f"did you mean {close}?" if close else "remove it"
        if self.strict:
            raise ApiError(400, f"{shown(name)}: no such field; {hint}", param=name[:_MOST_NAME])
        self.note(name, f"no such field; {hint}")

    def note(self, name: str, why: str) -> None:
        """Have the log tell once that a field has no effect."""
        name = shown(name)
        if name in self._told or len(self._told) > _MOST_NOTES:
            return
        self._told.add(name)
        if len(self._told) > _MOST_NOTES:
            _log.warning("more fields of requests have no effect; no further ones are named")
            return
        _log.warning("field %s of requests has no effect: %s", name, why)


def shown(name: str) -> str:
    """A field's name as it may be printed."""
    name = name if name.isprintable() else ascii(name)
    return name if len(name) <= _MOST_NAME else name[:_MOST_NAME] + "…"


def why_no_path(path: str) -> str:
    """What to use instead of a path that is not served; "" if it is not known."""
    for name, argument in PATHS.items():
        start, _, below = name.partition("/{")
        is_it = path.startswith(start + "/") or (path == start and not below)
        if argument.port is Port.REFUSED and is_it:
            return argument.says
    return ""
