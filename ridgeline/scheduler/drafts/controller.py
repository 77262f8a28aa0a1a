"""Decides, step by step, how many drafts each row verifies. None at all is a choice.

Verifying a draft costs time, and pays one token if it survives. All drafts of a step compete: sorted by their chance to survive,
the best B of them are verified, where

    B = argmax (rows + sum of the best B chances) / T(rows + B)

T is the measured time of a step with that many tokens (shape_times.py), chances are counted (acceptance.py). The time of a draft
model comes on top of it (small_model.py). While drafts do not pay, a step with some is tried rarely, to notice when they would.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import numpy as np

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.messages import StepResult
from ridgeline.scheduler.drafting import DecodingRows, Drafts
from ridgeline.scheduler.drafts.acceptance import Acceptance, RowRecord, Source, beyond, survival
from ridgeline.scheduler.drafts.offer import Proposer
from ridgeline.scheduler.drafts.shape_times import ShapeTimes
from ridgeline.scheduler.drafts.small_model import SmallModel
from ridgeline.scheduler.sequence import Sequence

PROBE_EVERY = 200                    # steps without drafts before a step with some is tried
_PROBE = 4                           # drafts of such a step, at least; and …
_PROBE_SHARE = 8                     # … one for each eighth row
_LEAST_CHANCE = 0.02                 # a draft below it is not verified, even where padding makes it free
_GAIN = 1.01                         # drafts must promise this much more than none
_OFF_EVERY = 500                     # steps with drafts before one without is taken, to measure it again
_CURIOUS_EVERY = 32                  # steps: then sizes that were never measured …
_CURIOSITY = 1.1                     # … are taken for that much faster, and so one after the other is tried
_HONESTY_KEEPS = 0.97                # of the counts behind _honesty with each drafted step …
_HONESTY_WEIGHT = 4.0                # … and what the belief in the chances is worth, in tokens
_LOOK_AGAIN = 32                     # steps for which _could_pay() is believed


@dataclass(slots=True)
class DraftCounters:
    drafts: int = 0                  # rows of a step that had drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: np.ndarray = field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    probes: int = 0                  # steps that had drafts only to learn


class Controller:
    """A Drafter. `most` drafts of a row at most; `adaptive` False: each row verifies all it is offered (to measure with)."""

    active = True

    def __init__(self, proposers: Several[Proposer], times: ShapeTimes, most: int, adaptive: bool = True) -> None:
        self.counters = DraftCounters()
        self.times = times
        self.acceptance = Acceptance(MOST_DRAFTS)
        self._proposers = tuple(proposers)
        self._most = min(most, MOST_DRAFTS)
        self._adaptive = adaptive
        self._records: dict[Sequence, RowRecord] = {}    # until ended()
        self._sources: dict[tuple[str, int, bool], Source] = {}      # to make one takes longer than to find it
        self._predicted: dict[Sequence, tuple[int, int]] = {}    # of rows with a prediction: its drafts accepted and rejected
        self._step = 0
        self._last_drafted = 0                           # steps
        self._last_off = 0
        self._promised, self._kept = 0.0, 0.0            # drafts that were expected to survive lately, and those that did
        self._looked = (0, 0, 0, False)                  # what _could_pay() said last: of which rows and keys, and in which step

    @property
    def _small(self) -> SmallModel | None:
        """The draft model: what is free comes before it."""
        last = self._proposers[-1] if self._proposers else None
        return last if isinstance(last, SmallModel) else None

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, rows: DecodingRows) -> Drafts | None:
        self._step += 1
        if rows.room <= 0 or not rows.most.any():
            return None
        if self._adaptive and not self._knows_off(len(rows.sequences), rows.keys):
            return None
        since = self._step - self._last_drafted
        probing = self._adaptive and since >= PROBE_EVERY
        if self._adaptive and (small := self._small) is not None:
            probing |= small.look(rows, self.times, self._step, since, probing)
        if self._adaptive and not probing and not self._could_pay(len(rows.sequences), rows.keys):
            return None
        offers = self._offers(rows)
        if not offers:
            return None
        chances = self._chances(offers)
        if len(self._proposers) > 1:
            offers, chances = _best_of_each_row(offers, chances, self._pass_share(len(rows.sequences), rows.keys))
        width = self._widths(rows, offers, chances, probing)
        if not width.any():
            return None
        self._last_drafted = self._step
        return self._drafts(rows, offers, chances, width)

    def _offers(self, rows: DecodingRows) -> list[_Offered]:
        """Of every proposer, for each row that may have drafts."""
        made, step, records, sources, place = [], self._step, self._records, self._sources, -1
        most_of_each = np.minimum(rows.most, self._most).tolist()
        for sequence, most, pending in zip(rows.sequences, most_of_each, rows.pending.tolist(), strict=True):
            place += 1
            if most <= 0:
                continue
            for proposer in self._proposers:
                offer = proposer.propose(sequence, most + pending)
                if offer is None:
                    continue
                tokens = offer.tokens
                if sequence.matcher is not None:
                    del tokens[sequence.matcher.allowed(tokens) :]       # the rest could never be accepted
                length = len(tokens) - pending
                if length <= 0:
                    continue
                record = records.get(sequence)
                if record is None:
                    record = records[sequence] = RowRecord(step=step)
                if record.step != step:
                    record.fade(step)
                if not pending:                          # nothing is in flight: blocks were short, or memory ran out
                    record.waiting.clear()
                key = (offer.source, offer.evidence, pending > 0)
                source = sources.get(key) or sources.setdefault(key, Source(*key))
                own = sequence if offer.on_device else None
                made.append(_Offered(place, tokens, length if length < most else most, source, record, own))
        return made

    def _chances(self, offers: list[_Offered]) -> np.ndarray:
        """float [offers, positions]"""
        found = {id(each.source): each.source for each in offers}
        numbers = {key: number for number, key in enumerate(found)}
        which = [numbers[id(each.source)] for each in offers]
        rates = np.stack([self.acceptance.rates(source) for source in found.values()])
        tried = np.array([each.record.tried for each in offers])
        accepted = np.array([each.record.accepted for each in offers])
        return survival(rates[which], tried, accepted, np.array([each.length for each in offers]))

    def _widths(self, rows: DecodingRows, offers: list[_Offered], chances: np.ndarray, probing: bool) -> np.ndarray:
        """int64 [D]: drafts that each row verifies."""
        count = len(rows.sequences)
        owners = np.array([each.place for each in offers])
        if not self._adaptive:
            lengths = np.zeros(count, np.int64)
            lengths[owners] = [each.length for each in offers]
            return np.minimum(lengths, np.maximum(0, rows.room - (np.cumsum(lengths) - lengths)))
        flat = chances.ravel()
        order = np.argsort(-flat, kind="stable")                 # of equal chances the earlier position: rows get prefixes
        order = order[: min(rows.room, int(np.count_nonzero(flat)))]
        enough = order[: int(np.count_nonzero(flat[order] >= _LEAST_CHANCE))]
        best, small = 0, self._small
        if small is not None and any(each.made_for is not None for each in offers):
            promised = 0.0
            for some, costs in small.choices(count, [each.made_for for each in offers], enough, chances.shape[1]):
                number, rate = self._best(np.cumsum(flat[some]) * self._honesty, count, rows.keys, costs)
                if number and rate > promised:
                    best, promised, order = number, rate, some
        else:
            best = self._best(np.cumsum(flat[enough]) * self._honesty, count, rows.keys)[0]
        if not best and probing:
            best = min(len(order), max(_PROBE, count // _PROBE_SHARE))
            self.counters.probes += 1
        return np.bincount(owners[order[:best] // chances.shape[1]], minlength=count)

    @property
    def _honesty(self) -> float:
        """The share of the promised tokens that came: of many estimates, the best are mostly too good."""
        return min(1.0, (self._kept + _HONESTY_WEIGHT) / (self._promised + _HONESTY_WEIGHT))

    def _best(self, gained: np.ndarray, rows: int, keys: int, costs: np.ndarray | None = None) -> tuple[int, float]:
        """How many drafts promise the most tokens a second, and how many these are. `gained`: tokens expected from the best 1,
        2, … of them; `costs`: seconds beside the step's own, of a draft model.

        Padding is free, so only numbers that fill a size are compared, and all drafts there are.
        """
        best, promised, most = 0, _GAIN * rows / self.times.seconds(rows, keys), len(gained)
        curious = self._step % _CURIOUS_EVERY == 0
        for size in self.times.sizes:
            number = min(size - rows, most)
            if number <= 0:
                continue
            seconds = self.times.seconds(rows + number, keys) + (0.0 if costs is None else float(costs[number - 1]))
            rate = (rows + float(gained[number - 1])) / seconds
            if curious and not self.times.measured(rows + number, keys):
                rate *= _CURIOSITY
            if rate > promised:
                best, promised = number, rate
            if number == most:
                break
        return best, promised

    def _pass_share(self, rows: int, keys: int) -> float:
        """A pass of the draft model against a step; 0: there is none."""
        small = self._small
        return 0.0 if small is None else small.pass_seconds(rows) / self.times.seconds(rows, keys)

    def _knows_off(self, rows: int, keys: int) -> bool:
        """Was a step without drafts measured at this size, and not too long ago? All gains are relative to it."""
        if self._step - self._last_off < _OFF_EVERY and self.times.measured(rows, keys):
            return True
        self._last_off = self._step
        return False

    def _could_pay(self, rows: int, keys: int) -> bool:
        """Would drafts pay if every row had as many as it may, all as good as the best that were counted? If not, no proposer is
        asked: steps cost the host what they cost without drafts."""
        size, bits = self.times.size_of(rows), keys.bit_length()
        known, of_keys, since, pays = self._looked
        if (known, of_keys) != (size, bits) or self._step - since >= _LOOK_AGAIN:
            chances = self.acceptance.best ** np.arange(1, self._most + 1)
            pays = self._best(np.cumsum(np.repeat(chances, rows)), rows, keys)[0] > 0
            self._looked = size, bits, self._step, pays
        return pays

    def _drafts(self, rows: DecodingRows, offers: list[_Offered], chances: np.ndarray, width: np.ndarray) -> Drafts:
        reach = int((width + rows.pending).max())
        none = [-1] * reach
        paths = [none] * len(width)
        own = width[[offered.place for offered in offers]]
        expected = np.cumsum(chances, axis=1)[np.arange(len(offers)), np.maximum(own, 1) - 1]
        for offered, drafts, survive in zip(offers, own.tolist(), expected.tolist(), strict=True):
            if drafts:
                paths[offered.place] = offered.tokens[:reach] + none[len(offered.tokens) :]
                offered.record.waiting.append((offered.source, survive))
        on_device = self._made_there(offers, width)
        if on_device is not None and on_device[width > 0].all():
            return Drafts(width.astype(np.int32), None, on_device)
        return Drafts(width.astype(np.int32), np.array(paths, np.int32), on_device)

    def _made_there(self, offers: list[_Offered], width: np.ndarray) -> np.ndarray | None:
        """bool [D]: rows whose drafts the draft model makes; None: it makes none."""
        small = self._small
        if small is None:
            return None
        on_device = np.zeros(len(width), bool)
        for offered in offers:
            if offered.made_for is not None and width[offered.place]:
                on_device[offered.place] = True
                small.drafted(offered.made_for)
        return on_device if on_device.any() else None

    # -- results -------------------------------------------------------------------------------------------------------

    def observe(self, sequences: list[Sequence], width: np.ndarray, accepted: np.ndarray, seconds: float) -> None:
        self._count(width, accepted)
        places: dict[Source, list[int]] = {}
        promised = 0.0
        for place, (sequence, own, kept) in enumerate(zip(sequences, width.tolist(), accepted.tolist(), strict=True)):
            record = self._records.get(sequence)
            if record is None or not record.waiting:     # it ended, or was preempted
                continue
            source, expected = record.waiting.pop(0)
            promised += expected
            record.count(own, kept, self._step)
            places.setdefault(source, []).append(place)
            if source.name == "prediction":
                before = self._predicted.get(sequence, (0, 0))
                self._predicted[sequence] = before[0] + kept, before[1] + own - kept
        kept = 0
        for source, listed in places.items():
            self.acceptance.count(source, width[listed], accepted[listed])
            kept += int(accepted[listed].sum())
        self._promised = _HONESTY_KEEPS * self._promised + promised
        self._kept = _HONESTY_KEEPS * self._kept + kept

    def _count(self, width: np.ndarray, accepted: np.ndarray) -> None:
        counters = self.counters
        counters.drafts += len(width)
        counters.draft_tokens += int(width.sum())
        counters.accepted_tokens += int(accepted.sum())
        counters.accepted_per_position += beyond(accepted, MOST_DRAFTS)

    def timed(self, num_tokens: int, keys: int, seconds: float) -> None:
        self.times.observe(num_tokens, keys, seconds)

    def proposed(self, rows: int, width: int, result: StepResult) -> None:
        if (small := self._small) is not None and result.typical:
            small.took(rows, width, result.draft_seconds, result.caught_up, result.catch_up_seconds)

    def predicted(self, sequence: Sequence) -> tuple[int, int]:
        """Drafts from the client's prediction so far: accepted, and rejected."""
        return self._predicted.get(sequence, (0, 0))

    def ended(self, sequence: Sequence) -> None:
        self._records.pop(sequence, None)
        self._predicted.pop(sequence, None)
        for proposer in self._proposers:
            proposer.ended(sequence)


@dataclass(slots=True)
class _Offered:
    """A proposer's offer for one row."""

    place: int                       # of the row
    tokens: list[int]
    length: int                      # drafts that the row may verify of it
    source: Source
    record: RowRecord                # of the row
    made_for: Sequence | None = None # the row's, if the device makes its drafts


def _best_of_each_row(
    offers: list[_Offered], chances: np.ndarray, pass_share: float = 0.0
) -> tuple[list[_Offered], np.ndarray]:
    """The offer with the most drafts that are expected to survive; of equals the first proposer's. A draft model takes time: each
    costs `pass_share` of a token, which a step without drafts would say meanwhile."""
    best: dict[int, int] = {}
    survive = chances.sum(axis=1)
    if pass_share:
        made = np.array([offered.made_for is not None for offered in offers])
        paid = np.cumsum(chances[made], axis=1) - pass_share * np.arange(1, chances.shape[1] + 1)
        survive[made] = paid.max(axis=1)
    expected = survive.tolist()
    for number, offered in enumerate(offers):
        other = best.get(offered.place)
        if other is None or expected[number] > expected[other]:
            best[offered.place] = number
    chosen = list(best.values())
    return [offers[number] for number in chosen], chances[chosen]
