"""What csrc/ is built with: nvcc, and the headers of a torch. Standard library only.

python tools/toolchain.py                          CMake's arguments, one a line, or what is missing
python tools/toolchain.py record SECONDS LIBRARY   one JSON object about a library just built
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HEADER = "torch/csrc/stable/library.h"


def find_nvcc() -> str | None:
    """$CUDACXX, that of $CUDA_HOME, the one on PATH, or that of /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME")
    candidates = (
        os.environ.get("CUDACXX"),
        home and f"{home}/bin/nvcc",
        "nvcc",
        "/usr/local/cuda/bin/nvcc",
    )
    return next((found for c in candidates if c and (found := shutil.which(c))), None)


def nvcc_version() -> str:
    """The release of the nvcc that is there. One that does not run ends the program: CMake says of
    it only that a library is missing."""
    nvcc = str(find_nvcc())
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{nvcc} does not run, exit code {done.returncode}:\n{done.stderr}")
    release = re.search(r"release .*, V(\S+)", done.stdout)
    return release.group(1) if release else "unknown"


def find_torch_include() -> Path | None:
    """The headers of this interpreter's torch, without the two seconds of importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    include = Path(spec.submodule_search_locations[0]) / "include"
    return include if (include / HEADER).is_file() else None


def why_no_kernels() -> str:
    """What is missing to build csrc/, with the remedy, or an empty string."""
    if find_nvcc() is None:
        return "nvcc was not found; put it on PATH or set CUDA_HOME"
    if find_torch_include() is None:
        return (
            "torch >= 2.11 was not found in the environment of the build; install torch, then use "
            "pip's --no-build-isolation"
        )
    return ""


def cmake_defines() -> dict[str, str]:
    """Variables of CMakeLists.txt; only where nothing is missing."""
    nvcc_version()
    return {
        "CMAKE_CUDA_COMPILER": str(find_nvcc()),
        "FUSEWRIGHT_TORCH_INCLUDE": str(find_torch_include()),
    }


def record(seconds: int, library: Path) -> dict[str, str | int]:
    """With what the library was built, and which file it is."""
    return {
        "torch": importlib.metadata.version("torch"),
        "nvcc": nvcc_version(),
        "seconds": seconds,
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
    }


def main() -> None:
    if reason := why_no_kernels():
        raise SystemExit(f"csrc cannot be built: {reason}")
    if sys.argv[1:2] == ["record"]:
        print(json.dumps(record(int(sys.argv[2]), Path(sys.argv[3]))))
    else:
        print(*(f"-D{name}={value}" for name, value in cmake_defines().items()), sep="\n")


if __name__ == "__main__":
    main()
