"""Decides, step by step, how many drafts each row verifies. None at all is a choice.

Verifying a draft costs time, and pays one token if it survives. All drafts of a step compete: sorted by their chance to survive,
the best B of them are verified, where

    B = argmax (rows + sum of the best B chances) / T(rows + B)

T is the measured time of the CUDA graph that such a step needs (shape_times.py): by its tokens, and by the most queries of a row
that it is made for. The time of a draft model comes on top of it (small_model.py). Chances are counted (acceptance.py). While
drafts do not pay, a step with some is tried rarely, to notice when they would.

A step has hundreds of drafts, and this runs once for each: what is counted by row is in arrays, and only proposers are asked one
row after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.messages import StepResult
from ridgeline.scheduler.drafting import DecodingRows, Drafts
from ridgeline.scheduler.drafts.acceptance import Acceptance, Honesty, RowRecords, Sources
from ridgeline.scheduler.drafts.looking import OFF_RUN, OFF_SOON, Search
from ridgeline.scheduler.drafts.offer import FORCED, Paths, Proposer
from ridgeline.scheduler.drafts.shape_times import Pace, ShapeTimes, Table
from ridgeline.scheduler.drafts.small_model import SmallModel
from ridgeline.scheduler.drafts.watch import BESIDE
from ridgeline.scheduler.drafts.weighing import Offers, Weighing, best_of_each_row, by_chance, cut, joined
from ridgeline.scheduler.sequence import Sequence

PROBE_EVERY = 200                    # steps without drafts before a step with some is tried
_PROBE = 4                           # drafts of such a step, or …
_PROBE_SHARE = 8                     # … one for each eighth row, …
_PROBE_COST = 1.25                   # … if it takes no longer than that, relative to one without; one otherwise
_LEAST_CHANCE = 0.02                 # a draft below it is not verified, even where padding makes it free
_GAIN = 1.02                         # drafts must promise this much more than none, …
_RETRY = 0.006                       # … but less with each step since there were some: what they took then may not hold any more
_OFF_COST = 0.003                    # steps without drafts are measured again as soon as they cost no more of the time, but …
_OFF_LATEST = 500                    # … no later than this
_OFF_LOOK = 8                        # steps between two looks at what they cost: a look takes the host's time
_DOUBTFUL = 1.3                      # times longer than a step with drafts: then a step without was slow when it was measured.
                                     # A spell in which a clock is low makes less of it
_CURIOUS_EVERY = 32                  # steps: then sizes that were never measured …
_CURIOSITY = 1.1                     # … are taken for that much faster, and so one after the other is tried
_LOOK_AGAIN = 32                     # steps for which _could_pay() is believed
_NEVER = (0, 0, False, 0, False)     # it was not asked: size, keys, waited, step, pays


@dataclass(slots=True)
class DraftCounters:
    drafts: int = 0                  # rows of a step that had drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: np.ndarray = field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    probes: int = 0                  # steps that had drafts only to learn


class Controller:
    """A Drafter. `most` drafts of a row at most; `adaptive` False: each row verifies all it is offered (to measure with);
    `native`: see RowRecords; `stages`: of the pipeline."""

    active = True

    def __init__(
        self, proposers: Several[Proposer], pace: Pace, most: int, adaptive: bool = True, native: Any = None,
        stages: int = 1,
    ) -> None:
        self.counters = DraftCounters()
        self.pace = pace
        self.acceptance = Acceptance(MOST_DRAFTS)
        self.proposers = tuple(proposers)
        self._most = min(most, MOST_DRAFTS)
        self._adaptive = adaptive
        self._sources = Sources(each.name for each in self.proposers)
        self._records = RowRecords(self._sources.kinds, native)
        self._weighing = Weighing(self._records, self._sources, self.acceptance, native, adaptive)
        self._honesty = Honesty()
        self._predicted: dict[Sequence, tuple[int, int]] = {}    # of rows with a prediction: its drafts accepted and rejected
        self._step = 0
        self._search = Search(off_run=OFF_RUN + stages - 1)              # results come that much later
        self._looked = _NEVER                            # what _could_pay() said last: of which rows, and in which step

    @property
    def times(self) -> ShapeTimes:
        """Of steps like the one that is planned."""
        return self.pace.now

    @property
    def _small(self) -> SmallModel | None:
        """The draft model: what is free comes before it."""
        last = self.proposers[-1] if self.proposers else None
        return last if isinstance(last, SmallModel) else None

    # -- planning ------------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Not where drafts are not looked for, and not in steps that are to show what steps without drafts take."""
        looks = self.will_look and (not self._adaptive or not self._search.off_left)
        return self.active and looks and any(proposer.name == FORCED for proposer in self.proposers)

    @property
    def will_look(self) -> bool:
        return not self._adaptive or self._search.will_look

    def awake(self) -> bool:
        """Looking for drafts takes the host's time. Where there were none for long, it does not look in every step."""
        if self._adaptive and not self._search.due():
            self._step += 1
            self._search.quiet += 1
            return False
        return True

    def plan(self, rows: DecodingRows) -> Drafts | None:
        """With a prompt beside them, rows have no drafts if a graph holds the step: there is none for both, and to launch one
        kernel after the other takes the host longer than drafts gain."""
        decodes = len(rows.sequences)
        self.pace.now = self.pace.waited if rows.waited else self.pace.ahead
        if self._adaptive and rows.num_prompts and self.times.has_graph(decodes, rows.num_prompts, rows.num_tokens - decodes):
            self._step += 1
            self._search.quiet += 1
            return None
        found = self._plan(rows)
        self._search.in_vain = 0 if found is not None else self._search.in_vain + 1
        return found

    def _plan(self, rows: DecodingRows) -> Drafts | None:
        self._step += 1
        self._search.quiet += 1
        if rows.room <= 0 or not np.count_nonzero(rows.most):
            return None
        if self._adaptive and not self._knows_off(len(rows.sequences), rows.keys):
            return None
        self._learn_from_watched(rows)
        since = self._step - self._search.last_drafted
        probing = self._adaptive and (since >= PROBE_EVERY or self._search.again)
        self._search.again = False
        if self._adaptive and (small := self._small) is not None:
            probing |= small.look(rows, self.times, self._step, since, probing)
        if self._adaptive and not probing and not self._could_pay(rows):
            self._watch_some(rows)
            return None
        self._search.quiet = 0
        offers = self._offers(rows, range(len(self.proposers)))
        if offers is None:
            return None
        if len(self.proposers) > 1:
            offers = best_of_each_row(offers, self._pass_share(len(rows.sequences), rows.keys))
        width = self._widths(rows, offers, probing)
        self._watch_others(rows, offers, width)
        if not np.count_nonzero(width):
            self._honesty.count(0.0, 0)
            return None
        self._search.last_drafted = self._step
        if self._off_is_due(rows, offers, width):
            self._search.off_left = self._search.off_run
        return self._drafts(rows, offers, width)

    def _offers(
        self, rows: DecodingRows, numbers: Iterable[int], places: list[int] | None = None
    ) -> Offers | None:
        """Of the proposers with these numbers, for each row that may have drafts, or only those at `places`."""
        allowed = np.minimum(rows.most, self._most)
        if places is not None:
            some = np.zeros_like(allowed)
            some[places] = allowed[places]
            allowed = some
        wanted = (allowed + rows.pending) * (allowed > 0)
        found: list[tuple[Paths, np.ndarray]] = []
        for number in numbers:
            proposer = self.proposers[number]
            paths = proposer.propose_all(rows.sequences, wanted)
            if paths is None:
                continue
            if rows.constrained and proposer.name != FORCED:     # what a grammar forces it allows
                cut(paths, {place: rows.sequences[place] for place in rows.constrained})
            pending = rows.pending[paths.places]
            enough = paths.ends > pending
            if np.count_nonzero(enough) < len(enough):
                paths, pending = paths.of(enough), pending[enough]
            if len(paths.places):
                found.append((paths, self._sources.number(number, paths.evidence, pending > 0)))
        if not found:
            return None
        paths, source = found[0] if len(found) == 1 else joined(found)
        return self._weighing.weigh(rows, allowed, paths, source, self._step)

    def _widths(self, rows: DecodingRows, offers: Offers, probing: bool) -> np.ndarray:
        """int64 [D]: drafts that each row verifies."""
        count = len(rows.sequences)
        # What grammars force is right but for its spelling. If the step has waited for it, Worth says whether that pays in all.
        # Without overlap no step waits for more than another.
        has_waited = self.pace.now is not self.pace.ahead
        if not self._adaptive or (has_waited and self._sources.all_of(offers.source, FORCED)):
            return offers.whole(count, rows.room)
        made_for = self._made_for(rows, offers)
        if made_for is None and self._weighing.native is not None:
            width = self._best_widths(offers, rows)
            if not probing or np.count_nonzero(width):
                self._search.probing = False
                return width
            chosen = np.zeros(0, np.int64)
        else:
            chosen = self._best(offers.chances, self._honesty.share, rows, made_for)
        self._search.probing = probing and not len(chosen)
        if self._search.probing:
            order = by_chance(offers.chances, 0.0)[: rows.room]
            chosen = order[: self._probe_size(count, rows.keys, len(order))]
            self.counters.probes += 1
        return np.bincount(offers.places[chosen // offers.chances.shape[1]], minlength=count)

    def _best_widths(self, offers: Offers, rows: DecodingRows) -> np.ndarray:
        """_best() in one native call, where the draft model makes no drafts."""
        count, times = len(rows.sequences), self.times
        bounds = times.bounds(count, min(self._most, int(rows.most.max())) + 1)
        curiosity = _CURIOSITY if self._step % _CURIOUS_EVERY == 0 else 1.0
        promised = self._least_rate(rows)
        tables = times.tables(bounds, rows.keys)
        return self._weighing.best_widths(
            offers, tables, count, rows.room, self._honesty.share, _LEAST_CHANCE, promised, curiosity
        )

    def _least_rate(self, rows: DecodingRows) -> float:
        """Tokens a second that drafts must promise. One step that loses a tenth costs little if it is rare, and tells whether
        drafts do not pay or were only slow for a while."""
        count, since = len(rows.sequences), self._step - self._search.last_drafted if self.times.changes else 0
        return _GAIN * count / self.times.seconds(count, rows.keys) / (1 + _RETRY * min(since, PROBE_EVERY))

    def _probe_size(self, rows: int, keys: int, most: int) -> int:
        """Drafts of a probe: several, but one only where each costs much of a step."""
        table = self.times.table(self.times.bound(rows, 2), keys)
        affordable = table.sizes[table.seconds <= _PROBE_COST * self.times.seconds(rows, keys)]
        affordable = affordable[affordable > rows] - rows
        return min(most, max(_PROBE, rows // _PROBE_SHARE), int(affordable[-1]) if len(affordable) else 1)

    def _best(
        self, chances: np.ndarray, honesty: float, rows: DecodingRows, made_for: list[Sequence | None] | None = None,
        curious: bool = False,
    ) -> np.ndarray:
        """The drafts that promise the most tokens a second, as places in the flat `chances` [offers, positions]; or none.
        `made_for`: of each offer its row, if the draft model is to make the drafts; None: it makes none. `curious`: as in steps
        that try what is not sure.

        A graph with room for many queries of a row takes longer. So for each bound of queries the best drafts within it
        compete. Padding is free: only numbers that fill a size are compared, and all drafts there are. Where the draft model
        would have to read texts first, drafts must pay by what is known: a try would cost all of that (look() tries one row).
        """
        count, positions, times = len(rows.sequences), chances.shape[1], self.times
        order, flat = by_chance(chances, _LEAST_CHANCE), honesty * chances.ravel()
        best, promised = order[:0], self._least_rate(rows)
        sure, curious = _GAIN * count / times.seconds(count, rows.keys), curious or self._step % _CURIOUS_EVERY == 0
        small = self._small if made_for is not None else None
        reads = small is not None and made_for is not None and small.must_read(made_for)
        for bound in times.bounds(count, min(self._most, int(rows.most.max())) + 1):
            kept = (order if bound > positions else order[order % positions < bound - 1])[: rows.room]
            table = times.table(bound, rows.keys)
            choices: Iterable[tuple[np.ndarray, np.ndarray | None]] = [(kept, None)]
            if small is not None and made_for is not None:
                choices = small.choices(count, made_for, kept, positions)
            for some, costs in choices:
                made = reads and costs is not None and len(costs) > 0 and float(costs[-1]) > 0
                number, rate = self._best_number(flat[some], count, table, costs, curious and not made)
                if rate > (max(promised, sure) if made else promised):
                    best, promised = some[:number], rate
            if bound > positions:
                break
        return best

    def _best_number(
        self, gained: np.ndarray, rows: int, table: Table, costs: np.ndarray | None, curious: bool
    ) -> tuple[int, float]:
        """How many of these drafts, and the tokens a second that they promise. `gained`: tokens expected of each; `costs`:
        seconds of a draft model for the first 1, 2, … of them."""
        first, last = table.sizes.searchsorted((rows + 1, rows + len(gained))).tolist()
        numbers = np.minimum(table.sizes[first : last + 1] - rows, len(gained))
        if not len(gained) or not len(numbers):
            return 0, 0.0
        seconds = table.seconds[first : last + 1]
        if costs is not None:
            seconds = seconds + costs[numbers - 1]
        rates = (rows + gained.cumsum()[numbers - 1]) / seconds
        if curious:
            rates = np.where(table.sure[first : last + 1], rates, _CURIOSITY * rates)
        place = int(rates.argmax())
        return int(numbers[place]), float(rates[place])

    def _made_for(self, rows: DecodingRows, offers: Offers) -> list[Sequence | None] | None:
        """Of each offer its row, if the draft model is to make the drafts; None: it makes none."""
        if not offers.has_some_on_device:
            return None
        places, own = offers.places.tolist(), offers.on_device.tolist()
        return [rows.sequences[place] if mine else None for place, mine in zip(places, own, strict=True)]

    def _pass_share(self, rows: int, keys: int) -> float:
        """A pass of the draft model against a step; 0: there is none."""
        small = self._small
        return 0.0 if small is None else small.pass_seconds(rows) / self.times.seconds(rows, keys)

    def _knows_off(self, rows: int, keys: int) -> bool:
        """Were steps without drafts measured at this size, and not too long ago? All gains are relative to them."""
        search = self._search
        if not self.pace.ahead.measured(rows, keys) or self._step - search.last_off >= _OFF_LATEST:
            search.off_left = max(search.off_left, search.off_run)
        if not search.off_left:
            return True
        search.last_off, search.off_left = self._step, search.off_left - 1
        return False

    def _off_is_due(self, rows: DecodingRows, offers: Offers, width: np.ndarray) -> bool:
        """A GPU's clock, and what else the host does, change the time of steps with and without drafts. Where drafts gain little,
        steps without cost little, and are measured often."""
        since, count = self._step - self._search.last_off, len(rows.sequences)
        if not self._adaptive or since < OFF_SOON or since % _OFF_LOOK:
            return False
        own = width[offers.places]
        gained = self._honesty.share * float((offers.chances * (np.arange(offers.chances.shape[1]) < own[:, None])).sum())
        seconds = self.times.drafted(count, count + int(width.sum()), 1 + int(width.max()), rows.keys)
        gain = (1 + gained / count) * self.pace.ahead.seconds(count, rows.keys) / seconds
        return since * _OFF_COST >= self._search.off_run * (1 - 1 / gain)

    def _could_pay(self, rows: DecodingRows) -> bool:
        """Would drafts pay if every row had as many as it may, all as good as the best that were counted? If not, no proposer is
        asked: steps cost the host what they cost without drafts."""
        count = len(rows.sequences)
        size, bits = self.times.size_of(count), rows.keys.bit_length()
        known, of_keys, waited, since, pays = self._looked
        if (known, of_keys, waited) != (size, bits, rows.waited) or self._step - since >= _LOOK_AGAIN:
            pays = self._would_pay(rows, self.acceptance.best)
            self._looked = size, bits, rows.waited, self._step, pays
        return pays

    def _would_pay(self, rows: DecodingRows, chance: float) -> bool:
        """If each draft were right with this chance, and what is not sure as fast as it is hoped to be."""
        chances = chance ** np.arange(1, self._most + 1)
        return len(self._best(np.tile(chances, (len(rows.sequences), 1)), 1.0, rows, curious=True)) > 0

    # -- learning without drafts -----------------------------------------------------------------------------------------

    def _watch_some(self, rows: DecodingRows) -> None:
        """Drafts do not pay. What a few rows would have had is compared with what comes."""
        watch, watched = self._search.watch, self._sources.watched_proposers
        places = watch.places(rows.sequences, self._step) if watched and watch.room > 0 else []
        offers = self._offers(rows, watched, places) if places else None
        if offers is not None:
            self._watch_others(rows, offers, np.zeros(len(rows.sequences), np.int64))

    def _watch_others(self, rows: DecodingRows, offers: Offers, width: np.ndarray) -> None:
        """Offers of rows that have no drafts in this step: each step begins with another, so that all have their turn."""
        watch, watched = self._search.watch, self._sources.watched_proposers
        if not self._adaptive or not watched or watch.room <= 0 or np.count_nonzero(width) == len(offers.places):
            return
        own = width[offers.places]
        idle = (self._sources.watched[offers.source] & (own == 0) & (offers.length > 0)).nonzero()[0].tolist()
        first, left = self._step % max(1, len(idle)), min(watch.room, BESIDE) if np.count_nonzero(own) else watch.room
        for number in [*idle[first:], *idle[:first]]:
            place = int(offers.places[number])
            sequence = rows.sequences[place]
            if watch.watches(sequence):
                continue
            pending = int(rows.pending[place])
            path = offers.paths.tokens[number, : pending + int(offers.length[number])].tolist()
            watch.keep(sequence, pending, path, int(offers.source[number]), int(offers.slots[number]))
            left -= 1
            if left <= 0:
                break

    def _learn_from_watched(self, rows: DecodingRows) -> None:
        """What was not drafted counts for its row as a draft does. Where that shows that a proposer has become better than what
        was counted of it, and good enough to pay, it is believed anew."""
        watch = self._search.watch
        seen = watch.seen()
        if seen is None:
            return
        slots = self._records.known(seen.sequences)
        there = slots >= 0
        self._records.count(slots[there], seen.source[there] >> 1, seen.width[there], seen.accepted[there], self._step)
        if (seen.accepted[seen.width > 1] == seen.width[seen.width > 1]).any():
            self._search.in_vain = 0                     # something is copied: look in every step
        found = watch.promising()
        if found is None:
            return
        number, tried, accepted = found
        if accepted / tried > self.acceptance.best and not self._could_pay(rows) and self._would_pay(rows, accepted / tried):
            self.acceptance.renew(self._sources.listed[number], tried, accepted)
            watch.forget(number)
            self._looked = _NEVER

    def _drafts(self, rows: DecodingRows, offers: Offers, width: np.ndarray) -> Drafts:
        self._search.watch.drafted(offers.slots[width[offers.places] > 0])
        self._weighing.send(offers, width, self._adaptive)
        reach, tokens = int((width + rows.pending).max()), offers.paths.tokens
        if len(offers.places) < len(width) or tokens.shape[1] < reach or offers.num_offering(width) < len(offers.places):
            some = width[offers.places].nonzero()[0]
            tokens = np.full((len(width), reach), -1, np.int32)
            tokens[offers.places[some], : offers.paths.tokens.shape[1]] = offers.paths.tokens[some, :reach]
        on_device = self._made_there(rows, offers, width)
        if on_device is not None and on_device[width > 0].all():
            return Drafts(width.astype(np.int32), None, on_device)
        return Drafts(width.astype(np.int32), tokens[:, :reach], on_device)

    def _made_there(self, rows: DecodingRows, offers: Offers, width: np.ndarray) -> np.ndarray | None:
        """bool [D]: rows whose drafts the draft model makes; None: it makes none."""
        small, made_for = self._small, self._made_for(rows, offers)
        if small is None or made_for is None:
            return None
        on_device = np.zeros(len(width), bool)
        for place, sequence in zip(offers.places.tolist(), made_for, strict=True):
            if sequence is not None and width[place]:
                on_device[place] = True
                small.drafted(sequence)
        return on_device if on_device.any() else None

    # -- results -------------------------------------------------------------------------------------------------------

    def observe(self, sequences: list[Sequence], width: np.ndarray, accepted: np.ndarray, seconds: float) -> None:
        counters, came = self.counters, self._records.outcome(self._records.known(sequences), width, accepted, self._step)
        counters.drafts += len(width)
        counters.draft_tokens += came.total
        counters.accepted_tokens += came.right
        counters.accepted_per_position += came.right_by
        for number in came.tried[:, 0].nonzero()[0].tolist():
            known = self._sources.listed[number]
            self.acceptance.count(known, came.tried[number], came.accepted[number])
            if known.name == "prediction":
                self._count_predicted(sequences, came.source == number, accepted, width - accepted)
        self._honesty.count(came.promised, came.kept)
        if self._search.probing and len(width) and came.right == came.total:
            self._search.again = True                    # all of a probe was right

    def _count_predicted(
        self, sequences: list[Sequence], mine: np.ndarray, accepted: np.ndarray, rejected: np.ndarray
    ) -> None:
        for place in np.flatnonzero(mine).tolist():
            before = self._predicted.get(sequences[place], (0, 0))
            self._predicted[sequences[place]] = before[0] + int(accepted[place]), before[1] + int(rejected[place])

    def slept(self, rows: int) -> bool:
        return self._adaptive and self._search.sleeps(rows)

    def timed(
        self, rows: int, tokens: int, queries: int, keys: int, seconds: float, rejected: int, waited: bool = False
    ) -> None:
        """The time between two results has the host's work for the next step in it, and so the search for drafts. A step without
        drafts tells what such steps take only if they were not looked for around it."""
        off, pace = self.pace.ahead, self.pace
        if self._search.slept:
            pace.passed(self._search.slept)
            self._search.slept = 0
        looked, measured = queries > 1 or self._search.quiet < OFF_RUN, off.measured(rows, keys)
        if looked and measured and seconds > 0:
            self._search.worth.count(rows, seconds, off.seconds(rows, keys), (tokens - rejected) / rows)
        self._search.worth.passed(rows)
        if queries > 1 or not looked or not measured or (waited and pace.waited is not off):
            pace.observe(rows, tokens, queries, keys, seconds, waited)
        else:
            pace.passed()
        if queries > 1 and measured and not waited:
            self._doubt_off(rows, tokens, queries, keys)

    def _doubt_off(self, rows: int, tokens: int, queries: int, keys: int) -> None:
        """A step without drafts does not take longer than one with some. If it seems to, it was slow when it was measured, as the
        first steps of a process are, and is measured again; later and later, if that does not help."""
        search, times = self._search, self.pace.ahead
        since = self._step - search.last_off
        if not self._adaptive or since < OFF_SOON or since % search.doubt:
            return
        if times.seconds(rows, keys) <= _DOUBTFUL * times.drafted(rows, tokens, queries, keys):
            search.doubt = OFF_SOON
        else:
            search.off_left, search.doubt = search.off_run, min(2 * search.doubt, _OFF_LATEST // 2)      # before they are anyway

    def proposed(self, rows: int, width: int, result: StepResult) -> None:
        if (small := self._small) is not None and result.typical:
            small.took(rows, width, result.draft_seconds, result.caught_up, result.catch_up_seconds)

    def predicted(self, sequence: Sequence) -> tuple[int, int]:
        """Drafts from the client's prediction so far: accepted, and rejected."""
        return self._predicted.get(sequence, (0, 0))

    def ended(self, sequence: Sequence) -> None:
        self._records.forget(sequence)
        self._search.watch.ended(sequence)
        self._predicted.pop(sequence, None)
        for proposer in self.proposers:
            proposer.ended(sequence)
