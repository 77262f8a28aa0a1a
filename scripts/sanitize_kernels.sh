#!/bin/sh
# compute-sanitizer over the small cases of every Triton kernel: accesses out of bounds (memcheck), and threads that use
# shared memory without waiting for each other (racecheck). Needs a GPU and the CUDA toolkit; minutes.
#
#   scripts/sanitize_kernels.sh [OP ...]
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
SANITIZER=${SANITIZER:-compute-sanitizer}
command -v "$SANITIZER" > /dev/null || { echo "$SANITIZER is not on the PATH; set SANITIZER to where it is" >&2; exit 2; }
# torch hands out pieces of large blocks: an access beyond a tensor would stay inside one, and nobody would see it.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

[ $# -gt 0 ] || set -- $("$PYTHON" scripts/run_op_cases.py --list)
"$PYTHON" scripts/run_op_cases.py "$@" > /dev/null || exit 1      # compile first: the tools slow that down too
failed=""
for tool in memcheck racecheck; do
    for op in "$@"; do
        log=$(mktemp)
        if "$SANITIZER" --tool "$tool" --error-exitcode 9 --print-limit 20 \
            "$PYTHON" scripts/run_op_cases.py "$op" > "$log" 2>&1; then
            echo "$tool $op: clean"
        else
            echo "$tool $op: FAILED"
            tail -n 40 "$log"
            failed="$failed $tool:$op"
        fi
        rm -f "$log"
    done
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
