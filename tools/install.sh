#!/usr/bin/env bash
# tools/install.sh PYTHON TARGET ARGUMENT...: installs ARGUMENTs for the Python TARGET with the uv of
# PYTHON, which is faster than pip. uv does not read pip's configuration: where it fails or
# is missing, as where only pip's index can be reached, pip does it.
set -euo pipefail
"$1" -m uv pip install -q --python "$2" "${@:3}" ||
  "$1" -m pip --python "$2" install --no-compile "${@:3}"
