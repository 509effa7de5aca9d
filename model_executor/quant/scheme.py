"""How a model's linear layers are quantized, as data: part of ``ModelSpec`` and so of the key.

The package's own formats are FP8: float8_e4m3fn, with magnitudes up to 448.  A value is its FP8
number times a float32 scale.  Others are admitted by name, see ``config/weight_format.py``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias, cast

from ...config import outside_key
from ...config.weight_format import STORED_FORMATS, StoredFormat
from .layouts import Layout

BLOCK = 128

QuantKind: TypeAlias = str
"""One of ``FORMATS``."""
KINDS: tuple[QuantKind, ...] = ("fp8", "fp8_block", "fp8_static")
"""The package's own, in which weights can also be quantized while they are loaded."""


@dataclass(frozen=True)
class QuantFormat:
    """An FP8 format: what a scale covers, of weights [N, K] and of activations [M, K].  Loading,
    sharding and quantizing follow from it.

    Attributes:
        rows, columns: the size of the part of a weight that shares a scale; 0: all of them.
        static: the activations' one scale is in the checkpoint; else scales are found at run time,
            one for each token and ``columns`` of it.
    """

    rows: int
    columns: int
    static: bool = False

    @property
    def blocks(self) -> bool:
        """Whether scales follow the columns, so that layers must have whole blocks of them."""
        return self.columns > 0

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """The shape of the scale of a weight [out_features, in_features]."""
        return _count(out_features, self.rows), _count(in_features, self.columns)


def _count(size: int, unit: int) -> int:
    return -(-size // unit) if unit else 1


_FP8 = {
    "fp8": QuantFormat(1, 0),
    "fp8_block": QuantFormat(BLOCK, BLOCK),
    "fp8_static": QuantFormat(0, 0, static=True),
}
FORMATS: MutableMapping[str, QuantFormat | StoredFormat] = ChainMap(
    cast(dict[str, QuantFormat | StoredFormat], _FP8),
    cast(dict[str, QuantFormat | StoredFormat], STORED_FORMATS),
)
"""Every format by its name, those that are admitted later included."""

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
"""The linear layers that are quantized unless they are left out.  Norms, embedding and ``lm_head``
never are."""
MOE_LINEARS = ("mlp.experts.gate_up", "mlp.experts.down", "mlp.shared.gate_up", "mlp.shared.down")
"""In a layer with experts these are quantized in place of ``mlp``.  The router and the shared gate
never are."""


@dataclass(frozen=True)
class QuantScheme:
    """How the layers of a model are quantized.

    Attributes:
        kind: of those that are in none of the lists below.
        unquantized: for each layer, the ``LINEARS`` left in the model's dtype.
        online: weights are quantized while they are loaded; others already are in the checkpoint.
        others: for each layer, the ``LINEARS`` of other kinds, each with its kind; empty if there
            are none in the model.
        gathered: the ``LINEARS`` that put the columns of their input in the order of their weight.
        layouts: how the checkpoint has the weights of each kind, if not as the kind's own tensors.
        modules: of a captured model, the checkpoint's modules of kinds in ``STORED_FORMATS``, each
            with its kind.
        notes: what a start says of them.
    """

    kind: QuantKind
    unquantized: tuple[tuple[str, ...], ...]
    online: bool = field(metadata=outside_key("values of weights never enter the code"))
    others: tuple[tuple[tuple[str, QuantKind], ...], ...] = ()
    gathered: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = field(
        default=(), metadata=outside_key("layers hold the same tensors, whatever a checkpoint has")
    )
    modules: tuple[tuple[str, QuantKind], ...] = field(
        default=(), metadata=outside_key("layers hold the same tensors, whatever a checkpoint has")
    )
    notes: tuple[str, ...] = field(
        default=(), compare=False, metadata=outside_key("what a start says of the folder")
    )

    def kind_of(self, layer: int, linear: str) -> QuantKind | None:
        """How one of ``LINEARS`` or ``MOE_LINEARS`` is quantized; None: not at all."""
        if linear in self.unquantized[layer]:
            return None
        return dict(self.others[layer]).get(linear, self.kind) if self.others else self.kind

    def layout_of(self, kind: QuantKind) -> Layout | None:
        """How the checkpoint has weights of a kind; None: as the kind's own tensors."""
        return next((layout for layout in self.layouts if layout.target == kind), None)

    def stored_as(self, module: str) -> Layout | StoredFormat | None:
        """How the checkpoint of a captured model has a module's weight, if in one of
        ``STORED_FORMATS`` or a layout of one."""
        kind = self._kinds.get(module, "")
        return self.layout_of(kind) or STORED_FORMATS.get(kind)

    @cached_property
    def _kinds(self) -> dict[str, QuantKind]:
        return dict(self.modules)

    def of_layers(self, numbers: Iterable[int]) -> QuantScheme:
        """The scheme of a model of some of the layers."""
        chosen = [*numbers]
        unquantized = tuple(self.unquantized[number] for number in chosen)
        others = tuple(self.others[number] for number in chosen) if self.others else ()
        return replace(self, unquantized=unquantized, others=others)
