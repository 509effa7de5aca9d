"""Device tables hold what was measured on a GPU: one file a GPU model and version of cuBLASLt.

``devices/`` ships them, and at ``-O3`` an artifact brings one for its own model's shapes, which is
asked first.  A GPU without a file takes ``rows`` and ``num_sms`` of one with the same compute
capability, whose kernels and caches are alike; ``algorithms`` and ``copy_tb_s`` are of one GPU.  A
file that cannot serve is ignored, and its reason is in ``report()`` and ``explain``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from .errors import UserError

FOLDER = Path(__file__).with_name("devices")
OPERANDS = ("bfloat16", "fp8 tensor", "fp8 token")
"""Kinds of x and weight of a cuBLASLt GEMM: bfloat16, or FP8 with a scheme of scales."""
ALGORITHM_BYTES = 64
ROWS = (
    "stream bfloat16",
    "cluster bfloat16",
    "stream fp8 tensor",
    "stream fp8 token",
    "stream fp8 block",
    "stream fp8 weight",
    "stream fp8 block weight",
    "tiled fp8 tensor",
    "tiled fp8 token",
    "tiled fp8 block",
    "push 2 ranks",
    "push 4 ranks",
    "push 8 ranks",
    "push twice 2 ranks",
    "push twice 4 ranks",
    "push twice 8 ranks",
    "stream sum 2 ranks",
    "in turn 2 ranks",
)
"""The kernels for which a table says up to how many rows they are used."""
_REMEDY = "write it anew with python -m fusewright.bench.ops.tune_linear"
_HEAD = {"gpu": str, "sm": int, "num_sms": int, "cublaslt": int}
Weight: TypeAlias = tuple[str, int, int]


class UnknownEntryError(UserError):
    """A table names a section or kernel that this version does not have."""


@dataclass(frozen=True)
class Algorithm:
    """The fastest algorithm that was measured for some shapes.

    Attributes:
        operands: one of ``OPERANDS``.
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
        if self.operands not in OPERANDS:
            expected = ", ".join(map(repr, OPERANDS))
            raise ValueError(f"operands {self.operands!r}, expected one of {expected}")
        if not 0 < self.least_rows <= self.most_rows:
            raise ValueError(f"rows {self.least_rows} to {self.most_rows}, expected 1 or more")
        if len(bytes.fromhex(self.algorithm)) != ALGORITHM_BYTES:
            raise ValueError(f"algorithm {self.algorithm!r}, expected {2 * ALGORITHM_BYTES} digits")

    @property
    def weight(self) -> Weight:
        """The GEMM that the algorithm was measured for, without its number of rows."""
        return self.operands, self.out_features, self.in_features


@dataclass(frozen=True)
class DeviceTable:
    """One file.

    Attributes:
        name: of the file, for people.
        gpu, sm, num_sms: the model, its compute capability such as 90, its multiprocessors.
        cublaslt: version of the library, as 130100.
        rows: one of ``ROWS`` -> (fewest columns of a weight, most rows), the first that fits holds.
        measured: where the figures come from.
        copy_tb_s: rate of a device-to-device copy, bytes read and written; 0: not measured.
    """

    name: str
    gpu: str
    sm: int
    num_sms: int
    cublaslt: int
    algorithms: tuple[Algorithm, ...] = ()
    rows: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    measured: Mapping[str, str] = field(default_factory=dict)
    copy_tb_s: float = 0.0

    @property
    def file(self) -> str:
        """The name without its folder."""
        return self.name.rpartition("/")[2]

    def find(self, operands: str, rows: int, out_features: int, in_features: int) -> bytes | None:
        """The algorithm for a call; None if the table names none."""
        weight = (operands, out_features, in_features)
        for a in self.algorithms:
            if a.weight == weight and a.least_rows <= rows <= a.most_rows:
                return bytes.fromhex(a.algorithm)
        return None

    def why_no_algorithms(self, gpu: str, cublaslt: int) -> str:
        """Why the algorithms cannot serve a GPU with a version of cuBLASLt; "" if they can."""
        if self.gpu != gpu:
            return f"{self.file}: measured on {self.gpu}, this is {gpu}"
        if self.cublaslt != cublaslt:
            return f"{self.file}: measured with cuBLASLt {self.cublaslt}, here is {cublaslt}"
        return ""

    def text(self) -> str:
        """The file's content."""
        head = asdict(self)
        del head["name"]
        lines = [json.dumps(a) for a in sorted(head.pop("algorithms"), key=_order)]
        sections = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        body = ",\n  ".join(lines)
        return "{" + ",\n ".join(sections) + f',\n "algorithms": [\n  {body}\n]}}\n'


