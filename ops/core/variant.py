"""Describes a Triton kernel as it is compiled, without Triton: what is fixed in it, and its code.

A ``Variant`` is what a compiler needs to know and a table is looked up by; a ``Binary`` is what a
driver needs to launch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

Constant: TypeAlias = bool | int | float | str | None

POINTERS: dict[torch.dtype, str] = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
DIVISOR = 16
"""An address in bytes, or an integer, is marked divisible if it is a multiple of this."""
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
_SIZES = {"i": 4, "q": 8, "f": 4, "d": 8, "Q": 8}


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel.

    Args:
        kernel: ``module:function`` in ``ops/triton_kernels``.
        signature: (name, type) of each run-time parameter, in the function's order; types as Triton
            writes them: ``*bf16``, ``i32``, ``i64``, ``fp32``.
        constexprs: (name, value) of every parameter that the code fixes.
        divisible: names of parameters known to be multiples of 16 (pointers: bytes).
        programmatic: launched before the kernel ahead has finished, on architectures that can; the
            code then waits for it first (``ops/triton_kernels/dependent.py``).
        max_registers: of a thread; 0: as many as the compiler takes.
    """

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Constant], ...]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    programmatic: bool = False
    max_registers: int = 0

    @property
    def function(self) -> str:
        return self.kernel.partition(":")[2]

    @cached_property
    def name(self) -> str:
        """The function and a digest of everything else, which makes a file's name."""
        return f"{self.function}-{hashlib.sha256(self.to_json().encode()).hexdigest()[:12]}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Variant:
        """The inverse of ``to_json``.  Raises TypeError for anything that it does not know."""
        data: dict[str, Any] = json.loads(text)
        for name in ("signature", "constexprs"):
            data[name] = tuple((key, value) for key, value in data[name])
        return cls(**data | {"divisible": tuple(data["divisible"])})

    def facts(self) -> dict[str, str]:
        """Every fact by the parameter's name, readable, for telling two variants apart."""
        mark = dict.fromkeys(self.divisible, f", a multiple of {DIVISOR}")
        found = {name: kind + mark.get(name, "") for name, kind in self.signature}
        found |= {name: repr(value) for name, value in self.constexprs}
        others = ("num_warps", "num_stages", "programmatic", "max_registers")
        return found | {name: str(getattr(self, name)) for name in others}


@dataclass(frozen=True)
class Binary:
    """Machine code of a variant for one architecture, and what a launch of it needs.

    Args:
        function: the entry's name in ``cubin``.
        sm: compute capability it was compiled for, such as 90.
        shared_bytes: dynamic shared memory of a block.
        num_threads: threads of a block.
    """

    function: str
    sm: int
    shared_bytes: int
    num_threads: int
    cubin: bytes


def struct_format(types: Iterable[str]) -> str:
    """``struct`` format of a kernel's parameters: native, so padded as C does.

    Raises:
        ValueError: a type that no parameter of ours has.
    """
    form = "@"
    for kind in types:
        code = "Q" if kind.startswith("*") else _FORMATS.get(kind)
        if code is None:
            raise ValueError(f"parameter of type {kind}, expected a pointer or {[*_FORMATS]}")
        form += code
    return form


def param_layout(form: str) -> list[tuple[int, int]]:
    """(offset, size) in bytes of each parameter of a ``struct_format``."""
    layout, end = [], 0
    for code in form.removeprefix("@"):
        size = _SIZES[code]
        offset = -(-end // size) * size
        layout.append((offset, size))
        end = offset + size
    return layout
