"""A matcher follows one answer through its grammar; masks hold the tokens that each answer of a batch may sample next.

A matcher's state is on the host and depends on the answer's tokens alone, so preemption does not touch it. A matcher that
fails keeps its error; other answers go on.

`ignore_eos` and `min_tokens` are applied to the mask here: they keep end tokens out for as long as the grammar allows any
other token. An answer whose grammar is complete ends whatever they ask: there is nothing valid to add.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.grammar.fill_thread import FillThread
from ridgeline.grammar.interface import LibraryMatcher, in_words
from ridgeline.grammar.llguidance_backend import is_llguidance, make_pool
from ridgeline.grammar.xgrammar_backend import BatchFiller, XGrammarMatcher
from ridgeline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor

Room = Callable[[tuple[int, int], type[np.int32]], np.ndarray]
Spell = Callable[[bytes], list[int]]
_LONGEST_TOKEN = 32                  # bytes: of a long forced text only as much is spelled as drafts may be
_ALONE = 4                           # up to this many rows are filled in this thread: waking others would take longer
_MAX_THREADS = 12                    # on three quarters of the cores; more save nothing
_NO_GUESSES: Mapping[int, list[int]] = {}
_NO_COPIES: Mapping[int, Any] = {}
_FAILED = "the grammar of structured_outputs failed on this answer: "
# Limits on the work of masks, in CPU time: on a busy machine a mask takes longer, but no more work.
SLOW_SECONDS = 0.25                  # of one mask: beyond it the whole batch would wait, so its request fails
# Of all masks of a step, or with drafts of as many steps as it stands for: each time it is used up, the dearest grammar gets a
# warning, …
STEP_SECONDS = 0.1
# … but never less than this for each answer: a harmless regex with a long count takes 0.6 ms a mask on one core of 2.5 GHz, and
# 128 answers with it, each in a state of its own, are no reason to fail them.
_ANSWER_SECONDS = 0.0015
_WARNINGS = 3                        # … and fails with this one, …
_FORGIVEN_SECONDS = 60.0             # … unless the one before is this old (wall-clock time)


class Matcher:
    """The state of one answer in its grammar."""

    __slots__ = (
        "__weakref__", "_accepted", "_early", "_followed", "_guided", "_late", "_matcher", "_min_tokens", "_num_tokens", "_spell",
        "_stopped", "drafted", "error", "family", "grammar",
    )

    def __init__(
        self, compiled: LibraryMatcher, params: SamplingParams, end_ids: Sequence[int], spell: Spell | None = None
    ) -> None:
        """`spell`: the tokens of a text, for `forced`."""
        self._spell = spell
        self._matcher = compiled.deep_copy()
        self.family = id(compiled)                       # copies of one compiled grammar share a lock inside the library
        self.grammar = 0 if params.structured_outputs is None else hash(params.structured_outputs.key)
        self._guided = is_llguidance(self._matcher)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._accepted = False                           # its newest token, by `Masks.advance`; accept() has not been called
        self._followed = 0                               # or this number of its newest tokens, by `follow_run`
        self._stopped: bool | None = None                # behind those: other threads may have the library's matcher now
        # Ids held back before min_tokens, and after: (word of the mask, bit).
        self._early = _bits({*end_ids, *params.stop_token_ids}) if params.min_tokens else []
        self._late = _bits(end_ids) if params.ignore_eos else []
        self.drafted = False                             # a copy behind drafts, see ahead()
        self.error = ""                                  # why it failed; final

    def accept(self, token: int) -> bool:
        """Take the answer's next token. False: the grammar does not allow it, and `error` says why."""
        if self._accepted:
            self._accepted = False
        elif self._followed:
            self._followed -= 1
        elif not self.error:
            self._num_tokens += 1
            self._stopped = None
            try:
                if not self._matcher.consume_token(token):
                    self.fail(self._matcher.get_error())
            except Exception as error:                   # any failure of the library fails this answer alone
                self.fail(str(error))
        return not self.error

    def follow(self, token: int) -> None:
        """accept(), ahead of the call that asks for its outcome: see `goes_on`."""
        self.accept(token)
        self._accepted, self._stopped = True, self.ended

    def follow_run(self, tokens: list[int]) -> bool:
        """accept() of tokens that a step with drafts brought, in one call and ahead of those that ask for each outcome. False:
        the answer ends with them, or its grammar refuses one: accept() will tell which. Only llguidance can do it."""
        if self.error or not self._guided or not tokens:
            return False
        self._stopped = None
        try:
            self._followed = int(self._matcher.try_consume_tokens(tokens))   # type: ignore[attr-defined]
            self._stopped = bool(self._matcher.is_stopped())
        except Exception as error:
            self.fail(str(error))
        self._num_tokens += self._followed
        return self._followed == len(tokens) and not self._stopped and not self.error

    @property
    def goes_on(self) -> bool:
        """Its newest token was followed, and more can come: accept() need not be called for it if `passed` is."""
        return self._accepted and not self.error and not self._stopped

    def passed(self) -> None:
        self._accepted, self._followed = False, 0

    def forced(self, most: int) -> list[int]:
        """The next tokens, if its grammar leaves only one text; at most that many. Only llguidance can say.

        Its own tokens end before the last of that text, for what follows could become a part of it, and a long text is spelled to
        its end each time. Mostly nothing becomes a part, and these are drafts: so the beginning of the text is spelled here."""
        if self.error or not self._guided:
            return []
        try:
            text = self._matcher.compute_ff_bytes()                          # type: ignore[attr-defined]
            if not text or self._spell is None:
                return list(self._matcher.compute_ff_tokens()[:most]) if text else []        # type: ignore[attr-defined]
            return self._spell(text[: _LONGEST_TOKEN * most])[:most]
        except Exception:                                # drafts are a favour: the answer goes on without them
            return []

    def allowed(self, tokens: list[int]) -> int:
        """How many of these tokens its grammar allows, one after the other. xgrammar is not asked: masks will tell."""
        if self.error or not self._guided:
            return len(tokens)
        try:
            return int(self._matcher.validate_tokens(tokens))                # type: ignore[attr-defined]
        except Exception:
            return 0

    def ahead(self, guesses: Iterable[int]) -> list[Matcher]:
        """Copies of this matcher after the first guess, after the second, and so on, as far as its grammar allows them and the
        answer goes on. This one stays as it is. For xgrammar: llguidance makes masks along guesses itself."""
        found: list[Matcher] = []
        newest = self
        for token in guesses:
            if newest.error:
                break
            copied = copy.copy(newest)
            copied._matcher, copied.drafted = newest._matcher.deep_copy(), True
            if not copied.accept(token) or copied.ended:
                break
            found.append(copied)
            newest = copied
        return found

    @property
    def ended(self) -> bool:
        """The grammar is complete: only an end token can follow."""
        if self.error or self._followed:
            return False
        return bool(self._matcher.is_stopped()) if self._stopped is None else self._stopped

    def fail(self, reason: str) -> None:
        self.error = _FAILED + in_words(reason)

    def held(self, later: int = 0) -> list[tuple[int, int]]:
        """End tokens to keep out of the mask, now or a number of tokens later: (word of the mask, bit)."""
        return self._early if self._num_tokens + later < self._min_tokens else self._late


