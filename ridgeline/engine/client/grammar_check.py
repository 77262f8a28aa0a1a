"""Compiles each request's grammar before the request goes to the engine, to refuse those that cannot be used.

The compiler runs in a process of its own (grammar/compile_worker) with limits on time and memory. A grammar that exceeds them is
refused; other requests are not affected. Verdicts are cached, so a grammar that is used again costs nothing here.

That process runs at a lower CPU priority than token generation. So there are two limits. A grammar that needs too much CPU time
is refused, and remembered. One that is not ready in time because other processes had the CPUs waits for another turn, which is
twice as long; after the longest turn it fails its request, for now.

Each new grammar is first tried with a little CPU time, which is enough for nearly all. Those that need more wait until every new
one was tried. While requests generate, both kinds get only a share of the CPUs, the slow ones the smaller: they compete for
caches and memory bandwidth, which priorities do not divide. A grammar that would wait too long gets Overloaded.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import msgspec

from ridgeline.errors import BadRequest, NotNow, Overloaded, TryAgain, one_line
from ridgeline.grammar.frames import Answer, Question
from ridgeline.grammar.grammar_cache import ByteLimitedCache
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.process.framed_child import FramedChild, Stopped, ask_another_if_stopped
from ridgeline.process.log import get_logger
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.text.tokenizer import Tokenizer

logger = get_logger("grammars")

COMPILE_SECONDS = 2.0                # wall-clock time of a grammar's first turn; on busy CPUs it gets further ones, …
_MOST_SECONDS = 8.0                  # … each twice as long, up to this: small grammars may wait for one turn
_CPU_PART = 0.75                     # of it, the CPU time that one grammar may take: less, so that it ends first on a free CPU
# Until the process is ready: half a second, but 3 s of CPU time with xgrammar, of which a busy machine gives it a tenth.
# A limit that such a machine exceeds would end a healthy process, and the next one after it.
_START_SECONDS = 120.0
_VERDICT_BYTES = 8 * 2**20           # of grammars whose verdict is remembered
_ENTRY_BYTES = 256
_LATE_SECONDS = 0.4                  # beyond its limit, after which no answer is expected
_RETRY_SECONDS = 60.0                # how long a grammar that took too long is refused without another try
TRY_SECONDS = 0.02                   # CPU seconds that each new grammar is tried with, …
_TRY_LIMIT = 0.3                     # … within this many seconds of wall-clock time
_PENDING_BYTES = 16 * 2**20          # of waiting grammars; the server limits the number of requests, …
_PENDING_ENTRY = 8 * 2**10           # … and each counts for at least this
_PATIENCE_SECONDS = 30.0             # the longest wait of one
_TURN_SECONDS = 1.0                  # the longest wait because of CPU time that earlier ones took, …
_TRY_TURN_SECONDS = 0.2              # … and the same before its first try
SHARE = 0.015 * (os.cpu_count() or 1)                    # of the CPUs while requests generate, for slow grammars, …
TRY_SHARE = 0.03 * (os.cpu_count() or 1)                 # … and for first tries, …
AT_ONCE = 0.1                        # … beyond this many CPU seconds saved up
_WATCH_SECONDS = 0.2                 # how often all waiting grammars are looked at, to end those that have waited for too long
_LOOK_SECONDS = 0.05                 # how often a waiting grammar checks whether requests still generate

# llguidance's reason to refuse a oneOf names an option of its own, which requests do not have.
_ONE_OF = "coerce_one_of"
_OVERLAP = (
    "an answer could fit two branches of a oneOf, which cannot be kept to; use anyOf, or tell the branches apart by a "
    "required property with a const"
)
_UNIQUE = '"uniqueItems"'
_REPEATED = (
    "uniqueItems cannot be kept to, because a grammar does not remember which items came before; leave it out and remove what is "
    "repeated, or list at most four values in the items' enum"
)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> GrammarVocabulary:
    """For a model whose logits have `vocab_size` ids."""
    return GrammarVocabulary.of(tokenizer.token_pieces(), tokenizer.special_ids, end_ids, vocab_size)


class GrammarChecker:
    """Safe to use from several threads; one grammar is compiled at a time."""

    def __init__(self, tokenizer: Tokenizer, backend: str = "auto", seconds: float = COMPILE_SECONDS) -> None:
        self._tokenizer = tokenizer
        self._backend = backend                          # the library that compiles
        self._seconds = seconds
        self._verdicts: ByteLimitedCache[_Verdict] = ByteLimitedCache(_VERDICT_BYTES)
        self._compiler: _Compiler | None = None
        self._lock = threading.Lock()
        self._pending = _Pending()
        self._allowance = _Allowance(SHARE, AT_ONCE, _TURN_SECONDS)
        self._try_allowance = _Allowance(TRY_SHARE, AT_ONCE, _TRY_TURN_SECONDS)
        self._tries = ThreadPoolExecutor(1, thread_name_prefix="grammar-try")
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")

    def check(self, asked: StructuredOutputs, seconds: float | None = None) -> None:
        """BadRequest if it cannot be used. Waits for the compiler, unless the verdict is known."""
        self._is_through(asked, self._seconds if seconds is None else seconds)

    def _is_through(self, asked: StructuredOutputs, seconds: float, try_seconds: float = 0.0) -> bool:
        """False: it was only tried, and this much CPU time was not enough. BadRequest when it cannot be used."""
        if self._is_good(asked):
            return True
        with self._lock:
            if self._is_good(asked):
                return True
            verdict = self._compile(asked, seconds, try_seconds)
            if verdict is None:
                return False
            self._verdicts.put(asked.key, verdict, _ENTRY_BYTES + 4 * len(asked.key) + len(verdict.refusal))
        verdict.require_good(asked)
        return True

    def _is_good(self, asked: StructuredOutputs) -> bool:
        """False: not known. BadRequest: known to be bad."""
        verdict = self._verdicts.get(asked.key)
        if verdict is None or verdict.until < time.monotonic():
            return False
        verdict.require_good(asked)
        return True

    def check_soon(
        self, asked: StructuredOutputs, others_generate: Callable[[], bool] = lambda: False, ends: float | None = None
    ) -> Future[None]:
        """check() in a thread, for callers that must not block. Overloaded if too much waits already, or it waits for too long.

        `ends`: the time.monotonic() after which its result is of no use. Cancelling the future gives it up too."""
        outcome: Future[None] = Future()
        if self._is_good(asked):
            outcome.set_result(None)
            return outcome
        size = _PENDING_ENTRY + 4 * len(asked.key)
        if not self._pending.add(size):
            message = f"grammars of {_PENDING_BYTES >> 20} MiB are waiting to be compiled; try again later"
            raise NotNow(message, self._seconds)
        outcome.add_done_callback(lambda _: self._pending.remove(size))
        now = time.monotonic()
        waiting = _Waiting(asked, outcome, min(now + _PATIENCE_SECONDS, ends or math.inf), others_generate)
        self._pending.untried.add(waiting)
        try:
            self._pending.give_up_in_time(waiting)
            self._tries.submit(self._try, waiting)
        except RuntimeError as error:                    # no thread: it must not keep its place, nor those behind it waiting
            self._pending.untried.discard(waiting)
            waiting.end(error)
        return outcome

    def _try(self, waiting: _Waiting) -> None:
        waiting.begun = time.monotonic()
        try:
            self._wait_for_turn(waiting, self._try_allowance)
            through = waiting.is_left or self._is_through(waiting.asked, min(_TRY_LIMIT, self._seconds), TRY_SECONDS)
        except Exception as error:
            waiting.end(error)
            through = True
        self._pending.untried.discard(waiting)
        if through:
            waiting.end()
        else:
            self._turns.submit(self._take_long, waiting)

    def _take_long(self, waiting: _Waiting) -> None:
        try:
            while self._pending.untried and not waiting.is_left:
                waiting.require_patience(0.0)
                time.sleep(_LOOK_SECONDS)
            self._wait_for_turn(waiting, self._allowance)
            if not waiting.is_left:
                # The time spent waiting for its turns is part of its limit.
                left = self._seconds - (time.monotonic() - waiting.begun) if waiting.turn == 1 else waiting.turn * self._seconds
                self.check(waiting.asked, max(left, self._seconds - _TURN_SECONDS - _TRY_TURN_SECONDS))
        except _NoProcessor as error:
            waiting.turn *= 2
            if waiting.turn * self._seconds > _MOST_SECONDS:
                waiting.end(error)
            else:
                self._turns.submit(self._take_long, waiting)     # behind those that have waited for their first turn
        except Exception as error:
            waiting.end(error)
        else:
            waiting.end()

    def _wait_for_turn(self, waiting: _Waiting, allowance: _Allowance) -> None:
        """Overloaded if the wait is too long."""
        waiting.require_patience(0.0)
        while (turn := allowance.seconds_until_turn()) and waiting.others_generate() and not waiting.is_left:
            waiting.require_patience(turn)
            time.sleep(min(turn, _LOOK_SECONDS))

    def _compile(self, asked: StructuredOutputs, seconds: float, try_seconds: float = 0.0) -> _Verdict | None:
        """None: it was only tried, and that was not enough."""
        cpu_seconds = try_seconds or _CPU_PART * self._seconds
        question = msgspec.msgpack.encode(Question(asked, seconds, cpu_seconds))
        answer = ask_another_if_stopped(lambda: self._answer(question, seconds + _LATE_SECONDS), "compiles grammars")
        (self._try_allowance if try_seconds else self._allowance).spend(answer.spent)
        if try_seconds and answer.verdict in ("late", "busy"):
            return None
        if answer.verdict == "busy":
            raise _NoProcessor("the machine is too busy to compile a grammar; try again later", self._seconds)
        if answer.verdict == "killed":
            raise TryAgain("the process that compiled the grammar was killed; try again later", self._seconds)
        if answer.verdict in ("good", "refused"):
            known = next((words for mark, words in ((_ONE_OF, _OVERLAP), (_UNIQUE, _REPEATED)) if mark in answer.reason), None)
            return _Verdict(f"structured_outputs.{asked.kind} cannot be used: {known}" if known else answer.reason)
        reason = "takes too much memory to compile"
        if answer.verdict == "late":
            reason = f"takes more than {cpu_seconds:.2g} s of CPU time to compile"
        # A machine's speed varies: after a while it is worth another try.
        refusal = f"structured_outputs.{asked.kind} {reason}; use a simpler grammar"
        return _Verdict(refusal, time.monotonic() + _RETRY_SECONDS)

    def _answer(self, question: bytes, seconds: float) -> Answer:
        """Of the process, which is started if there is none."""
        if self._compiler is None or not self._compiler.alive:
            tokenizer = self._tokenizer
            vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
            self._compiler = _Compiler(self._backend, vocabulary)
        compiler = self._compiler
        try:
            return msgspec.msgpack.decode(compiler.ask(question, seconds), type=Answer)
        except (TimeoutError, EOFError) as gone:
            if self._compiler is not compiler:
                raise TryAgain("the server is stopping; try again later", self._seconds) from None
            self._compiler = None
            if isinstance(gone, Stopped):
                raise
            return Answer("busy" if isinstance(gone, TimeoutError) else "killed")

    def close(self) -> None:
        """End the process; the next check starts it again. A thread that asks the process keeps its pipes, whose numbers could be
        another file's otherwise: it finds them at their end, and closes them."""
        compiler, self._compiler = self._compiler, None
        if compiler is None:
            return
        if self._lock.acquire(blocking=False):
            compiler.end()
            self._lock.release()
        else:
            compiler.process.kill()


