"""compute-sanitizer over the small cases of every kernel; writes benchmarks/h200/sanitizer.json.

    python scripts/sanitize_kernels.py [--jobs N] [--seconds S]

memcheck finds accesses out of bounds, racecheck threads that use shared memory without waiting for each other. The cases are
those of the ops (run_op_cases.py), and the tests of kernels that only larger steps reach. Needs a GPU and the CUDA toolkit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck")
CASES = "scripts/run_op_cases.py"
# Kernels that no small case of an op reaches, by the tests that do.
TESTS = (
    "tests/test_ring_gemv.py::test_ring_gemv", "tests/test_ring_gemm.py::test_ring_gemm",
    "tests/test_wide_gemm.py::test_wide_gemm", "tests/test_gated_gemm.py::test_on_a_gpu",
    "tests/test_attention_tma.py::test_prompts_agree_with_the_definition",
    "tests/test_linear_kernels.py::test_small_gemm", "tests/test_attention_gpu_shapes.py",
)  # fmt: skip
FOUND = 9                            # the exit status that means: the tool has found something
# torch hands out pieces of large blocks: an access beyond a tensor would stay inside one, and nobody would see it.
ENVIRONMENT = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=8, help="checks at the same time (most of each is the host's)")
    parser.add_argument("--seconds", type=float, default=900, help="a check that has not ended by then is not clean")
    args = parser.parse_args()
    sanitizer = os.environ.get("SANITIZER") or shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not on the PATH; set SANITIZER to where it is")
    from ridgeline.bench.device_log import gpu_facts
    from ridgeline.bench.record import record, write

    deadline = time.monotonic() + args.seconds
    ops = subprocess.run([sys.executable, CASES, "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    programs = {op: [CASES, op] for op in ops} | {test: ["-m", "pytest", "-q", "-x", test] for test in TESTS}
    results: dict[str, str] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda words: run([sys.executable, *words], deadline), programs.values()))     # compile without the tools
        work = {f"{tool} {name}": [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20",
                                   sys.executable, *words] for tool in TOOLS for name, words in programs.items()}  # fmt: skip
        for name, (state, log) in zip(work, pool.map(lambda words: run(words, deadline), work.values()), strict=True):
            results[name] = state
            print(f"{name}: {state}", flush=True)
            if state != "clean":
                print("\n".join(log.splitlines()[-40:]), flush=True)
    write(record("sanitizer", {"tools": list(TOOLS), "jobs": args.jobs}, {"checks": results}, gpu=gpu_facts()),
          ROOT / "benchmarks" / "h200" / "sanitizer.json")  # fmt: skip
    if set(results.values()) != {"clean"}:
        sys.exit(1)


def run(words: list[str], deadline: float) -> tuple[str, str]:
    """(clean, found, failed or not ended; what it said)."""
    left = deadline - time.monotonic()
    if left <= 0:
        return "not begun, the time was over", ""
    try:
        done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, timeout=left, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return "not ended, the time was over", ""
    return {0: "clean", FOUND: "FOUND"}.get(done.returncode, f"FAILED with {done.returncode}"), done.stdout


if __name__ == "__main__":
    main()
