#!/usr/bin/env bash
# Builds csrc/ into ops/_fw_cuda.so of this checkout. Needs nvcc and some torch >= 2.11, CPU or CUDA.
# PYTHON names the interpreter whose torch headers are used (default: .venv's, else python3).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)}
PATH="$(dirname "$PYTHON"):$PATH" # cmake and ninja may live beside it
cmake -S . -B build/csrc -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release \
  -DFUSEWRIGHT_CUDA=ON -DPython_EXECUTABLE="$PYTHON"
cmake --build build/csrc
install -m 755 build/csrc/_fw_cuda.so ops/_fw_cuda.so
ls -l ops/_fw_cuda.so
