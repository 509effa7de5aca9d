"""The series of ``/metrics`` about drafts, under vLLM's names where it has them."""

from __future__ import annotations

from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ....engine.messages.draft_stats import DraftStats

LABELS = {
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("position",),
    "fusewright:spec_decode_num_draft_tokens_per_pos": ("position",),
    "fusewright:spec_decode_chosen": ("drafts",),
}
"""Series that have more labels."""
_counter = CounterMetricFamily


def of_drafts(drafts: DraftStats | None) -> list[tuple[Any, str, str, Any]]:
    """(kind, name, text, value) of the series of an engine that drafts; a dict has a value a label.
    There are none where nobody drafts."""
    if drafts is None:
        return []
    accepted, drafted = (
        {(str(i),): n for i, n in enumerate(each)} for each in (drafts.accepted, drafts.drafted)
    )
    chosen = {(str(i),): n for i, n in enumerate(drafts.policy.get("chosen", ()))}
    name = "spec_decode_num"
    return [
        (_counter, f"vllm:{name}_drafts", "Drafts of a request.", drafts.num_steps),
        (_counter, f"vllm:{name}_draft_tokens", "Drafted tokens.", drafts.num_drafted),
        (_counter, f"vllm:{name}_accepted_tokens", "Right drafts.", drafts.num_accepted),
        (_counter, f"vllm:{name}_accepted_tokens_per_pos", "The same by position.", accepted),
        (_counter, f"fusewright:{name}_draft_tokens_per_pos", "Drafts by position.", drafted),
        (_counter, "fusewright:spec_decode_chosen", "Steps by their most drafts.", chosen),
        (
            GaugeMetricFamily,
            "fusewright:spec_decode_off",
            "1 if the drafter has failed.",
            int(bool(drafts.error)),
        ),
    ]
