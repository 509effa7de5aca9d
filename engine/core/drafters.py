"""Makes the drafter that ``speculative_config`` names."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...config import UserError
from ...config.speculative import SpeculativeConfig
from ..messages.draft_run import DraftRun
from .drafting.model_drafter import ModelDrafter
from .drafting.policy import DraftPolicy
from .drafting.replay import AlwaysDrafts
from .drafting.seams import Drafter
from .drafting.step_costs import StepCosts, knee
from .drafts import Drafts
from .kv_blocks import BlockPool
from .ngram import NgramDrafter

_log = logging.getLogger(__name__)


def _ngram(config: SpeculativeConfig, model: DraftRun | None) -> Drafter:
    if config.acceptance:
        return AlwaysDrafts()
    return NgramDrafter(config.prompt_lookup_max, config.prompt_lookup_min, config.method)


def _model(config: SpeculativeConfig, model: DraftRun | None) -> Drafter:
    if model is None:
        raise ValueError(f"method {config.method}: the engine has loaded no draft model")
    return ModelDrafter(model, config.method)


_DRAFTERS: dict[str, Callable[[SpeculativeConfig, DraftRun | None], Drafter]] = {
    "ngram": _ngram,
    "suffix": _ngram,
    "draft_model": _model,
    "eagle3": _model,
    "mtp": _model,
}
"""Method -> its drafter; ``config.speculative.METHODS`` has the same names."""
_FLAT_ROWS = 190
"""Rows up to which a step takes as long as one of one row, until times are measured: on an H200 the
products then take as long as reading the weights (docs/scheduling.md#how-prompts-are-split)."""


def make_drafts(
    config: SpeculativeConfig | None,
    pool: BlockPool,
    vocab_size: int,
    model: DraftRun | None,
    *,
    on_device: bool = False,
) -> Drafts | None:
    """The drafts of a scheduler; None if nobody is asked for any.

    Args:
        vocab_size: columns of the logits.
        model: the draft model, where there is one.
        on_device: the worker can place rows behind drafts that the host does not know.

    Raises:
        UserError: a layer keeps a state that cannot go back to before a draft.
    """
    if config is None:
        return None
    if pool.has_states:
        raise UserError(
            f"speculative_config: method={config.method!r}: the model has layers that keep a state "
            "of the whole sequence, which cannot go back to before a wrong draft; leave it out"
        )
    drafter, most = _DRAFTERS[config.method](config, model), config.num_speculative_tokens
    policy = None
    if config.adaptive:
        costs = StepCosts(knee(_FLAT_ROWS), model.share if model is not None else 0.0)
        policy = DraftPolicy(most, costs)
    if config.acceptance:
        _log.warning(
            "speculative_config: acceptance=%s judges drafts by chance, to measure their speed: "
            "outputs are not those of the model; leave it out to get those",
            [round(rate, 3) for rate in config.acceptance],
        )
    is_real = on_device and not config.acceptance
    remembers = is_real and config.method == "suffix" and config.suffix_cached_tokens > 0
    return Drafts(
        drafter,
        most,
        policy,
        vocab_size,
        on_device=on_device,
        is_replayed=bool(config.acceptance),
        remembers=config.prompt_lookup_max if remembers else 0,
        planner=drafter if on_device and isinstance(drafter, ModelDrafter) else None,
    )
