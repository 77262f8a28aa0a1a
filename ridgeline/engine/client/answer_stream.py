"""The growing answers to a caller's prompts, as AsyncLLM returns them.

A reader awaits batches, or sets a sink that is called with each delta as it arrives, which wakes no task per token. While the
sink cannot take deltas, or the reader still works on earlier ones, a bounded number of deltas waits here. Knows asyncio and
outputs; no engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from ridgeline.engine.client.outputs import (
    AnswerDelta,
    CompletionOutput,
    RequestOutput,
    add_text,
    bytes_of,
    bytes_of_answer,
)
from ridgeline.engine.client.processor import RequestState
from ridgeline.errors import TimedOut

UNREAD = 64                          # deltas a slow reader is handed one by one; what comes on top is joined to them

Batch = list[tuple[int, AnswerDelta]]                    # (prompt number, what is new in one of its answers)
Sink = Callable[[Batch], bool]                           # False: not now, keep it for the reader


class AnswerStream:
    """The growing answers to one or several prompts: an async iterator over batches of (prompt number, AnswerDelta).

    A batch is everything that came since the last one, so a slow reader gets fewer and larger batches. `outputs` holds
    the whole so far. A reader that stops early must call close(), which aborts the
    unfinished requests.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self.outputs: list[RequestOutput] = []
        self.error: Exception | None = None
        self._abort = abort                              # ends a request, given its wire id
        self._unfinished: set[str] = set()               # wire ids
        self._new: Batch = []
        self._newest: dict[tuple[int, int], AnswerDelta] = {}     # of each answer, among these
        self._sink: Sink | None = None
        self._reader_waits = False                       # and has nothing in hand that must come first
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    # -- the reader's side ---------------------------------------------------------------------------------------------

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> Batch:
        self._reader_waits = True
        try:
            await self._news.wait()
        finally:
            self._reader_waits = False
        if self._new:
            batch, self._new = self._new, []
            self._newest.clear()
            if not self._ended.is_set():
                self._news.clear()
            return batch
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    def deliver_to(self, sink: Sink) -> None:
        """Deltas that arrive while the reader waits for its next batch go to `sink`, at once and in order. The iterator
        yields what the sink did not take, and ends as before."""
        self._sink = sink

    async def complete(self) -> list[RequestOutput]:
        """All answers, once they are complete; deltas wake no task."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error
        return self.outputs

    def close(self) -> None:
        """Abort the unfinished requests. Does nothing after the end."""
        self._sink = None                                # it refers to this stream: no cycle for the garbage collector
        unfinished, self._unfinished = self._unfinished, set()
        self.end()
        for wire_id in unfinished:
            self._abort(wire_id)

    def num_bytes(self) -> int:
        """About how much memory the answers take that wait here for their reader."""
        return sum(map(bytes_of, self.outputs)) + sum(bytes_of_answer(delta) for _, delta in self._new)

    # -- the engine client's side --------------------------------------------------------------------------------------

    def add(self, wire_id: str, state: RequestState) -> int:
        """One more prompt; its number."""
        self.outputs.append(state.output)
        self._unfinished.add(wire_id)
        return len(self.outputs) - 1

    def push(self, place: int, delta: AnswerDelta) -> None:
        if self._sink is not None and self._reader_waits and not self._new:
            try:
                if self._sink([(place, delta)]):
                    return
            except Exception as error:                   # the error of this reader alone: other streams go on
                self.fail(error)
                return
        answer = (place, delta.index)
        if len(self._new) >= UNREAD and answer in self._newest:
            _join(self._newest[answer], delta)
            return
        self._new.append((place, delta))
        self._newest[answer] = delta
        self._news.set()

    def finish(self, wire_id: str) -> None:
        self._unfinished.discard(wire_id)
        if not self._unfinished:
            self.end()

    def fail(self, error: Exception) -> None:
        """One request of the stream failed: the whole stream did."""
        if self.error is None:
            self.error = error
        self.close()

    def end_at(self, moment: float) -> None:
        """The stream fails if it has not ended by then; `moment` is a time.monotonic()."""
        error = TimedOut("the request was not answered within this server's request_timeout")
        self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - time.monotonic()), self.fail, error)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended.set()
        self._news.set()


def _join(unread: AnswerDelta, delta: AnswerDelta) -> None:
    """The reader gets both in one piece."""
    add_text(unread, delta.text)
    unread.token_ids.extend(delta.token_ids)
    if unread.logprobs is not None and delta.logprobs is not None:
        unread.logprobs.extend(delta.logprobs)
    unread.finish_reason, unread.stop_reason = delta.finish_reason, delta.stop_reason
    unread.text_offsets.extend(delta.text_offsets)


# -- outputs of the kinds that can be asked for ------------------------------------------------------------------------


def so_far(output: RequestOutput) -> RequestOutput:
    """A copy of what there is now: the original goes on growing."""
    answers = [
        replace(answer, token_ids=answer.token_ids.copy(), text_offsets=answer.text_offsets.copy(),
                logprobs=None if answer.logprobs is None else answer.logprobs.copy())
        for answer in output.outputs
    ]
    return replace(output, outputs=answers)


def only_new(output: RequestOutput, batch: Batch) -> RequestOutput:
    """The new tokens and text of the answers in `batch`."""
    answers: dict[int, CompletionOutput] = {}
    for _, delta in batch:
        whole = output.outputs[delta.index]
        logprobs = None if whole.logprobs is None else whole.logprobs.empty()
        new = answers.setdefault(
            delta.index, CompletionOutput(delta.index, cumulative_logprob=whole.cumulative_logprob, logprobs=logprobs)
        )
        add_text(new, delta.text)
        new.token_ids.extend(delta.token_ids)
        new.text_offsets.extend(delta.text_offsets)
        if new.logprobs is not None and delta.logprobs is not None:
            new.logprobs.extend(delta.logprobs)
        new.finish_reason, new.stop_reason = delta.finish_reason, delta.stop_reason
    return replace(output, outputs=list(answers.values()))
