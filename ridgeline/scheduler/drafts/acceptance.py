"""How likely drafts are to be accepted: counted, by proposer and position, and for each row.

A rate is conditional: of the drafts whose predecessors were all accepted, the share that was accepted too. So the chance that
draft j of a row survives is the product of the first j rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ridgeline.draft_options import DRAFT_MODEL, MOST_DRAFTS
from ridgeline.scheduler.drafts.offer import EVIDENCE, FORCED
from ridgeline.scheduler.sequence import Sequence

# What is believed before anything was counted, and how many counts that is worth.
_PRIORS = {FORCED: (0.9, 0.9, 0.9, 0.9), "prediction": (0.6, 0.7, 0.8, 0.9), DRAFT_MODEL: (0.7, 0.7, 0.7, 0.7)}
_BY_EVIDENCE = (0.4, 0.5, 0.65, 0.8)
_PRIOR_WEIGHT = 2.0
_POSITION_WEIGHT = 8.0               # a position is believed to be like the one before it
_REMEMBERED = 500.0                  # counts of a position; then the old ones count half
_RENEWED = 2.0                       # counts that are kept of a source that has changed
_ROW_WEIGHT = 12.0                   # counts of the proposer that a row's own are weighed against, more if rows are alike, …
_BY_CHANCE = 3.0                     # … unless they surprise: by more than that, as a squared distance over the variance, …
_LEAST_SPREAD = 0.1                  # … which is at least this
_ROW_KEEPS = 0.95                    # of a row's counts with each drafted step …
_ROW_FADES = 0.997                   # … and with each step without drafts: a row that was given up is tried again
_FADES = _ROW_FADES ** np.arange(8192)                   # after n steps; the last is as good as nothing
_FADES_AT = _FADES.ctypes.data
_HONESTY_KEEPS = 0.97                # of the counts of a promise with each step …
_HONESTY_WEIGHT = 4.0                # … and what the belief in the chances is worth, in tokens
_IN_FLIGHT = 2                       # steps whose drafts of a row may be in flight at once
_FIRST_SLOTS = 64


class Source(NamedTuple):
    """Drafts that are counted together."""

    name: str                        # of the proposer
    evidence: int                    # its grade
    late: bool                       # proposed while tokens were in flight, so that the path had to guess them, too


class Sources:
    """Sources by number, so that a step's drafts can have theirs in an array: of each proposer its grades of evidence, of each
    grade first what was proposed with all tokens known. Half of a number, the `kind`, is what a row's own record is kept by."""

    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        self.listed = [Source(name, grade, late) for name in names for grade in range(EVIDENCE) for late in (False, True)]
        self.kinds = len(self.listed) // 2
        # Sources from this number on are the draft model's, which is the last proposer.
        self.first_on_device = sum(each.name != DRAFT_MODEL for each in self.listed)
        # Proposers whose offers say something where they are not drafted, too, and which sources are theirs. What grammars force
        # is sure, and what a draft model says has to be made first.
        self.watched_proposers = [number for number, name in enumerate(names) if name not in (FORCED, DRAFT_MODEL)]
        self.watched = np.array([number // (2 * EVIDENCE) in self.watched_proposers for number in range(len(self.listed))], bool)

    def all_of(self, source: np.ndarray, name: str) -> bool:
        """Are all of these the proposer's of that name?"""
        return all(self.listed[number].name == name for number in {*source.tolist()})

    def number(self, proposer: int, evidence: np.ndarray, late: np.ndarray) -> np.ndarray:
        return np.asarray(2 * (evidence + EVIDENCE * proposer) + late)


class Honesty:
    """Of many estimates, the best are mostly too good: what was promised lately is compared with what came."""

    def __init__(self) -> None:
        self._promised, self._kept = 0.0, 0.0            # drafts that were expected to survive, and those that did

    @property
    def share(self) -> float:
        return min(1.0, (self._kept + _HONESTY_WEIGHT) / (self._promised + _HONESTY_WEIGHT))

    def count(self, promised: float, kept: int) -> None:
        """Of one step; nothing of a step whose offers were all left out, so that what was given up is tried again."""
        self._promised = _HONESTY_KEEPS * self._promised + promised
        self._kept = _HONESTY_KEEPS * self._kept + kept


@dataclass(slots=True)
class Outcome:
    """What became of a step's drafts."""

    source: np.ndarray               # int64 [rows]: where they are from; -1: the row has ended, or was preempted
    tried: np.ndarray                # int64 [sources, positions]: drafts whose predecessors were all accepted …
    accepted: np.ndarray             # … and those that were accepted, too
    promised: float                  # drafts that were expected to survive …
    kept: int                        # … and how many of these rows' did
    total: int                       # drafts of all rows …
    right: int                       # … and those that were accepted, …
    right_by: np.ndarray             # … by position: int64


@dataclass(slots=True)
class _Counts:
    tried: list[float]               # by position
    accepted: list[float]
    rates: np.ndarray | None = None  # from these; None: not calculated yet


class RowRecords:
    """What the drafts of each row came to lately, by kind, which is a proposer and a grade of evidence: text that happens to
    repeat a pair of words says nothing about text that is copied, nor about what a draft model says. And the drafts that are in
    flight: where they are from, and how many are expected to survive.

    All of it is arrays, so that a step's rows are counted at once. A sequence has a slot in them until it is forgotten.
    """

    def __init__(self, kinds: int, native: Any = None) -> None:
        """`native`: the library (ops/cpu), which the engine hands over; None: all is done in numpy."""
        self.kinds, self.native = kinds, native
        self._slots: dict[Sequence, int] = {}
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._last: tuple[list[Sequence], np.ndarray] | None = None  # whose slots were asked for last, and which they are
        self.tried, self.accepted = np.zeros((2, _FIRST_SLOTS, kinds))
        self._step = np.zeros((_FIRST_SLOTS, kinds), np.int64)       # when it was last counted
        self._source = np.zeros((_FIRST_SLOTS, _IN_FLIGHT), np.int64)    # in flight, the oldest first …
        self._expected = np.zeros((_FIRST_SLOTS, _IN_FLIGHT))
        self.waiting = np.zeros(_FIRST_SLOTS, np.int64)              # … and of how many steps
        self._addresses = self._found_at()

    def __len__(self) -> int:
        return len(self._slots)

    most_in_flight, num_fades = _IN_FLIGHT, len(_FADES)
    weights = _ROW_WEIGHT, _BY_CHANCE, _LEAST_SPREAD

    @property
    def counted_at(self) -> tuple[int, ...]:
        """Addresses, for native code: drafts tried and accepted, when they were counted, steps in flight; and how counts fade."""
        tried, accepted, step, _, _, waiting = self._addresses
        return tried, accepted, step, waiting, _FADES_AT

    @property
    def in_flight_at(self) -> list[int]:
        """Addresses: sources, expected drafts, and steps in flight."""
        return self._addresses[3:]

    def slots(self, sequences: list[Sequence]) -> np.ndarray:
        """Of each sequence; one that has none gets one. Steps that repeat have the same list, which is not looked up again."""
        if self._last is not None and self._last[0] is sequences:
            return self._last[1]
        known = self._slots
        found = [known.get(sequence, -1) for sequence in sequences]
        if -1 in found:
            found = [self._add(sequence) if slot < 0 else slot for sequence, slot in zip(sequences, found, strict=True)]
        slots = np.array(found, np.int64)
        self._last = sequences, slots
        return slots

    def known(self, sequences: list[Sequence]) -> np.ndarray:
        """The same; -1: it has none."""
        if self._last is not None and self._last[0] is sequences:
            return self._last[1]
        known = self._slots
        return np.array([known.get(sequence, -1) for sequence in sequences], np.int64)

    def forget(self, sequence: Sequence) -> None:
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._free.append(slot)
            self._last = None

    def fade(self, slots: np.ndarray, kind: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tried and accepted drafts, as they count in this step."""
        cells = slots * self.kinds + kind
        kept = _FADES.take(step - self._step.take(cells), mode="clip")
        return self.tried.take(cells) * kept, self.accepted.take(cells) * kept

    def count(self, slots: np.ndarray, kind: np.ndarray, width: np.ndarray, accepted: np.ndarray, step: int) -> None:
        """Drafts have come back."""
        tried, kept = self.fade(slots, kind, step)
        self.tried[slots, kind] = tried * _ROW_KEEPS + np.minimum(width, accepted + 1)
        self.accepted[slots, kind] = kept * _ROW_KEEPS + accepted
        self._step[slots, kind] = step

    def send(self, slots: np.ndarray, source: np.ndarray, expected: np.ndarray) -> None:
        """These rows have drafts in the step that is planned."""
        place = self.waiting[slots]
        if int(place.max()) == _IN_FLIGHT:                       # of a step that was planned and did not run
            self._drop_oldest(slots[place == _IN_FLIGHT])
            place = self.waiting[slots]
        self._source[slots, place], self._expected[slots, place] = source, expected
        self.waiting[slots] = place + 1

    def arrive(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The oldest drafts in flight of these rows, which all have some: where they are from, and how many were expected."""
        source, expected = self._source[slots, 0], self._expected[slots, 0]
        self._drop_oldest(slots)
        return source, expected

    def outcome(self, slots: np.ndarray, width: np.ndarray, accepted: np.ndarray, step: int) -> Outcome:
        """The oldest drafts in flight of these rows have come back; slot -1: of none."""
        if self.native is None:
            return self.outcome_reference(slots, width, accepted, step)
        rows, cells = len(slots), 2 * self.kinds * MOST_DRAFTS
        numbers = np.zeros(2 * cells + MOST_DRAFTS + rows + 4, np.int64)         # the last four are doubles
        at = numbers.ctypes.data
        source_at = at + 8 * (2 * cells + MOST_DRAFTS)
        self.native.draft_outcome(
            slots.tobytes(), width.astype(np.int64).tobytes(), accepted.astype(np.int64).tobytes(), *self._addresses,
            _FADES_AT, source_at, at, at + 8 * cells, at + 16 * cells, source_at + 8 * rows, rows, self.kinds, _IN_FLIGHT,
            MOST_DRAFTS, step, len(_FADES), _ROW_KEEPS,
        )
        tried, own = numbers[: 2 * cells].reshape(2, 2 * self.kinds, MOST_DRAFTS)
        right_by, source = numbers[2 * cells : 2 * cells + MOST_DRAFTS], numbers[-rows - 4 : -4]
        promised, kept, total, right = numbers[-4:].view(np.float64).tolist()
        return Outcome(source, tried, own, promised, int(kept), int(total), int(right), right_by)

    def outcome_reference(self, slots: np.ndarray, width: np.ndarray, accepted: np.ndarray, step: int) -> Outcome:
        """The same in numpy, where there is no native library."""
        every = int(width.sum()), int(accepted.sum()), beyond(accepted, MOST_DRAFTS)
        there = (slots >= 0) & (self.waiting[slots] > 0)
        slots, width, accepted = slots[there], width[there], accepted[there]
        source, counts = np.full(len(there), -1, np.int64), np.zeros((2, 2 * self.kinds, MOST_DRAFTS), np.int64)
        if not len(slots):
            return Outcome(source, counts[0], counts[1], 0.0, 0, *every)
        own, expected = self.arrive(slots)
        source[there] = own
        for number in set(own.tolist()):
            mine = own == number
            counts[0, number] = beyond(np.minimum(width[mine], accepted[mine] + 1), MOST_DRAFTS)
            counts[1, number] = beyond(accepted[mine], MOST_DRAFTS)
        self.count(slots, own >> 1, width, accepted, step)
        kept = int(accepted[expected > 0].sum())
        return Outcome(source, counts[0], counts[1], float(expected.cumsum()[-1]), kept, *every)

    def _found_at(self) -> list[int]:
        tables = (self.tried, self.accepted, self._step, self._source, self._expected, self.waiting)
        return [each.ctypes.data for each in tables]

    def _drop_oldest(self, slots: np.ndarray) -> None:
        for table in (self._source, self._expected):
            for place in range(_IN_FLIGHT - 1):
                table[slots, place] = table[slots, place + 1]
        self.waiting[slots] -= 1

    def _add(self, sequence: Sequence) -> int:
        slot = self._slots.get(sequence)                         # it may be listed twice
        if slot is not None:
            return slot
        if not self._free:
            self._grow()
        slot = self._slots[sequence] = self._free.pop()
        self.tried[slot] = self.accepted[slot] = self._step[slot] = self.waiting[slot] = 0
        return slot

    def _grow(self) -> None:
        size = len(self.waiting)
        self._free = list(range(2 * size - 1, size - 1, -1))
        self.tried, self.accepted, self._step, self._source, self._expected, self.waiting = (
            np.concatenate([each, np.zeros_like(each)])
            for each in (self.tried, self.accepted, self._step, self._source, self._expected, self.waiting)
        )
        self._addresses = self._found_at()


class Acceptance:
    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._counts: dict[Source, _Counts] = {}

    def count(self, source: Source, tried: np.ndarray, accepted: np.ndarray) -> None:
        """Drafts have come back: by position, those whose predecessors were all accepted, and those that were accepted, too."""
        counts = self._of(source)
        for place, (number, right) in enumerate(zip(tried.tolist(), accepted.tolist(), strict=True)):
            if not number:                               # nor behind it
                break
            counts.tried[place] += number
            counts.accepted[place] += right
        counts.rates = None

    def renew(self, source: Source, tried: float, accepted: float) -> None:
        """It has changed: of what was counted little is kept, and this comes to it, of the first position."""
        counts = self._of(source)
        keep = min(1.0, _RENEWED / max(counts.tried[0], 1e-9))
        counts.tried = [keep * each for each in counts.tried]
        counts.accepted = [keep * each for each in counts.accepted]
        counts.tried[0] += tried
        counts.accepted[0] += accepted
        counts.rates = None

    def rates(self, source: Source) -> np.ndarray:
        """float [positions]: the chance of each draft, given that those before it are accepted."""
        counts = self._of(source)
        if counts.rates is None:
            counts.rates = self._calculated(source, counts)
        return counts.rates

    @property
    def best(self) -> float:
        """The largest first rate of any source that is known: no row's drafts promise more."""
        return max((float(self.rates(source)[0]) for source in self._counts), default=1.0)

    def _of(self, source: Source) -> _Counts:
        counts = self._counts.get(source)
        if counts is None:
            counts = self._counts[source] = _Counts([0.0] * self._positions, [0.0] * self._positions)
        return counts

    def _calculated(self, source: Source, counts: _Counts) -> np.ndarray:
        rate, weight = _PRIORS.get(source.name, _BY_EVIDENCE)[source.evidence], _PRIOR_WEIGHT
        rates = np.empty(self._positions)
        for place, (tried, accepted) in enumerate(zip(counts.tried, counts.accepted, strict=True)):
            if not tried and place:
                rates[place:] = rate                     # where nothing was counted: as the one before
                break
            if tried > _REMEMBERED:
                tried, accepted = counts.tried[place], counts.accepted[place] = tried / 2, accepted / 2
            rates[place] = rate = (accepted + weight * rate) / (tried + weight)
            weight = _POSITION_WEIGHT
        return rates


def survival(
    rates: np.ndarray, tried: np.ndarray, accepted: np.ndarray, lengths: np.ndarray, native: Any = None
) -> np.ndarray:
    """float [offers, positions]: the chance that each draft is accepted, 0 beyond an offer's length. A proposer's rates, each
    offer's in its row, or one row for all, are weighed against what the row's own drafts came to. Rows differ: some copy, others
    do not. So the proposer's rates count little where a row's first few drafts came to much less than they say."""
    positions = rates.shape[1]
    if native is not None:
        chances = np.empty((len(tried), positions))
        native.draft_chances(
            rates.tobytes(), tried.tobytes(), accepted.tobytes(), lengths.tobytes(), chances.ctypes.data, *chances.shape,
            len(rates), _ROW_WEIGHT, _BY_CHANCE, _LEAST_SPREAD,
        )
        return chances
    first = rates[:, 0]
    variance = first * (1 - first)                       # of one draft
    missing, by_chance = first * tried - accepted, tried * variance
    surprise = np.maximum(missing, 0.0) ** 2 / np.maximum(by_chance, _LEAST_SPREAD)      # chance alone makes 1 of it, rarely 3
    weight = (_alike(variance, tried, missing, by_chance) / np.maximum(surprise / _BY_CHANCE, 1.0))[:, None]
    found = ((accepted[:, None] + weight * rates) / (tried[:, None] + weight)).cumprod(axis=1)
    if int(lengths.min()) < positions:
        found *= np.arange(positions) < lengths[:, None]
    return np.asarray(found)


def _alike(variance: np.ndarray, tried: np.ndarray, missing: np.ndarray, by_chance: np.ndarray) -> float:
    """How many counts of a row the proposer's rates are worth: many, where chance alone explains how rows differ.

        variance of a row's counts  =  tried · p (1 - p)  +  tried² · how much rows differ         worth  =  p (1 - p) / that

    To the difference its own uncertainty is added: few rows, or rows with few counts, say little about it."""
    squares, rows = float(tried @ tried), len(tried)
    if not squares:
        return _ROW_WEIGHT
    expected = float(by_chance.sum())
    differ = max(0.0, float(missing @ missing) - expected)
    unsure = expected * (2 / rows) ** 0.5
    return max(_ROW_WEIGHT, float(variance.sum()) / len(variance) * squares / max(differ + unsure, 1e-9))


def beyond(values: np.ndarray, positions: int) -> np.ndarray:
    """By position: how many of the values are larger."""
    return len(values) - np.bincount(values, minlength=positions + 1).cumsum()[:positions]
