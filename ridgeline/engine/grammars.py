"""The engine's grammars: compiled in a thread, so that steps go on, and kept for the next request with the same one.

A request whose grammar is not there yet is unready, and the scheduler passes it over. The tokenizer, which nothing else in
the engine needs, is loaded when the first grammar arrives, in the same thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ridgeline.errors import RidgelineError, one_line
from ridgeline.grammar.cache import ByteLimitedCache
from ridgeline.grammar.vocabulary import GrammarVocabulary
from ridgeline.log import get_logger
from ridgeline.messages import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from ridgeline.grammar.matcher import Masks, Matcher

CACHE_BYTES = 64 * 2**20
logger = get_logger("grammars")

Outcome = tuple[Request, dict[int, "Matcher"], str]      # a matcher for each answer, or why there is none


class Grammars:
    def __init__(self, load_vocabulary: Callable[[], GrammarVocabulary], cache_bytes: int = CACHE_BYTES) -> None:
        self.cache: ByteLimitedCache[LLMatcher] = ByteLimitedCache(cache_bytes)
        self._load_vocabulary = load_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._tokenizer: LLTokenizer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._num_pending = 0
        self._masks: Masks | None = None

    @property
    def num_pending(self) -> int:
        """Requests whose outcome has not been taken."""
        return self._num_pending

    def prepare(self, request: Request) -> None:
        """Make matchers for its answers; they come with take()."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._num_pending += 1
        self._thread.submit(self._prepare, request)

    def take(self, wait_seconds: float = 0.0) -> list[Outcome]:
        """What is there; with a time to wait, as soon as something is."""
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
    def masks(self) -> Masks:
        """Where masks are filled; asked for only once there are matchers."""
        if self._masks is None:
            from ridgeline.grammar.matcher import Masks

            assert self._vocabulary is not None
            self._masks = Masks(len(self._vocabulary.pieces))
        return self._masks

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, request: Request) -> None:
        try:
            self._outcomes.put((request, self._matchers(request), ""))
        except Exception as error:
            if not isinstance(error, RidgelineError):
                logger.exception("the grammar of request %s failed", request.request_id)
            self._outcomes.put((request, {}, one_line(error)))

    def _matchers(self, request: Request) -> dict[int, Matcher]:
        asked = request.params.structured_outputs
        assert asked is not None
        # The library takes a tenth of a second to import: that is spent here, and only where grammars are used.
        from ridgeline.grammar.compiler import compile_grammar, compiled_bytes, make_tokenizer
        from ridgeline.grammar.matcher import Matcher

        if self._vocabulary is None or self._tokenizer is None:
            self._vocabulary = self._load_vocabulary()
            self._tokenizer = make_tokenizer(self._vocabulary)
        compiled = self.cache.get(asked.key)
        if compiled is None:
            compiled = compile_grammar(self._tokenizer, asked)
            self.cache.put(asked.key, compiled, compiled_bytes(asked))
        matchers = {}
        for index in range(request.params.n):
            matcher = matchers[index] = Matcher(compiled, request.params, self._vocabulary.end_ids)
            for token in (request.resumed or {}).get(index, []):
                matcher.accept(token)
        return matchers
