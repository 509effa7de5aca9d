"""Device tables hold what was measured on a GPU model: one file each, in sections.

``devices/`` ships tables, ``--tuned-config-dir`` names a folder of more, and at ``-O3`` an artifact
brings one of its own; ``ops/core/device_table.py`` asks the artifact's first and the shipped last.
``rows`` and ``num_sms`` serve every GPU of the same compute capability, whose kernels and caches
are alike.  The rest serves the same model alone, with the same version of the library.  A row of a
kernel that this build lacks decides nothing: a table may come from another build.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from .arch import ARCHS
from .errors import UserError
from .expert_tables import ExpertShape, ExpertTable, parse_vllm
from .ports import nearest as nearest_name

FOLDER = Path(__file__).with_name("devices")
OPERANDS = ("bfloat16", "fp8 tensor", "fp8 token")
"""Kinds of x and weight of a cuBLASLt GEMM: bfloat16, or FP8 with a scheme of scales."""
ALGORITHM_BYTES = 64
_FP8 = ("fp8 tensor", "fp8 token", "fp8 block")
_RANKS = ("2 ranks", "4 ranks", "8 ranks")
ROWS: Mapping[str, tuple[str, ...]] = {
    "stream": ("bfloat16", *_FP8, "fp8 weight", "fp8 block weight", "sum 2 ranks"),
    "cluster": ("bfloat16", "fp8 tensor", "fp8 token"),
    "packed": ("4 bits",),
    "persistent": ("bfloat16", "fp8 tensor", "fp8 token"),
    "tiled": (*_FP8, "4 bits", "8 bits"),
    "push": (*_RANKS, *(f"twice {ranks}" for ranks in _RANKS)),
    "in turn": ("2 ranks",),
}
"""The kernels for which a table says up to how many rows they are used -> what each is used for: a
weight format, or a stage over ranks.  ``rows`` has both, as "stream bfloat16"."""
SECTIONS = ("copy_tb_s", "matrix_tflop_s", "rows", "experts", "algorithms")
NUMBERS = ("bfloat16", "fp8")
"""Kinds of numbers of which a table has the rate of matrix multiplications."""
LIBRARIES = {"algorithms": "cuBLASLt", "experts": "Triton"}
"""The sections that serve one version of a library alone."""
_REMEDY = (
    "correct it, or measure anew: python -m fusewright.bench.ops.tune_linear writes algorithms, "
    "fusewright tune moe writes experts"
)
_MOST_SM = 199
Weight: TypeAlias = tuple[str, int, int]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a section was measured: the GPU, the versions of libraries, the commit of this package
    and the command or document."""

    gpu: str
    versions: dict[str, str] = {}
    commit: str = ""
    how: str = ""


class Algorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest algorithm that was measured for some shapes.

    Attributes:
        operands: one of ``OPERANDS``.
        out_features, in_features: shape of the weight.
        least_rows, most_rows: range of x's rows, both included.
        algorithm: cuBLASLt's algorithm, in hexadecimal.
        us, us_before: time at ``most_rows`` with the algorithm, and of the op without it.
    """

    operands: str
    out_features: Count
    in_features: Count
    least_rows: Count
    most_rows: Count
    algorithm: str
    us: Rate
    us_before: Rate

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
        gpu, sm, num_sms, memory_bytes: the model, its compute capability such as 90, its
            multiprocessors, its memory (0: not known).
        measured: section -> how it was measured.
        copy_tb_s: rate of a device-to-device copy, bytes read and written; 0: not measured.
        matrix_tflop_s: one of ``NUMBERS`` -> the rate of a large matrix multiplication.
        rows: kernel and format or stage, see ``ROWS`` -> (fewest columns of a weight, most rows
            for which it is ahead); the first that fits holds.
        experts, algorithms: one entry for each shape of experts; for each weight and range of rows.
        unknown_rows: those of ``rows`` whose kernels this build lacks.  They are kept for the file
            alone: they change neither what runs nor an artifact's key.
    """

    name: str = field(compare=False, repr=False)
    gpu: str
    sm: Count
    num_sms: Count
    memory_bytes: Count = 0
    measured: Mapping[str, Measured] = field(default_factory=dict)
    copy_tb_s: Rate = 0.0
    matrix_tflop_s: Mapping[str, Rate] = field(default_factory=dict)
    rows: Mapping[str, tuple[tuple[Count, Count], ...]] = field(default_factory=dict)
    experts: tuple[ExpertTable, ...] = ()
    algorithms: tuple[Algorithm, ...] = ()
    unknown_rows: Mapping[str, tuple[tuple[Count, Count], ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

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

    def why_not(self, section: str, gpu: str, version: str) -> str:
        """Why a section of ``LIBRARIES`` cannot serve a GPU with a version of its library; "" if
        it can, or the table has no such section."""
        if not getattr(self, section):
            return ""
        if self.gpu != gpu:
            return f"{self.file}: measured on {self.gpu}, this is {gpu}"
        library = LIBRARIES[section]
        if (measured := self.measured[section].versions.get(library)) != version:
            has = f"measured with {library} {measured}, here is {version or 'none'}"
            return f"{self.file}: {section}: {has}"
        return ""

    @property
    def left_out(self) -> str:
        """A sentence about the rows of kernels that this build lacks; "" if there are none."""
        if not self.unknown_rows:
            return ""
        rows: dict[str, list[str]] = {}
        for key in self.unknown_rows:
            rows.setdefault(_kernel_of(key), []).append(repr(key))
        told = []
        for kernel, keys in rows.items():
            close = nearest_name(kernel, ROWS)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(ROWS)}"
            told.append(f"{kernel!r} of rows {', '.join(keys)} ({hint})")
        serves = "the next row serves" if self.rows else "the rows of the next table serve"
        return f"{self.name}: this build lacks kernel {'; '.join(told)}; {serves}"

    def updated(self, new: DeviceTable) -> DeviceTable:
        """This table with the sections of another in place of its own; of experts, with those of
        the same shapes."""
        sections = {name: held for name in SECTIONS if (held := getattr(new, name))}
        replaced = {each.shape for each in new.experts}
        others = (each for each in self.experts if each.shape not in replaced)
        sections |= {"experts": (*others, *new.experts)}
        if "rows" in new.measured:
            sections |= {"rows": new.rows, "unknown_rows": new.unknown_rows}
        return replace(self, measured={**self.measured, **new.measured}, **sections)

    def text(self) -> str:
        """The file's content."""
        ordered = sorted(self.algorithms, key=lambda a: (a.weight, a.least_rows))
        content = msgspec.to_builtins(replace(self, experts=(), algorithms=tuple(ordered)))
        content["experts"] = [each.to_json() for each in self.experts]
        content["rows"] |= content.pop("unknown_rows")
        del content["name"]
        parts = [f"{json.dumps(key)}: {_in_lines(value)}" for key, value in content.items()]
        return "{" + ",\n ".join(parts) + "}\n"


def _in_lines(value: Any) -> str:
    """JSON, with a line for each entry of an object or array."""
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n  " + ",\n  ".join(entries) + "}"
    if isinstance(value, (list, tuple)) and value:
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "]"
    return json.dumps(value)


def parse_table(text: str | bytes, name: str) -> DeviceTable:
    """The table of a file's content.

    Raises:
        UserError: it is not a table, or says what is unknown here; names the file and the key.
    """
    try:
        content = msgspec.json.decode(text, type=dict[str, Any])
        known = [f.name for f in fields(DeviceTable) if f.compare]
        if unknown := sorted(map(repr, content.keys() - {*known})):
            raise ValueError(f"unknown: {', '.join(unknown)}; expected {', '.join(known)}")
        experts = msgspec.convert(content.pop("experts", []), list[Any])
        table = msgspec.convert({"name": name, **content}, DeviceTable)
        table = replace(table, experts=tuple(map(ExpertTable.from_json, experts)))
        _check(table)
    except (ValueError, msgspec.MsgspecError) as error:
        raise UserError(f"{name}: {error}: not a table of a device; {_REMEDY}") from error
    unknown_rows = {key: held for key, held in table.rows.items() if _kernel_of(key) not in ROWS}
    rows = {key: held for key, held in table.rows.items() if key not in unknown_rows}
    return replace(table, rows=rows, unknown_rows=unknown_rows)


