#!/usr/bin/env bash
# Runs this checkout on a GPU machine where fusewright is not installed and nothing can be fetched.
#   tools/gpu.sh test [pytest arguments]   the GPU tests; stamp to bench/results and to $OUT
#   tools/gpu.sh run COMMAND...            any command with the package importable
# Wheels in .whl/ are installed into /tmp/site first; csrc/ is built unless ops/ holds a library
# newer than its sources. PYTHON names the interpreter (default python3, the one that holds torch).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

site=/tmp/site
if compgen -G '.whl/*.whl' >/dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" .whl/*.whl
fi

source tools/pkgroot.sh
export PYTHONPATH="$PKGROOT:$site${PYTHONPATH:+:$PYTHONPATH}"

if [ ! -f ops/_fw_cuda.so ] || [ -n "$(find csrc CMakeLists.txt -newer ops/_fw_cuda.so -type f)" ]; then
  PYTHON=$(command -v "$PYTHON") tools/build_csrc.sh
fi

command=${1:?usage: tools/gpu.sh test [pytest arguments] | run COMMAND...}
shift
case "$command" in
  test)
    code=0
    # PYTHONSAFEPATH: the root holds folders called config and ops, not for sys.path
    PYTHONSAFEPATH=1 "$PYTHON" tools/gpu_stamp.py run "$@" || code=$?
    if [ -n "${OUT:-}" ] && [ -f bench/results/gpu-tests.json ]; then
      cp bench/results/gpu-tests.json "$OUT/"
    fi
    exit "$code"
    ;;
  run) exec "$@" ;;
  *) echo "tools/gpu.sh: unknown command '$command', expected test or run" >&2; exit 2 ;;
esac