@dataclass(slots=True)
class _Along:
    """A copy of the library's matcher of an answer, to go along guesses with. The answer's own stays where it is, whatever
    happens there, and the copy is not used again."""

    matcher: Any
    guesses: list[int]


def _hold_back(mask: np.ndarray, held: list[tuple[int, int]]) -> None:
    """Take these bits out of a mask, unless that would leave no token."""
    words = mask.view(np.uint32)
    before = [words[word] for word, _ in held]
    for word, bit in held:
        words[word] &= ~np.uint32(bit)
    if not words.any():
        for (word, _), value in zip(held, before, strict=True):
            words[word] |= value


def _bits(ids: Iterable[int]) -> list[tuple[int, int]]:
    return [(token >> 5, 1 << (token & 31)) for token in sorted(ids)]


def _with_guesses(
    wanted: Sequence[tuple[int, Matcher]], guesses: Mapping[int, list[int]]
) -> tuple[list[tuple[int, Matcher]], dict[int, _Along]]:
    """Matchers to fill masks with, and by row a copy of those that have guesses; xgrammar's: one for each guess."""
    listed: list[tuple[int, Matcher]] = []
    along: dict[int, _Along] = {}
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
    return each[0].family


def _family_of_second(each: tuple[int, Matcher]) -> int:
    return each[1].family


