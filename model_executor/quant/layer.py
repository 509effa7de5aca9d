"""The protocols of a layer that can be quantized and whose scales are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from ...config.weight_format import StoredFormat
from ..sharding import ShardRule
from .scheme import QuantFormat


class LayerShare(Protocol):
    """A linear layer, or one expert's share of a layer of experts; writing to its tensors writes to
    the layer's."""

    @property
    def quant(self) -> QuantFormat | StoredFormat | None:
        """The format of the weight; None: the model's dtype."""

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], or as the format stores it."""

    @property
    def weight_scale(self) -> Tensor:
        """The scales of a quantized weight."""

    @property
    def rules(self) -> Mapping[str, ShardRule]:
        """How the layer's tensors are spread over the ranks, by name."""


class Quantizable(Protocol):
    """A layer whose weight can be quantized."""

    @property
    def weight(self) -> Tensor:
        """The weight of all shares."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers that the weight stands for, however it is stored."""

    def share(self, expert: int | None) -> tuple[LayerShare | None, bool]:
        """The share of an expert, or the layer itself for None, and whether another rank has it:
        then the share of any expert here stands for it.  None if the layer has experts alone."""

    def shares(self) -> Sequence[LayerShare]:
        """All shares that are here: one, or one an expert."""


def is_quantizable(module: Any) -> TypeGuard[Quantizable]:
    """Whether a module is such a layer: by its methods, since a module's tensors are no attributes
    that ``isinstance`` sees from Python 3.12 on."""
    return all(callable(getattr(type(module), name, None)) for name in ("share", "shares"))
