"""``KERNELS`` holds the process's compiled Triton kernels, as a loaded library holds those of csrc.

An artifact or the compiler fills it with binaries by variant; a launch loads the one that it needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from ...config import UserError
from .device_table import gpu_of
from .driver import Function
from .variant import Binary, Variant


class KernelMissingError(UserError):
    """A launch needs a variant that a sealed table does not hold."""


class KernelTable:
    """Binaries by variant, and the kernels that are loaded from them.

    Once ``sealed``, nothing is compiled any more, and a missing variant is an error.
    ``compiled_late`` lists the variants that a launch had to wait for.
    """

    def __init__(self) -> None:
        self.sealed = False
        self.compiled_late: list[Variant] = []
        self.functions: dict[Hashable, Function] = {}
        """Loaded kernels by a launch's key, as ``Launch.run`` makes it."""
        self._binaries: dict[Variant, Binary] = {}
        self._loaded: dict[tuple[Variant, int], Function] = {}
        self._lock = threading.RLock()

    def add(self, variant: Variant, binary: Binary) -> None:
        self._binaries[variant] = binary

    def binaries(self) -> dict[Variant, Binary]:
        return dict(self._binaries)

    def precompile(
        self,
        variants: Iterable[Variant],
        sm: int,
        on_done: Callable[[Variant], None] | None = None,
        jobs: int | None = None,
    ) -> None:
        """Compile the missing variants, in threads: the passes of Triton release the GIL.

        Args:
            sm: compute capability to compile for, such as 90; no GPU is needed.
            on_done: called after each, in the thread that compiled it.
            jobs: number of threads; None: one for each processor.

        Raises:
            Exception: the first failure of the compiler; its notes name the variant.
        """
        from ._triton_compile import compile_variant

        def compile_one(variant: Variant) -> None:
            self.add(variant, compile_variant(variant, sm))
            if on_done is not None:
                on_done(variant)

        missing = [variant for variant in {*variants} if not self._fits(variant, sm)]
        missing.sort(key=lambda variant: variant.name)
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            for _ in pool.map(compile_one, missing):
                pass

    def get(self, variant: Variant, sm: int) -> Binary:
        """The binary of ``variant`` for ``sm``, compiled now if it is missing.

        Raises:
            KernelMissingError: it is missing, and the table is sealed.
        """
        with self._lock:
            if not self._fits(variant, sm):
                if self.sealed:
                    raise KernelMissingError(self._why_missing(variant, sm))
                from ._triton_compile import compile_variant

                self.add(variant, compile_variant(variant, sm))
                self.compiled_late.append(variant)
            return self._binaries[variant]

    def load(self, key: Hashable, variant: Variant, device: int) -> Function:
        """The loaded kernel for launches with ``key``, on the current device ``device``."""
        with self._lock:
            function = self._loaded.get((variant, device))
            if function is None:
                binary = self.get(variant, gpu_of(torch.device("cuda", device))[1])
                function = self._loaded[variant, device] = Function(variant, binary, device)
            self.functions[key] = function
            return function

    def _fits(self, variant: Variant, sm: int) -> bool:
        binary = self._binaries.get(variant)
        return binary is not None and binary.sm == sm

    def _why_missing(self, variant: Variant, sm: int) -> str:
        remedy = "nothing may be compiled here: rebuild the artifact with these sources and model"
        if variant in self._binaries:
            held = self._binaries[variant].sm
            return f"{variant.name} is there for sm_{held}, expected sm_{sm}; {remedy}"
        wanted = variant.facts()
        differing = [
            [
                f"{name} is {wanted.get(name, 'absent')}, there {held.get(name, 'absent')}"
                for name in {**wanted, **held}
                if wanted.get(name) != held.get(name)
            ]
            for held in (v.facts() for v in self._binaries if v.kernel == variant.kernel)
        ]
        nearest: list[str] = min(differing, key=len, default=["no variant of it is there"])
        what = f"kernel {variant.kernel} is missing as {variant.name}"
        return f"{what}: {'; '.join(nearest)}; {remedy}"


KERNELS = KernelTable()
