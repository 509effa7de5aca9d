"""Loads a draft head; what its checkpoint lacks, its embedding for one, is the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.errors import UserError
from ..checkpoint import TensorInfo, open_checkpoint_file, read_headers
from ..dummy import fill_dummy
from ..loader import Model, ProgressBar, load_captured, load_weights, materialize, no_progress
from ..models.decoder import DecoderModel
from ..models.draft_head import DraftHead
from ..parallel import TensorParallelRank
from ..spec import ModelSpec
from .forms import FROM_TARGET, NEXTN_JOIN, TO_TARGET, canonical
from .read import missing_map

_OF_TARGET = {
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "lm_head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}
"""What a head may lack, and the target's names for it."""


def load_head(
    spec: ModelSpec,
    folder: Path | str,
    device: torch.device | str,
    *,
    target: Model,
    target_folder: Path,
    load_format: str = "auto",
    seed: int = 0,
    progress: ProgressBar = no_progress,
    **others: Any,
) -> Model:
    """``load_model`` for the head of ``spec``.

    Args:
        target: whose embedding and ``lm_head`` are shared, where it holds them whole.
        target_folder: where they are read otherwise.

    Raises:
        UserError: as of ``load_model``, or the maps of the vocabulary do not fit.
    """
    if spec.captured:
        dummy = load_format == "dummy"
        return _load_captured(spec, Path(folder), device, progress, seed if dummy else None)
    head = DraftHead(spec)
    if load_format == "dummy":
        materialize(head, spec.dtype, device)
        fill_dummy(head, spec.dtype, seed, TensorParallelRank())
        if head.target_ids is not None:
            torch.arange(len(head.target_ids), out=head.target_ids)
        return head.eval()
    stored = {canonical(name): info for name, info in read_headers(Path(folder)).items()}
    maps = {name: stored.pop(name) for name in (TO_TARGET, FROM_TARGET) if name in stored}
    shared: dict[str, nn.Parameter] = {}
    lacking = [name for name in _OF_TARGET if name not in stored]
    for name in lacking:
        parameter = _shared(name, head, target)
        if parameter is not None:
            shared[name] = parameter
    if len(shared) < len(lacking):
        of_target = read_headers(target_folder)
        for name in set(lacking) - set(shared):
            theirs = next((n for n in _OF_TARGET[name] if n in of_target), None)
            if theirs is not None:
                stored[name] = of_target[theirs]
    embed, lm_head = head.embed, head.lm_head
    assert embed is not None and lm_head is not None
    # Without these modules no tensor is looked for.
    head.embed = None if "embed_tokens.weight" in shared else embed
    head.lm_head = None if "lm_head.weight" in shared else lm_head
    load_weights(head, stored, device, progress)
    head.embed, head.lm_head = embed, lm_head
    embed.weight = shared.get("embed_tokens.weight", embed.weight)
    lm_head.weight = shared.get("lm_head.weight", lm_head.weight)
    if head.target_ids is not None:
        head.target_ids.copy_(_target_ids(spec, maps, Path(folder)))
    return head.eval()


def _load_captured(
    spec: ModelSpec,
    folder: Path,
    device: torch.device | str,
    progress: ProgressBar,
    seed: int | None,
) -> Model:
    """A layer that predicts further tokens, of a captured model; random weights with a ``seed``."""
    from ..captured.model import fill_captured
    from .captured import CapturedHead, stored_head

    head = CapturedHead(spec)
    if seed is not None:
        materialize(head, None, device)
        fill_captured(head, seed)
        return head
    assert spec.head is not None
    found = read_headers(folder)
    there = {name.rpartition(".")[0] for name in found}
    joins = (f"model.layers.{spec.head.layer}.{name}" for name in NEXTN_JOIN)
    if missing := [name for name in joins if name not in there]:
        raise UserError(f"{folder}: the checkpoint lacks {', '.join(missing)}; download it again")
    load_captured(head, stored_head(spec), found, device, progress)
    return head


def _shared(name: str, head: DraftHead, target: Model) -> nn.Parameter | None:
    """The target's own parameter, if it is just what the head needs."""
    if not isinstance(target, DecoderModel) or target.spec.tensor_parallel_size > 1:
        return None
    mine, theirs = (
        (each.embed if name.startswith("embed") else each.lm_head) for each in (head, target)
    )
    if mine is None or theirs is None or mine.weight.shape != theirs.weight.shape:
        return None
    weight = theirs.weight
    return weight if weight.dtype == head.spec.dtype else None


def _target_ids(spec: ModelSpec, maps: dict[str, TensorInfo], folder: Path) -> Tensor:
    """The target's token of each of the head's.

    Raises:
        UserError: they are missing, not tokens of the target, or not all different.
    """
    head = spec.head
    assert head is not None
    if TO_TARGET not in maps:
        raise missing_map(folder, head.draft_vocab_size, spec.vocab_size)
    values = {name: _read(info) for name, info in maps.items()}
    offsets = values[TO_TARGET]
    if offsets.shape != (head.draft_vocab_size,) or offsets.is_floating_point():
        raise UserError(
            f"{maps[TO_TARGET].file}: {TO_TARGET} is {offsets.dtype} {list(offsets.shape)}, "
            f"expected an integer for each of draft_vocab_size={head.draft_vocab_size} tokens"
        )
    ids = offsets.long() + torch.arange(len(offsets))
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= spec.vocab_size or len(ids.unique()) < len(ids):
        raise UserError(
            f"{maps[TO_TARGET].file}: {TO_TARGET} gives tokens {least} to {most}, expected "
            f"different ones of 0..{spec.vocab_size - 1}; the head is damaged or of another model"
        )
    chosen = values.get(FROM_TARGET)
    if chosen is not None:
        expected = torch.zeros(spec.vocab_size, dtype=torch.bool)
        expected[ids] = True
        if chosen.shape != expected.shape or not torch.equal(chosen.bool(), expected):
            raise UserError(
                f"{maps[FROM_TARGET].file}: {FROM_TARGET} and {TO_TARGET} name other tokens; the "
                "head is damaged"
            )
    return ids


def _read(info: TensorInfo) -> Tensor:
    with open_checkpoint_file(info.file) as opened:
        tensor: Tensor = opened.get_tensor(info.name)
        return tensor
