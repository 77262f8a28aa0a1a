"""Answers whose masks take too long for a step to wait: a thread fills them ahead, and until then the scheduler skips the row.

Such an answer has outgrown the matcher that it began with (grammar/matcher.py). It gets one without the limits of steps, which
follows its tokens so far. From then on the thread fills the next mask whenever the newest token has come, and other rows go on
meanwhile. Answers take turns: each has one mask in the queue at most.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from ridgeline.engine.core.grammars import Grammars
from ridgeline.errors import RidgelineError, one_line
from ridgeline.grammar.background import thread_steps_back
from ridgeline.grammar.masks import Masks, num_threads
from ridgeline.grammar.matcher import Matcher
from ridgeline.messages import TokenDelta
from ridgeline.process.log import get_logger
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.scheduler.sequence import Sequence

logger = get_logger("grammars")

_Call = Future[tuple[Matcher, np.ndarray]]               # the answer's matcher, and the mask of its next token


class SlowAnswers:
    def __init__(self, scheduler: Scheduler, grammars: Grammars) -> None:
        self._answers = scheduler.answers
        self._grammars = grammars
        self._calls: dict[Sequence, _Call | None] = {}   # of each answer, what the thread has to do
        self._threads: ThreadPoolExecutor | None = None
        self.filled = 0                                  # masks

    def wait(self, seconds: float) -> bool:
        """At most that long, until a mask is filled. False: none is to be filled."""
        calls = [call for call in self._calls.values() if call is not None]
        if calls:
            wait(calls, seconds, FIRST_COMPLETED)
        return bool(calls)

    def look_after(self) -> list[TokenDelta]:
        """Before a step is planned: take masks that are filled, and ask for those that come next. Answers whose grammar has
        failed end."""
        for sequence in self._answers.outgrown:
            self._calls.setdefault(sequence)
        self._answers.outgrown.clear()
        deltas: list[TokenDelta] = []
        for sequence, call in [*self._calls.items()]:
            if call is not None and call.done() and not sequence.finished:
                deltas += self._take(sequence, call)
            if self._calls[sequence] is None and not sequence.finished:
                self._go_on(sequence)
        self.forget_ended()
        return deltas

    def forget_ended(self) -> None:
        """Of answers that have ended nothing is kept. There may be no step for a long time that would look after them."""
        for sequence in [sequence for sequence in self._calls if sequence.finished]:
            if (call := self._calls.pop(sequence)) is not None:
                call.cancel()

    def _take(self, sequence: Sequence, call: _Call) -> list[TokenDelta]:
        """The mask is there, or the answer ends."""
        self._calls[sequence] = None
        try:
            sequence.matcher, mask = call.result()
        except RidgelineError as error:
            return [self._answers.fail(sequence, one_line(error), True)]
        except Exception as error:                       # one answer's fault must not end the others; it is not the client's
            logger.exception("a mask of request %s failed", sequence.request.request_id)
            return [self._answers.fail(sequence, one_line(error))]
        if sequence.matcher.error:
            return [self._answers.fail(sequence, sequence.matcher.error, True)]
        sequence.matcher.mask = mask
        self.filled += 1
        return []

    def _go_on(self, sequence: Sequence) -> None:
        """Nothing is under way for it."""
        matcher = sequence.matcher
        assert matcher is not None
        if self._answers.wait(sequence) and not matcher.is_ready:
            mask = np.empty(self._grammars.masks.num_words, np.int32)
            if matcher.outgrown:
                said = sequence.tokens[sequence.num_prompt :].tolist()
                call = self._started().submit(self._grow, sequence.request.params, said, mask)
            else:
                call = self._started().submit(self._fill, matcher, mask)
            self._calls[sequence] = call

    def _started(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max(1, num_threads() // 4), "slow-masks", initializer=thread_steps_back)
        return self._threads

    def _grow(self, params: SamplingParams, said: list[int], mask: np.ndarray) -> tuple[Matcher, np.ndarray]:
        return self._fill(self._grammars.grown(params, said), mask)

    @staticmethod
    def _fill(matcher: Matcher, mask: np.ndarray) -> tuple[Matcher, np.ndarray]:
        if not matcher.error and (failed := Masks.fill_one(matcher._matcher, mask)):
            matcher.fail(failed)
        return matcher, mask

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
