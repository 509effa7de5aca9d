"""The text decoder of a model that has other parts too, such as a vision tower.

The decoder is built alone, as the causal language model that it is.  Its weights are found by the
names that they have in the whole model, which is built without memory for that: the library's
renamings are those of the whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config import UserError
from ..checkpoint import TensorInfo
from .checkpoint_map import (
    TiedTensors,
    moves_of,
    separate,
    skipped_of,
    sources_of,
    tied_tensors,
    untie,
)
from .facts import CapturedFacts
from .library import build, class_of, first_line, make_config, unmodified
from .moves import Move


def text_config(config: Any) -> Any:
    """The configuration of a model's text decoder where it is a causal language model of its own;
    ``config`` itself for a model without other parts.

    Raises:
        UserError: the library has the text decoder in no class of its own.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    whole, text = class_of(config), config.get_text_config(decoder=True)
    if type(text) is type(config) or whole.config_class is not type(config):
        return config
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) == whole.__name__:
            return config
        raise UserError(
            f"{whole.__name__} has a text decoder of type {text.model_type!r}, of which the "
            "library has no causal language model of its own; a decoder that only its whole model "
            "can run is not served yet"
        )
    tied = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    text.tie_word_embeddings = tied
    text.dtype = config.dtype or text.dtype
    return text


def whole_config(facts: CapturedFacts) -> Any:
    """The configuration of the folder: that of the whole model where others are parts of it."""
    return make_config(json.loads(facts.whole or facts.config))


@dataclass(frozen=True)
class Stored:
    """A captured model as its checkpoint has it, on the meta device.

    Attributes:
        model: the library's model of the whole folder.
        names: name in ``model`` -> name in the model that is served; empty where they are one.
        here: the checkpoint's tensors by the names that the library knows, where it has others.
    """

    model: Any
    names: Mapping[str, str]
    here: Callable[[Mapping[str, TensorInfo]], Mapping[str, TensorInfo]] = dict

    def moves(
        self, found: Mapping[str, TensorInfo], types: Mapping[str, tuple[str, ...]] | None = None
    ) -> list[Move]:
        """``moves_of``, to the parameters of the model that is served."""
        types, found = types or {}, self.here(found)
        if not self.names:
            return moves_of(self.model, found, types=types)
        of_whole = {name: types[own] for name, own in self.names.items() if own in types}
        moves = moves_of(self.model, found, self._skip, of_whole)
        return [move._replace(parameter=self.names[move.parameter]) for move in moves]

    def untie(self, found: Mapping[str, TensorInfo]) -> dict[str, str]:
        """``untie``, by the names in the model that is served."""
        notes = untie(self.model, self.here(found), self._skip)
        return {self.names.get(name, name): note for name, note in notes.items()}

    def tied(self, found: Mapping[str, TensorInfo]) -> list[TiedTensors]:
        """``tied_tensors``, by the names in the model that is served."""
        tied = tied_tensors(self.model, self.here(found), self._skip)
        return [each._replace(name=self.names.get(each.name, each.name)) for each in tied]

    def sources(self, found: Mapping[str, TensorInfo]) -> dict[str, tuple[str, ...]]:
        """``sources_of``, by the names in the model that is served."""
        sources = sources_of(self.model, self.here(found), self._skip)
        return {self.names.get(name, name): tensors for name, tensors in sources.items()}

    def left_out(self, found: Mapping[str, TensorInfo]) -> str:
        """One line of the checkpoint's tensors that belong to other parts of the model."""
        skipped = skipped_of(self.model, found, self._skip) if self.names else []
        if not skipped:
            return ""
        counts = Counter(_prefix(name) for name in skipped)
        parts = ", ".join(f"{count} of {prefix}.*" for prefix, count in counts.items())
        return (
            f"the text decoder of {type(self.model).__name__} is served alone; the checkpoint's "
            f"other tensors are left out: {parts}"
        )

    def _skip(self, name: str) -> bool:
        return bool(self.names) and name not in self.names and name in self._whole

    @property
    def _whole(self) -> Mapping[str, Any]:
        return dict(self.model.state_dict(keep_vars=True))


def _prefix(name: str) -> str:
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "model" and rest else first


def stored_model(facts: CapturedFacts, dtype: torch.dtype) -> Stored:
    """A captured model as its checkpoint has it.

    Raises:
        UserError: as ``build``; the whole model cannot be built, or has its text decoder in no
            place of its own.
    """
    text: Any = build(facts, dtype)
    if not facts.whole:
        return Stored(text, {})
    config = whole_config(facts)
    kind = class_of(config)
    try:
        whole: Any = unmodified(config, dtype, "meta")
    except Exception as error:
        raise UserError(
            f"{kind.__name__}, whose text decoder would be served, cannot be built: "
            f"{first_line(error)}"
        ) from error
    names = _names(whole, text)
    for name, own in names.items():
        if own in facts.untied:
            separate(whole, name)
    return Stored(whole, names)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _names(whole: Any, text: Any) -> dict[str, str]:
    """Name of each parameter and buffer of the text decoder in the whole model -> its
    name in the decoder alone."""
    places = {text.base_model_prefix: type(text.base_model)}
    found = {
        own: next((name for name, m in whole.named_modules() if type(m) is kind), "")
        for own, kind in places.items()
    }
    modules = {id(module): name for name, module in text.named_modules()}
    head = modules[id(text.get_output_embeddings())]
    outer = {id(module): name for name, module in whole.named_modules()}
    found[head] = outer.get(id(whole.get_output_embeddings()), "")
    shapes = {name: tensor.shape for name, tensor in _tensors(whole)}
    names = {}
    for name, tensor in _tensors(text):
        own = next((own for own in found if name.startswith(f"{own}.")), "")
        there = f"{found.get(own, '')}{name.removeprefix(own)}"
        if not found.get(own) or shapes.get(there) != tensor.shape:
            raise UserError(
                f"{type(whole).__name__} has its text decoder's {name} in no place that is known "
                f"of {type(text).__name__}; a decoder that only its whole model can run is not "
                "served yet"
            )
        names[there] = name
    return names
