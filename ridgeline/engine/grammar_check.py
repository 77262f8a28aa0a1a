"""Does this grammar compile? Asked by the front end of every request that brings one, before the engine hears of it.

The compiler runs in a process of its own (grammar/worker) with limits on time and memory: what exceeds them is refused, and
nobody else notices. Verdicts are remembered, so a grammar that is used again costs nothing here.

That process comes behind whoever generates. So a grammar that was not through in time has perhaps had too little of the
processors: then it is not the grammar that is refused, but the request, for now. And while others generate, new grammars get
only a small share of the processors between them, however many come: they share caches and memory with whoever generates,
where coming behind does not help. What would have to wait too long for its turn is refused, for now.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import msgspec

from ridgeline.engine.children import start_child
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest, Overloaded, RequestError
from ridgeline.grammar.cache import ByteLimitedCache
from ridgeline.grammar.frames import Answer, Question, read_frame, write_frame
from ridgeline.grammar.vocabulary import GrammarVocabulary
from ridgeline.sampling_params import StructuredOutputs

COMPILE_SECONDS = 2.0                # what one grammar may take
_START_SECONDS = 60.0                # what the process may take to be there: on a loaded machine, many times the usual half
_VERDICT_BYTES = 8 * 2**20           # of grammars whose verdict is remembered
_ENTRY_BYTES = 256
_LATE_SECONDS = 0.4                  # after which no answer comes, whatever the reason
_RETRY_SECONDS = 60.0                # how long a grammar that took too much is refused without a look
MAX_PENDING = 32                     # grammars that wait for the compiler …
_TURN_SECONDS = 1.0                  # … and how long, at most
SHARE = 0.015 * (os.cpu_count() or 1)                    # of a processor's time for new grammars while others generate, …
AT_ONCE = 0.1                        # … beyond so many seconds of it
_LOOK_SECONDS = 0.05                 # how often one that waits for its turn looks whether others still generate


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> GrammarVocabulary:
    """For a model whose logits have `vocab_size` ids. BadRequest where answers have no end."""
    vocabulary = GrammarVocabulary.of(tokenizer.token_pieces(), tokenizer.special_ids, end_ids, vocab_size)
    if not vocabulary.end_ids:
        raise BadRequest("structured_outputs needs a model with an end token; this one has none")
    return vocabulary


class GrammarChecker:
    """Safe to use from several threads; one grammar is compiled at a time."""

    def __init__(self, tokenizer: Tokenizer, backend: str = "auto", seconds: float = COMPILE_SECONDS) -> None:
        self._tokenizer = tokenizer
        self._backend = backend                          # which library compiles
        self._seconds = seconds
        self._verdicts: ByteLimitedCache[_Verdict] = ByteLimitedCache(_VERDICT_BYTES)
        self._compiler: _Compiler | None = None
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(MAX_PENDING)
        self._allowance = _Allowance(SHARE, AT_ONCE)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")

    def check(self, asked: StructuredOutputs, seconds: float | None = None) -> None:
        """BadRequest when it cannot be used. Waits for the compiler, unless the verdict is known."""
        if not self._is_good(asked):
            with self._lock:
                if not self._is_good(asked):
                    verdict = self._compile(asked, self._seconds if seconds is None else seconds)
                    self._verdicts.put(asked.key, verdict, _ENTRY_BYTES + 4 * len(asked.key) + len(verdict.refusal))
                    verdict.tell()

    def _is_good(self, asked: StructuredOutputs) -> bool:
        """False: not known. BadRequest: known to be bad."""
        verdict = self._verdicts.get(asked.key)
        if verdict is None or verdict.until < time.monotonic():
            return False
        verdict.tell()
        return True

    def check_soon(self, asked: StructuredOutputs, others_generate: Callable[[], bool] = lambda: False) -> Future[None]:
        """The same, elsewhere: for callers that must not wait. Overloaded when too many wait already, or for too long."""
        if self._is_good(asked):
            known: Future[None] = Future()
            known.set_result(None)
            return known
        if not self._room.acquire(blocking=False):
            raise Overloaded(f"{MAX_PENDING} grammars are waiting to be compiled; try again later", self._seconds)
        future = self._threads.submit(self._check_in_turn, asked, time.monotonic(), others_generate)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _check_in_turn(self, asked: StructuredOutputs, arrived: float, others_generate: Callable[[], bool]) -> None:
        if self._is_good(asked):
            return
        while (turn := self._allowance.seconds_until_turn()) and others_generate():
            if time.monotonic() + turn > arrived + _TURN_SECONDS:
                raise Overloaded("too many new grammars come while others generate; try again later", max(1.0, turn))
            time.sleep(min(turn, _LOOK_SECONDS))
        # Who has waited has that much less.
        self.check(asked, max(self._seconds - _TURN_SECONDS, self._seconds - (time.monotonic() - arrived)))

    def _compile(self, asked: StructuredOutputs, seconds: float) -> _Verdict:
        if self._compiler is None or not self._compiler.alive:
            tokenizer = self._tokenizer
            vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
            self._compiler = _Compiler(self._backend, vocabulary)
        compiler = self._compiler
        question = msgspec.msgpack.encode(Question(asked, seconds))
        try:
            answer = msgspec.msgpack.decode(compiler.ask(question, seconds + _LATE_SECONDS), type=Answer)
        except (TimeoutError, EOFError) as gone:
            if self._compiler is not compiler:
                raise RequestError("the front end is closing") from None
            self._compiler = None
            answer = Answer("busy" if isinstance(gone, TimeoutError) else "memory")
        self._allowance.spend(answer.spent)
        if answer.verdict == "busy":
            raise Overloaded("the machine is too busy to compile a grammar; try again later", self._seconds)
        if answer.verdict in ("good", "refused"):
            return _Verdict(answer.reason)
        reason = "takes too much memory to compile"
        if answer.verdict == "late":
            reason = f"takes more than {seconds:.2g} s to compile"
        # The machine may be to blame: after a while it is worth another try.
        refusal = f"structured_outputs.{asked.kind} {reason}; use a simpler grammar"
        return _Verdict(refusal, time.monotonic() + _RETRY_SECONDS)

    def close(self) -> None:
        """End the process; it is started again when somebody asks."""
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.end()


class _Allowance:
    """Of the processors' time, for new grammars: a share, saved up to a little. What one grammar took beyond it delays the next,
    but for no longer than it could wait."""

    def __init__(self, share: float, most: float) -> None:
        self._share, self._most = share, most
        self._left, self._at = most, time.monotonic()

    def seconds_until_turn(self) -> float:
        now = time.monotonic()
        self._left, self._at = min(self._most, self._left + self._share * (now - self._at)), now
        return 0.0 if self._left >= 0 else -self._left / self._share

    def spend(self, seconds: float) -> None:
        self._left = max(self._left - seconds, -self._share * _TURN_SECONDS)


class _Verdict(NamedTuple):
    refusal: str                     # empty: it can be used
    until: float = math.inf

    def tell(self) -> None:
        if self.refusal:
            raise BadRequest(self.refusal)


class _Compiler:
    """The process (grammar/worker), ready to be asked."""

    def __init__(self, backend: str, vocabulary: GrammarVocabulary) -> None:
        self._process = start_child(
            "ridgeline.grammar.worker", backend, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.end = weakref.finalize(self, _end, self._process)
        try:
            self.ask(msgspec.msgpack.encode(vocabulary), _START_SECONDS)
        except (TimeoutError, EOFError):
            raise RequestError("the process that compiles grammars could not be started") from None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, frame: bytes, seconds: float) -> bytes:
        """TimeoutError or EOFError, and then the process is gone."""
        source, target = self._process.stdout, self._process.stdin
        assert source is not None and target is not None
        deadline = time.monotonic() + seconds
        answer, in_time = None, True
        with suppress(OSError):                          # it is gone: no answer says so
            write_frame(target, frame)
            # An answer is short and written at once: when its first byte is there, the rest is.
            in_time = bool(select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0])
            answer = read_frame(source) if in_time else None
        if answer is None:
            self.end()
            raise EOFError if in_time else TimeoutError
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
