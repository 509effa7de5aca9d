"""Lists of modules in a checkpoint's config, as patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from ..hf_json import HfConfig


def matcher(section: HfConfig, *fields: str) -> Callable[[str], bool]:
    """Whether a name is in the list of the first of ``fields`` that is there."""
    field = next((name for name in fields if section.has(name)), fields[0])
    patterns: Any = section.values.get(field)
    patterns = [] if patterns is None else patterns
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise section.error(field, patterns, "a list of module names")
    tests = [_pattern(section, field, pattern) for pattern in patterns]
    return lambda name: any(test(name) for test in tests)


def _pattern(section: HfConfig, field: str, pattern: str) -> Callable[[str], bool]:
    """``re:`` and an expression for the name's beginning, a name with ``*`` or the begin of
    one up to a dot, the class
    ``Linear``, or a name: whole, or one end of it up to a dot."""
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise section.error(field, pattern, f"a regular expression ({error})") from error
        return lambda name: expression.match(name) is not None
    if "*" in pattern:
        return lambda name: fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    if pattern == "Linear":
        return lambda name: True
    return lambda name: f".{pattern}." in f".{name}."
