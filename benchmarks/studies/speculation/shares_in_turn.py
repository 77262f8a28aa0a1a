"""The host's processor time to share the keys of decode rows out among CTAs: numpy and the native call, in turn in one process.

    python benchmarks/studies/speculation/shares_in_turn.py --out benchmarks/cpu/shares-in-turn.json

With drafts, shares are made anew for every step of a GPU; without, every 32 steps. `bench host` on a CPU has no shares, so they
are not in its figures. Rows are of like length (600 to 680 keys, where several cuts are compared) or of any (100 to 1,100).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.bench.lab.record import percentiles, record, write
from ridgeline.ops.attention.split_kv import share_out
from ridgeline.ops.cpu import native

PROGRAMS = 66                        # CTAs at once: four on each of 132 SMs, eight KV heads
CASES = {f"{rows} rows, {low} to {high} keys": (rows, low, high)
         for rows in (8, 32, 64, 256) for low, high in ((600, 680), (100, 1100))}
CALLS = 20                           # of a part


def microseconds(lengths: np.ndarray, library: Any) -> float:
    began = time.thread_time()
    for _ in range(CALLS):
        share_out(lengths, PROGRAMS, native=library)
    return (time.thread_time() - began) / CALLS * 1e6


def compare(lengths: np.ndarray, library: Any, rounds: int) -> dict[str, Any]:
    ways: dict[str, Any] = {"numpy": None, "native": library}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):                     # the first warms up
        for name in (ways if number % 2 else reversed(ways)):
            took = microseconds(lengths, ways[name])
            if number:
                times[name].append(took)
    ratios = [new / old for new, old in zip(times["native"], times["numpy"], strict=True)]
    return {f"{name}_us": percentiles(values) | {"least": min(values)} for name, values in times.items()} | {
        "ratio": statistics.median(ratios)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", help="the record")
    args = parser.parse_args()
    library, rng, figures = native.library(), np.random.default_rng(0), {}
    for name, (rows, low, high) in CASES.items():
        figures[name] = found = compare(rng.integers(low, high, rows).astype(np.int32), library, args.rounds)
        print(f"{name}: {found['numpy_us']['median']:.0f} us, native {found['native_us']['median']:.0f} ({found['ratio']:.2f})")
    if args.out:
        workload = {"cases": list(CASES), "rounds": args.rounds, "calls": CALLS, "programs": PROGRAMS}
        write(record("shares-in-turn", workload, figures), Path(args.out))


if __name__ == "__main__":
    main()