class _NoProcessor(NotNow):
    """Other processes had the CPUs: the grammar used less CPU time than it may."""


class _Waiting:
    """A grammar without a verdict, and the request that waits for it."""

    def __init__(
        self, asked: StructuredOutputs, outcome: Future[None], until: float, others_generate: Callable[[], bool]
    ) -> None:
        self.asked = asked
        self.others_generate = others_generate
        self.begun = 0.0                                 # when its first try began, by time.monotonic()
        self.turn = 1                                    # how many times as long as the first its turn is
        self._outcome = outcome
        self._until = until                              # by time.monotonic()

    @property
    def is_left(self) -> bool:
        return self._outcome.cancelled()

    def require_patience(self, seconds: float) -> None:
        """Overloaded if `seconds` more are too long a wait."""
        if time.monotonic() + seconds > self._until:
            raise NotNow("too many new grammars are waiting to be compiled; try again later", max(1.0, seconds))

    def is_over(self) -> bool:
        """Its request has an answer, or gets one now because it has waited for too long: whatever holds up the compiler."""
        try:
            self.require_patience(-_LATE_SECONDS)        # by itself it gives up before
        except Overloaded as error:
            self.end(error)
        return self._outcome.done()

    def end(self, error: Exception | None = None) -> None:
        with suppress(InvalidStateError):                # done or cancelled
            if error is None:
                self._outcome.set_result(None)
            else:
                self._outcome.set_exception(error)


