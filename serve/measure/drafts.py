"""What the commands that measure say of drafts: ``--acceptance``, and counts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ...config import UserError
from ...config.speculative import with_fields
from ...config.step_fields import MOST_DRAFTS

Acceptance = Annotated[
    str | None,
    typer.Option(
        metavar="P,P,…",
        help="Replay drafts of which each position is right with this probability if those before "
        "it are: how many tokens are drafted, too. Outputs are not those of the model then.",
    ),
]


def with_acceptance(engine: dict[str, Any], acceptance: str | None) -> dict[str, Any]:
    """The options of an engine whose drafts are judged by ``--acceptance``.

    Raises:
        UserError: it is no list of probabilities.
    """
    if acceptance is None:
        return engine
    rates = []
    for item in acceptance.split(","):
        try:
            rate = float(item)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise UserError(
                f"acceptance={acceptance}: {item!r} is none; expected probabilities in [0, 1], one "
                "for each draft, such as 0.8,0.7,0.6"
            )
        rates.append(rate)
    if len(rates) > MOST_DRAFTS:
        raise UserError(
            f"acceptance={acceptance[:20]}…: {len(rates)} drafts; expected {MOST_DRAFTS} at most"
        )
    text = engine.get("speculative_config")
    text = '{"method": "ngram"}' if text is None else text
    fields = {"num_speculative_tokens": len(rates), "acceptance": rates}
    return {**engine, "speculative_config": with_fields(text, fields)}


def since(after: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """What was drafted between two reports of an engine's drafts; nothing if nobody drafts.

    ``acceptance`` is by position, of the drafts whose positions before were right;
    ``accepted_length`` are the tokens of a request in a step with drafts; ``chosen`` are the steps
    by the most drafts that a request might have, where that is chosen.
    """
    if not after:
        return {}
    before = before or {}

    def grown(name: str) -> list[int]:
        old = before.get(name) or [0] * len(after[name])
        return [a - b for a, b in zip(after[name], old, strict=True)]

    drafted, accepted = grown("drafted_by_position"), grown("accepted_by_position")
    reached = [drafted[0], *accepted[:-1]]
    tried = [min(pair) for pair in zip(reached, drafted, strict=True)]
    steps = after["steps"] - before.get("steps", 0)
    chosen = after["policy"].get("chosen")
    old = before.get("policy", {}).get("chosen") or [0] * len(chosen or ())
    return {
        "replayed": after["replayed"],
        "steps": steps,
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "acceptance": [
            round(a / t, 3) if t else None for a, t in zip(accepted, tried, strict=True)
        ],
        "accepted_length": round(1 + sum(accepted) / steps, 3) if steps else None,
        "chosen": chosen and [a - b for a, b in zip(chosen, old, strict=True)],
    }


def drafts_text(drafts: Mapping[str, Any], tpot_ms: float | None = None) -> str:
    """A line of what ``since`` returned; nothing if nobody drafts."""
    if not drafts:
        return ""
    if not drafts["drafted"]:
        text = "drafts: none"
    else:
        rates = ", ".join("-" if rate is None else f"{rate:.2f}" for rate in drafts["acceptance"])
        text = (
            f"drafts: {drafts['accepted']} of {drafts['drafted']} accepted, by position {rates}; "
            f"{drafts['accepted_length']:.2f} tokens a request and step"
        )
    if drafts["chosen"]:
        counts = ", ".join(f"{k}: {n}" for k, n in enumerate(drafts["chosen"]) if n)
        text += f"; steps by drafts chosen {counts}"
    if tpot_ms is not None:
        text += f"; {tpot_ms:.3f} ms an accepted token"
    if drafts["replayed"]:
        text += "; replayed: outputs are not those of the model"
    return text
