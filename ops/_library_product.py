"""Chooses the library's algorithm for the linear layers that the streaming kernels leave to it.

``algorithms.json`` names the fastest measured for a GPU, a version of cuBLASLt, a shape of weight
and a range of rows; ``python -m fusewright.bench.ops.tune_linear`` writes it.  Where it names none,
torch's own call serves.  The choice is by shapes alone, when an op is called, so that a captured
graph holds it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import UserError
from . import _cublaslt

TABLE = Path(__file__).with_name("algorithms.json")
_SHAPES = 4096


@dataclass(frozen=True)
class Algorithm:
    """The fastest algorithm that was measured for some shapes.

    Attributes:
        operands: one of ``_cublaslt.OPERANDS``.
        out_features, in_features: shape of the weight.
        least_rows, most_rows: range of x's rows, both included.
        algorithm: cuBLASLt's algorithm, in hexadecimal.
        us, us_before: time at ``most_rows`` with the algorithm, and of the op without it.
    """

    operands: str
    out_features: int
    in_features: int
    least_rows: int
    most_rows: int
    algorithm: str
    us: float
    us_before: float

    def __post_init__(self) -> None:
        if self.operands not in _cublaslt.OPERANDS:
            expected = ", ".join(map(repr, _cublaslt.OPERANDS))
            raise ValueError(f"operands {self.operands!r}, expected one of {expected}")
        if not 0 < self.least_rows <= self.most_rows:
            raise ValueError(f"rows {self.least_rows} to {self.most_rows}, expected 1 or more")
        if len(bytes.fromhex(self.algorithm)) != _cublaslt.ALGORITHM_BYTES:
            raise ValueError(
                f"algorithm {self.algorithm!r}, expected {2 * _cublaslt.ALGORITHM_BYTES} digits"
            )

    @property
    def weight(self) -> tuple[str, int, int]:
        """The product that the algorithm was measured for, without its number of rows."""
        return self.operands, self.out_features, self.in_features


@dataclass(frozen=True)
class Table:
    """The algorithms measured on one GPU with one version of cuBLASLt."""

    gpu: str
    cublaslt: int
    algorithms: tuple[Algorithm, ...]

    def find(self, operands: str, rows: int, out_features: int, in_features: int) -> bytes | None:
        """The algorithm for a call; None if the table names none."""
        weight = (operands, out_features, in_features)
        for a in self.algorithms:
            if a.weight == weight and a.least_rows <= rows <= a.most_rows:
                return bytes.fromhex(a.algorithm)
        return None


@cache
def read_table(path: Path = TABLE) -> Table:
    """Read the table of a file.

    Raises:
        UserError: the file is not a table, or two of its entries are for the same call.
    """
    try:
        content = json.loads(path.read_text())
        algorithms = tuple(Algorithm(**entry) for entry in content["algorithms"])
        table = Table(content["gpu"], content["cublaslt"], algorithms)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path}: {error}: not a table of algorithms; write it anew with"
            " python -m fusewright.bench.ops.tune_linear"
        ) from error
    _refuse_overlaps(algorithms, path)
    return table


def _refuse_overlaps(algorithms: tuple[Algorithm, ...], path: Path) -> None:
    last: Algorithm | None = None
    for a in sorted(algorithms, key=lambda a: (a.weight, a.least_rows)):
        if last and a.weight == last.weight and a.least_rows <= last.most_rows:
            raise UserError(
                f"{path}: {a.weight} has two algorithms for {a.least_rows} rows; expected one"
            )
        last = a


@cache
def table_of(device: torch.device) -> Table | None:
    """The table for a device with the cuBLASLt that is installed; None if there is none.

    The first call starts the library, so it must not come during a capture.
    """
    table = read_table()
    if device.type != "cuda" or torch.cuda.get_device_name(device) != table.gpu:
        return None
    if _cublaslt.version() != table.cublaslt:
        return None
    _cublaslt.handle(_index(device))
    return table


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache(_SHAPES)
def _planned(
    operands: str, device: torch.device, rows: int, out_features: int, in_features: int
) -> tuple[_cublaslt.Product, bytes] | None:
    table = table_of(device)
    found = table.find(operands, rows, out_features, in_features) if table else None
    if found is None:
        return None
    product = _cublaslt.Product(operands, _index(device), rows, out_features, in_features)
    if reason := product.refuses(found):
        raise RuntimeError(
            f"{TABLE.name}: the algorithm for {operands} {[out_features, in_features]} and {rows}"
            f" rows: {reason}; write the table anew with python -m fusewright.bench.ops.tune_linear"
        )
    return product, found


def _plain(*tensors: Tensor) -> bool:
    """Whether the tensors are like those on which the algorithms were measured, so that their
    copies can read them."""
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)


def _check_devices(op: str, x: Tensor, **others: Tensor) -> None:
    """Refuse operands on several devices: the library would take any address for x's device."""
    for name, t in others.items():
        if t.device != x.device:
            raise ValueError(
                f"{op}: {name} is on {t.device}, expected {x.device}, where x is: move one of them"
            )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``; for bfloat16 on a GPU by the table's algorithm, if it names one.

    Raises:
        ValueError: x and weight are on different devices.
    """
    _check_devices("linear", x, weight=weight)
    fits = x.dtype == weight.dtype == torch.bfloat16 and x.shape[-1] == weight.shape[1]
    if not fits or bias is not None or not _plain(x, weight):
        return F.linear(x, weight, bias)
    planned = _planned("bfloat16", x.device, x.numel() // max(x.shape[-1], 1), *weight.shape)
    if planned is None:
        return F.linear(x, weight, bias)
    product, algorithm = planned
    return product.run(x, weight, x.new_empty((*x.shape[:-1], weight.shape[0])), algorithm)


def linear_fp8(
    scheme: str,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor | None:
    """``linear_fp8`` on a GPU by the table's algorithm; None if it names none.

    Raises:
        ValueError: the operands are on different devices.
    """
    _check_devices("linear_fp8", x, x_scale=x_scale, weight=weight, weight_scale=weight_scale)
    planned = _planned(f"fp8 {scheme}", x.device, x.shape[0], *weight.shape)
    other = bias is not None or out_dtype != torch.bfloat16
    if planned is None or other or not _plain(x, x_scale, weight, weight_scale):
        return None  # scheme_of has compared shapes and dtypes
    product, algorithm = planned
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    return product.run(x, weight, y, algorithm, x_scale, weight_scale)
