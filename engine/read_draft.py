"""Reads the draft model that ``speculative_config`` names, with options of its own."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..config import EngineOptions, Hardware, ResolvedConfig, UserError
from ..config.speculative import LOOKUP_METHODS, SpeculativeConfig
from ..model_executor.draft_checks import check_drafter, drafter_reader
from ..model_executor.spec import ModelSpec
from .worker.draft_model import DraftParts
from .worker.startup import read_model

_log = logging.getLogger(__name__)


def read_draft_model(
    options: EngineOptions,
    config: ResolvedConfig,
    spec: ModelSpec,
    hardware: Hardware,
    *,
    weights: bool = True,
) -> DraftParts | None:
    """Read the folder of the draft model that ``options`` name; None if they name none.

    Args:
        weights: they will be loaded.

    Raises:
        UserError: the folder is bad, or the model cannot draft for one of ``spec``.
    """
    asked = config.scheduler.speculative
    if asked is None or asked.method in LOOKUP_METHODS:
        return None
    own, read = _options(options, asked, config), drafter_reader(asked.method, spec)
    if asked.method != "draft_model":  # it reads and makes hidden states of the target's dtype
        own = replace(own, dtype=config.precision.dtype)
    try:
        folder, drafter, resolved = read_model(own, hardware, weights=weights, read=read)
    except UserError as error:
        raise UserError(f"speculative_config: {error}") from error
    longest = resolved.model.max_model_len
    if asked.max_model_len is None and longest < config.model.max_model_len:
        _log.info(
            "drafts: %s was made for %d positions; longer sequences go on without drafts",
            folder,
            longest,
        )
    parts = DraftParts(folder, drafter, _beside(resolved, config), asked.num_speculative_tokens)
    check_drafter(asked.method, parts.folder, parts.spec, spec)
    return parts


def _options(
    options: EngineOptions, asked: SpeculativeConfig, config: ResolvedConfig
) -> EngineOptions:
    """The options of the draft model of a target with ``options``, resolved as ``config``.

    Without ``max_model_len`` it has what the draft model was made for.
    """
    return replace(
        options,
        model=asked.model or options.model,
        tokenizer=None,
        chat_template=None,
        hf_overrides="",
        quantization=asked.quantization,
        max_model_len=asked.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        enable_chunked_prefill=True,  # it reads prompts in the chunks of the target
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
        distributed_executor="mp",
        require_fusion=(),
        record_expert_load=False,
        speculative_config=None,
    )


def _beside(own: ResolvedConfig, target: ResolvedConfig) -> ResolvedConfig:
    """The config of a draft model that reads all rows of a step of the target, and no sequence
    that the target does not have."""
    num_rows = target.scheduler.max_num_rows
    scheduler = replace(own.scheduler, max_num_rows=num_rows, is_drafter=True)
    longest = min(own.model.max_model_len, target.model.max_model_len)
    model = replace(own.model, max_model_len=longest)
    sizes = target.capture.sizes if own.capture.sizes else ()
    calls = replace(own.compile, named_kernels=())  # it need not call all ops that are named
    capture = replace(own.capture, sizes=sizes)
    return replace(own, model=model, scheduler=scheduler, capture=capture, compile=calls)
