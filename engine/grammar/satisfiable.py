"""Finds JSON schemas that no text of finite length satisfies, since references lead back to
themselves through what is required: llguidance would let a model write without end."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

_MOST_VISITS = 100_000
"""Schemas looked at, in all; a document that needs more counts as satisfiable."""


class _TooLarge(Exception):
    pass


def check_satisfiable(text: str) -> str:
    """Why no text of finite length satisfies the schema of a grammar in JSON, or ""."""
    try:
        grammars = json.loads(text)["grammars"]
        documents = [each["json_schema"] for each in grammars if "json_schema" in each]
        for document in documents:
            if not _Document(document).is_satisfiable():
                return "no finite JSON satisfies the schema: its references require each other"
    except (ValueError, KeyError, TypeError, RecursionError, _TooLarge):
        pass  # llguidance says what is wrong, if anything is
    return ""


class _Document:
    """A schema and those within it that it refers to.

    A schema that is referred to is satisfiable once one alternative of it needs satisfiable ones
    only; each becomes so at most once, and has those looked at again that refer to it.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._good: set[str] = set()
        self._used_by: dict[str, set[str]] = defaultdict(set)
        self._now, self._met = "#", set[str]()
        self._num_visits = 0

    def is_satisfiable(self) -> bool:
        seen, to_do = {"#"}, ["#"]
        while to_do:
            self._now = to_do.pop()
            self._met.clear()
            if self._now in self._good:
                continue
            if self._holds(self._target(self._now)):
                self._good.add(self._now)
                to_do += self._used_by[self._now]
            unseen = self._met - seen
            seen |= unseen
            to_do += unseen
        return "#" in self._good

    def _target(self, reference: str) -> Any:
        target = self._schema
        for part in reference.split("/")[1:]:
            target = target[part.replace("~1", "/").replace("~0", "~")]
        return target

    def _holds(self, schema: Any) -> bool:
        """Whether something finite satisfies a schema, as far as references are known to."""
        self._num_visits += 1
        if self._num_visits > _MOST_VISITS:
            raise _TooLarge
        if not isinstance(schema, dict):
            return schema is not False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            self._used_by[reference].add(self._now)
            self._met.add(reference)
            if reference not in self._good:
                return False
        if "enum" in schema or "const" in schema:
            return True
        if not all(self._holds(each) for each in schema.get("allOf", ())):
            return False
        for name in ("anyOf", "oneOf"):
            if name in schema and not any(self._holds(each) for each in schema[name]):
                return False
        kind = schema.get("type")
        if kind in ("object", ["object"]):
            return all(self._holds(each) for each in _required(schema))
        if kind in ("array", ["array"]) and (least := schema.get("minItems", 0)) > 0:
            first = schema.get("prefixItems", ())[:least]
            rest = [schema.get("items", True)] if least > len(first) else []
            return all(self._holds(each) for each in (*first, *rest))
        return True


def _required(schema: dict[str, Any]) -> list[Any]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if "patternProperties" in schema:
        others = True  # which pattern a name matches is not looked at
    return [properties.get(name, others) for name in schema.get("required", ())]
