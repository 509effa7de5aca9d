"""Tuned tiles of the experts' GEMMs: a section of a device table, or files in the format that vLLM
and SGLang share.

A file of theirs is of one GPU model, number of experts, intermediate size and kind of weights, all
of which are in its name; it holds a tile for each of some numbers of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from importlib import metadata
from typing import Any, TypeAlias

from .arch import HOPPER
from .errors import UserError

_NAME = re.compile(
    r"E=(?P<experts>\d+),N=(?P<intermediate>\d+),device_name=(?P<device>[^,]+?)"
    r"(,dtype=(?P<dtype>\w+))?(,block_shape=\[(?P<block>\d+, ?\d+)\])?\.json"
)
_KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_RANGES = ((16, 256), (16, 256), (32, 256), (1, 64), (1, 16), (1, 8))
KINDS = ("bfloat16", "fp8", "fp8 block")
"""Kinds of weights: 16 bits; FP8 with a scale a tensor or channel; FP8 with one a block of 128."""
ExpertShape: TypeAlias = tuple[int, int, str]
"""Experts, intermediate size and kind of weights, by which tiles are found."""


@dataclass(frozen=True)
class ExpertTile:
    """The tile that one program computes: rows of slots by columns of the weight, ``depth`` at a
    time.  ``group`` row tiles are walked before the next column tile."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory that its steps under way take."""
        return (self.rows + self.columns) * self.depth * itemsize * self.stages

    def to_json(self) -> dict[str, int]:
        return dict(zip(_KEYS, astuple(self), strict=True))


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, as a rank holds them: how many, their intermediate size, the model's
    hidden size, how many a token chooses, and one of ``KINDS``."""

    experts: int
    intermediate: int
    hidden: int
    top_k: int
    kind: str

    @property
    def shape(self) -> ExpertShape:
        return self.experts, self.intermediate, self.kind

    @property
    def itemsize(self) -> int:
        return 2 if self.kind == "bfloat16" else 1


@dataclass(frozen=True)
class ExpertTable:
    """The tiles of one shape of experts, by number of tokens, in order."""

    experts: int
    intermediate: int
    kind: str
    tiles: tuple[tuple[int, ExpertTile], ...]

    @property
    def shape(self) -> ExpertShape:
        return self.experts, self.intermediate, self.kind

    def find(self, num_tokens: int) -> ExpertTile:
        """The tile of the nearest number of tokens; of two as near, of the lower."""
        return min(self.tiles, key=lambda tile: abs(tile[0] - num_tokens))[1]

    def to_json(self) -> dict[str, Any]:
        """The entry of a device table."""
        tiles = {str(tokens): tile.to_json() for tokens, tile in self.tiles}
        return asdict(self) | {"tiles": tiles}

    @classmethod
    def from_json(cls, entry: Any) -> ExpertTable:
        """The tiles of an entry that ``to_json`` made; raises ValueError if it did not."""
        names = [field.name for field in fields(cls)]
        if not isinstance(entry, Mapping) or entry.keys() != {*names}:
            raise ValueError(f"experts: expected an object of {', '.join(names)}")
        experts, intermediate, kind, tiles = (entry[name] for name in names)
        if type(experts) is not int or type(intermediate) is not int:
            raise ValueError(f"{experts!r} experts of {intermediate!r}, expected two integers")
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is unknown, expected one of {', '.join(KINDS)}")
        return cls(experts, intermediate, kind, read_tiles(tiles, kind))


def installed_triton() -> str:
    """Triton's version, without importing it; "" if it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def vllm_name(shape: ExpertShape, gpu: str) -> str:
    """The name of vLLM's file for a shape and a GPU."""
    experts, intermediate, kind = shape
    dtype = "" if kind == "bfloat16" else ",dtype=fp8_w8a8"
    block = ",block_shape=[128,128]" if kind == "fp8 block" else ""
    device = gpu.replace(" ", "_")
    return f"E={experts},N={intermediate},device_name={device}{dtype}{block}.json"


def vllm_text(table: ExpertTable, triton: str) -> str:
    """The content of vLLM's file."""
    return json.dumps({"triton_version": triton, **table.to_json()["tiles"]}, indent=4) + "\n"


def parse_vllm(name: str, text: str | bytes, gpu: str, triton: str) -> ExpertTable:
    """The tiles of vLLM's file for a GPU and a version of Triton.

    Raises:
        UserError: it cannot serve; says why.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise UserError(f"{name}: expected a name as {vllm_name((8, 14336, 'bfloat16'), gpu)}")
    if found["device"] != gpu.replace(" ", "_"):
        raise UserError(f"{name}: measured on {found['device']}, this is {gpu.replace(' ', '_')}")
    kind = _kind(name, found["dtype"], found["block"])
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON ({error})") from error
    version = content.pop("triton_version", triton) if isinstance(content, dict) else triton
    if version != triton:
        raise UserError(f"{name}: measured with Triton {version}, here is {triton or 'none'}")
    try:
        tiles = read_tiles(content, kind)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    return ExpertTable(int(found["experts"]), int(found["intermediate"]), kind, tiles)


def _kind(name: str, dtype: str | None, block: str | None) -> str:
    if dtype is None and block is None:
        return "bfloat16"
    if dtype == "fp8_w8a8" and block is None:
        return "fp8"
    if dtype == "fp8_w8a8" and block is not None and block.replace(" ", "") == "128,128":
        return "fp8 block"
    raise UserError(f"{name}: weights of dtype {dtype} in blocks of {block}, which no kernel has")


def read_tiles(content: Any, kind: str) -> tuple[tuple[int, ExpertTile], ...]:
    """The tiles by number of tokens of a JSON object, in order; raises ValueError."""
    if not isinstance(content, Mapping):
        raise ValueError("holds no object of tiles by number of tokens")
    tiles = [(_tokens(key), _tile(key, tile, kind)) for key, tile in content.items()]
    if not tiles:
        raise ValueError("holds no tile")
    return tuple(sorted(tiles, key=lambda tile: tile[0]))


def _tokens(key: str) -> int:
    if not key.isdecimal() or int(key) < 1:
        raise ValueError(f"key {key!r}, expected a number of tokens")
    return int(key)


def _tile(key: str, found: Any, kind: str) -> ExpertTile:
    if not isinstance(found, Mapping):
        raise ValueError(f"the tile of {key} tokens is no object")
    values: list[int] = []
    for field, (least, most) in zip(_KEYS, _RANGES, strict=True):
        value: Any = found.get(field)
        whole = type(value) is int and least <= value <= most
        if not whole or (field not in ("GROUP_SIZE_M", "num_stages") and value & (value - 1)):
            raise ValueError(
                f"{field} of {key} tokens is {value!r}, expected {least} to {most}, for tiles and "
                "warps a power of two"
            )
        values.append(value)
    tile = ExpertTile(*values)
    if kind == "fp8 block" and (tile.depth != 128 or tile.columns > 128):
        raise ValueError(f"the tile of {key} tokens does not fit scales of blocks of 128")
    if (taken := tile.shared_bytes(2 if kind == "bfloat16" else 1)) > HOPPER.shared_bytes:
        raise ValueError(
            f"the tile of {key} tokens takes {taken} bytes of shared memory, at most "
            f"{HOPPER.shared_bytes}"
        )
    return tile
