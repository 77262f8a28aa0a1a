"""compute-sanitizer over the small cases of every kernel; writes benchmarks/h200/sanitizer.json.

    python scripts/sanitize_kernels.py [--jobs N] [--seconds S] [NAME ...]

memcheck finds accesses out of bounds, racecheck threads that use shared memory without waiting for each other. The cases are
those of the ops and of kernel_cases.py (run_op_cases.py runs both), each in processes of a few, and a test of what attention
is told besides its tensors. Both tools must find the fault that is put before them. Needs a GPU and the CUDA toolkit.

Races that are not ours are told apart: plain Triton has no shared memory in the language, so all use of it there is the
compiler's (reductions, changes of layout); in Gluon the word by which `warp_specialize` tells warps their part is, which the
generated code puts between barriers of all warps, though racecheck does not see it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck")
OPS = ROOT / "ridgeline" / "ops"
CASES = "scripts/run_op_cases.py"
TESTS = {"attention shapes": ["-m", "pytest", "-q", "-x", "tests/test_attention_gpu_shapes.py", "-k", "kernel_"]}
MOST_RUNS = 12                       # of ops' cases, in one process
FOUND = 9                            # the exit status that means: the tool has found something
COMPILERS = "FOUND, the compiler's"
# torch hands out pieces of large blocks: an access beyond a tensor would stay inside one, and nobody would see it.
ENVIRONMENT = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}


@dataclass(slots=True)
class Outcome:
    state: str                       # clean, FOUND, FOUND (the compiler's), or why none of them
    seconds: float = 0.0
    log: str = ""
    found: set[str] = field(default_factory=set)         # kernels that the tool has named
    ran: set[str] = field(default_factory=set)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="only these of the programs; nothing is written then")
    parser.add_argument("--jobs", type=int, default=8, help="checks at the same time (most of each is the host's)")
    parser.add_argument("--seconds", type=float, default=900, help="a check that has not ended by then is not clean")
    args = parser.parse_args()
    sanitizer = os.environ.get("SANITIZER") or shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not on the PATH; set SANITIZER to where it is")
    from ridgeline.bench.device_log import gpu_facts
    from ridgeline.bench.record import record, write

    deadline = time.monotonic() + args.seconds
    listed = subprocess.run([sys.executable, CASES, "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    chosen = {name: words for name, words in programs(listed.split()).items() if not args.names or name in args.names}
    command = [sanitizer, "--error-exitcode", str(FOUND), "--print-limit", "20", "--tool"]
    # The first tool's processes compile, the second's find everything in the cache.
    work = {f"{tool} {name}": [*command, tool, sys.executable, *words] for tool in TOOLS
            for name, words in (chosen | {"fault": [CASES, f"fault:{tool}"]}).items()}  # fmt: skip
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, outcome in zip(work, pool.map(lambda words: run(words, deadline), work.values()), strict=True):
            outcomes[name] = outcome
            print(f"{name}: {outcome.state} {' '.join(sorted(outcome.found))} ({outcome.seconds:.0f} s)", flush=True)
            if outcome.state != "clean" and not name.endswith(" fault"):
                print("\n".join(outcome.log.splitlines()[-40:]), flush=True)
    kernels = by_kernel(outcomes)
    missing = sorted(launched() - {kernel for kernel, tools in kernels.items() if len(tools) == len(TOOLS)})
    if not args.names:
        figures = {"kernels": kernels, "not_checked": missing, "checks": {name: each.state for name, each in outcomes.items()},
                   "seconds": {name: round(each.seconds, 1) for name, each in outcomes.items()}}  # fmt: skip
        write(record("sanitizer", {"tools": list(TOOLS), "jobs": args.jobs}, figures, gpu=gpu_facts()),
              ROOT / "benchmarks" / "h200" / "sanitizer.json")  # fmt: skip
        if missing:
            sys.exit(f"not checked by both tools: {', '.join(missing)}")
    wanted = {name: ("FOUND",) if name.endswith(" fault") else ("clean", COMPILERS) for name in outcomes}
    if not all(each.state in wanted[name] for name, each in outcomes.items()):
        sys.exit(1)


def programs(listed: list[str]) -> dict[str, list[str]]:
    """What to run, by name, from the list of ops (name:runs) and of other cases: attention, which takes longest, first."""
    parts: list[str] = []
    groups: list[list[str]] = [[]]
    room = MOST_RUNS
    for name, _, runs in (each.partition(":") for each in listed):
        if not runs:
            parts.append(name)
        elif int(runs) > MOST_RUNS:
            count = -(-int(runs) // MOST_RUNS)
            parts += [f"{name}:{part}/{count}" for part in range(count)]
        else:
            if int(runs) > room:
                groups.append([])
                room = MOST_RUNS
            groups[-1].append(name)
            room -= int(runs)
    return {" ".join(names): [CASES, *names] for names in ([[each] for each in reversed(parts)] + groups) if names} | TESTS


def run(words: list[str], deadline: float) -> Outcome:
    begun = time.monotonic()
    if begun >= deadline:
        return Outcome("not begun, the time was over")
    process = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)  # fmt: skip
    try:
        log, _ = process.communicate(timeout=deadline - begun)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)           # the tool and what it runs
        log, _ = process.communicate()
        return Outcome("not ended, the time was over", time.monotonic() - begun, log)
    state = {0: "clean", FOUND: "FOUND"}.get(process.returncode, f"FAILED with {process.returncode}")
    places = set(re.findall(r" at (?:void )?(\w+)\+0x\w+(?: in (\S+):(\d+))?", log))
    found = {kernel for kernel, _, _ in places}
    if state == "FOUND" and "racecheck" in words and places and all(map(is_the_compilers, *zip(*places, strict=True))):
        state = COMPILERS
    ran = set(" ".join(re.findall(r"^kernels: (.*)$", log, re.MULTILINE)).split())
    return Outcome(state, time.monotonic() - begun, log, found, ran)


def by_kernel(outcomes: dict[str, Outcome]) -> dict[str, dict[str, str]]:
    """What each tool says of each kernel that ran to the end."""
    kernels: dict[str, dict[str, str]] = {}
    for name, outcome in outcomes.items():
        tool, _, program = name.partition(" ")
        for kernel in outcome.ran if program != "fault" else ():
            state = kernels.setdefault(kernel, {})
            states = [state.get(tool, "clean"), outcome.state if kernel in outcome.found else "clean"]
            state[tool] = next((each for each in ("FOUND", COMPILERS) if each in states), "clean")
    return dict(sorted(kernels.items()))


def launched() -> set[str]:
    """The kernels that the op files launch."""
    return {name for file in OPS.glob("*.py") for name in re.findall(r"(\w*_kernel)\[", file.read_text())}


def is_the_compilers(kernel: str, file: str, line: str) -> bool:
    """Whether an access to shared memory is none of the kernel's own."""
    path = OPS / Path(file).name
    if not path.is_file():
        return False
    if any(re.search(rf"@triton_kernel\([^\n]*\)\ndef {kernel}\(", each.read_text()) for each in OPS.glob("*.py")):
        return True
    at, *behind = path.read_text().splitlines()[int(line) - 1 :]
    if at.lstrip().startswith("if "):                    # constant, around it: the compiler names the line of the choice
        depth = len(at) - len(at.lstrip())
        inside = itertools.takewhile(lambda each: not each.strip() or len(each) - len(each.lstrip()) > depth, behind)
        return any("warp_specialize(" in each for each in inside)
    return at.startswith(f"def {kernel}(") or "warp_specialize(" in at


if __name__ == "__main__":
    main()
