"""Reads the configuration of a draft head: a Hugging Face folder -> ``ModelSpec``, without torch.

EAGLE-3 heads come as their authors and SGLang write them, and as vLLM's ``speculators`` does; the
latter nests the layer's configuration.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...config.errors import UserError
from ..captured.described import Lookup, nowhere
from ..checkpoint import checkpoint_files, read_raw_header
from ..hf_json import HfConfig, read_json
from ..models.families import llama
from ..spec import ModelSpec
from .forms import TO_TARGET, canonical
from .spec import EAGLE3_NAMES, FIRST_EAGLE, HeadSpec

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def read_head(
    folder: Path | str,
    impl: str = "auto",
    lookup: Lookup = nowhere,
    ranks: int = 1,
    *,
    target: ModelSpec,
) -> ModelSpec:
    """The spec of the EAGLE-3 head in a folder, which is to draft for ``target``.  Arguments are
    those of ``read_spec``.

    Raises:
        UserError: it is no such head, or not one for ``target``.
    """
    path = Path(folder) / "config.json"
    config = HfConfig(path, read_json(path))
    names = config.values.get("architectures") or []
    if any(name in FIRST_EAGLE for name in names):
        raise UserError(
            f"{path}: {names[0]!r} is a head of EAGLE 1 or 2, which is not supported; use an "
            f"EAGLE-3 head ({EAGLE3_NAMES[0]})"
        )
    name = next((name for name in names if name in EAGLE3_NAMES), None)
    if name is None:
        raise UserError(
            f"{path}: architectures={names!r}: expected an EAGLE-3 head, one of "
            f"{', '.join(EAGLE3_NAMES)}; a whole model drafts with method='draft_model'"
        )
    layer, nested = config, config.values.get("transformer_layer_config")
    if nested is not None:
        if not isinstance(nested, dict):
            raise config.error("transformer_layer_config", nested, "an object")
        own = {"num_hidden_layers": 1} | nested
        layer = HfConfig(path, own, prefix="transformer_layer_config.")
    if target.captured is not None and not target.captured.layers:
        raise UserError(
            f"{path}: the model ({target.architecture}) has no list of layers that attend once "
            "each, whose hidden states a head could read; use a draft_model, or ngram"
        )
    spec = llama(layer, name)
    size = spec.hidden_size
    if config.has("target_hidden_size"):
        size = config.integer("target_hidden_size")
    vocab_size = spec.vocab_size
    if config.has("draft_vocab_size"):
        vocab_size = config.integer("draft_vocab_size")
    head = HeadSpec(
        form="eagle3",
        target_hidden_size=size,
        kept=_places(config, target),
        draft_vocab_size=vocab_size,
        maps_vocabulary=vocab_size != spec.vocab_size,
        norm_before_residual=config.flag("norm_before_residual", False),
    )
    # Heads are trained on short texts, and their configs say so; rotations go on behind these.
    longest = max(spec.max_position_embeddings, target.max_position_embeddings)
    spec = replace(
        spec, head=head, max_position_embeddings=longest, tie_word_embeddings=False, notes=()
    )
    _check(path, config, spec, head, target)
    if head.maps_vocabulary and TO_TARGET not in (names := _tensors(path.parent)) and names:
        raise missing_map(path.parent, head.draft_vocab_size, spec.vocab_size)
    return spec


def missing_map(folder: Path, draft_vocab_size: int, vocab_size: int) -> UserError:
    """The error of a head that lacks the map of its vocabulary."""
    return UserError(
        f"{folder}: the head drafts {draft_vocab_size} of {vocab_size} tokens and has no tensor "
        f"{TO_TARGET}, which says which; download it again"
    )


def _tensors(folder: Path) -> set[str]:
    """The names of a checkpoint's tensors; none where there is no readable one."""
    try:
        return {canonical(n) for file in checkpoint_files(folder) for n in read_raw_header(file)}
    except UserError:
        return set()


def _places(config: HfConfig, target: ModelSpec) -> tuple[int, ...]:
    """The places whose hidden states the head reads.  ``speculators`` counts the layer ahead of
    which they are taken; ``eagle_config``, as of SGLang, the layer that makes them."""
    count = target.num_layers
    nested = config.values.get("eagle_config")
    ids: Any = config.values.get(_LAYER_IDS)
    name, later = _LAYER_IDS, 0
    if ids is None and isinstance(nested, dict):
        ids, name, later = nested.get(_LAYER_IDS), f"eagle_config.{_LAYER_IDS}", 1
        if nested.get("use_aux_hidden_state") is False:
            raise config.error(
                "eagle_config.use_aux_hidden_state", False, "a head of EAGLE-3, which reads them"
            )
    if ids is None:
        if count < 6:
            raise config.error(
                name, None, f"the layers that the head reads, since the model has {count} alone"
            )
        return 2, count // 2, count - 3
    most = count - later
    fits = isinstance(ids, list) and len(ids) > 0 and len(set(map(str, ids))) == len(ids)
    if not fits or not all(type(i) is int and 0 <= i <= most for i in ids):
        raise config.error(
            name, ids, f"different layers, 0 to {most}: the model has {count} layers"
        )
    return tuple(i + later for i in ids)


def _check(
    path: Path, config: HfConfig, spec: ModelSpec, head: HeadSpec, target: ModelSpec
) -> None:
    """Refuse a head of another model.

    Raises:
        UserError: names the first field that says so.
    """
    other = "; it is a head for another model"
    if spec.vocab_size != target.vocab_size:
        raise UserError(
            f"{path}: vocab_size={spec.vocab_size}, and the model's is {target.vocab_size}{other}"
        )
    if head.target_hidden_size != target.hidden_size:
        field = "target_hidden_size" if config.has("target_hidden_size") else "hidden_size"
        raise UserError(
            f"{path}: {field}={head.target_hidden_size}, and the model's hidden_size is "
            f"{target.hidden_size}{other}"
        )
    if head.draft_vocab_size > spec.vocab_size:
        raise config.error(
            "draft_vocab_size", head.draft_vocab_size, f"at most vocab_size = {spec.vocab_size}"
        )
    for name, size in (("hidden_size", spec.hidden_size), ("hidden_size", target.hidden_size)):
        if size % 2:
            raise config.error(name, size, "an even number, for a draft head to read its states")
    verifier = config.values.get("speculators_config")
    verifier = verifier.get("verifier") if isinstance(verifier, dict) else None
    theirs = verifier.get("architectures") if isinstance(verifier, dict) else None
    if isinstance(theirs, list) and theirs and target.architecture not in theirs:
        raise UserError(
            f"{path}: speculators_config.verifier.architectures={theirs!r}, and the model is "
            f"{target.architecture}{other}"
        )
