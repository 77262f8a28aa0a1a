"""Masks hold the tokens that each answer of a batch may sample next, as its matcher says (matcher.py).

A mask that fails, or takes too long, fails its own answer. Drafts must not fail one that would succeed without them: where a mask
along guesses fails, the answer fails only if it gets there, and where such masks take too long, it has no more drafts.

Where there is a way without a step that waits (Matcher.outgrown), the answer takes that one and does not fail. Where a step has
waited for long, or a mask needs more work than a step may wait for, rows are left out of sampling and run again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.grammar.fill_thread import FillThread
from ridgeline.grammar.interface import LibraryMatcher
from ridgeline.grammar.llguidance_backend import make_pool
from ridgeline.grammar.matcher import Matcher
from ridgeline.grammar.xgrammar_backend import BatchFiller, XGrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

Room = Callable[[tuple[int, int], type[np.int32]], np.ndarray]
_ALONE = 4                           # up to this many rows are filled in this thread: waking others would take longer
_MAX_THREADS = 12                    # on three quarters of the cores; more save nothing
_NO_GUESSES: Mapping[int, list[int]] = {}
_NO_COPIES: Mapping[int, Any] = {}
# Limits on the work of masks, in CPU time: on a busy machine a mask takes longer, but no more work.
SLOW_SECONDS = 0.25                  # of one mask: beyond it the whole batch would wait, so its request fails, …
LONG_SECONDS = 0.01                  # … and from here on its answer gets masks that no step waits for, if it can
# Of all masks of a step, or with drafts of as many steps as it stands for: each time it is used up, the dearest grammar gets a
# warning, …
STEP_SECONDS = 0.1
# … but never less than this for each answer: a harmless regex with a long count takes 0.6 ms a mask on one core of 2.5 GHz, and
# 128 answers with it, each in a state of its own, are no reason to fail them.
_ANSWER_SECONDS = 0.0015
_BETWEEN_LOOKS = 64                  # steps, at least
_WARNINGS = 3                        # … and fails with this one, …
_FORGIVEN_SECONDS = 60.0             # … unless the one before is this old (wall-clock time)


@dataclass(slots=True)
class _Along:
    """A copy of the library's matcher of an answer, to go along guesses with. The answer's own stays where it is, whatever
    happens there, and the copy is not used again."""

    matcher: Any
    guesses: list[int]
    error: str = ""                  # what the library raised there


def _hold_back(mask: np.ndarray, held: list[tuple[int, int]]) -> None:
    """Take these bits out of a mask, unless that would leave no token."""
    words = mask.view(np.uint32)
    before = [words[word] for word, _ in held]
    for word, bit in held:
        words[word] &= ~np.uint32(bit)
    if not words.any():
        for (word, _), value in zip(held, before, strict=True):
            words[word] |= value


def _with_guesses(
    wanted: Sequence[tuple[int, Matcher]], guesses: Mapping[int, list[int]]
) -> tuple[list[tuple[int, Matcher]], dict[int, _Along]]:
    """Matchers to fill masks with, and by row a copy of those that have guesses; xgrammar's: one for each guess."""
    listed: list[tuple[int, Matcher]] = []
    along: dict[int, _Along] = {}
    if not guesses:
        return [*wanted], along
    for row, matcher in wanted:
        listed.append((row, matcher))
        own = guesses.get(row)
        if own and not matcher.error:
            if matcher._guided:
                along[row] = _Along(matcher._matcher.deep_copy(), own)
            else:
                listed += enumerate(matcher.ahead(own), row + 1)
    return listed, along


def _family_of_first(each: tuple[Matcher, int]) -> int:
    return each[0].family.number


def _family_of_second(each: tuple[int, Matcher]) -> int:
    return each[1].family.number


def _work(wall: float, cpu_before: float) -> float:
    """Seconds of work that threads did together: no more than the time that passed, and no more than the CPU time that this
    process used meanwhile. So neither a busy machine nor other threads of this process make masks look slow by themselves."""
    return min(wall, time.process_time() - cpu_before)


def _allowed(wanted: Sequence[tuple[int, Matcher]], along: Mapping[int, _Along]) -> float:
    """Seconds of work for these masks: a step with drafts fills as many for an answer as it saves steps, if they are right."""
    answers = max(1, sum(matcher.origin is None for _, matcher in wanted))
    masks = len(wanted) + sum(len(each.guesses) for each in along.values())
    return min(SLOW_SECONDS, max(STEP_SECONDS, _ANSWER_SECONDS * answers)) * masks / answers


