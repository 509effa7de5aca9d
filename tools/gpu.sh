#!/usr/bin/env bash
# Runs this checkout on a GPU machine where fusewright is not installed and nothing can be fetched.
#   tools/gpu.sh test [--round 1|2] [pytest arguments]
#                                          the GPU tests; stamp to bench/results and to $OUT. Both
#                                          rounds take about ten minutes on one H200; with the stamp
#                                          of one in bench/results, the other completes it. With
#                                          $OUT/round-N.jsonl of a round that was cut off in
#                                          build/gpu-tests (carry it), only what it lacks is run
#   tools/gpu.sh run COMMAND...            any command with the package importable
# Wheels in .whl/ are installed into /tmp/site first. `test` builds csrc/ from source here, where the
# build folder of an earlier call spares what has not changed; `run` takes a library that is newer
# than its sources, also one that was carried here. PYTHON names the interpreter (default python3, the
# one that holds torch).
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

build() { PYTHON=$(command -v "$PYTHON") tools/build_csrc.sh; }

command=${1:?usage: tools/gpu.sh test [--round 1|2] [pytest arguments] | run COMMAND...}
shift
case "$command" in
  test)
    build
    code=0
    # PYTHONSAFEPATH: the root holds folders called config and ops, not for sys.path
    PYTHONSAFEPATH=1 "$PYTHON" tools/gpu_stamp.py run "$@" || code=$?
    if [ -n "${OUT:-}" ] && [ -f bench/results/gpu-tests.json ]; then
      cp bench/results/gpu-tests.json "$OUT/"
    fi
    exit "$code"
    ;;
  run)
    library=ops/_fw_cuda.so
    if [ ! -f $library ] || [ -n "$(find csrc CMakeLists.txt -newer $library -type f)" ]; then
      build
    fi
    exec "$@"
    ;;
  *) echo "tools/gpu.sh: unknown command '$command', expected test or run" >&2; exit 2 ;;
esac
