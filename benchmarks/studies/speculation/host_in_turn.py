"""The host's processor time of a step, of this code and of another checkout of it, in turn.

    python benchmarks/studies/speculation/host_in_turn.py --other ../before --other-commit 65d17a21 --out host-in-turn.json

On a machine with other work times change from minute to minute, by more than a change of the code does. Here two processes do
the steps of `bench host --drafts` (bench/workload/host_drafts.py), some steps of one, then some of the other: both see the same
machine.
`ratio`: the median of the ratios of neighbouring parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from ridgeline.bench.lab.record import percentiles, record, write
from ridgeline.bench.workload import host_drafts

STEPS, WARM = 15, 60                 # steps of a part, and of the first, which does not count
HERE = Path(__file__).resolve().parents[3]


def work(case: str) -> None:
    """Does as many steps as each line says, and prints their times."""
    rows, each = map(int, case.split(":"))
    whole, host_drafts._WARM_STEPS = host_drafts._steps, 0

    def parts(core: Any, executor: Any, tokens: int, steps: int) -> list[dict[str, float]]:
        for line in sys.stdin:
            print(json.dumps(whole(core, executor, tokens, int(line))), flush=True)
        return [{"host_ms": 0.0}]

    host_drafts._steps = parts
    host_drafts.drafted_steps(rows, each, 1500, "cpu")


def start(case: str, code: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--work", case]
    return subprocess.Popen(
        command, cwd=code, env={**os.environ, "PYTHONPATH": str(code)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(process: subprocess.Popen[str], steps: int) -> list[dict[str, float]]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return [dict(each) for each in json.loads(process.stdout.readline())]


def compare(case: str, other: Path, rounds: int) -> dict[str, Any]:
    running = {"other": start(case, other), "this": start(case, HERE)}
    for process in running.values():
        ask(process, WARM)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    ratios = []
    for number in range(rounds):
        part = {name: ask(running[name], STEPS) for name in (("other", "this") if number % 2 else ("this", "other"))}
        this, before = (statistics.median(each["host_ms"] for each in part[name]) for name in ("this", "other"))
        ratios.append(this / before)
        for name, found in part.items():
            times[name] += found
    for process in running.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    found: dict[str, Any] = {"ratio": statistics.median(ratios)}
    for name, steps in times.items():
        found[name] = {call: percentiles(values) | {"least": min(values)} for call in steps[0]
                       if (values := [each[call] for each in steps])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required="--work" not in sys.argv, help="another checkout, with its native library")
    parser.add_argument("--other-commit", default="")
    parser.add_argument("--cases", nargs="+", default=["256:0", "256:1", "64:3", "32:4"], metavar="ROWS:EACH")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", help="the record")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    figures = {}
    for case in args.cases:
        figures[case] = found = compare(case, args.other.resolve(), args.rounds)
        print(f"{case:>6}: {found['ratio']:.2f} of the other; " + ", ".join(
            f"{name} {found[name]['host_ms']['median']:.3f} ms ({found[name]['host_ms']['least']:.3f} at least)"
            for name in ("other", "this")
        ), flush=True)
    if args.out:
        workload = {"cases": args.cases, "rounds": args.rounds, "steps": STEPS, "other_commit": args.other_commit}
        write(record("host-in-turn", workload, figures), Path(args.out))


if __name__ == "__main__":
    main()