def _kernel_of(key: str) -> str:
    """The kernel that a key of ``rows`` names, known or not."""
    known = next((kernel for kernel in ROWS if f"{key} ".startswith(f"{kernel} ")), None)
    if known is not None:
        return known
    uses = sorted({use for each in ROWS.values() for use in each}, key=len, reverse=True)
    named = (key.removesuffix(f" {use}") for use in uses if key.endswith(f" {use}"))
    return next(named, key.partition(" ")[0])


def _check(table: DeviceTable) -> None:
    """Refuse an unknown device or stage, a format that a known kernel lacks, two entries for one
    call, and a section of which nothing says how it was measured."""
    if not table.gpu or not ARCHS[0].sm <= table.sm <= _MOST_SM:
        least = f"the name of a GPU and a compute capability of {ARCHS[0].sm} to {_MOST_SM}"
        raise ValueError(f"gpu={table.gpu!r}, sm={table.sm}: unknown device; expected {least}")
    for key, ranges in table.rows.items():
        kernel = _kernel_of(key)
        if kernel in ROWS and key.removeprefix(f"{kernel} ") not in ROWS[kernel]:
            expected = ", ".join(ROWS[kernel])
            raise ValueError(f"rows[{key!r}]: unknown format or stage; expected {expected}")
        if not ranges or ranges[-1][0] != 0:
            raise ValueError(f"rows[{key!r}]: {ranges}, expected the last to begin at 0 columns")
    if unknown := sorted(table.matrix_tflop_s.keys() - {*NUMBERS}):
        expected = ", ".join(NUMBERS)
        raise ValueError(f"matrix_tflop_s[{unknown[0]!r}]: unknown; expected {expected}")
    for section in SECTIONS:
        there, measured = bool(getattr(table, section)), table.measured.get(section)
        if there and measured is None:
            raise ValueError(f"measured[{section!r}] is missing")
        if measured and section != "rows" and measured.gpu != table.gpu:
            raise ValueError(f"measured[{section!r}]: on {measured.gpu!r}, not on {table.gpu!r}")
    if unknown := sorted(table.measured.keys() - {*SECTIONS}):
        expected = ", ".join(SECTIONS)
        raise ValueError(f"measured[{unknown[0]!r}]: unknown section; expected {expected}")
    shapes = [each.shape for each in table.experts]
    if twice := [shape for shape in shapes if shapes.count(shape) > 1]:
        raise ValueError(f"experts: {twice[0]} is there twice; expected once")
    last: Algorithm | None = None
    for a in sorted(table.algorithms, key=lambda a: (a.weight, a.least_rows)):
        if last and a.weight == last.weight and a.least_rows <= last.most_rows:
            raise ValueError(f"{a.weight} has two algorithms for {a.least_rows} rows; expected one")
        last = a


