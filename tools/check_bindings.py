"""Compiles the bindings of csrc/ against the oldest and the newest torch that are supported.

No nvcc and no GPU: bindings are plain C++. The headers of both versions and CUDA's come from pip's
index, once, into build/headers; the compiler's options are those of CMakeLists.txt. Where they
cannot be fetched nothing is checked, which is said, and is a failure in CI ($CI).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

from wheel_headers import fetch, index_url

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "build" / "headers"
CUDA = {"nvidia-cuda-runtime": "13.0.96", "nvidia-cuda-crt": "13.0.88"}


def torch_versions() -> list[str]:
    """The lower bound of pyproject.toml, and what constraints.txt pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = re.findall(r"^torch>=([\d.]+)$", "\n".join(project["dependencies"]), re.M)
    (newest,) = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M)
    return [version + ".0" * (2 - version.count(".")) for version in (oldest, newest)]


def compile_bindings(torch_include: Path, cuda_includes: list[Path], folder: Path) -> bool:
    """Whether CMake's target `bindings` is built; the compiler's messages go to stderr."""
    configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "--log-level=WARNING"]
    configure += [f"-DFUSEWRIGHT_TORCH_INCLUDE={torch_include}"]
    configure += [f"-DFUSEWRIGHT_CUDA_INCLUDE={';'.join(map(str, cuda_includes))}"]
    for command in (configure, ["cmake", "--build", folder, "--target", "bindings"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            return False
    return True


def main() -> None:
    started = time.monotonic()
    versions = torch_versions()
    try:
        torches = {version: fetch("torch", version, HEADERS) for version in versions}
        cuda = [fetch(project, version, HEADERS) for project, version in CUDA.items()]
    except (OSError, LookupError, zipfile.BadZipFile) as error:
        message = (
            f"csrc bindings NOT CHECKED against torch {' and '.join(versions)}: no headers from "
            f"{index_url()}: {error}"
        )
        if os.environ.get("CI"):
            raise SystemExit(message) from error
        print(f"notice: {message}")
        return
    cuda_includes = [include for folder in cuda for include in folder.glob("nvidia/*/include")]
    failed = [
        version
        for version, folder in torches.items()
        if not compile_bindings(
            folder / "torch" / "include", cuda_includes, ROOT / "build" / f"bindings-{version}"
        )
    ]
    if failed:
        raise SystemExit(f"csrc bindings do not compile against torch {' and '.join(failed)}")
    seconds = time.monotonic() - started
    print(f"csrc bindings compile against torch {' and '.join(versions)} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