class _Pending:
    """The waiting grammars."""

    def __init__(self) -> None:
        self.untried: set[_Waiting] = set()
        self._waiting: list[_Waiting] = []               # all without an outcome, …
        self._watcher: threading.Thread | None = None    # … and the thread that gives them one in the end
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> bool:
        """False: there is no room."""
        with self._lock:
            if self._bytes and self._bytes + size > _PENDING_BYTES:
                return False
            self._bytes += size
            return True

    def remove(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def give_up_in_time(self, waiting: _Waiting) -> None:
        """End its wait when its patience is over, also while the threads that compile are held up by another grammar."""
        with self._lock:
            if self._watcher is None:
                watcher = threading.Thread(target=self._watch, name="grammar-patience", daemon=True)
                watcher.start()                          # RuntimeError where the system has no thread: the next one tries again
                self._watcher = watcher
            self._waiting.append(waiting)

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(_WATCH_SECONDS):
            with self._lock:
                waiting = self._waiting
            over = {each for each in waiting if each.is_over()}          # ending one calls remove(): without the lock
            with self._lock:
                self._waiting = [each for each in self._waiting if each not in over]
                if not self._waiting:
                    self._watcher = None
                    return


class _Allowance:
    """A budget of CPU time for new grammars: it grows by a share of the time, up to `most`. A grammar that overdraws it delays
    the next one, by `turn` seconds at most."""

    def __init__(self, share: float, most: float, turn: float) -> None:
        self._share, self._most, self._turn = share, most, turn
        self._left, self._at = most, time.monotonic()

    def seconds_until_turn(self) -> float:
        now = time.monotonic()
        self._left, self._at = min(self._most, self._left + self._share * (now - self._at)), now
        return 0.0 if self._left >= 0 else -self._left / self._share

    def spend(self, seconds: float) -> None:
        self._left = max(self._left - seconds, -self._share * self._turn)


class _Verdict(NamedTuple):
    refusal: str                     # empty: the grammar can be used
    until: float = math.inf

    def require_good(self, asked: StructuredOutputs) -> None:
        if self.refusal:
            raise BadRequest(self.refusal, field=f"structured_outputs.{asked.kind}")


class _Compiler(FramedChild):
    """The process (grammar/compile_worker), once it is ready."""

    def __init__(self, backend: str, vocabulary: GrammarVocabulary) -> None:
        try:
            super().__init__("ridgeline.grammar.compile_worker", backend)
            self.ask(msgspec.msgpack.encode(vocabulary), _START_SECONDS)
        except (TimeoutError, EOFError, OSError) as error:
            logger.error("the process that compiles grammars could not be started: %s", one_line(error))
            raise TryAgain("the process that compiles grammars could not be started; try again later") from None