def read_table(path: Path) -> DeviceTable:
    """The table of a file; raises UserError as ``parse_table`` does."""
    try:
        return parse_table(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a table of a device; {_REMEDY}") from error


@cache
def shipped(folder: Path = FOLDER) -> tuple[DeviceTable, ...]:
    """Every table of a folder, by name.  Raises UserError: a file is none."""
    return tuple(map(read_table, sorted(folder.glob("*.json"))))


def tables_for(
    here: DeviceTable, triton: str, folder: Path | None, more: Iterable[DeviceTable]
) -> tuple[tuple[DeviceTable, ...], dict[str, str]]:
    """The tables that a user's folder and ``more`` have for the GPU of ``here``, without tiles that
    were measured with another Triton, and file -> why it or they do not serve.  Of ``more``, the
    shipped ones, only tiles are taken: what compiled code depends on.  Raises UserError if the
    folder cannot be read, or a table in it is malformed."""
    ignored: dict[str, str] = {}
    tables = [replace(here, name=t.name, experts=t.experts, measured=t.measured) for t in more
              if t.experts and t.gpu == here.gpu]  # fmt: skip
    tables = [*(_read_folder(folder, here, triton, ignored) if folder else ()), *tables]
    for at, table in enumerate(tables):
        if reason := table.why_not("experts", here.gpu, triton):
            ignored[table.file], tables[at] = reason, replace(table, experts=())
    return tuple(tables), ignored


def _read_folder(
    folder: Path, here: DeviceTable, triton: str, ignored: dict[str, str]
) -> Iterable[DeviceTable]:
    """The device tables of a GPU, then the tiles of vLLM's files as one table."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        raise UserError(f"tuned_config_dir={folder}: {error.strerror}; give a folder") from error
    of_vllm: list[ExpertTable] = []
    for path in paths:
        try:
            text = path.read_text()
            if path.name.startswith("E=") or '"gpu"' not in text:
                of_vllm.append(parse_vllm(path.name, text, here.gpu, triton))
                continue
        except (UserError, OSError, UnicodeDecodeError) as error:
            ignored[path.name] = str(error)
            continue
        table = parse_table(text, str(path))
        if table.gpu == here.gpu:
            yield table
        else:
            ignored[path.name] = f"{path.name}: measured on {table.gpu}, this is {here.gpu}"
    if of_vllm:
        measured = {"experts": Measured(here.gpu, {"Triton": triton}, how="vLLM's files")}
        yield replace(here, name=str(folder), experts=tuple(of_vllm), measured=measured)


def find_experts(tables: Iterable[DeviceTable], shape: ExpertShape) -> ExpertTable | None:
    """The first tiles for a shape of experts, if there are some."""
    return next((each for table in tables for each in table.experts if each.shape == shape), None)


def nearest(gpu: str, sm: int, tables: Iterable[DeviceTable]) -> DeviceTable | None:
    """The table that serves a GPU with what is portable: its own, else one of a GPU of the same
    compute capability; for an unknown GPU (``sm`` 0) the first."""
    fits = [t for t in tables if t.rows and (t.sm == sm or not sm)]
    return next((t for t in fits if t.gpu == gpu), fits[0] if fits else None)


def copy_ceiling(gpu: str, tables: Iterable[DeviceTable]) -> float:
    """The measured copy rate of a GPU model's memory in TB/s, 0 if no table has it: the ceiling of
    what only moves bytes."""
    return next((t.copy_tb_s for t in tables if t.gpu == gpu and t.copy_tb_s), 0.0)


def file_name(gpu: str) -> str:
    """The name of the file for a GPU."""
    return f"{gpu.lower().replace(' ', '-')}.json"


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that a GPU reached where nothing else was in the way.

    Attributes:
        copy_tb_s: bytes read and written by a device-to-device copy; 0: not measured.
        bfloat16_tflop_s, fp8_tflop_s: matrix multiplications; 0: not measured.
        notes: sentences about figures that are not what their names say.
    """

    gpu: str
    copy_tb_s: float
    bfloat16_tflop_s: float
    fp8_tflop_s: float
    notes: tuple[str, ...] = ()


def ceilings(table: DeviceTable) -> Ceilings:
    """The ceilings of a table's GPU.  A rate of matrix multiplications that the table lacks is
    that of its best cuBLASLt algorithm in bfloat16, and twice that of bfloat16 in FP8."""
    notes = []
    bfloat16 = table.matrix_tflop_s.get("bfloat16", 0.0)
    if not bfloat16:
        rates = [
            2 * a.most_rows * a.out_features * a.in_features / a.us / 1e6
            for a in table.algorithms
            if a.operands == "bfloat16" and a.us
        ]
        bfloat16 = round(max(rates, default=0.0))
        notes.append(
            f"{table.gpu}: bfloat16 TFLOP/s are those of its fastest measured linear layer; those "
            "of a large matrix multiplication are not measured"
        )
    fp8 = table.matrix_tflop_s.get("fp8", 0.0)
    if not fp8:
        fp8 = 2 * bfloat16
        notes.append(f"{table.gpu}: FP8 TFLOP/s are taken as twice those of bfloat16")
    return Ceilings(table.gpu, table.copy_tb_s, bfloat16, fp8, tuple(notes))
