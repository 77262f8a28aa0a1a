"""Weighs offers: how many drafts of each may be verified, and how likely each is to be accepted.

All offers of a step are weighed at once, by native code (ops/cpu/src/drafted.c) if the engine has handed it over, else in numpy,
which is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.native_room import NativeRoom
from ridgeline.scheduler.drafting import DecodingRows
from ridgeline.scheduler.drafts.acceptance import Acceptance, RowRecords, Sources, survival
from ridgeline.scheduler.drafts.offer import EVIDENCE, Paths
from ridgeline.scheduler.drafts.shape_times import Tables
from ridgeline.scheduler.sequence import Sequence

_FIRST = 2                           # drafts of a row before any came back, unless much speaks for them


@dataclass(slots=True)
class Offers:
    """Proposers' offers; several of a row, where there are several proposers."""

    paths: Paths
    length: np.ndarray               # drafts that the row may verify of them
    source: np.ndarray               # number of the Source
    first_on_device: int             # sources from this number on are the draft model's
    slots: np.ndarray                # of the row's record …
    tried: np.ndarray                # … and what it says
    accepted: np.ndarray
    chances: np.ndarray              # float [offers, positions]: of each draft to be accepted

    @property
    def places(self) -> np.ndarray:
        return self.paths.places

    @property
    def on_device(self) -> np.ndarray:
        """bool: the draft model is to make them."""
        return self.source >= self.first_on_device

    @property
    def has_some_on_device(self) -> bool:
        return int(self.source.max()) >= self.first_on_device

    def whole(self, rows: int, room: int) -> np.ndarray:
        """int64 [rows]: widths of all drafts there are, as far as there is room."""
        lengths = np.zeros(rows, np.int64)
        lengths[self.places] = self.length
        return np.minimum(lengths, np.maximum(0, room - (np.cumsum(lengths) - lengths)))

    def num_offering(self, width: np.ndarray) -> int:
        """Offers whose rows have drafts."""
        return int(np.count_nonzero(width if len(width) == len(self.places) else width[self.places]))

    def of(self, chosen: np.ndarray) -> Offers:
        return Offers(
            self.paths.of(chosen), self.length[chosen], self.source[chosen], self.first_on_device, self.slots[chosen],
            self.tried[chosen], self.accepted[chosen], self.chances[chosen],
        )


class Weighing:
    """`adaptive` False: rows of which nothing is known may have as many drafts as others. `native`: see RowRecords."""

    def __init__(self, records: RowRecords, sources: Sources, acceptance: Acceptance, native: Any, adaptive: bool) -> None:
        self.native = native
        self._records, self._sources, self._acceptance, self._adaptive = records, sources, acceptance, adaptive
        self._rates = np.zeros((len(sources.listed), MOST_DRAFTS))
        self._rates_at = self._rates.ctypes.data
        self._room, self._scratch = NativeRoom(1024), NativeRoom(1024)

    def weigh(self, rows: DecodingRows, allowed: np.ndarray, paths: Paths, source: np.ndarray, step: int) -> Offers:
        """`allowed`: drafts of each row."""
        found = sorted(set(source.tolist()))
        if self.native is None:
            return self._arranged(rows, allowed, paths, source, step, found)
        for number in found:
            self._rates[number] = self._acceptance.rates(self._sources.listed[number])
        records, count = self._records, len(source)
        slots = records.slots(rows.sequences)
        if self._room.size < (4 + 2 * MOST_DRAFTS) * count:
            self._room = NativeRoom((4 + 2 * MOST_DRAFTS) * count)
        at = self._room.address
        positions = self.native.arrange_offers(
            _int64(paths.places), _int64(paths.ends), _int64(source), rows.pending.tobytes(), _int64(allowed), slots.tobytes(),
            *records.counted_at, self._rates_at, at, count, records.kinds, MOST_DRAFTS, step, records.num_fades, EVIDENCE,
            self._sources.first_on_device, _FIRST if self._adaptive else 0,
        )
        numbers = self._room.numbers
        begin = (4 + positions) * count
        self.native.draft_chances(
            at + 32 * count, at + 16 * count, at + 24 * count, at, at + 8 * begin, count, positions, 2, *records.weights
        )
        length, own = self._room.copy(2 * count).reshape(2, count)
        tried, accepted = self._room.copy(2 * count, 2 * count).view(np.float64).reshape(2, count)
        chances = numbers[begin : begin + count * positions].copy().view(np.float64).reshape(count, positions)
        return Offers(paths, length, source, self._sources.first_on_device, own, tried, accepted, chances)

    def _arranged(
        self, rows: DecodingRows, allowed: np.ndarray, paths: Paths, source: np.ndarray, step: int, found: list[int]
    ) -> Offers:
        records, places = self._records, paths.places
        slots, allowed, pending = records.slots(rows.sequences)[places], allowed[places], rows.pending[places]
        records.waiting[slots[pending == 0]] = 0         # nothing is in flight: blocks were short, or memory ran out
        tried, accepted = records.fade(slots, source >> 1, step)
        length = np.minimum(paths.ends - pending, allowed)
        if self._adaptive:                               # a draft model is alike for all rows
            new = (tried == 0) & ((source >> 1) % EVIDENCE < EVIDENCE - 1) & (source < self._sources.first_on_device)
            length = np.where(new, np.minimum(length, _FIRST), length)
        rates = np.array([self._acceptance.rates(self._sources.listed[number])[: int(length.max())] for number in found])
        chances = survival(rates[np.searchsorted(found, source)], tried, accepted, length)
        return Offers(paths, length, source, self._sources.first_on_device, slots, tried, accepted, chances)

    def best_widths(
        self, offers: Offers, tables: Tables, rows: int, room: int, honesty: float, least: float, promised: float,
        curiosity: float,
    ) -> np.ndarray:
        """int64 [rows]: drafts that each verifies; native. See Controller._best."""
        count, positions = offers.chances.shape
        if self._scratch.size < (needed := 3 * count * positions + rows):
            self._scratch = NativeRoom(needed)
        at = self._scratch.address
        self.native.choose_drafts(
            offers.chances.tobytes(), _int64(offers.places), tables.bounds, tables.sizes, tables.seconds, tables.sure, at,
            at + 8 * rows, count, positions, rows, room, tables.num_bounds, tables.num_sizes, honesty, least, promised, curiosity,
        )
        return self._scratch.copy(rows)

    def send(self, offers: Offers, width: np.ndarray, promise: bool) -> None:
        """Rows have that many drafts in the step that is planned. `promise`: what they are expected to bring is compared with
        what comes, but not of new rows."""
        count, positions = offers.chances.shape
        if self.native is not None and not self.native.send_drafts(
            _int64(offers.places), offers.slots.tobytes(), _int64(offers.source), width.tobytes(), offers.chances.tobytes(),
            offers.tried.tobytes(), *self._records.in_flight_at, count, positions, self._records.most_in_flight, promise,
        ):
            return
        own = width[offers.places]
        expected = (offers.chances * (np.arange(positions) < own[:, None])).cumsum(axis=1)[:, -1]
        expected *= promise * (offers.tried > 0)         # what is believed of a new row is no promise
        some = own.nonzero()[0]
        self._records.send(offers.slots[some], offers.source[some], expected[some])


