"""Keeps hidden states of a captured model's layers for a draft head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...attention import AttentionInputs
from ...models.decoder import keep_hidden
from ...spec import ModelSpec
from ..interfaces import PagedAttention
from ..ranks.spread import whole
from .alike import first_tensor


@contextmanager
def keeping(
    spec: ModelSpec, library: nn.Module, attend: PagedAttention, inputs: AttentionInputs
) -> Iterator[None]:
    """Let a model that is called in the block store the hidden states of ``spec.kept`` that lie
    between its layers: behind the layer's attention, where no chain of linear layers is cut.  Those
    of the last layer wait for ``attend.after(spec.num_layers)``."""
    assert spec.captured is not None
    places = [place for place in spec.kept if 0 <= place <= spec.num_layers]
    if not places:
        yield
        return
    layers: Any = library.get_submodule(spec.captured.layers)
    waiting: dict[int, Tensor] = {}

    def keep(place: int) -> None:
        if place in waiting:
            keep_hidden(waiting.pop(place), spec, place, inputs)

    def note(place: int, values: Any) -> None:
        x = first_tensor(values)
        assert x is not None
        waiting[place] = whole(x)[0]

    def before(place: int) -> Any:
        return lambda module, args, kwargs: note(place, (args, kwargs))

    def behind(module: nn.Module, args: Any, out: Any) -> None:
        note(spec.num_layers, out)

    hooks = [
        layers[-1].register_forward_hook(behind)
        if place == spec.num_layers
        else layers[place].register_forward_pre_hook(before(place), with_kwargs=True)
        for place in places
    ]
    attend.after = keep
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
