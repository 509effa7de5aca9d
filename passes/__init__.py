"""The passes rewrite graphs over the semantic ops: one rule a file, ``pipeline`` the ordered list.

A rule takes ``(gm, context)`` and returns a ``PassReport``: which sites it expected, which it
matched, and why the others were missed.  Every replacement goes through ``Context.replace``, which
keeps both sides, so that ``verify`` can run one against the other.
"""

from ..config import VerificationError
from .check_references import check_references
from .pipeline import CANONICALIZE, JOIN, RAISE, build_passes, run_passes
from .report import (
    PassReport,
    RequiredFusionError,
    Site,
    check_any_expected,
    check_required,
)
from .rule import Context, Rule
from .sites import op_name
from .subgraph import Subgraph, digest, external_inputs, extract, fake_value
from .verify_inputs import random_value

__all__ = [
    "CANONICALIZE",
    "JOIN",
    "RAISE",
    "Context",
    "PassReport",
    "RequiredFusionError",
    "Rule",
    "Site",
    "Subgraph",
    "VerificationError",
    "build_passes",
    "check_any_expected",
    "check_references",
    "check_required",
    "digest",
    "external_inputs",
    "extract",
    "fake_value",
    "op_name",
    "random_value",
    "run_passes",
]
