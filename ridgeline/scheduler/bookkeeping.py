"""The scheduler's records: its limits, its counters, and what it remembers of the plans it made."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ridgeline.messages import BlockOp, RowAdded, StepResult
from ridgeline.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from ridgeline.grammar.matcher import Matcher


@dataclass(slots=True)
class SchedulerLimits:
    max_rows: int                    # sequences that run at once
    max_step_tokens: int             # token budget of a step
    max_model_len: int
    chunked_prefill: bool = True
    max_waiting_steps: int = 10_000  # after that many steps a waiting request goes ahead of every priority
    enough_rows: int | None = None   # batch size beyond which a row gets no cheaper; None: unknown
    stages: int = 1                  # of the pipeline: that many steps run at once, each with rows of its own


@dataclass(slots=True)
class SchedulerCounters:
    steps: int = 0
    computed_tokens: int = 0         # planned; the next five are what steps reported, once they were taken in
    useful_tokens: int = 0
    wasted_tokens: int = 0           # computed twice because of preemptions
    padded_tokens: int = 0           # computed to fill up a captured shape
    rejected_tokens: int = 0         # computed in vain, as drafts
    prompt_tokens: int = 0           # of rows that did not decode
    chunks: int = 0                  # partial prefills
    joins: int = 0                   # sequences admitted in the place of one that had left, while others were running
    preemptions: int = 0
    out_of_memory: int = 0           # steps that did not fit into memory, and were forgotten
    late_tokens: int = 0             # sampled after a stop, dropped
    left_out: int = 0                # times that a row's token was dropped because its mask was not there in time
    finished: int = 0
    held_slots: int = 0              # KV slots held, and of these the ones in use, summed over steps: paging's waste
    used_slots: int = 0


class Masked(NamedTuple):
    """The positions of a step at which grammars say what may be sampled."""

    matchers: list[tuple[int, Matcher]]      # (position among all that are sampled, matcher there), the first of each answer
    num_positions: int                       # that are sampled in all
    guesses: dict[int, list[int]]            # by that position: what is guessed to follow, and has positions of its own


@dataclass(slots=True)
class DraftPlan:
    """The drafts of one plan, by place; see StepPlan."""

    width: np.ndarray                # int32 [R]
    tokens: np.ndarray | None        # int32 [R, P]
    start: np.ndarray                # int32 [R]: the position that the first of them is a guess for; -1: the device makes them
    num_positions: int = 0           # that the step samples at
    goes_on: bool = False            # the step behind it need not wait for its result: see Sequence.goes_on
    # [R], if all rows decode and were put in another order: where each was before, and all of them as they were.
    order: tuple[np.ndarray, np.ndarray] | None = None
    # What constrained() said last, and of which answers: their masks are begun with it, and filled.
    _masked: tuple[list[int], Masked] | None = None

    @property
    def on_device(self) -> np.ndarray:
        """[N]: places whose drafts the device makes."""
        return np.flatnonzero((self.width > 0) & (self.start < 0))

    def constrained(self, flight: InFlight) -> Masked:
        """Once all steps before it have been taken in. A draft that the grammar refuses will not be accepted, so no position
        behind it counts, nor one behind a token that ends the answer."""
        lengths = [-1 if each.finished or each.matcher is None else len(each.tokens) for _, each in flight.constrained]
        if self._masked is not None and self._masked[0] == lengths:
            return self._masked[1]
        found, sampled = Masked([], self.num_positions, {}), flight.sampled.nonzero()[0]
        own = self.width[sampled]
        first, start, widths = (np.cumsum(1 + own) - (1 + own)).tolist(), self.start[sampled].tolist(), own.tolist()
        tokens = [] if self.tokens is None else self.tokens[sampled].tolist()
        for (number, sequence), length in zip(flight.constrained, lengths, strict=True):
            if length < 0 or sequence.matcher is None:
                continue
            found.matchers.append((first[number], sequence.matcher))
            if tokens and (width := widths[number]):
                begin = length - start[number]
                guesses = tokens[number][begin : begin + width]
                found.guesses[first[number]] = guesses[: _end(guesses, sequence.stop_ids)]
        self._masked = lengths, found
        return found


@dataclass(slots=True)
class InFlight:
    """What update() needs to remember of a plan."""

    step: int
    rows: np.ndarray
    stays: np.ndarray                # numbers that change when a row gets another sequence, or none
    ends: np.ndarray                 # computed tokens of each row once the step is done; with drafts the most they can be
    sampled: np.ndarray              # bool: the row samples
    steady: Steady
    num_decodes: int                 # rows that go on from their newest token …
    num_prompt_tokens: int           # … and what the others compute together
    num_pairs: int                   # (query, key) pairs of those
    drafts: DraftPlan | None = None
    num_scored: int = 0              # of the prompt tokens, those with log-probabilities
    waited: bool = False             # none was in flight when it was planned
    left_out: set[int] = field(default_factory=set)      # places of rows that sampled without their mask: the token is dropped

    @property
    def sequences(self) -> list[Sequence]:
        return self.steady.sequences

    @property
    def constrained(self) -> list[tuple[int, Sequence]]:
        return self.steady.constrained

    def matchers(self) -> Masked:
        """See Scheduler.constrained()."""
        if self.drafts is not None:
            return self.drafts.constrained(self)
        listed = [
            (place, matcher) for place, sequence in self.constrained
            if not sequence.finished and (matcher := sequence.matcher) is not None
        ]
        return Masked(listed, int(np.count_nonzero(self.sampled)), {})

    def followed(self, result: StepResult) -> list[tuple[int, Matcher]]:
        """(place, matcher) of rows that bring nothing but tokens, which their grammars have followed already and go on behind.
        Those of a step with drafts follow them now."""
        if not self.constrained:
            return []
        places = self.sampled.nonzero()[0].tolist()
        if self.drafts is not None:
            return self._follow(result, places)
        return [
            (places[number], matcher) for number, sequence in self.constrained
            if (matcher := sequence.matcher) is not None and matcher.goes_on and sequence.simple
        ]

    def _follow(self, result: StepResult, places: list[int]) -> list[tuple[int, Matcher]]:
        found, tokens, counts = [], result.tokens.tolist(), result.num_new.tolist()
        for number, sequence in self.constrained:
            matcher, place = sequence.matcher, places[number]
            if matcher is None or sequence.finished:
                continue
            said = tokens[place][: counts[place]]
            if matcher.follow_run(said[: _end(said, sequence.stop_ids)]) and sequence.simple:
                found.append((place, matcher))
        return found

    def said(self, result: StepResult) -> list[tuple[Matcher, int]]:
        """See Scheduler.said()."""
        if not self.constrained or result.failed or self.drafts is not None:
            return []
        tokens = result.tokens[self.sampled, 0].tolist()
        return [
            (sequence.matcher, tokens[place]) for place, sequence in self.constrained
            if sequence.matcher is not None and not sequence.finished and tokens[place] not in sequence.stop_ids
        ]

    @staticmethod
    def free_rows(flights: Iterable[InFlight], rows: np.ndarray, need: np.ndarray, limits: SchedulerLimits) -> np.ndarray:
        """bool [R], in a pipeline: rows that may compute although steps are in flight. A row whose newest token is sampled in
        one of them may not. Of those that decode, each step takes an even part, so that all stages have work."""
        busy = np.zeros(limits.max_rows, bool)
        for flight in flights:
            busy[flight.rows[flight.sampled]] = True
        decodes = (need == 1) & ~busy[rows]
        most = -(-len(rows) // limits.stages)
        return np.asarray(~busy[rows] & (~decodes | (np.cumsum(decodes) <= most)))

    def samples(self, row: int, stay: np.ndarray) -> bool:
        """Does it bring tokens of the sequence that has this row now?"""
        place = np.flatnonzero(self.rows == row)
        return bool((self.sampled[place] & (self.stays[place] == stay[row])).any())

    @property
    def num_tokens(self) -> int:
        """What it computes."""
        drafts = 0 if self.drafts is None else int(self.drafts.width.sum())
        return self.num_decodes + self.num_prompt_tokens + drafts

    def _surplus(self, result: StepResult, width: np.ndarray) -> np.ndarray:
        """int [R]: tokens of each row that were planned and not accepted. A token that failed is none of them."""
        advanced = result.num_new
        if result.failed:
            advanced, failed = advanced.copy(), list(result.failed)
            advanced[failed] += width[failed] > 0
        return self.sampled * (1 + width) - advanced

    def shorten(self, stays: np.ndarray, too_many: np.ndarray) -> None:
        """An earlier step with drafts brought fewer tokens than this one was planned behind: by row, of these stays."""
        self.ends -= too_many[self.rows] * (stays[self.rows] == self.stays)

    def check(self, result: StepResult) -> np.ndarray | None:
        """The device does what the plan says; with drafts, no more than it says, and at least one token. Of such a step: the
        tokens of each row that were planned and not accepted."""
        if self.step != result.step:
            raise AssertionError(f"result of step {result.step} arrived, step {self.step} is the oldest in flight")
        if not result.lengths.shape == result.num_new.shape == self.ends.shape:
            raise AssertionError(f"step {self.step} came back with {len(result.lengths)} rows, {len(self.ends)} were planned")
        if self.drafts is None:
            surplus = None
            fits = np.count_nonzero((result.lengths == self.ends) & (result.num_new == self.sampled)) == len(self.ends)
        else:
            surplus = self._surplus(result, self.drafts.width)
            right = (surplus >= 0) & (surplus <= self.drafts.width) & (result.lengths == self.ends - surplus)
            fits = np.count_nonzero(right) == len(right)
        if not fits:
            raise AssertionError(f"step {self.step} computed or sampled something else than was planned")
        return surplus


def _end(tokens: list[int], stop_ids: frozenset[int]) -> int:
    """How many of them come before a token that ends the answer, or that is none."""
    if stop_ids.isdisjoint(tokens) and min(tokens, default=0) >= 0:          # nearly always
        return len(tokens)
    return next((place for place, token in enumerate(tokens) if token < 0 or token in stop_ids), len(tokens))


@dataclass(slots=True)
class Steady:
    """What a plan in which every row decodes has in common with the next, as long as the same rows run."""

    rows: np.ndarray                 # as Rows.ranked() has them
    plan_rows: np.ndarray            # the plan's rows, tokens and Want flags
    num_tokens: np.ndarray
    want: np.ndarray
    sequences: list[Sequence]
    constrained: list[tuple[int, Sequence]]              # (which of the rows that sample, its sequence) with a grammar
    sampled: np.ndarray              # bool
    most_drafts: np.ndarray | None = None                # of a step, as requests want it; None: not asked for yet …
    with_grammar: list[int] = field(default_factory=list)                # … and then the places of rows with a grammar …
    scored: list[int] = field(default_factory=list)      # … and of those that want the prompt's log-probabilities
    goes_on: bool = False            # all of them; see Sequence.goes_on
    _answers: list[tuple[str, int, int]] | None = None
    _texts: list[array[int]] | None = None
    _raw: bytes | None = None
    _ones: np.ndarray | None = None

    @property
    def raw(self) -> bytes:
        """The rows, for native code."""
        if self._raw is None:
            self._raw = self.rows.tobytes()
        return self._raw

    @property
    def ones(self) -> np.ndarray:
        """int64: a token of each row."""
        if self._ones is None:
            self._ones = np.ones(len(self.rows), np.int64)
        return self._ones

    @property
    def texts(self) -> list[array[int]]:
        """Of each row, the tokens of its sequence."""
        if self._texts is None:
            self._texts = [sequence.tokens for sequence in self.sequences]
        return self._texts

    @property
    def answers(self) -> list[tuple[str, int, int]]:
        """Of each row, as TokenDeltas name it. Made once, and never changed."""
        if self._answers is None:
            self._answers = [(each.request.request_id, each.index, each.prefill.num_cached) for each in self.sequences]
        return self._answers

    def in_order(self, order: np.ndarray) -> Steady:
        """The same rows, where those with drafts are put behind the others."""
        places = operator.itemgetter(*order.tolist())    # of two rows at least
        sequences, answers = list(places(self.sequences)), list(places(self.answers))
        constrained = [each for each in enumerate(sequences) if each[1].matcher is not None] if self.constrained else []
        return Steady(
            self.rows[order], self.plan_rows[order], self.num_tokens, self.want[order], sequences, constrained,
            self.sampled[order], goes_on=self.goes_on, _answers=answers,
        )


@dataclass(slots=True)
class Delta:
    """How the device's rows change with the next plan."""

    removed: list[int] = field(default_factory=list)
    added: list[RowAdded] = field(default_factory=list)
    appended: list[tuple[int, int, int, int]] = field(default_factory=list)
    block_ops: list[BlockOp] = field(default_factory=list)
