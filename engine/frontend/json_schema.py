"""Brings JSON schemas to the form that llguidance reads.

llguidance finds a reference only as a plain path from the root of one document. So the schema is
built anew as a tree: every reference is resolved where it stands, and what it names goes into one
table of definitions, which several documents share. Annotations are left out, and bounds of numbers
are narrowed to what llguidance counts exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

from ...config import UserError

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats of strings that llguidance keeps to. Any other is an annotation, as JSON Schema says."""
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAPS = frozenset(("properties", "patternProperties", "dependentSchemas", "dependencies"))
_SINGLE = frozenset(
    (
        *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"),
        *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_DEFINITIONS = ("$defs", "definitions")
_LEAST = frozenset(("minLength", "minItems", "minProperties", "minContains"))
_MOST = frozenset(("maxLength", "maxItems", "maxProperties", "maxContains"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_PLAIN = frozenset(
    (
        *("type", "required", "pattern", "multipleOf", "uniqueItems", "dependentRequired"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that are passed on as they are; llguidance refuses those that it does not know."""
_ASSERTIONS = _LISTS | _MAPS | _SINGLE | _LEAST | _MOST | _BOUNDS | _PLAIN
_ASSERTIONS |= {"const", "enum", "format"}

_MOST_SCHEMAS = 1 << 13
_MOST_VALUES = 1 << 16
"""Most values of one ``const`` or ``enum``, those within its lists and objects included."""
_MOST_NESTED = 128
_MOST_COUNT = 1 << 24
"""No output has this many characters or items, so a greater limit is left out."""
_EXACT = 1 << 53
"""Integers below it are exact as floats, which llguidance counts in."""
_GREATEST = (1 << 63) - 1024
"""The greatest float that is an integer of 64 bits."""
_TINY = 1e-60
"""Numbers closer to 0 have more digits than llguidance takes."""
_LONG = 10**18
"""llguidance needs a bound on either side of numbers with so many digits."""


class Document(NamedTuple):
    """A schema with references of its own, in place of a schema within another."""

    schema: Any


@dataclass(frozen=True, eq=False)
class _Resource:
    """A document, or a part of it that has an ``$id``: ``#`` in a reference means its root."""

    root: Any
    uri: str
    document: Any
    """The root of the document that it lies in."""


class _Place(NamedTuple):
    schema: Any
    resource: _Resource


@dataclass
class _Tree:
    """Schemas on their way into one document."""

    definitions: dict[str, Any] = field(default_factory=dict)
    _names: dict[tuple[int, int], str] = field(default_factory=dict)
    _waiting: list[tuple[str, _Place]] = field(default_factory=list)
    _named: dict[int, dict[str, _Place]] = field(default_factory=dict)
    _num_schemas: int = 0

    def build(self, document: Document) -> Any:
        """The schema of a document; what it refers to is in ``definitions`` then."""
        built = self._schema(_root(document), 0)
        while self._waiting:
            name, place = self._waiting.pop()
            self.definitions[name] = self._schema(place, 0)
        return built

    def _schema(self, place: _Place, depth: int) -> Any:
        if isinstance(place.schema, Document):
            place = _root(place.schema)
        schema, resource = place
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise UserError(f"grammar: {_short(schema)} in the JSON schema: expected a schema")
        self._num_schemas += 1
        if self._num_schemas > _MOST_SCHEMAS or depth > _MOST_NESTED:
            raise UserError(
                f"grammar: the JSON schema has more than {_MOST_SCHEMAS} schemas, or more than "
                f"{_MOST_NESTED} within each other; make it smaller"
            )
        built: dict[str, Any] = {}
        for name, value in schema.items():
            if name == "$ref":
                built[name] = f"#/$defs/{self._name(value, resource)}"
            elif name in _LISTS and isinstance(value, list):
                built[name] = [self._schema(_enter(each, resource), depth + 1) for each in value]
            elif name in _MAPS and isinstance(value, Mapping):
                built[name] = {
                    key: each
                    if isinstance(each, list)  # of ``dependencies``
                    else self._schema(_enter(each, resource), depth + 1)
                    for key, each in value.items()
                }
            elif name in _SINGLE:
                built[name] = self._schema(_enter(value, resource), depth + 1)
            elif name in _LISTS or name in _MAPS:
                built[name] = value  # which is refused
            else:
                _add_assertion(built, name, value)
        _add_bounds(built, schema)
        return built

    def _name(self, reference: Any, resource: _Resource) -> str:
        """The name of the definition of what a reference names."""
        place, seen = self._find(reference, resource), set()
        while (onward := _only_reference(place.schema)) is not None:
            if id(place.schema) in seen:
                raise UserError(f"grammar: $ref={_short(reference)} leads only to itself")
            seen.add(id(place.schema))
            place = self._find(onward, place.resource)
        key = (id(place.schema), id(place.resource.root))
        if key not in self._names:
            last = re.sub(r"\W", "", str(reference).rpartition("/")[2], flags=re.ASCII)
            self._names[key] = f"{len(self._names)}_{last[:40]}"
            self._waiting.append((self._names[key], place))
        return self._names[key]

    def _find(self, reference: Any, resource: _Resource) -> _Place:
        """Find the place that a reference names."""
        if not isinstance(reference, str):
            raise UserError(f"grammar: $ref={_short(reference)}: expected text")
        base, _, fragment = reference.partition("#")
        fragment, place = unquote(fragment), _Place(resource.root, resource)
        if base or (fragment and not fragment.startswith("/")):
            uri = _joined(resource.uri, base)
            named = self._places_by_name(resource.document)
            name = uri if not fragment or fragment[0] == "/" else f"{uri}#{fragment}"
            if name not in named:
                raise UserError(
                    f"grammar: $ref={_short(reference)}: not in the JSON schema; expected a "
                    "reference to a part of it, such as #/$defs/name"
                )
            place = named[name]
        if fragment.startswith("/"):
            for segment in fragment[1:].split("/"):
                place = _step(place, segment.replace("~1", "/").replace("~0", "~"), reference)
        return place

    def _places_by_name(self, document: Any) -> dict[str, _Place]:
        """The parts of a document that have a URI or an anchor."""
        named = self._named.get(id(document))
        if named is None:
            named = self._named[id(document)] = {}
            todo = [_root(Document(document))]
            named[""] = todo[0]
            while todo:
                place = todo.pop()
                if place.schema is place.resource.root:
                    named.setdefault(place.resource.uri, place)
                if isinstance(place.schema, Mapping):
                    for word in ("$anchor", "$dynamicAnchor", "$id"):
                        anchor = str(place.schema.get(word, ""))
                        if anchor and (word != "$id" or anchor.startswith("#")):
                            named[f"{place.resource.uri}#{anchor.removeprefix('#')}"] = place
                    todo += [_enter(each, place.resource) for each in _parts(place.schema)]
        return named


def _root(document: Document) -> _Place:
    schema = document.schema
    resource = _Resource(schema, _uri(schema) or "", schema)
    return _Place(schema, resource)


def _enter(schema: Any, resource: _Resource) -> _Place:
    """A schema within another, which may be a resource of its own."""
    uri = _uri(schema)
    if uri is not None and schema is not resource.root:
        resource = _Resource(schema, _joined(resource.uri, uri), resource.document)
    return _Place(schema, resource)


def _uri(schema: Any) -> str | None:
    """The ``$id`` of a schema, without an empty fragment; None if it has none."""
    uri = schema.get("$id") if isinstance(schema, Mapping) else None
    return uri.rstrip("#") if isinstance(uri, str) and not uri.startswith("#") else None


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri).rstrip("#") if uri else base
    except ValueError as error:
        raise UserError(f"grammar: {_short(uri)} in the JSON schema: {error}") from error


def _step(place: _Place, segment: str, reference: str) -> _Place:
    schema = place.schema
    if isinstance(schema, Mapping) and segment in schema:
        return _enter(schema[segment], place.resource)
    if isinstance(schema, list) and segment.isdecimal() and int(segment) < len(schema):
        return _enter(schema[int(segment)], place.resource)
    raise UserError(
        f"grammar: $ref={_short(reference)}: the JSON schema has no {_short(segment)} there"
    )


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas directly within a schema, those of its definitions too."""
    for name, value in schema.items():
        if isinstance(value, Mapping) and (name in _MAPS or name in _DEFINITIONS):
            yield from value.values()
        elif name in _LISTS and isinstance(value, list):
            yield from value
        elif name in _SINGLE:
            yield value


def _only_reference(schema: Any) -> Any:
    """The reference of a schema that says nothing else; None if it says more."""
    if not isinstance(schema, Mapping) or "$ref" not in schema:
        return None
    return None if _ASSERTIONS & schema.keys() else schema["$ref"]


def _add_assertion(built: dict[str, Any], name: str, value: Any) -> None:
    """Add what a keyword demands; annotations demand nothing."""
    if name in _PLAIN:
        built[name] = value
    elif name in ("const", "enum"):
        _check_literals(name, value)
        built[name] = value
    elif name == "format":
        if not isinstance(value, str) or value in FORMATS:
            built[name] = value
    elif name in _LEAST or name in _MOST:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_limit = isinstance(value, int) and value > _MOST_COUNT and name in _MOST
        if not is_limit:
            built[name] = value


def _check_literals(name: str, value: Any) -> None:
    """Refuse numbers that llguidance would change: it has them as floats."""
    todo, num_values = [value], 0
    while todo:
        each = todo.pop()
        num_values += 1
        if num_values + len(todo) > _MOST_VALUES:
            raise UserError(f"grammar: {name} has more than {_MOST_VALUES} values; name fewer")
        if isinstance(each, Mapping):
            todo += each.values()
        elif isinstance(each, list):
            todo += each
        elif isinstance(each, int | float) and not (
            -_GREATEST <= each <= _GREATEST and float(each) == each
        ):
            raise UserError(
                f"grammar: {name} has {_short(each)}: this number cannot be written exactly; "
                "ask for text, or for a range by minimum and maximum"
            )


def _add_bounds(built: dict[str, Any], schema: Mapping[str, Any]) -> None:
    """Add the bounds of numbers; those that a float does not have are narrowed to one."""
    bounds = {name: value for name, value in schema.items() if name in _BOUNDS}
    for name, value in bounds.items():
        may_be_flag = name.startswith("exclusive")  # in draft 4
        if not isinstance(value, int | float) or (isinstance(value, bool) and not may_be_flag):
            raise UserError(f"grammar: {name}={_short(value)}: expected a number")
    for sign, inclusive, exclusive in (
        (1, "minimum", "exclusiveMinimum"),
        (-1, "maximum", "exclusiveMaximum"),
    ):
        bound, strict = bounds.get(inclusive), bounds.get(exclusive)
        if isinstance(strict, bool):
            bound, strict = (None, bound) if strict else (bound, None)
        if bound is not None:
            built[inclusive] = _narrowed(bound, sign, inclusive)
        if strict is not None and _is_plain(strict):
            built[exclusive] = strict
        elif strict is not None:
            within = _narrowed(strict, sign, exclusive, is_strict=True)
            built[inclusive] = (max if sign > 0 else min)(within, built.get(inclusive, within))
    lower = max(built.get("minimum", -math.inf), built.get("exclusiveMinimum", -math.inf))
    upper = min(built.get("maximum", math.inf), built.get("exclusiveMaximum", math.inf))
    if lower >= _LONG and upper == math.inf:
        built["maximum"] = _GREATEST
    if upper <= -_LONG and lower == -math.inf:
        built["minimum"] = -_GREATEST


def _is_plain(bound: float) -> bool:
    return bound == 0 or _TINY <= abs(bound) < _EXACT


def _narrowed(bound: float, sign: int, name: str, *, is_strict: bool = False) -> float:
    """The number nearest to a bound, and within it, that llguidance counts exactly; not the bound
    itself if it ``is_strict``.

    Args:
        sign: 1 of a lower bound, -1 of an upper one.
    """
    lower = sign * bound  # An upper bound is a lower one of the negated numbers.
    if abs(lower) < _EXACT:
        return bound if _is_plain(bound) else sign * _TINY if lower > 0 else 0
    if not lower < _GREATEST:
        raise UserError(
            f"grammar: {name}={_short(bound)}: no number beyond it can be written; expected one "
            f"between {-_GREATEST} and {_GREATEST}"
        )
    within = float(max(lower, -_GREATEST))
    if within < lower or (is_strict and within == lower):
        within = math.nextafter(within, math.inf)
    return sign * (int(within) if abs(within) >= _EXACT else within)


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 100 else shown[:100] + "…"


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as llguidance reads it, with all that it refers to.  Schemas within it may be
    ``Document``s.

    Raises:
        UserError: it is no schema, is too large, or a reference names nothing in it.
    """
    tree = _Tree()
    built: dict[str, Any] = tree.build(Document(schema))
    if isinstance(version := schema.get("$schema"), str):
        built = {"$schema": version, **built}
    return {**built, "$defs": tree.definitions} if tree.definitions else built