def _order(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[k] for k in ("operands", "out_features", "in_features", "least_rows"))


def parse_table(text: str | bytes, name: str) -> DeviceTable:
    """The table of a file's content.

    Raises:
        UserError: it is not a table, or two of its entries are for the same call.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}, expected an object")
        unknown = content.keys() - {f.name for f in fields(DeviceTable)}
        unknown |= {f"rows of {kernel}" for kernel in content.get("rows", {}) if kernel not in ROWS}
        if unknown:
            raise UnknownEntryError(f"{name}: unknown: {', '.join(sorted(unknown))}; {_REMEDY}")
        algorithms = tuple(Algorithm(**entry) for entry in content.pop("algorithms"))
        rows = {kernel: _ranges(kernel, found) for kernel, found in content.pop("rows", {}).items()}
        for key, kind in _HEAD.items():
            if type(content[key]) is not kind:
                raise ValueError(f"{key}={content[key]!r}, expected {kind.__name__}")
        if not 0 <= content.get("copy_tb_s", 0.0) < math.inf:
            raise ValueError(f"copy_tb_s={content['copy_tb_s']!r}, expected 0 or more")
        table = DeviceTable(name, algorithms=algorithms, rows=rows, **content)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{name}: {error}: not a table of a device; {_REMEDY}") from error
    _refuse_overlaps(algorithms, name)
    return table


def _ranges(kernel: str, found: Any) -> tuple[tuple[int, int], ...]:
    ranges = tuple((int(fewest), int(most)) for fewest, most in found)
    if not ranges or ranges[-1][0] != 0:
        raise ValueError(f"rows of {kernel!r}: {found}, expected the last to begin at 0 columns")
    return ranges


def _refuse_overlaps(algorithms: Iterable[Algorithm], name: str) -> None:
    last: Algorithm | None = None
    for a in sorted(algorithms, key=lambda a: (a.weight, a.least_rows)):
        if last and a.weight == last.weight and a.least_rows <= last.most_rows:
            raise UserError(
                f"{name}: {a.weight} has two algorithms for {a.least_rows} rows; expected one"
            )
        last = a


def read_table(path: Path) -> DeviceTable:
    """The table of a file; raises UserError as ``parse_table`` does."""
    try:
        return parse_table(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a table of a device; {_REMEDY}") from error


@dataclass(frozen=True)
class Tables:
    """The tables of a folder, and the files that say what is unknown here -> the reason."""

    tables: tuple[DeviceTable, ...]
    ignored: Mapping[str, str]


@cache
def shipped(folder: Path = FOLDER) -> Tables:
    """Every table of a folder, by name.  A file with an unknown section or kernel is ignored.

    Raises:
        UserError: a file is malformed.
    """
    tables: list[DeviceTable] = []
    ignored: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            tables.append(read_table(path))
        except UnknownEntryError as error:
            ignored[path.name] = str(error)
    return Tables(tuple(tables), ignored)


def nearest(gpu: str, sm: int, tables: Iterable[DeviceTable]) -> DeviceTable | None:
    """The table that serves a GPU with what is portable: its own, else one of a GPU of the same
    compute capability; for an unknown GPU (``sm`` 0) the first."""
    fits = [t for t in tables if t.rows and (t.sm == sm or not sm)]
    return next((t for t in fits if t.gpu == gpu), fits[0] if fits else None)


def copy_ceiling(gpu: str, tables: Iterable[DeviceTable]) -> float:
    """The measured copy rate of a GPU model's memory in TB/s, 0 if no table has it: the ceiling of
    what only moves bytes."""
    return next((t.copy_tb_s for t in tables if t.gpu == gpu and t.copy_tb_s), 0.0)


def file_name(gpu: str, cublaslt: int) -> str:
    """The name of the file for a GPU and a version of cuBLASLt."""
    return f"{gpu.lower().replace(' ', '-')}-cublaslt{cublaslt}.json"
