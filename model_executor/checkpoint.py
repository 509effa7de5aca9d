"""A safetensors checkpoint on disk: its files and the tensors that their headers promise."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..config.errors import UserError
from .hf_json import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
F8_E4M3 = "F8_E4M3"
UNNEEDED = re.compile(
    r"(^|\.)("
    r"rotary(_pos)?_emb\.((original_)?inv_freq|cos_cached|sin_cached)"
    r"|position_ids"
    r"|(self_)?attn\.(masked_)?bias"
    r")$"
)
"""Buffers that older versions of transformers saved: tables of rope, positions, causal masks.  They
are computed here, and may be of any type."""
_MOST_HEADER_BYTES = 10**8
"""Longest header that safetensors itself reads, in bytes."""
_FLOAT_SIZES = dict(zip((*FLOATS, F8_E4M3, "F8_E8M0"), (8, 4, 2, 2, 1, 1), strict=True))
_INT_SIZES = {"BOOL": 1, "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8}
_ITEMSIZE = _FLOAT_SIZES | _INT_SIZES


def dtype_names(dtype: Any) -> tuple[str, ...]:
    """The safetensors types from which a tensor of a torch dtype is read."""
    if str(dtype) == "torch.float8_e8m0fnu":
        return ("F8_E8M0",)
    if dtype.is_floating_point:
        return FLOATS
    return (str(dtype).removeprefix("torch.").replace("uint", "U").replace("int", "I"),)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint; ``dtype`` is safetensors' name for it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        size = _ITEMSIZE[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True)
class RawTensor:
    """Where the bytes of one tensor are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_raw_header(file: Path) -> dict[str, RawTensor]:
    """The tensors of one safetensors file, read without torch.

    Raises:
        UserError: it cannot be read, or has another form.
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, tensor in header.items():
            start, end = map(int, tensor["data_offsets"])
            dtype, shape = str(tensor["dtype"]), tuple(tensor["shape"])
            tensors[name] = RawTensor(file, dtype, shape, 8 + length + start, end - start)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check its permissions") from error
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is truncated or damaged ({error}); download it again") from error
    return tensors


@contextmanager
def open_checkpoint_file(file: Path) -> Iterator[Any]:
    """Open one safetensors file for reading tensors on the CPU, memory-mapped.

    Raises:
        UserError: it is missing, unreadable, truncated or damaged, then or while it is read.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except FileNotFoundError as error:
        raise UserError(f"checkpoint file {file} is missing; download the model again") from error
    except OSError as error:
        reason = error.strerror or "read failed"
        raise UserError(f"cannot read {file}: {reason}; check its permissions") from error
    except SafetensorError as error:
        raise UserError(f"{file} is truncated or damaged ({error}); download it again") from error


class OpenFiles(ExitStack):
    """Checkpoint files, each opened when it is first asked for, and closed together: opening one
    reads its header, which is long where a model has many experts."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def __getitem__(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = self.enter_context(open_checkpoint_file(file))
        return self._opened[file]


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor in the folder's checkpoint but ``UNNEEDED`` ones, by name, from the headers
    alone.

    Raises:
        UserError: there is no safetensors checkpoint, a file is missing or damaged, or a tensor
            is of none of the known types.
    """
    found: dict[str, TensorInfo] = {}
    for file in checkpoint_files(folder):
        with open_checkpoint_file(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if UNNEEDED.search(name):
                    continue
                view = opened.get_slice(name)
                info = TensorInfo(file, name, tuple(view.get_shape()), view.get_dtype())
                if info.dtype not in _ITEMSIZE:
                    raise UserError(
                        f"tensor {name} in {file} is of type {info.dtype}, expected one of "
                        f"{', '.join(_ITEMSIZE)}; use unquantized weights, or another format"
                    )
                found[name] = info
    return found


def checkpoint_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in order: the single one, as transformers prefers it to an
    index beside it, else those that the index names.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if index.is_file():
        names = indexed_files(index)
        for name in names:
            if not (folder / name).is_file():
                raise UserError(
                    f"checkpoint file {folder / name}, named in {INDEX}, is missing; download the "
                    "model again"
                )
        return [folder / name for name in names]
    others = [path.name for path in sorted(folder.glob("*.bin"))[:1]]
    remedy = f"convert {others[0]} to safetensors" if others else "download the weights"
    raise UserError(
        f"model {str(folder)!r} has neither {SINGLE} nor {INDEX}; {remedy}, or use "
        "--load-format dummy for random weights"
    )


def indexed_files(index: Path) -> list[str]:
    """The names of the files that an index names, in order.

    Raises:
        UserError: it names none, or one in another folder.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map; download it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise UserError(f"{index} names {name!r}; checkpoint files must lie beside the index")
    return names