def _drop_drafts(grammar: int, wanted: Sequence[tuple[int, Matcher]], along: Mapping[int, _Along]) -> bool:
    """Its answers have no more drafts. False: none of them has any, so their own masks take that long."""
    drafting = [
        matcher.origin or matcher for row, matcher in wanted
        if matcher.grammar == grammar and (row in along or matcher.origin is not None)
    ]
    for matcher in drafting:
        matcher.alone = True
    return bool(drafting)


def num_threads() -> int:
    """Threads that fill masks."""
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) * 3 // 4))


class Masks:
    """Fills the masks of a step: int32 [rows, ceil(vocab / 32)], id 32 w + b at bit b of word w.

    The library's threads fill all rows in one call, without Python's lock. A few masks take fifty times as long as the others (a
    text close to its maximum length, where every token must be tested), so idle threads steal rows from busy ones. Copies of one
    compiled grammar share a lock: they are neighbours in the list, so that mostly one thread gets them.
    """

    def __init__(self, vocab_size: int, threads: int | None = None, room: Room = np.empty) -> None:
        self.seconds = 0.0                               # wall-clock time spent on masks, and …
        self.filled = 0                                  # … how many there were
        self._room = room                                # allocates the buffer: pinned where the device copies it
        self._buffer = np.empty((0, -(-vocab_size // 32)), np.int32)
        self._threads = num_threads() if threads is None else threads
        self._pool: LLExecutor | None = None
        self._others: BatchFiller | None = None          # for xgrammar's matchers, once there are some
        self._look_for_slow = False
        self._unseen = _BETWEEN_LOOKS                    # steps since it last looked without need
        self._warned: dict[int, tuple[int, float]] = {}  # by grammar: how many warnings, and when the last was
        self._ahead: dict[Matcher, int] = {}             # rows that advance() or begin() have filled for the next fill() …
        self._begun: tuple[Mapping[int, list[int]], dict[int, _Along]] | None = None     # … the latter along these guesses
        self._thread: FillThread | None = None           # in which it does
        self._doubted: list[Matcher] = []                # that lack masks behind guesses of the step before
        self.left_out: set[Matcher] = set()              # whose masks fill() could not fill in time

    def advance(self, said: Sequence[tuple[Matcher, int]], wanted: Sequence[tuple[int, Matcher]] = (), num_rows: int = 0) -> None:
        """Accept the answers' newest tokens in the library's threads, and begin to fill the masks that these answers need next:
        the caller has the result to take in meanwhile. Until wait() or fill() it may ask these matchers only for accept(), which
        returns the outcome here, and `ended`.

        fill() of the same rows finds them filled. With too few rows for threads, tokens are accepted here, and fill() does the
        rest.
        """
        self.wait()
        ours = [each for each in said if each[0]._guided and not each[0].error]
        if len(ours) <= _ALONE or self._threads <= 1 or self._look_for_slow:
            for matcher, token in said:
                matcher.follow(token)
            return
        started, worked = time.perf_counter(), time.process_time()
        ours.sort(key=_family_of_first)
        listed: list[Any] = [(matcher._matcher, token) for matcher, token in ours]
        try:
            good = self._workers().consume_token_par(listed)
        except Exception:                                # raised before any token was accepted
            return
        for (matcher, _), fits in zip(ours, good, strict=True):
            matcher._num_tokens += 1
            if not fits:
                matcher.fail(matcher._matcher.get_error())
            matcher.was_told(bool(matcher._matcher.is_stopped()))
        spent = time.perf_counter() - started
        self.seconds += spent
        self._look_for_slow = _work(spent, worked) > STEP_SECONDS        # next time, one by one: which grammar is it?
        current = {matcher for matcher, _ in ours}
        ahead = [each for each in wanted if each[1] in current]
        self._ahead = {matcher: row for row, matcher in ahead}
        if not ahead:
            return                                       # fill() begins anew
        masks = self._cleared(wanted, num_rows, _NO_COPIES)
        self._start(lambda: self._fill_ahead(ahead, masks))

    def begin(self, wanted: Sequence[tuple[int, Matcher]], num_rows: int, guesses: Mapping[int, list[int]]) -> None:
        """Begin to fill what fill() will be asked for next: the caller launches the step meanwhile. Where there is too little to
        do for threads, or a grammar is slow, fill() does it all."""
        self.wait()
        wanted = [each for each in wanted if not each[1].family.ahead_of_steps]
        few = len(wanted) + sum(map(len, guesses.values())) <= _ALONE
        if few or self._threads <= 1 or self._look_for_slow or not all(each._guided and not each.error for _, each in wanted):
            return
        along = _with_guesses(wanted, guesses)[1]
        masks = self._cleared(wanted, num_rows, along)
        self._ahead, self._begun = {matcher: row for row, matcher in wanted}, (guesses, along)
        self._start(lambda: self._fill_ahead(wanted, masks, along))

    def forget(self) -> None:
        """What was begun is not wanted any more."""
        self.wait()
        self._ahead, self._begun = {}, None

    def _start(self, call: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = FillThread()
        self._thread.start(call)

    def _fill_ahead(
        self, ahead: Sequence[tuple[int, Matcher]], masks: np.ndarray, along: Mapping[int, _Along] = _NO_COPIES
    ) -> None:
        """In the thread. What the caller does meanwhile counts, too: at worst the next step looks for a slow grammar, by the
        processor time of each, and finds none."""
        started, worked = time.perf_counter(), time.process_time()
        self._fill_guided(ahead, masks, along)
        self._look_for_slow |= self._takes_long(_work(time.perf_counter() - started, worked), ahead, along)

    def _takes_long(self, work: float, wanted: Sequence[tuple[int, Matcher]], along: Mapping[int, _Along]) -> bool:
        """Shall the next step find out which grammar is slow? Where the step need not limit them, now and then: one slow mask
        among many is worth it, many that are not quite fast are none."""
        self._unseen += 1
        if work > _allowed(wanted, along):
            return True
        if work < LONG_SECONDS + _ANSWER_SECONDS / 3 * len(wanted) or self._unseen < _BETWEEN_LOOKS:
            return False
        self._unseen = 0
        return True

    @property
    def num_words(self) -> int:
        """Of a mask, of 32 bits each."""
        return self._buffer.shape[1]

    @property
    def busy(self) -> bool:
        """Are masks being filled that advance() or begin() has begun?"""
        return self._thread is not None and self._thread.busy

    def wait(self) -> None:
        """Until the masks are filled that were begun. From now on their matchers may be asked for anything."""
        if self._thread is not None and self._thread.busy:
            started = time.perf_counter()
            if self._thread.wait() is not None:          # fill() will find out which matcher failed
                self._ahead, self._begun = {}, None
            self.seconds += time.perf_counter() - started

    def fill(
        self, wanted: Sequence[tuple[int, Matcher]], num_rows: int, guesses: Mapping[int, list[int]] = _NO_GUESSES,
    ) -> np.ndarray | None:
        """`wanted` are (row of the mask, matcher). All other rows, and those of matchers that fail, allow every token. None: no
        row needs a mask. `guesses`, by row: the rows behind it are for what may follow the first of them, the second, and so on,
        as far as its grammar allows them.

        The result is valid until the next call. Each step that advance() or begin() fills masks for must call it, or forget(),
        also without answers that go on: else those rows would be taken for the next step's.
        """
        ahead, along = self._taken(guesses)
        for matcher in self._doubted:
            matcher.trust()
        self._doubted.clear()
        waited, self.left_out = self.left_out, set()
        if not wanted:
            return None
        again = along is None                            # those along guesses are to be filled now
        if along is None:
            wanted, along = _with_guesses(wanted, guesses)
        missing = [each for each in wanted if ahead.get(each[1]) != each[0] or (again and each[0] in along)] if ahead else wanted
        masks = self._rows(num_rows) if ahead else self._cleared(wanted, num_rows, along)
        started = time.perf_counter()
        for row in {*ahead.values()}.difference(row for row, _ in wanted):           # of answers that have ended meanwhile
            masks[row] = -1
        missing = self._take_filled(missing, masks)
        if waited:                                       # those that were left out go first
            missing.sort(key=lambda each: each[1] not in waited)
        alone = len(missing) <= _ALONE or self._threads <= 1 or self._look_for_slow
        work = self._one_by_one(missing, masks, along) if alone else self._at_once(missing, masks, along)
        self._look_at(wanted, masks, along)
        if not ahead:
            self._look_for_slow = self._takes_long(work, wanted, along)
        self.seconds += time.perf_counter() - started
        self.filled += len(wanted) + sum(len(each.guesses) for each in along.values())
        return masks

    @staticmethod
    def _take_filled(wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray) -> list[tuple[int, Matcher]]:
        """Copies the masks that were filled before the step was planned. Returns the others."""
        missing = [each for each in wanted if each[1].mask is None]
        if len(missing) < len(wanted):
            for row, matcher in wanted:
                if matcher.mask is not None:
                    masks[row] = matcher.mask
        return missing

    def _taken(self, guesses: Mapping[int, list[int]]) -> tuple[dict[Matcher, int], dict[int, _Along] | None]:
        """What has been filled ahead, and copies of matchers with which masks along these guesses were; None: none were."""
        self.wait()
        ahead, begun, self._ahead, self._begun = self._ahead, self._begun, {}, None
        if begun is None:
            return ahead, None
        return (ahead, begun[1]) if begun[0] == guesses else ({}, None)      # else answers have ended meanwhile

    def _cleared(self, wanted: Sequence[tuple[int, Matcher]], num_rows: int, along: Mapping[int, _Along]) -> np.ndarray:
        """Rows that will not be filled allow every token."""
        masks = self._rows(num_rows)
        if len(wanted) + sum(len(each.guesses) for each in along.values()) < num_rows:
            masks.fill(-1)
        return masks

    def _rows(self, num_rows: int) -> np.ndarray:
        if len(self._buffer) < num_rows:
            self._buffer = self._room((max(num_rows, 2 * len(self._buffer)), self.num_words), np.int32)
        return self._buffer[:num_rows]

    def _workers(self) -> LLExecutor:
        if self._pool is None:
            self._pool = make_pool(self._threads)
        return self._pool

    def _fill_guided(
        self, wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray, along: Mapping[int, _Along] = _NO_COPIES,
    ) -> None:
        where: Any = (masks.ctypes.data, 4 * self.num_words, len(masks))
        ordered = sorted(wanted, key=_family_of_second)
        alone: list[Any] = [(matcher._matcher, row) for row, matcher in ordered if row not in along]
        if alone:
            self._workers().unsafe_compute_mask_ptr(alone, *where)
        if len(alone) < len(ordered):
            runs: list[Any] = [(own.matcher, row, own.guesses) for row, _ in ordered if (own := along.get(row)) is not None]
            self._workers().unsafe_compute_mask_ptr_with_draft_token(runs, *where)

    def close(self) -> None:
        """End the threads."""
        self.wait()
        if self._thread is not None:
            self._thread.close()
        self._pool = self._thread = None

    def _look_at(self, wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray, along: Mapping[int, _Along]) -> None:
        """After filling: mark the matchers that failed, and hold back end tokens that may not come yet.

        This runs for every token, and few masks allow an end token: so it reads columns of the masks, not rows.
        """
        columns: dict[int, list[int]] = {}
        for row, matcher in wanted:
            own = along.get(row)
            if own is not None and not matcher.error and (own.error or own.matcher.is_error()):
                self._fill_again(row, matcher, own, masks)
            elif own is None and not matcher.error and matcher._matcher.is_error():
                self._fail(matcher, matcher._matcher.get_error())
            if matcher.error or (self.left_out and (matcher.origin or matcher) in self.left_out):
                masks[row : row + 1 + (0 if own is None else len(own.guesses))] = -1
                if matcher.origin is not None:
                    self._doubt(matcher.origin, matcher._num_tokens - matcher.origin._num_tokens, matcher._matcher.get_error())
                continue
            for later in range(1 if own is None else 1 + len(own.guesses)):
                self._hold(matcher.held(later), masks, row + later, columns)

    def _fill_again(self, row: int, matcher: Matcher, own: _Along, masks: np.ndarray) -> None:
        """A mask along guesses failed, and the library does not say which: one after the other, up to that one."""
        matcher.alone = True
        masks[row : row + 1 + len(own.guesses)] = -1
        if matcher.family.in_step:
            self._fail(matcher, own.error or own.matcher.get_error())
            return
        if failed := self.fill_one(matcher._matcher, masks[row]):
            matcher.fail(failed)
            return
        library = matcher._matcher.deep_copy()           # the answer's own stays where it is
        for later, token in enumerate(own.guesses, 1):
            if not library.consume_token(token):         # a guess that is refused is not accepted, whatever mask comes behind it
                self._doubt(matcher, later, library.get_error())
                return
            if library.is_stopped():
                return
            if failed := self.fill_one(library, masks[row + later]):
                self._doubt(matcher, later, failed)
                return

    def _fail(self, matcher: Matcher, reason: str) -> None:
        matcher.fail(reason)
        if matcher.outgrown:
            self.left_out.add(matcher)

    @staticmethod
    def fill_one(library: LibraryMatcher, mask: np.ndarray) -> str:
        """Returns why it cannot."""
        failed = ""
        try:
            library.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except Exception as error:
            failed = str(error)
        if library.is_error():
            failed = library.get_error()
        if failed:
            mask.fill(-1)
        return failed

    def _doubt(self, matcher: Matcher, later: int, reason: str) -> None:
        matcher.doubt(later, reason)
        self._doubted.append(matcher)

    @staticmethod
    def _hold(held: list[tuple[int, int]], masks: np.ndarray, row: int, columns: dict[int, list[int]]) -> None:
        for word, bit in held:
            if word not in columns:
                columns[word] = masks[:, word].tolist()
            if columns[word][row] & bit:
                _hold_back(masks[row], held)
                break

    def _one_by_one(
        self, wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray, along: Mapping[int, _Along] = _NO_COPIES,
    ) -> float:
        """Fill masks in this thread, and fail a mask, or all of a grammar together, that is too slow. Those that remain when the
        step has waited long enough are left out. Returns the CPU time."""
        spent: dict[int, float] = {}
        began = before = time.thread_time()
        limit, first, size = _allowed(wanted, along), masks.ctypes.data, 4 * self.num_words
        for row, matcher in wanted:
            if matcher.error:
                continue
            if before - began > limit:
                self.left_out.add(matcher.origin or matcher)
                continue
            own = along.get(row)
            try:
                if own is None:
                    matcher._matcher.unsafe_compute_mask_ptr(first + row * size, size)
                else:
                    own.matcher.unsafe_compute_mask_ptr_with_draft_token(first + row * size, size, own.guesses)
            except Exception as error:
                if own is None:
                    self._fail(matcher, str(error))
                else:
                    own.error = str(error)
            now = time.thread_time()
            if now - before > LONG_SECONDS:
                self._took_long(matcher, own, now - before)
            spent[matcher.grammar] = spent.get(matcher.grammar, 0.0) + now - before
            before = now
            if now - began > limit:
                dearest = max(spent, key=spent.__getitem__)
                if not _drop_drafts(dearest, wanted, along) and self._warn(dearest):
                    self._fail_all(dearest, [each for _, each in wanted])
        return before - began

    @staticmethod
    def _took_long(matcher: Matcher, own: _Along | None, seconds: float) -> None:
        """With guesses nothing says that its own mask did: that is seen in the next step, which has none."""
        if own is not None or matcher.origin is not None:
            masks = 1 if own is None else 1 + len(own.guesses)
            if seconds > masks * (LONG_SECONDS if matcher.family.in_step else SLOW_SECONDS):
                (matcher.origin or matcher).alone = True
        elif not matcher.error and not matcher.outgrow() and seconds > SLOW_SECONDS and not matcher._matcher.is_error():
            matcher.fail(f"a mask took more than {SLOW_SECONDS} s of CPU time; use a simpler grammar")

    def _warn(self, grammar: int) -> bool:
        """True: this was the last warning, and the grammar fails."""
        now = time.monotonic()
        self._warned = {each: said for each, said in self._warned.items() if now < said[1] + _FORGIVEN_SECONDS}
        times = self._warned.get(grammar, (0, now))[0] + 1
        self._warned[grammar] = times, now
        return times >= _WARNINGS

    @staticmethod
    def _fail_all(grammar: int, matchers: Iterable[Matcher]) -> None:
        for matcher in matchers:
            if matcher.grammar == grammar and not matcher.error and not matcher.outgrow():
                matcher.fail(
                    f"its masks took most of {STEP_SECONDS} s of CPU time in a step (more with more than "
                    f"{STEP_SECONDS / _ANSWER_SECONDS:.0f} answers), again and again; use a simpler grammar"
                )

    def _fill_others(self, listed: list[tuple[XGrammarMatcher, int]], masks: np.ndarray) -> None:
        if self._others is None:
            self._others = BatchFiller(self._threads)
        self._others.fill(listed, masks)

    def _at_once(self, wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray, along: Mapping[int, _Along]) -> float:
        """Fill masks in the library's threads. Returns the work, as `_work` counts it."""
        started, worked = time.perf_counter(), time.process_time()
        guided = [each for each in wanted if each[1]._guided]
        others: Any = []
        if len(guided) < len(wanted):
            others = [(matcher._matcher, row) for row, matcher in wanted if not matcher._guided]
        try:
            self._fill_guided(guided, masks, along)
            if others:
                self._fill_others(others, masks)
        except Exception:                                # it does not say which matcher failed
            return self._one_by_one(wanted, masks, along)
        return _work(time.perf_counter() - started, worked)
