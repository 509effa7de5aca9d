"""Inductor's fusion of an op's reference, as the rival of a fused kernel.

Compiled for widths as they are and for three ranges of tokens, as a server would: what is fixed for
a few tokens is wrong for many.  Compiling takes longer than measuring; ``precompile_fusions``
does it in processes beside each other, through Inductor's cache on disk.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...config import UserError
from ...ops import BY_NAME
from .harness import KernelWork

_RANGES = ((1, 1, 1), (2, 32, 24), (33, 1 << 15, 3072))
"""Fewest and most tokens, and those that it is compiled and tuned with: no model's width.  So few
that offsets fit 32 bits, as Inductor would have it."""

Key: TypeAlias = tuple[str, str, int]
"""Op, sizes, fewest tokens."""


@dataclass(frozen=True)
class InductorFusion:
    """A library function: a call of the op, whose first dimensions count tokens.

    Args:
        op: its name.
        shape: what the op's other sizes are of.
        tokens: number of tokens of the call.
        make: arguments for so many tokens on a device.
        counted: positions of the arguments that have a row a token.
        backend: the backend of ``torch.compile``.
    """

    op: str
    shape: str
    tokens: int
    make: Callable[[int, torch.device], tuple[Any, ...]] = field(compare=False)
    counted: tuple[int, ...] = (0,)
    backend: str = "inductor"

    def __call__(self, *args: Any) -> Any:
        if self.key not in _COMPILED:
            self.compile(next(a.device for a in args if isinstance(a, Tensor)))
            _COMPILED.add(self.key)
        return _function(self.op, self.backend)(*args)

    @property
    def key(self) -> Key:
        """Identifies the code, which is compiled once."""
        return self.op, self.shape, self._range[0]

    @property
    def _range(self) -> tuple[int, int, int]:
        return next(r for r in _RANGES if r[0] <= self.tokens <= r[1])

    def compile(self, device: torch.device) -> None:
        """Compile the code for the range of token counts that contains this call's."""
        least, most, typical = self._range
        with torch.inference_mode():  # arguments too: what is compiled looks at where they are of
            args = self.make(typical, device)
            for position in self.counted if least < most else ():
                torch._dynamo.mark_dynamic(args[position], 0, min=least, max=most)
            # One code object has a variant for each width and range, and widths stay as they are.
            variants = {"recompile_limit": 256, "automatic_dynamic_shapes": False}
            with torch._dynamo.config.patch(variants):
                _function(self.op, self.backend)(*args)


_COMPILED: set[Key] = set()


@functools.cache
def _function(op: str, backend: str) -> Callable[..., Any]:
    """The reference, compiled; where the op has one that Inductor sees through, that stands for it,
    since Dynamo traces no parser of chains."""
    inline = [i.name for i in BY_NAME[op].implementations if i.inline and op == "chain"]
    reference = BY_NAME[op].overload(inline[0]) if inline else BY_NAME[op].reference
    return torch.compile(reference, backend=backend, fullgraph=True)


def against_inductor(
    op: str,
    label: str,
    make: Callable[[int, torch.device], tuple[Any, ...]],
    shape: str,
    tokens: int,
    counted: tuple[int, ...] = (0,),
) -> KernelWork:
    """A call of an op beside Inductor's fusion of its reference: see ``InductorFusion``."""
    rival = InductorFusion(op, shape, tokens, make, counted)
    return KernelWork(op, label, functools.partial(make, tokens), {}, {"inductor": rival})


def find_fusions() -> dict[Key, InductorFusion]:
    """The Inductor fusions of all benchmarks in this folder, one for each compiled code."""
    fusions: dict[Key, InductorFusion] = {}
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        for work in importlib.import_module(f"{__package__}.{path.stem}").works():
            for library in work.libraries.values():
                if isinstance(library, InductorFusion):
                    fusions.setdefault(library.key, library)
    return fusions


def precompile_fusions(fusions: Iterable[InductorFusion]) -> None:
    """Fill Inductor's cache with these.

    Raises:
        UserError: a process failed; it has said why.
    """
    keys = [*dict.fromkeys(fusion.key for fusion in fusions)]
    command = [sys.executable, "-c", "from fusewright.bench.kernels.fusion import main; main()"]
    # A process compiles by itself: workers of its own would outnumber the processors.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    parts = max(1, min(len(keys), len(os.sched_getaffinity(0)) - 1))
    running = [
        subprocess.Popen([*command, json.dumps(keys[part::parts])], env=environment)
        for part in range(parts)
        if keys
    ]
    failed = [process.wait() for process in running]
    if any(failed):
        raise UserError("bench kernels: Inductor failed on a fusion, see above")


def main() -> None:
    """Compile the fusions whose keys are the argument."""
    fusions = find_fusions()
    for op, shape, least in json.loads(sys.argv[1]):
        fusions[op, shape, least].compile(torch.device("cuda"))
