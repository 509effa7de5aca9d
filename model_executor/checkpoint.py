"""A safetensors checkpoint on disk: its files and the tensors that their headers promise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
_ITEMSIZE = dict(zip((*FLOATS, F8_E4M3), (8, 4, 2, 2, 1), strict=True))


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


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor in the folder's checkpoint, by name, from the headers alone.

    Raises:
        UserError: there is no safetensors checkpoint, a file is missing or damaged, or a tensor
            is of none of the known types.
    """
    found: dict[str, TensorInfo] = {}
    for file in checkpoint_files(folder):
        with open_checkpoint_file(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(name)
                info = TensorInfo(file, name, tuple(view.get_shape()), view.get_dtype())
                if info.dtype not in _ITEMSIZE:
                    raise UserError(
                        f"tensor {name} in {file} is of type {info.dtype}, expected one of "
                        f"{', '.join(_ITEMSIZE)}; use unquantized or FP8 weights"
                    )
                found[name] = info
    return found


def checkpoint_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in order.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} has no weight_map; download it again")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise UserError(
                    f"{index} names {name!r}; checkpoint files must lie beside the index"
                )
            if not (folder / name).is_file():
                raise UserError(
                    f"checkpoint file {folder / name}, named in {INDEX}, is missing; download the "
                    "model again"
                )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = [path.name for path in sorted(folder.glob("*.bin"))[:1]]
    remedy = f"convert {others[0]} to safetensors" if others else "download the weights"
    raise UserError(
        f"model {str(folder)!r} has neither {SINGLE} nor {INDEX}; {remedy}, or use "
        "--load-format dummy for random weights"
    )
