"""What a checkpoint's config says of its weights, and how fields that several projects have are
read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ...config.weight_format import GROUPS
from ..hf_json import HfConfig
from .layouts import Layout
from .scheme import QuantKind

KindOf: TypeAlias = Callable[[str], QuantKind | None]
"""How a module of a name is quantized; None: not at all."""
MODELOPT_FILE = "hf_quant_config.json"
IN_16_BITS = "the checkpoint quantizes activations too, which stay in 16 bits here: {}"


def says_quantized(config: HfConfig) -> bool:
    """Whether the config of a model, or ModelOpt's file beside it, says how it is quantized."""
    beside = config.path.parent / MODELOPT_FILE
    return config.section("quantization_config") is not None or beside.is_file()


@dataclass(frozen=True)
class Dialect:
    """What a config says.

    Attributes:
        kind: of the layers that are quantized, or of the first group of them.
        kind_of: how each module is quantized.
        layouts: how the checkpoint has the weights of each kind, if not as the kind's own tensors.
        ordered: columns of weights are in groups that do not lie together.
        notes: what a start says.
        where: file and section, for errors.
    """

    kind: QuantKind
    kind_of: KindOf
    layouts: tuple[Layout, ...] = ()
    ordered: bool = False
    notes: tuple[str, ...] = ()
    where: str = ""


def of_one_kind(kind: QuantKind, left: Callable[[str], bool], *laid: Layout) -> Dialect:
    """All modules are of a kind but for those that are left out."""
    return Dialect(kind, lambda name: None if left(name) else kind, laid)


def group_size(section: HfConfig, field: str) -> int:
    """The columns that share a scale, 0 for all: one of the sizes of the package's formats."""
    size = section.integer(field, least=-1)
    if size not in (-1, *GROUPS):
        expected = f"{', '.join(map(str, GROUPS))}, or -1 for a whole row"
        raise section.error(field, size, f"{expected}; quantize the model again with one of these")
    return max(0, size)


def num_bits(section: HfConfig, field: str, *allowed: int) -> int:
    """The bits of a weight."""
    bits = section.integer(field)
    if bits not in allowed:
        expected = " or ".join(map(str, allowed))
        raise section.error(field, bits, f"{expected}; use a checkpoint of so many bits")
    return bits
