"""compute-sanitizer over the small cases of every kernel; writes benchmarks/h200/sanitizer.json.

    python scripts/sanitize_kernels.py [--jobs N] [--seconds S] [NAME ...]

memcheck finds accesses out of bounds. racecheck finds unsynchronised accesses to shared memory. The cases are those of the ops
and of kernel_cases.py (run_op_cases.py runs both), a few per process, and the tests of attention's arguments. Both tools must
also find a planted fault. Needs a GPU and the CUDA toolkit.

Every race that racecheck reports is in the record. These kinds are classified, and are no failure:
- the compiler's: plain Triton has no shared memory in the language, so the compiler makes all accesses to it (reductions, layout
  conversions). In Gluon it makes those of the word that tells warps their partition in `warp_specialize`: the generated code puts
  it between barriers of all warps, which racecheck does not see;
- a library's: in a kernel that is not Triton's, such as cuDNN's attention;
- explained: a pair of our accesses that the machine code, read by hand, orders (KNOWN). It counts as found again if the source
  lines change.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck")
OPS = ROOT / "ridgeline" / "ops"
CASES = "scripts/run_op_cases.py"
TESTS = {"attention shapes": ["-m", "pytest", "-q", "-x", "tests/ops/test_attention_gpu_shapes.py", "-k", "kernel_"]}
MOST_RUNS = 12                       # of ops' cases, in one process
FOUND = 9                            # the exit status that means: the tool has found something
PRINTED = 1000                       # most reports: what is not printed cannot be classified
EXPLAINED, COMPILERS, LIBRARYS = "FOUND, explained", "FOUND, the compiler's", "FOUND, a library's"
STATES = ("FOUND", EXPLAINED, COMPILERS, LIBRARYS, "clean")        # worst first
# torch suballocates large blocks: an access beyond a tensor would stay inside one, and memcheck would not see it.
ENVIRONMENT = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}


@dataclass(slots=True, frozen=True)
class Access:
    kind: str                        # Read or Write
    kernel: str
    file: str = ""                   # unknown in libraries
    line: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.file}:{self.line}" if self.file else self.kind


UNKNOWN = Access("?", "?")


@dataclass(slots=True, frozen=True)
class Explained:
    """Two accesses to shared memory that racecheck reports, though they are ordered."""

    kernel: str
    file: str
    write: tuple[str, ...]           # lines of the source: the access is the first of them,
    read: tuple[str, ...]            # and here the last
    reason: str


KNOWN = [
    Explained(
        "prompt_kernel", "kernel_prefill_hopper.py",
        ("scale_shared.index(slot).store(scale)",
         "group_barrier()",
         "mbarrier.expect(full.index(slot), TILE_KEYS * PARTS * WIDTH * cache.dtype.primitive_bitwidth // 8)"),
        ("mbarrier.wait(bytes_full.index(source), (now // BYTE_STAGES) & 1)",
         "mbarrier.wait(v_empty.index(slot), ((now // VALUE_STAGES) & 1) ^ 1)",
         "for cut in range(CUTS):",
         "scale = scales.index(source * CUTS + cut).load(gl.SliceLayout(1, layout))"),
        "a warp stores, bar.warp.sync, its first thread arrives at the barrier for which the readers wait; the assembler turns "
        "bar.warp.sync into a NOP where the warp runs together, which racecheck seems not to count: of the first load it "
        "leaves out just as much as the first thread has stored",
    ),
]


@dataclass(slots=True)
class Outcome:
    state: str                       # one of STATES, or why none of them
    seconds: float = 0.0
    log: str = ""
    found: dict[str, str] = field(default_factory=dict)  # kernels that the tool has named: their state
    ran: set[str] = field(default_factory=set)
    findings: list[dict[str, str | int]] = field(default_factory=list)   # racecheck's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="check only these; no record is written then")
    parser.add_argument("--jobs", type=int, default=8, help="checks at the same time (most of their time is spent on the CPU)")
    parser.add_argument("--seconds", type=float, default=900, help="time limit: a check that has not ended by then is not clean")
    args = parser.parse_args()
    sanitizer = os.environ.get("SANITIZER") or shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not on the PATH; set SANITIZER to where it is")
    from ridgeline.bench.lab.device_log import gpu_facts
    from ridgeline.bench.lab.record import record, write

    deadline = time.monotonic() + args.seconds
    listed = subprocess.run([sys.executable, CASES, "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    chosen = {name: words for name, words in programs(listed.split()).items() if not args.names or name in args.names}
    command = [sanitizer, "--error-exitcode", str(FOUND), "--print-limit", str(PRINTED), "--tool"]
    # The first tool's processes compile, the second's find everything in the cache.
    work = {f"{tool} {name}": [*command, tool, sys.executable, *words] for tool in TOOLS
            for name, words in (chosen | {"fault": [CASES, f"fault:{tool}"]}).items()}
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        ended = pool.map(lambda words: run(words, deadline - time.monotonic()), work.values())
        for name, outcome in zip(work, ended, strict=True):
            outcomes[name] = outcome
            print(f"{name}: {outcome.state} {' '.join(sorted(outcome.found))} ({outcome.seconds:.0f} s)", flush=True)
            if outcome.state != "clean" and not name.endswith(" fault"):
                print("\n".join(outcome.log.splitlines()[-40:]), flush=True)
    kernels = by_kernel(outcomes)
    missing = sorted(launched() - {kernel for kernel, tools in kernels.items() if len(tools) == len(TOOLS)})
    if not args.names:
        figures = {"kernels": kernels, "not_checked": missing, "checks": {name: each.state for name, each in outcomes.items()},
                   "races": {name: each.findings for name, each in outcomes.items() if each.findings},
                   "seconds": {name: round(each.seconds, 1) for name, each in outcomes.items()}}
        write(record("sanitizer", {"tools": list(TOOLS), "jobs": args.jobs}, figures, gpu=gpu_facts()),
              ROOT / "benchmarks" / "h200" / "sanitizer.json")
        if missing:
            sys.exit(f"not checked by both tools: {', '.join(missing)}")
    wanted = {name: ("FOUND",) if name.endswith(" fault") else STATES[1:] for name in outcomes}
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


def run(words: list[str], seconds: float) -> Outcome:
    begun = time.monotonic()
    if seconds <= 0:
        return Outcome("not begun, the time was over")
    process = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    try:
        log, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)           # the tool and what it runs
        log, _ = process.communicate()
        return Outcome("not ended, the time was over", time.monotonic() - begun, log)
    state = {0: "clean", FOUND: "FOUND"}.get(process.returncode, f"FAILED with {process.returncode}")
    ran = set(" ".join(re.findall(r"^kernels: (.*)$", log, re.MULTILINE)).split())
    found = dict.fromkeys(re.findall(r" at (?:void )?(\w+)\+0x\w+", log), "FOUND")
    findings: list[dict[str, str | int]] = []
    if state == "FOUND" and "racecheck" in words and "Target application returned an error" not in log:
        pairs = Counter[tuple[Access, Access]]()
        for first, second, hazards in races(log):
            pairs[first, second] += hazards
        states = {pair: state_of(*pair, ran) for pair in pairs}
        findings = [finding(*pair, hazards, states[pair]) for pair, hazards in pairs.items()]
        for kernel in {access.kernel for pair in pairs for access in pair}:
            found[kernel] = worst(each for pair, each in states.items() if kernel in {access.kernel for access in pair})
        state = worst(states.values())
    return Outcome(state, time.monotonic() - begun, log, found, ran, findings)


def races(log: str) -> list[tuple[Access, Access, int]]:
    """The pairs of accesses that racecheck reports, with how often. An unknown pair for what cannot be read."""
    reports = re.split(r"Race reported between", log)
    reports = reports[1:] or reports
    pairs = [(UNKNOWN, UNKNOWN, 0)] * (len(reports) >= PRINTED)
    for report in reports:
        found = re.findall(
            r"(\w+) access at (?:void )?(.+?)\+0x[0-9a-f]+(?: in (\S+):(\d+))?(?: \[(\d+) hazards?\])?\s*$", report, re.MULTILINE
        )
        accesses = [Access(kind, kernel, Path(file).name, int(line or 0)) for kind, kernel, file, line, _ in found]
        if not accesses or len(accesses) != report.count(" access at "):
            pairs.append((UNKNOWN, UNKNOWN, 0))
        others = accesses[1:] or accesses                # alone: two threads at the same place
        pairs += [(accesses[0], other, int(each[-1] or 0)) for other, each in zip(others, found[-len(others) :], strict=True)]
    return pairs


def state_of(first: Access, second: Access, ran: set[str]) -> str:
    """What a reported pair of accesses is. `ran`: the Triton kernels that the process has printed at its end."""
    pair = (first, second)
    if ran and not any(each.file or each.kernel in ran | launched() | {UNKNOWN.kernel} for each in pair):
        return LIBRARYS
    if all(is_the_compilers(each.kernel, each.file, each.line) for each in pair):
        return COMPILERS
    return "FOUND" if explained(first, second) is None else EXPLAINED


def finding(first: Access, second: Access, hazards: int, state: str) -> dict[str, str | int]:
    """A pair as the record has it."""
    known = explained(first, second) if state == EXPLAINED else None
    told: dict[str, str | int] = {"kernel": first.kernel, "accesses": f"{first}, {second}", "hazards": hazards, "state": state}
    return told if known is None else told | {"reason": known.reason}


def explained(write: Access, read: Access) -> Explained | None:
    """Why such a pair is in order, if it is known and the source is still the one that was looked at."""
    if (write.kind, read.kind) != ("Write", "Read") or write.kernel != read.kernel:
        return None
    for each in KNOWN:
        if write.kernel == each.kernel and write.file == read.file == each.file:
            lines = tuple(line.strip() for line in op_file(each.file).read_text().splitlines())
            written = lines[write.line - 1 : write.line - 1 + len(each.write)]
            if written == each.write and lines[read.line - len(each.read) : read.line] == each.read:
                return each
    return None


def op_file(name: str) -> Path:
    """The file of that name below ridgeline/ops, or a path that does not exist."""
    return next(OPS.rglob(name), OPS / name)


def worst(states: Iterable[str]) -> str:
    return min(states, key=STATES.index)


def by_kernel(outcomes: dict[str, Outcome]) -> dict[str, dict[str, str]]:
    """What each tool says of each kernel that ran to the end."""
    kernels: dict[str, dict[str, str]] = {}
    for name, outcome in outcomes.items():
        tool, _, program = name.partition(" ")
        for kernel in outcome.ran if program != "fault" else ():
            state = kernels.setdefault(kernel, {})
            state[tool] = worst((state.get(tool, "clean"), outcome.found.get(kernel, "clean")))
    return dict(sorted(kernels.items()))


@functools.cache
def launched() -> set[str]:
    """The kernels that the op files launch."""
    return {name for file in OPS.rglob("*.py") for name in re.findall(r"(\w*_kernel)\[", file.read_text())}


def is_the_compilers(kernel: str, file: str, line: int) -> bool:
    """Whether an access to shared memory is none of the kernel's own."""
    path = op_file(Path(file).name)
    if not path.is_file():
        return False
    if any(re.search(rf"@triton_kernel\([^\n]*\)\ndef {re.escape(kernel)}\(", each.read_text()) for each in OPS.rglob("*.py")):
        return True
    at, *behind = path.read_text().splitlines()[line - 1 :]
    if at.lstrip().startswith("if "):                    # constant, around it: the compiler names the line of the choice
        depth = len(at) - len(at.lstrip())
        inside = itertools.takewhile(lambda each: not each.strip() or len(each) - len(each.lstrip()) > depth, behind)
        return any("warp_specialize(" in each for each in inside)
    return at.startswith(f"def {kernel}(") or "warp_specialize(" in at


if __name__ == "__main__":
    main()