def _int64(array: np.ndarray) -> bytes:
    return array.astype(np.int64, copy=False).tobytes()


def cut(paths: Paths, constrained: dict[int, Sequence]) -> None:
    """What a grammar refuses could never be accepted."""
    for number, place in enumerate(paths.places.tolist()):
        sequence = constrained.get(place)
        if sequence is not None and sequence.matcher is not None:
            end = paths.ends[number] = sequence.matcher.allowed(paths.tokens[number, : paths.ends[number]].tolist())
            paths.tokens[number, end:] = -1


def joined(found: list[tuple[Paths, np.ndarray]]) -> tuple[Paths, np.ndarray]:
    """Several proposers' offers, row by row; of a row in the order of the proposers."""
    places = np.concatenate([paths.places for paths, _ in found])
    reach = max(paths.tokens.shape[1] for paths, _ in found)
    tokens, first = np.full((len(places), reach), -1, np.int32), 0
    for paths, _ in found:
        tokens[first : first + len(paths.places), : paths.tokens.shape[1]] = paths.tokens
        first += len(paths.places)
    ends, evidence = (np.concatenate([getattr(paths, name) for paths, _ in found]) for name in ("ends", "evidence"))
    order = np.argsort(places, kind="stable")
    return Paths(places, tokens, ends, evidence).of(order), np.concatenate([source for _, source in found])[order]


def best_of_each_row(offers: Offers, pass_share: float) -> Offers:
    """The offer with the most drafts that are expected to survive; of equals the first proposer's. A draft model takes time: each
    of its drafts costs `pass_share` of a token, which a step without drafts would say meanwhile."""
    places, chances = offers.places, offers.chances
    if (places[1:] > places[:-1]).all():                 # one each
        return offers
    survive, made = chances.sum(axis=1), offers.on_device
    if offers.has_some_on_device:
        paid = np.cumsum(chances[made], axis=1) - pass_share * np.arange(1, chances.shape[1] + 1)
        survive[made] = paid.max(axis=1)
    order = np.lexsort((-survive, places))
    ranked = places[order]
    first = np.ones(len(order), bool)
    first[1:] = ranked[1:] != ranked[:-1]
    chosen = order[first]
    return offers.of(chosen)


def by_chance(chances: np.ndarray, least: float) -> np.ndarray:
    """Places in the flat array with a chance above `least`, the best first; of equals the earlier position: rows get prefixes."""
    flat = chances.ravel()
    order = (-flat).argsort(kind="stable")
    return order[: int(np.count_nonzero(flat > least))]
