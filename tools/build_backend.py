"""The build backend of pyproject.toml: scikit-build-core's, told first whether csrc/ is built.

`pip install -C kernels=on|off|auto .` decides; auto, the default, builds csrc/ where nvcc and
torch's headers are there. A build that was begun and fails is an error, never a wheel without
kernels. A wheel without kernels is pure Python, tagged so, needs no CMake, and keeps the reason in
its metadata, where `fusewright env` finds it: pip shows nothing of what a backend prints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import toolchain
from scikit_build_core import build as core

Settings = dict[str, Any]

CHOICES = ("auto", "on", "off")
NO_KERNELS = "no_kernels.txt"  # in the wheel's metadata; read by ops/core/cuda.py


def why_no_kernels(choice: str) -> str:
    """Why the wheel is built without kernels; empty: it is built with them."""
    if choice not in CHOICES:
        raise SystemExit(f"kernels={choice!r}: expected one of {', '.join(CHOICES)}")
    if choice == "off":
        return "installed with kernels=off"
    reason = toolchain.why_no_kernels()
    if reason and choice == "on":
        raise SystemExit(f"kernels=on, but {reason}")
    return reason


@contextmanager
def resolved(settings: Settings | None) -> Iterator[Settings]:
    """Settings for scikit-build-core: where to build from, or a pure wheel with the reason."""
    given = dict(settings or {})
    if reason := why_no_kernels(given.pop("kernels", "auto")):
        with tempfile.TemporaryDirectory() as folder:
            note = Path(folder) / NO_KERNELS
            note.write_text(reason + "\n")
            print(f"fusewright: no CUDA kernels, pure-Python wheel: {reason}", flush=True)
            include = {f"wheel.force-include.{note}": f"${{SKBUILD_METADATA_DIR}}/{NO_KERNELS}"}
            yield {"wheel.cmake": "false"} | include | given
    else:
        defines = toolchain.cmake_defines().items()
        yield {f"cmake.define.{name}": value for name, value in defines} | given


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    with resolved(config_settings) as settings:
        return core.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    with resolved(config_settings) as settings:
        return core.build_editable(wheel_directory, settings, metadata_directory)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    with resolved(config_settings) as settings:
        return core.prepare_metadata_for_build_wheel(metadata_directory, settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    with resolved(config_settings) as settings:
        return core.prepare_metadata_for_build_editable(metadata_directory, settings)


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    with resolved(config_settings) as settings:
        return core.get_requires_for_build_wheel(settings)


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    with resolved(config_settings) as settings:
        return core.get_requires_for_build_editable(settings)


def without_kernels_key(settings: Settings | None) -> Settings:
    """An sdist has the sources of csrc/ either way."""
    return {name: value for name, value in (settings or {}).items() if name != "kernels"}


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    return core.build_sdist(sdist_directory, without_kernels_key(config_settings))


def get_requires_for_build_sdist(config_settings: Settings | None = None) -> list[str]:
    return core.get_requires_for_build_sdist(without_kernels_key(config_settings))
