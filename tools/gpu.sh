#!/usr/bin/env bash
# Runs this checkout on a GPU machine where fusewright is not installed and nothing can be fetched.
#   tools/gpu.sh test [--round 1|2] [pytest arguments]
#                                          the GPU tests; stamp to bench/results and to $OUT. Both
#                                          rounds take about ten minutes on one H200; with the stamp
#                                          of one in bench/results, the other completes it. Why
#                                          one failed is in $OUT/round-N.jsonl.failed.txt at once. With
#                                          $OUT/round-N.jsonl of a round that was cut off in
#                                          build/gpu-tests (carry it), only what it lacks is run
#   tools/gpu.sh sanitize TOOL [pytest arguments]
#                                          the tests named (default: csrc's implementations of ops,
#                                          in bfloat16) under compute-sanitizer's TOOL: memcheck,
#                                          racecheck, initcheck or synccheck. It looks into csrc's
#                                          kernels alone
#   tools/gpu.sh run COMMAND...            any command with the package importable
# Wheels in .whl/ are installed into /tmp/site first. `test` builds csrc/ from source here, where the
# build folder of an earlier call spares what has not changed; the others take a library that is
# newer than its sources, also one that was carried here. PYTHON names the interpreter (default python3, the
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

build_if_old() {
  local library=ops/_fw_cuda.so
  if [ ! -f $library ] || [ -n "$(find csrc CMakeLists.txt -newer $library -type f)" ]; then
    build
  fi
}

usage='tools/gpu.sh test [--round 1|2] [pytest arguments] | sanitize TOOL [...] | run COMMAND...'
command=${1:?usage: $usage}
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
  sanitize)
    tool=${1:?usage: $usage}
    shift
    build_if_old
    [ $# -gt 0 ] || set -- tests/ops/test_conformance.py \
      -k 'matches_reference and bfloat16 and (cuda or skinny or low_bit or admitted)'
    # ops/core/driver.py asks for a kernel's parameters until the driver says there is none, which
    # memcheck would report as an error.
    options=()
    [ "$tool" != memcheck ] || options=(--report-api-errors no)
    # A tensor is an allocation of its own, or one that is overrun reaches its neighbour unseen.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONSAFEPATH=1 exec compute-sanitizer --tool "$tool" \
      --kernel-name kns=fusewright --error-exitcode 1 --print-limit 20 "${options[@]}" \
      "$PYTHON" -m pytest -m gpu -p no:cacheprovider "$@"
    ;;
  run)
    build_if_old
    exec "$@"
    ;;
  *) echo "tools/gpu.sh: unknown command '$command', expected $usage" >&2; exit 2 ;;
esac
