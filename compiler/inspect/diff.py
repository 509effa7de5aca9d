"""Compares two explanations: sites, launches, bytes, kernel choices, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .explain import Explanation

_SENTENCES = {
    "sites": "Sites where a pass does something else.",
    "figures": "What a layer and the step do otherwise: launches, bytes, calls.",
    "choices": "Kernel choices, and the number of calls that got them.",
    "notes": "What holds of one of them only.",
}


@dataclass(frozen=True)
class Differences:
    """Two explanations' differences: name -> (left, right), "-" where one side has no such thing.

    Attributes:
        left, right: labels.
        sites: pass and place -> outcomes.
        figures: launches and bytes, of a layer of each kind and of the step.
        choices: kernel choice -> how many calls got it.
        notes: what the figures cannot know -> where that holds.
    """

    left: str
    right: str
    sites: Mapping[str, tuple[str, str]]
    figures: Mapping[str, tuple[str, str]]
    choices: Mapping[str, tuple[str, str]]
    notes: Mapping[str, tuple[str, str]]

    def tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """(sentence, rows under a heading) for each kind of difference."""
        for title, sentence in _SENTENCES.items():
            pairs: Mapping[str, tuple[str, str]] = getattr(self, title)
            rows = [[name, *both] for name, both in pairs.items()]
            if rows:
                yield sentence, [[title, self.left, self.right], *rows]


def differences(left: tuple[str, Explanation], right: tuple[str, Explanation]) -> Differences:
    (left_label, one), (right_label, two) = left, right
    return Differences(
        left_label,
        right_label,
        _unequal(_sites(one), _sites(two)),
        _unequal(_figures(one), _figures(two)),
        _unequal(one.choices, two.choices),
        _unequal(dict.fromkeys(one.notes, "holds"), dict.fromkeys(two.notes, "holds")),
    )


def _unequal(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys([*one, *two])
    pairs = {name: (str(one.get(name, "-")), str(two.get(name, "-"))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _sites(facts: Explanation) -> dict[str, str]:
    sites: dict[str, list[str]] = {}
    for site in facts.sites:
        place = f"{site.name}, {site.layers}, {site.module or 'model'}"
        why = f": {site.reason}" if site.reason else ""
        sites.setdefault(place, []).append(f"{site.count} {site.outcome}{why}")
    return {place: "; ".join(outcomes) for place, outcomes in sites.items()}


def _figures(facts: Explanation) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for layer in facts.layers:
        figures[f"launches of {layer.title}"] = layer.launches
        figures[f"bytes of {layer.title}"] = layer.bytes
        calls = (call.op.rpartition("::")[2] for call in layer.calls)
        figures[f"calls of {layer.title}"] = ", ".join(calls)
    return figures | {"launches of the step": facts.launches, "bytes of the step": facts.bytes}