def _work(wall: float, cpu_before: float) -> float:
    """Seconds of work that threads did together: no more than the time that passed, and no more than the CPU time that this
    process used meanwhile. So neither a busy machine nor other threads of this process make masks look slow by themselves."""
    return min(wall, time.process_time() - cpu_before)


def _allowed(wanted: Sequence[tuple[int, Matcher]], along: Mapping[int, _Along]) -> float:
    """Seconds of work for these masks: a step with drafts fills as many for an answer as it saves steps, if they are right."""
    answers = max(1, sum(not matcher.drafted for _, matcher in wanted))
    masks = len(wanted) + sum(len(each.guesses) for each in along.values())
    return min(SLOW_SECONDS, max(STEP_SECONDS, _ANSWER_SECONDS * answers)) * masks / answers


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
        self._words = -(-vocab_size // 32)
        self._room = room                                # allocates the buffer: pinned where the device copies it
        self._buffer = np.empty((0, self._words), np.int32)
        self._threads = num_threads() if threads is None else threads
        self._pool: LLExecutor | None = None
        self._others: BatchFiller | None = None          # for xgrammar's matchers, once there are some
        self._look_for_slow = False
        self._warned: dict[int, tuple[int, float]] = {}  # by grammar: how many warnings, and when the last was
        self._ahead: dict[Matcher, int] = {}             # rows that advance() has filled for the next fill()
        self._thread: FillThread | None = None           # in which it does

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
            matcher._accepted = True
            matcher._num_tokens += 1
            if not fits:
                matcher.fail(matcher._matcher.get_error())
            matcher._stopped = bool(matcher._matcher.is_stopped())
        spent = time.perf_counter() - started
        self.seconds += spent
        self._look_for_slow = _work(spent, worked) > STEP_SECONDS        # next time, one by one: which grammar is it?
        current = {matcher for matcher, _ in ours}
        ahead = [each for each in wanted if each[1] in current]
        self._ahead = {matcher: row for row, matcher in ahead}
        if not ahead:
            return                                       # fill() begins anew
        masks = self._rows(num_rows)
        if len(wanted) < num_rows:
            masks.fill(-1)
        if self._thread is None:
            self._thread = FillThread()
        self._thread.start(lambda: self._fill_ahead(ahead, masks))

    def _fill_ahead(self, ahead: Sequence[tuple[int, Matcher]], masks: np.ndarray) -> None:
        """In the thread. What the caller does meanwhile counts, too: at worst the next step looks for a slow grammar, by the
        processor time of each, and finds none."""
        started, worked = time.perf_counter(), time.process_time()
        self._fill_guided(ahead, masks)
        self._look_for_slow |= _work(time.perf_counter() - started, worked) > STEP_SECONDS

    @property
    def busy(self) -> bool:
        """Are masks being filled that advance() has begun?"""
        return self._thread is not None and self._thread.busy

    def wait(self) -> None:
        """Until the masks are filled that advance() has begun. From now on their matchers may be asked for anything."""
        if self._thread is not None and self._thread.busy:
            started = time.perf_counter()
            if self._thread.wait() is not None:          # fill() will find out which matcher failed
                self._ahead = {}
            self.seconds += time.perf_counter() - started

    def fill(
        self, wanted: Sequence[tuple[int, Matcher]], num_rows: int, guesses: Mapping[int, list[int]] = _NO_GUESSES,
    ) -> np.ndarray | None:
        """`wanted` are (row of the mask, matcher). All other rows, and those of matchers that fail, allow every token. None: no
        row needs a mask. `guesses`, by row: the rows behind it are for what may follow the first of them, the second, and so on,
        as far as its grammar allows them.

        The result is valid until the next call. Each step that advance() fills masks for must call it, also without answers that
        go on: else those rows would be taken for the next step's.
        """
        self.wait()
        ahead, self._ahead = self._ahead, {}
        if not wanted:
            return None
        masks = self._rows(num_rows)
        along: dict[int, _Along] = {}
        if guesses:
            wanted, along = _with_guesses(wanted, guesses)
        missing = [each for each in wanted if ahead.get(each[1]) != each[0] or each[0] in along] if ahead else wanted
        started = time.perf_counter()
        if ahead:
            for row in {*ahead.values()}.difference(row for row, _ in wanted):       # of answers that have ended meanwhile
                masks[row] = -1
        elif len(wanted) < num_rows:
            masks.fill(-1)
        alone = len(missing) <= _ALONE or self._threads <= 1 or self._look_for_slow
        work = self._one_by_one(missing, masks, along) if alone else self._at_once(missing, masks, along)
        self._look_at(wanted, masks, along)
        if not ahead:
            self._look_for_slow = work > _allowed(wanted, along)
        self.seconds += time.perf_counter() - started
        self.filled += len(wanted) + sum(len(each.guesses) for each in along.values())
        return masks

    def _rows(self, num_rows: int) -> np.ndarray:
        if len(self._buffer) < num_rows:
            self._buffer = self._room((max(num_rows, 2 * len(self._buffer)), self._words), np.int32)
        return self._buffer[:num_rows]

    def _workers(self) -> LLExecutor:
        if self._pool is None:
            self._pool = make_pool(self._threads)
        return self._pool

    def _fill_guided(
        self, wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray, along: Mapping[int, _Along] = _NO_COPIES,
    ) -> None:
        where: Any = (masks.ctypes.data, 4 * self._words, len(masks))
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
            library, count = (matcher._matcher, 1) if own is None else (own.matcher, 1 + len(own.guesses))
            if not matcher.error and library.is_error():
                matcher.fail(library.get_error())
            if matcher.error:
                masks[row : row + count] = -1
                continue
            for later in range(count):
                self._hold(matcher.held(later), masks, row + later, columns)

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
        """Fill masks in this thread, and fail a mask, or all of a grammar together, that is too slow. Returns the CPU time."""
        spent: dict[int, float] = {}
        began = before = allowed = time.thread_time()
        limit, first, size = _allowed(wanted, along), masks.ctypes.data, 4 * self._words
        for row, matcher in wanted:
            if matcher.error:
                continue
            own, slow = along.get(row), SLOW_SECONDS
            try:
                if own is None:
                    matcher._matcher.unsafe_compute_mask_ptr(first + row * size, size)
                else:
                    slow *= 1 + len(own.guesses)
                    own.matcher.unsafe_compute_mask_ptr_with_draft_token(first + row * size, size, own.guesses)
            except Exception as error:
                matcher.fail(str(error))
            now = time.thread_time()
            if now - before > slow and not matcher.error and not matcher._matcher.is_error():
                matcher.fail(f"a mask took more than {SLOW_SECONDS} s of CPU time; use a simpler grammar")
            spent[matcher.grammar] = spent.get(matcher.grammar, 0.0) + now - before
            before = now
            if now > allowed + limit:
                allowed = now
                dearest = max(spent, key=spent.__getitem__)
                if self._warn(dearest):
                    self._fail_all(dearest, [each for _, each in wanted])
                    del spent[dearest]
        return before - began

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
            if matcher.grammar == grammar and not matcher.error:
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
