"""A dial for drafts: rows whose drafts are right with a given chance, and a clock that only steps move. No model."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

import numpy as np

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.drafting import DecodingRows
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.offer import Offer, RowByRow
from ridgeline.scheduler.drafts.shape_times import Pace, ShapeTimes
from ridgeline.scheduler.sequence import Sequence, Turn
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, GraphShapes, most_queries

CONTEXT = 640
RIGHT = 7                            # the token that every draft names
Seconds = Callable[[int, int, int, int], float]          # of a step: rows, tokens, most tokens of a row, keys of each row


def make_sequence(number: int = 0, prompt: Several[int] = (1, 2, 3), **fields: Any) -> Sequence:
    request = Request(f"r{number}", list(prompt), SamplingParams(), **fields)
    return Sequence(request, 0, Turn(0, number, 0), 10**9, 0, frozenset())


class DialProposer(RowByRow):
    """Always has as many drafts as it is asked for."""

    name = "dial"

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        self.asked += 1
        return Offer([RIGHT] * most, 2)

    def ended(self, sequence: Sequence) -> None:
        """It knows no sequence."""


class Dial:
    """Steps of `rows` rows with drafts that are right with chance `alpha`, or each row's with its own; `seconds` is the true time
    of a step."""

    def __init__(
        self, rows: int, alpha: float | list[float], seconds: Seconds, model: Callable[[int, int], float],
        graphs: GraphShapes | None, context: int = CONTEXT, search: float = 0.0,
    ) -> None:
        """`search`: what a step takes longer if drafts are looked for."""
        self.search = search
        self.alpha, self.seconds, self.context = alpha, seconds, context
        self.proposer = DialProposer()
        self.controller = Controller([self.proposer], Pace(ShapeTimes(model, graphs)), MOST_DRAFTS)
        self.sequences = [make_sequence(number) for number in range(rows)]
        self.rng = random.Random(rows)
        self.tokens, self.time, self.drafted = 0.0, 0.0, 0
        self.widths: list[int] = []                      # drafts of each step, all rows together
        self.of_first: list[int] = []                    # drafts of the first row in each step
        self.widest = 0                                  # drafts of a row

    @property
    def rate(self) -> float:
        return self.tokens / self.time

    def run(self, steps: int) -> Dial:
        count, keys = len(self.sequences), self.context * len(self.sequences)
        for _ in range(steps):
            rows = DecodingRows(
                self.sequences, np.full(count, most_queries(count) - 1), np.zeros(count, np.int64), MOST_VERIFIED - count, count,
                keys,
            )
            asked = self.proposer.asked
            planned = self.controller.plan(rows) if self.controller.awake() else None
            width = planned.width if planned is not None else np.zeros(count, np.int64)
            alphas = self.alpha if isinstance(self.alpha, list) else [self.alpha] * count
            accepted = np.array([self._accepted(own, alpha) for own, alpha in zip(width.tolist(), alphas, strict=True)])
            total, queries = count + int(width.sum()), 1 + int(width.max())
            seconds = self.seconds(count, total, queries, self.context) + self.search * (self.proposer.asked > asked)
            if not self.controller.slept(count):
                self.controller.timed(count, total, queries, keys, seconds, int((width - accepted).sum()))
            had = np.nonzero(width)[0]
            if len(had):
                self.controller.observe([self.sequences[place] for place in had.tolist()], width[had], accepted[had], seconds)
            for sequence, own, kept, alpha in zip(self.sequences, width.tolist(), accepted.tolist(), alphas, strict=True):
                right = kept == own and self.rng.random() < alpha
                sequence.tokens.extend([RIGHT] * kept + [RIGHT if right else RIGHT + 1])
            # What these widths gain on average: one run then says as much as many.
            self.tokens += count + sum(expected_gain(alpha, own) for own, alpha in zip(width.tolist(), alphas, strict=True))
            self.time += seconds
            self.drafted += planned is not None
            self.widths.append(total - count)
            self.of_first.append(int(width[0]))
            self.widest = queries - 1
        return self

    def _accepted(self, width: int, alpha: float) -> int:
        kept = 0
        while kept < width and self.rng.random() < alpha:
            kept += 1
        return kept


def expected_gain(alpha: float, width: int) -> float:
    """Accepted drafts of a row."""
    return sum(alpha**position for position in range(1, width + 1))


def expected_rate(rows: int, alpha: float, width: int, seconds: Seconds, context: int = CONTEXT) -> float:
    """Tokens a second if every row always verifies `width` drafts."""
    return rows * (1 + expected_gain(alpha, width)) / seconds(rows, rows * (1 + width), 1 + width, context)


def best_rate(rows: int, alpha: float, seconds: Seconds, context: int = CONTEXT) -> float:
    """With the best width that a step may have, none included."""
    widths = [width for width in range(most_queries(rows)) if rows * (1 + width) <= MOST_VERIFIED]
    return max(expected_rate(rows, alpha, width, seconds, context) for width in widths)
