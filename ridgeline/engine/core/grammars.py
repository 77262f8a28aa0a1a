"""The engine's grammars: compiled in a thread, so that steps go on, and cached for the next request with the same grammar.

A request whose grammar is not compiled yet is unready, and the scheduler skips it. The vocabulary is prepared in the same thread:
while a server's engine starts, elsewhere when the first grammar arrives.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ridgeline.errors import BadRequest, EngineDead, RidgelineError, one_line
from ridgeline.grammar.background import thread_steps_back
from ridgeline.grammar.compiler import compile_grammar, compiled_bytes, make_backend
from ridgeline.grammar.grammar_cache import ByteLimitedCache
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.grammar.interface import Backend, LibraryMatcher
from ridgeline.grammar.masks import Masks, Room, num_threads
from ridgeline.grammar.matcher import Family, Matcher, Spell
from ridgeline.messages import Request
from ridgeline.process.log import get_logger
from ridgeline.sampling_params import SamplingParams, StructuredOutputs

CACHE_BYTES = 64 * 2**20
ENOUGH = 4                           # answers that share one compilation of a grammar; beyond it the grammar is compiled again, …
COPIES_PER_THREAD = 4                # … at most this often for each thread that fills masks, …
COPIES_SECONDS = 0.2                 # … and with at most this much CPU time in all
logger = get_logger("grammars")

Outcome = tuple[Request, dict[int, Matcher], str]      # a matcher for each answer, or why there is none


class Compiled:
    """A grammar from which matchers are copied.

    llguidance's copies share a cache of what they have learnt, and a lock on it: threads that fill the masks of one grammar's
    answers would wait for each other. So a grammar with many answers at once is compiled again for every few of them, and a new
    answer goes to the compilation with the fewest. There are several for each thread, because a few masks take fifty times as
    long as the others, and other threads should be able to steal the rows behind them. One per answer would learn too slowly.

    What copies have learnt is limited. Beyond the limit all of them fail, and so would every new one: answers that begin later
    get a new compilation.

    `in_step`: the work of each mask is limited, too, and an answer can outgrow its matcher. `outgrown`: its first mask takes too
    long for that already.
    """

    def __init__(self, make: Callable[[], LibraryMatcher], most: int, in_step: bool = False, outgrown: bool = False) -> None:
        began = time.thread_time()
        self._make = make
        self._in_step, self._outgrown = in_step, outgrown
        self._prototypes = [make()]
        self._families = [Family(self.first)]
        self._alive: list[weakref.WeakSet[Matcher]] = [weakref.WeakSet()]
        self._most = max(1, min(most, int(COPIES_SECONDS / max(time.thread_time() - began, 1e-6))))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._prototypes)

    @property
    def first(self) -> LibraryMatcher:
        return self._prototypes[0]

    def has_room(self, answers: int) -> bool:
        """This many more answers can begin without compiling it again."""
        if any(family.is_spent for family in self._families):
            return False
        return len(self) == self._most or sum(map(len, self._alive)) + answers <= ENOUGH * len(self)

    def start(self, params: SamplingParams, end_ids: Sequence[int], spell: Spell | None) -> Matcher:
        """A matcher for another answer."""
        with self._lock:
            for number in range(len(self)):
                if self._families[number].is_spent:
                    self._put(number)
            if not self.has_room(1):
                self._put(len(self))
            fewest = min(range(len(self)), key=lambda number: len(self._alive[number]))
            made = Matcher(self._prototypes[fewest], params, end_ids, spell, self._families[fewest])
            made.family.in_step, made.outgrown = self._in_step, self._outgrown
            self._alive[fewest].add(made)
        return made

    def _put(self, number: int) -> None:
        """Compile it again, in this place."""
        compiled, here = self._make(), slice(number, number + 1)
        self._prototypes[here], self._families[here], self._alive[here] = [compiled], [Family(compiled)], [weakref.WeakSet()]


class Grammars:
    """`room` allocates the buffers that masks are filled into."""

    def __init__(
        self, load_vocabulary: Callable[[], GrammarVocabulary], backend: str = "auto", room: Room = np.empty,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.cache: ByteLimitedCache[Compiled] = ByteLimitedCache(cache_bytes)
        self._name = backend
        self._room = room
        self._load_vocabulary = load_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._backend: Backend | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._num_pending = 0
        self._waiting: dict[str, Request] = {}           # by id: requests that the thread has not begun
        self._lock = threading.Lock()                    # on _waiting
        self._arrived: list[Request] = []                # those of them that have not been submitted to the thread
        self._masks: Masks | None = None
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        """Requests whose outcome has not been taken."""
        return self._num_pending

    def prepare(self, request: Request) -> None:
        """Make matchers for its answers; take() returns them. Copies of a cached grammar take microseconds and are made at once,
        so that requests that arrive together also begin together. Others are compiled from the next take() on: by then all
        messages have been read, and requests that were aborted meanwhile are not compiled."""
        self._num_pending += 1
        compiled = self._compiled_for(request)
        if compiled is not None:
            self._outcomes.put((request, self._start(compiled, request), ""))
            return
        with self._lock:
            self._waiting[request.request_id] = request
        self._arrived.append(request)

    def begin(self) -> None:
        """Submit the requests that have arrived and were not aborted."""
        thread = self._started_thread()
        for request in self._arrived:
            if self._waiting.get(request.request_id) is request:
                thread.submit(self._prepare_waiting, request)
        self._arrived.clear()

    def load_early(self) -> None:
        """Begin to prepare the vocabulary before the first request. The libraries keep Python's lock meanwhile, seconds with
        a large vocabulary, and no running request would get a token in that time. An error is left to the request that needs a
        grammar."""
        self._started_thread().submit(self._load)

    def wait_until_loaded(self) -> None:
        """What load_early() has begun is done."""
        self._started_thread().submit(int).result()      # there is one thread, so this comes after it

    def _started_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        return self._thread

    def _load(self) -> Backend:
        """In the thread."""
        if self._vocabulary is None or self._backend is None:
            self._vocabulary = self._load_vocabulary()
            if self._is_closed:                          # it may have waited; an engine that starts again has other grammars
                raise EngineDead("the engine that needed this grammar was closed")
            self._backend = make_backend(self._name, self._vocabulary)
            thread_steps_back()                          # not before: on a busy machine loading would take ten times as long
        return self._backend

    def forget(self, request_id: str) -> None:
        """The request was aborted: do not compile its grammar, unless that has begun."""
        with self._lock:
            if self._waiting.pop(request_id, None) is not None:
                self._num_pending -= 1
        self._arrived = [request for request in self._arrived if request.request_id != request_id]

    def _prepare_waiting(self, request: Request) -> None:
        with self._lock:
            if self._waiting.get(request.request_id) is not request:     # aborted; perhaps another has its id now
                return
            del self._waiting[request.request_id]
        self._prepare(request)

    def _compiled_for(self, request: Request) -> Compiled | None:
        """The cached grammar, if its answers can begin without compiling anything."""
        asked = request.params.structured_outputs
        compiled = self.cache.get(asked.key) if asked is not None and self._backend is not None else None
        if compiled is None or request.resumed or not compiled.has_room(request.params.n):
            return None
        return compiled

    def _start(self, compiled: Compiled, request: Request) -> dict[int, Matcher]:
        assert self._vocabulary is not None and self._backend is not None
        end_ids, spell = self._vocabulary.end_ids, self._backend.spell
        return {index: compiled.start(request.params, end_ids, spell) for index in range(request.params.n)}

    def take(self, wait_seconds: float = 0.0) -> list[Outcome]:
        """Outcomes that are ready; with `wait_seconds`, wait for the first of them."""
        if self._arrived:
            self.begin()
        outcomes: list[Outcome] = []
        while self._num_pending:
            try:
                outcomes.append(self._outcomes.get(timeout=wait_seconds) if wait_seconds else self._outcomes.get_nowait())
            except queue.Empty:
                break
            wait_seconds = 0.0
            self._num_pending -= 1
        return outcomes

    @property
    def has_masks(self) -> bool:
        """Masks have been filled."""
        return self._masks is not None

    @property
    def masks(self) -> Masks:
        """Fills masks; only once there are matchers."""
        if self._masks is None:
            assert self._vocabulary is not None
            self._masks = Masks(len(self._vocabulary.pieces), room=self._room)
        return self._masks

    def close(self) -> None:
        self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._masks is not None:
            self._masks.close()

    def _prepare(self, request: Request) -> None:
        try:
            self._outcomes.put((request, self._matchers(request), ""))
        except Exception as error:
            if not isinstance(error, RidgelineError):
                logger.exception("the grammar of request %s failed", request.request_id)
            self._outcomes.put((request, {}, one_line(error)))

    def _compile(self, backend: Backend, asked: StructuredOutputs) -> Compiled:
        if self._name == "xgrammar":                     # no shared lock, and its masks take no more than compiling left to do
            return Compiled(lambda: compile_grammar(backend, asked), 1)
        most = COPIES_PER_THREAD * num_threads() if num_threads() > 1 else 1         # one thread waits for none
        try:
            return Compiled(lambda: compile_grammar(backend, asked, in_step=True), most, in_step=True)
        except BadRequest:                               # or it only needs more work than a step may wait for
            return Compiled(lambda: compile_grammar(backend, asked), 1, in_step=True, outgrown=True)

    def grown(self, params: SamplingParams, tokens: Sequence[int]) -> Matcher:
        """A matcher behind these tokens without the limits of steps, which shares nothing with others: so no step waits for its
        lock. For any thread. BadRequest, or an error of the matcher: its grammar has failed."""
        asked = params.structured_outputs
        assert asked is not None and self._vocabulary is not None and self._backend is not None
        made = Matcher(compile_grammar(self._backend, asked), params, self._vocabulary.end_ids)
        made.alone = made.family.ahead_of_steps = True
        for token in tokens:
            made.accept(token)
        return made

    def _matchers(self, request: Request) -> dict[int, Matcher]:
        asked = request.params.structured_outputs
        assert asked is not None
        backend, compiled = self._load(), self.cache.get(asked.key)
        if compiled is None:
            compiled = self._compile(backend, asked)
        matchers = self._start(compiled, request)
        for index, matcher in matchers.items():
            for token in (request.resumed or {}).get(index, []):
                matcher.accept(token)
        self.cache.put(asked.key, compiled, len(compiled) * compiled_bytes(asked, compiled.first))
        return matchers
