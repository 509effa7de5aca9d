"""``PassReport`` lists what a pass did: every expected site, matched or missed with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..config import UserError


class RequiredFusionError(UserError):
    """A fusion that was required did not match; the message lists the missed sites."""


@dataclass(frozen=True)
class Site:
    """One place where a rule could apply.  ``name`` is the graph node; ``module`` says where in the
    model it was traced; ``reason`` why it was missed, or why a part of it was left as it was;
    ``chain`` what had been read of a chain that was cut there."""

    name: str
    matched: bool
    reason: str = ""
    module: str = ""
    chain: str = ""


@dataclass(frozen=True)
class Check:
    """One distinct rewrite whose sides were compared: the largest differences of their outputs,
    what its rule allows, and the inputs of which no other value showed in any output."""

    site: str
    max_abs: float
    max_rel: float
    atol: float
    rtol: float
    seed: int
    unseen: list[str] = field(default_factory=list)


@dataclass
class PassReport:
    """The outcome of one pass over one graph; ``checks`` has one entry for each distinct rewrite
    that was verified."""

    name: str
    sites: list[Site] = field(default_factory=list)
    ops_before: int = 0
    ops_after: int = 0
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)

    @property
    def matched(self) -> int:
        return sum(site.matched for site in self.sites)

    @property
    def missed(self) -> list[Site]:
        return [site for site in self.sites if not site.matched]

    def match(self, name: str, left: str = "") -> None:
        """Add a matched site; ``left`` says which part of it was left as it was, and why."""
        self.sites.append(Site(name, matched=True, reason=left))

    def miss(self, name: str, reason: str, chain: str = "") -> None:
        self.sites.append(Site(name, matched=False, reason=reason, chain=chain))

    def summary(self) -> str:
        """One line: how many expected sites matched, and the reasons of the others and of those
        that matched in part, counted."""
        line = f"{self.name}: {self.matched} of {len(self.sites)} sites"
        reasons = Counter((site.matched, site.reason) for site in self.sites if site.reason)
        for (matched, reason), count in reasons.items():
            line += f"; {count} {'in part' if matched else 'missed'}: {reason}"
        return line

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sites": len(self.sites),
            "matched": self.matched,
            "matched_sites": [site.name for site in self.sites if site.matched],
            "missed": [{"site": s.name, "reason": s.reason} for s in self.missed],
            "in_part": {s.name: s.reason for s in self.sites if s.matched and s.reason},
            "ops_before": self.ops_before,
            "ops_after": self.ops_after,
            "seconds": self.seconds,
            "checks": [asdict(check) for check in self.checks],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PassReport:
        """The report that ``to_json`` gave."""
        left = data.get("in_part", {})
        sites = [Site(name, True, left.get(name, "")) for name in data["matched_sites"]]
        sites += [Site(miss["site"], False, miss["reason"]) for miss in data["missed"]]
        checks = [Check(**check) for check in data["checks"]]
        return PassReport(
            data["name"], sites, data["ops_before"], data["ops_after"], data["seconds"], checks
        )


def check_required(reports: Iterable[PassReport], required: Iterable[tuple[str, int]]) -> None:
    """Refuse a graph in which a required pass missed a site or matched too few.

    Args:
        required: (name of a pass, least number of matches).

    Raises:
        RequiredFusionError: names the pass and its misses.
    """
    by_name = {report.name: report for report in reports}
    for name, count in required:
        report = by_name.get(name)
        if report is None:
            raise RequiredFusionError(f"require_fusion={name}: this pass does not run here")
        if report.missed:
            sites = ", ".join(
                f"{site.name} ({site.reason}{f': {site.chain}' if site.chain else ''})"
                for site in report.missed
            )
            raise RequiredFusionError(f"require_fusion={name}: missed {sites}")
        if report.matched < count:
            raise RequiredFusionError(
                f"require_fusion={name}:{count}: only {report.matched} sites matched"
            )


def check_any_expected(reports: Iterable[PassReport], graph: str) -> None:
    """Refuse a graph in which no pass found a site: there, "no site missed" would mean nothing.

    Raises:
        RequiredFusionError: names the graph and the passes.
    """
    fusions = [report for report in reports if report.name != "cleanup"]
    if not any(report.sites for report in fusions):
        names = ", ".join(report.name for report in fusions) or "none"
        raise RequiredFusionError(
            f"require_all_fusions: no fusion is expected in {graph}, so there is nothing to "
            f"require (passes that looked for sites: {names}); drop require_all_fusions"
        )
