"""What can be measured of speculation without a model: the time of a search, and the steps until copying is noticed.

    python benchmarks/studies/speculation/without_a_model.py --out speculation-without-a-model.json

`search`: milliseconds of processor time in which a proposer looks for drafts of all rows, in one native call and row by row; both
must find the same. Rows and earlier answers have 600 tokens, drawn so that a few are frequent, as in text.

`noticed`: rows whose drafts were all wrong for some hundred steps begin to copy, so that 95 of 100 are right; how many steps pass
until the first of them has drafts. Step times are simulated: a CPU on which 8 tokens take 3.3 steps of one, and an 8B model on an
H200 as in tests/scheduler/drafts/test_controller.py. `watch` off: as the controller was before it compared what it did not draft
with what came (scheduler/drafts/watch.py), and looked for drafts in each eighth step at least, now in each fourth.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.bench.lab.record import command, record, write
from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.messages import Request
from ridgeline.ops.cpu import native
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.drafting import DecodingRows
from ridgeline.scheduler.drafts import looking
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.ngram import Ngram
from ridgeline.scheduler.drafts.ngram_table import NgramTable
from ridgeline.scheduler.drafts.offer import Offer, Proposer, RowByRow
from ridgeline.scheduler.drafts.shape_times import Pace, ShapeTimes
from ridgeline.scheduler.drafts.suffix import Suffix
from ridgeline.scheduler.drafts.watch import Watch
from ridgeline.scheduler.sequence import Sequence, Turn
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, GraphShapes, most_queries

LENGTH, CONTEXT, ALPHA = 600, 640, 0.95
GRAPHS = GraphShapes(256, 8192, MOST_VERIFIED)
Seconds = Callable[[int, int], float]                    # of a step, by rows and drafts
NOW, BEFORE = looking._MOST_SKIPPED, 8


def sequence(number: int, tokens: list[int]) -> Sequence:
    return Sequence(Request(f"r{number}", tokens, SamplingParams()), 0, Turn(0, number, 0), 10**9, 0, frozenset())


# -- searches ----------------------------------------------------------------------------------------------------------


def text(rng: random.Random, count: int) -> list[int]:
    return [min(5000, int(rng.paretovariate(0.9))) for _ in range(count)]


def filled(proposer: Suffix, rng: random.Random) -> Suffix:
    for number in range(300):
        answer = sequence(number, [1])
        answer.tokens.extend(text(rng, LENGTH))
        answer.finished = True
        proposer.ended(answer)
    return proposer


def search(rows: int, steps: int) -> list[dict[str, Any]]:
    library = native.library()
    if library is None:
        raise SystemExit("the native library cannot be built here")
    made: dict[str, tuple[Proposer, Proposer]] = {
        "ngram": (NgramTable(2, 8, library.ngram_drafts), Ngram(2, 8)),
        "suffix": (filled(Suffix(2**26, library.suffix_drafts), random.Random(1)), filled(Suffix(2**26), random.Random(1))),
    }
    found = []
    for name, both in made.items():
        rng = random.Random(rows)
        asked, most = [sequence(number, text(rng, LENGTH)) for number in range(rows)], np.full(rows, 2)
        took: tuple[list[float], list[float]] = ([], [])
        for _ in range(steps):
            paths = []
            for proposer, times in zip(both, took, strict=True):
                began = time.thread_time()
                paths.append(proposer.propose_all(asked, most))
                times.append((time.thread_time() - began) * 1e3)
            one, other = ([] if each is None else each.tokens.tolist() for each in paths)
            assert one == other, "the two ways find different drafts"
            for row in asked:
                row.tokens.extend(text(rng, 1))
        at_once, by_row = (statistics.median(times[1:]) for times in took)       # the first also builds the index
        found.append({"proposer": name, "rows": rows, "at_once_ms": at_once, "row_by_row_ms": by_row})
    return found


# -- noticing ----------------------------------------------------------------------------------------------------------


class Copies(RowByRow):
    """Its drafts are all the same token. Silent at first, or wrong."""

    name = "ngram"

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        return Offer([7] * most, 2) if self.speaks else None

    def ended(self, sequence: Sequence) -> None:
        """It knows no sequence."""


class Blind(Watch):
    """It watches nothing."""

    room = 0

    def keep(self, sequence: Sequence, pending: int, tokens: list[int], source: int, slot: int) -> None:
        """Nothing."""


def on_a_cpu(rows: int, drafts: int) -> float:
    return 10e-3 * (1 + 0.33 * (rows + drafts - 1))


def on_an_h200(rows: int, drafts: int) -> float:
    """Milliseconds of steps by tokens, as on an H200 at 65d17a21."""
    plain = ([1, 8, 32, 64, 128, 256], [3.79, 3.95, 4.21, 4.55, 4.99, 7.3])
    drafted = ([4, 16, 96, 128, 256, 384, 512], [4.0, 4.35, 5.3, 5.36, 7.49, 10.36, 13.1])
    return 1e-3 * (float(np.interp(rows + drafts, *(drafted if drafts else plain))) + rows * CONTEXT * 3.3e-5)


CASES: dict[str, tuple[int, int, Seconds, bool]] = {     # rows, those that begin to copy, times, whether there were offers before
    "CPU, 1 row": (1, 1, on_a_cpu, True), "CPU, 8 rows": (8, 8, on_a_cpu, True),
    "H200, 1 row of 8": (8, 1, on_an_h200, True), "H200, 64 rows": (64, 64, on_an_h200, True),
    "CPU, 1 row, no offers before": (1, 1, on_a_cpu, False), "H200, 1 row, no offers before": (1, 1, on_an_h200, False),
}
STEPS = 400                          # for which the rows are followed


def noticed(case: str, watch: bool, seed: int) -> tuple[int, int]:
    """Steps until the first row that copies has drafts, and in how many of STEPS it has some."""
    rows, copying, seconds, speaks = CASES[case]
    rng, proposer = random.Random(seed), Copies(speaks)
    graphs = None if seconds is on_a_cpu else GRAPHS
    chosen = Controller([proposer], Pace(ShapeTimes(lambda tokens, keys: 3e-3 + 2e-8 * keys, graphs)), MOST_DRAFTS)
    looking._MOST_SKIPPED = NOW if watch else BEFORE
    if not watch:
        chosen._search.watch = Blind()
    sequences, begin = [sequence(number, [1, 2, 3]) for number in range(rows)], 300 + 7 * seed
    had = []
    for step in range(begin + STEPS):
        if step == begin:
            proposer.speaks = True
        most, none = np.full(rows, most_queries(rows) - 1), np.zeros(rows, np.int64)
        asked = DecodingRows(sequences, most, none, MOST_VERIFIED - rows, rows, CONTEXT * rows)
        drafts = chosen.plan(asked) if chosen.awake() else None
        width = np.zeros(rows, np.int64) if drafts is None else drafts.width
        right = np.zeros(rows, np.int64)
        for place, row in enumerate(sequences):
            alpha = ALPHA if step >= begin and place < copying else 0.0
            while right[place] < width[place] and rng.random() < alpha:
                right[place] += 1
            last = 7 if right[place] == width[place] and rng.random() < alpha else 8
            row.tokens.extend([7] * int(right[place]) + [last])
        total = int(width.sum())
        chosen.timed(rows, rows + total, 1 + int(width.max()), CONTEXT * rows, seconds(rows, total), int((width - right).sum()))
        if total:
            some = np.flatnonzero(width)
            chosen.observe([sequences[place] for place in some.tolist()], width[some], right[some], 0.0)
        if step >= begin:
            had.append(bool(width[0]))
    return next((step for step, has in enumerate(had) if has), STEPS), sum(had)


def notice(runs: int) -> list[dict[str, Any]]:
    found = []
    for case in CASES:
        for watch in (False, True):
            came = [noticed(case, watch, seed) for seed in range(runs)]
            found.append({"case": case, "watch": watch, "mean_steps": statistics.mean(first for first, _ in came),
                          "most_steps": max(first for first, _ in came),
                          "steps_with_drafts": statistics.mean(number for _, number in came), "of": STEPS})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=30, help="searches of each number of rows")
    parser.add_argument("--runs", type=int, default=10, help="of each simulated case")
    parser.add_argument("--out", help="the record")
    args = parser.parse_args()
    figures = {"search": [each for rows in args.rows for each in search(rows, args.steps)], "noticed": notice(args.runs)}
    for row in figures["search"]:
        print(f"{row['proposer']:<7} {row['rows']:>4}: {row['at_once_ms']:.3f} ms at once, {row['row_by_row_ms']:.3f} by row")
    for row in figures["noticed"]:
        print(f"{row['case']:<30} watch {row['watch']!s:<5} noticed after {row['mean_steps']:.1f} steps, at most "
              f"{row['most_steps']}; drafts in {row['steps_with_drafts']:.0f} of {row['of']}")
    if args.out:
        write(record("speculation-without-a-model", {"command": command(args.out)}, figures), Path(args.out))


if __name__ == "__main__":
    main()
