#!/usr/bin/env bash
# Builds csrc/ into ops/_fw_cuda.so of this checkout; what has not changed since the last build here is
# not compiled again. Needs nvcc, a C++ compiler, cmake, ninja and a torch >= 2.11, CPU or CUDA.
# PYTHON names the interpreter whose torch headers are used (default: .venv's, else python3).
# Leaves build/csrc/built.json: with what the library was built, and in how many seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)}
PATH="$(dirname "$PYTHON"):$PATH" # cmake and ninja may live beside it
library=ops/_fw_cuda.so
record=build/csrc/built.json
started=$SECONDS

arguments=$("$PYTHON" tools/toolchain.py)
mapfile -t arguments <<<"$arguments"
cmake -S . -B build/csrc -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release "${arguments[@]}"
cmake --build build/csrc
if [ -f "$record" ] && cmp -s build/csrc/_fw_cuda.so "$library"; then
  echo "$library is what was built here before: $(cat "$record")"
  exit
fi
install -m 755 build/csrc/_fw_cuda.so "$library"
"$PYTHON" tools/toolchain.py record "$((SECONDS - started))" "$library" >"$record"
echo "$library: built from source: $(cat "$record")"
