"""The requests that are in the engine, as the client's process sees them, and how they resume in another engine.

A request is open from the frame that adds it until its last answer has ended or its reader closes the stream. All tokens
received are kept here, so a lost engine loses none: the request resumes in the next engine after those tokens, and readers get
no token twice. No processes, no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ridgeline.engine.client.answer_stream import AnswerStream
from ridgeline.engine.client.processor import RequestState
from ridgeline.engine.client.wait_estimate import LoadMeter
from ridgeline.engine.ipc import TO_ENGINE, Abort, Add, Deltas
from ridgeline.errors import BadRequest, RequestError, RidgelineError
from ridgeline.messages import Request, TokenDelta
from ridgeline.metrics import RequestTimes, ServingMetrics

MAX_REPLAYS = 2                      # a request that made no progress in more engines than this may be what kills them
_AT_ONCE = 64                        # deltas handled before other tasks may run


class OpenRequest:
    """A request in the engine, or waiting for a restarted one."""

    __slots__ = ("begun", "place", "replayed_at", "replays", "request", "request_id", "state", "stream", "times")

    def __init__(
        self, request_id: str, request: Request, state: RequestState, stream: AnswerStream, place: int, times: RequestTimes
    ) -> None:
        self.begun = False                               # a token has come
        self.replays = 0                                 # engines it was sent to since it last had more …
        self.replayed_at = 0                             # … tokens than this
        self.request_id = request_id
        self.request = request
        self.state = state
        self.stream = stream
        self.place = place
        self.times = times

    @property
    def num_unfinished(self) -> int:
        return sum(not answer.finished() for answer in self.state.output.outputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.state.output.outputs)

    @property
    def may_move(self) -> bool:
        """Whether another engine may get it when its own is lost. One that lost two engines in a row without a new token may be
        the cause: it waits for its own engine."""
        return not self.replays or self.num_tokens > self.replayed_at

    def count_replay(self) -> None:
        tokens = self.num_tokens
        self.replays = 1 if tokens > self.replayed_at else self.replays + 1
        self.replayed_at = tokens

    def again(self) -> Request:
        """The request for another engine: it resumes after the tokens received."""
        if not self.begun:
            return self.request
        answers = self.state.output.outputs
        return replace(
            self.request, resumed={answer.index: answer.token_ids for answer in answers if not answer.finished()}
        )


class OpenRequests:
    """All open requests. `send` sends a frame to the engine; without an engine it does nothing, and replay() makes up for it."""

    def __init__(self, load: LoadMeter, metrics: ServingMetrics, send: Callable[[bytes], None]) -> None:
        self.by_wire_id: dict[str, OpenRequest] = {}     # wire ids are never used twice, whatever ids callers choose
        self.wire_ids: dict[str, str] = {}               # ids that callers chose -> wire ids
        self.num_aborted = 0                             # by this process
        self._load = load
        self._metrics = metrics
        self._send = send

    def __len__(self) -> int:
        return len(self.by_wire_id)

    def submit(
        self, name: str | None, request: Request, frame: bytes, state: RequestState, stream: AnswerStream, arrived: float
    ) -> None:
        wire_id, output = request.request_id, state.output
        times = output.metrics = self._metrics.sent(len(output.prompt_token_ids), len(output.outputs), arrived)
        if not request.prefix_caching:
            times.off = ("prefix caching",)
        self.by_wire_id[wire_id] = OpenRequest(name or wire_id, request, state, stream, stream.add(wire_id, state), times)
        self._load.queued(len(request.prompt_token_ids), request.params.n)
        if name:
            self.wire_ids[name] = wire_id
            state.output.request_id = name
        self._send(frame)

    def forget(self, wire_id: str, tell_engine: bool) -> None:
        opened = self.by_wire_id.pop(wire_id, None)
        if opened is not None:
            if self.wire_ids.get(opened.request_id) == wire_id:
                del self.wire_ids[opened.request_id]
            request = opened.request
            self._load.left(len(request.prompt_token_ids), request.params.n, opened.begun, finished=not tell_engine)
            if tell_engine:
                self.num_aborted += 1
                self._metrics.left(opened.times, opened.num_unfinished, opened.stream.error is not None)
                self._send(TO_ENGINE.encode(Abort(wire_id)))

    def abandon(self, wire_id: str) -> None:
        """Its reader has gone: abort it."""
        self.forget(wire_id, tell_engine=True)

    def abort(self, request_id: str) -> None:
        """End one prompt's answers where they are, with the finish reason "abort"; other prompts of its stream go on."""
        wire_id = self.wire_ids.get(request_id, request_id)
        opened = self.by_wire_id.get(wire_id)
        if opened is None or opened.request_id != request_id:
            return
        self.abandon(wire_id)
        output = opened.state.output
        for answer in output.outputs:
            if not answer.finished():
                last = TokenDelta(wire_id, answer.index, [], finish_reason="abort", num_cached_tokens=output.num_cached_tokens)
                opened.stream.push(opened.place, opened.state.take(last)[0])
        opened.stream.finish(wire_id)

    def refuse(self, wire_id: str, reason: str, field: str) -> None:
        """The engine did not take the request."""
        if wire_id in self.by_wire_id:
            self.by_wire_id[wire_id].stream.fail(BadRequest(reason, field=field))

    def fail_all(self, error: RidgelineError) -> None:
        for opened in list(self.by_wire_id.values()):
            opened.stream.fail(error)

    def replay(self, is_last: bool) -> None:
        """Send all open requests to the new engine, in the order in which they came.

        The last engine that may be started gets no request that may have killed the others: one without any new token.
        """
        for wire_id, opened in list(self.by_wire_id.items()):
            opened.count_replay()
            if is_last and opened.replays > MAX_REPLAYS:
                opened.stream.fail(RequestError(f"the engine failed {opened.replays} times with this request in it"))
            elif wire_id in self.by_wire_id:             # else its stream failed because of another of its prompts
                self._send(TO_ENGINE.encode(Add(opened.again())))

    def release(self, wire_id: str) -> OpenRequest:
        """Another engine takes it over: nothing is counted, its stream goes on."""
        opened = self.by_wire_id.pop(wire_id)
        if self.wire_ids.get(opened.request_id) == wire_id:
            del self.wire_ids[opened.request_id]
        self._load.left(len(opened.request.prompt_token_ids), opened.request.params.n, opened.begun, finished=False)
        return opened

    def take_over(self, wire_id: str, opened: OpenRequest) -> None:
        """A request of an engine that was lost: it resumes here after the tokens that its reader has."""
        tokens, answers = len(opened.request.prompt_token_ids), opened.request.params.n
        opened.count_replay()
        self.by_wire_id[wire_id] = opened
        if opened.request_id != wire_id:
            self.wire_ids[opened.request_id] = wire_id
        self._load.queued(tokens, answers)
        if opened.begun:
            self._load.begun(tokens, answers)
        self._send(TO_ENGINE.encode(Add(opened.again())))

    def take(self, news: Deltas, ended: float) -> Iterator[None]:
        """Handle a step's tokens, some answers at a time."""
        opened = self.by_wire_id
        for wire_id in news.started:
            if wire_id in opened:
                self._metrics.started(opened[wire_id].times, news.began)
        for number, (answer, token_ids) in enumerate(news.deltas.plain(), 1):
            each = opened.get(answer[0])
            if each is not None:                         # else it was aborted meanwhile
                try:
                    self._take_tokens(each, answer, token_ids, ended)
                except Exception as error:               # one request's failure must not cost others their tokens
                    each.stream.fail(error)
            if not number % _AT_ONCE:
                yield
        for number, delta in enumerate(news.deltas.others, len(news.deltas.answers) + 1):
            each = opened.get(delta.request_id)
            if each is not None:
                try:
                    self._take_delta(each, delta, ended)
                except Exception as error:
                    each.stream.fail(error)
            if not number % _AT_ONCE:
                yield

    def _take_tokens(self, opened: OpenRequest, answer: tuple[str, int, int], token_ids: list[int], ended: float) -> None:
        """New tokens and nothing else. As _take_delta(), in half the time where the answer is plain text."""
        wire_id, index, num_cached = answer
        state = opened.state
        if not state.is_plain:
            self._take_delta(opened, TokenDelta(wire_id, index, token_ids, num_cached_tokens=num_cached), ended)
            return
        if state.output.outputs[index].finish_reason is not None:
            return
        if not opened.begun:
            self._begin(opened)
        new = state.more(index, token_ids, state.output.num_cached_tokens if opened.replays else num_cached)
        self._metrics.took(opened.times, index, len(token_ids), ended)
        opened.stream.push(opened.place, new)

    def _begin(self, opened: OpenRequest) -> None:
        """Its first token has come."""
        opened.begun = True
        self._load.begun(len(opened.request.prompt_token_ids), opened.request.params.n)

    def _take_delta(self, opened: OpenRequest, delta: TokenDelta, ended: float) -> None:
        state = opened.state
        if state.output.outputs[delta.index].finished():
            return                                       # a stop string ended it in this process
        if opened.replays:
            delta.num_cached_tokens = state.output.num_cached_tokens     # the first engine's count stays
        if not opened.begun:
            self._begin(opened)
        try:
            new, stop_here = state.take(delta)
        except RidgelineError as error:
            self._metrics.answered(opened.times, delta.index, "error")
            opened.stream.fail(error)
            return
        self._metrics.took(opened.times, delta.index, len(new.token_ids), ended)
        if new.finish_reason is not None:
            self._metrics.answered(opened.times, delta.index, new.finish_reason)
        if stop_here:
            self._send(TO_ENGINE.encode(Abort(delta.request_id, delta.index)))
        opened.stream.push(opened.place, new)
        if state.output.finished:
            self.forget(delta.request_id, tell_engine=False)
            opened.stream.finish(delta.request_id)
