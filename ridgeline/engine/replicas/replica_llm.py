"""One of several engines behind a front end: an AsyncLLM without a tokenizer, whose requests are watched to learn its times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ridgeline.config import EngineConfig
from ridgeline.engine.client.answer_stream import AnswerStream
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.open_requests import OpenRequest, OpenRequests
from ridgeline.engine.client.processor import RequestState
from ridgeline.engine.client.wait_estimate import LoadMeter
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.ipc import Deltas, FromEngine, Ready
from ridgeline.engine.replicas.placement import Placement
from ridgeline.engine.replicas.prefix_tree import Chain
from ridgeline.engine.replicas.replica_load import ReplicaLoad, Ticket, Usage
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt, token_bytes
from ridgeline.errors import RidgelineError
from ridgeline.messages import Request
from ridgeline.metrics import ServingMetrics

Send = Callable[[RoutedPrompt], Ticket]


class FrontEnd(Protocol):
    """What a replica calls when something of its engine changes."""

    def engine_changed(self) -> None: ...

    def engine_lost(self, replica: ReplicaLLM) -> None: ...

    def engine_opened(self, replica: ReplicaLLM) -> None: ...


class PartialLoad(LoadMeter):
    """One engine's load, counted in the load of all as well."""

    def __init__(self, total: LoadMeter) -> None:
        super().__init__()
        self._total = total

    def queued(self, tokens: int, answers: int) -> None:
        super().queued(tokens, answers)
        self._total.queued(tokens, answers)

    def begun(self, tokens: int, answers: int) -> None:
        super().begun(tokens, answers)
        self._total.begun(tokens, answers)

    def left(self, tokens: int, answers: int, began: bool, finished: bool) -> None:
        super().left(tokens, answers, began, finished)
        self._total.left(tokens, answers, began, finished)


class WatchedRequests(OpenRequests):
    """The open requests of one engine. Each has a ticket in `routed`, the load by which engines are chosen."""

    def __init__(self, load: LoadMeter, metrics: ServingMetrics, send: Callable[[bytes], None], routed: ReplicaLoad) -> None:
        super().__init__(load, metrics, send)
        self.routed = routed
        self.send_ticket: Send | None = None             # set by the front end: it knows all loads
        self._tickets: dict[str, Ticket] = {}            # by wire id
        self._next: RoutedPrompt | None = None           # of the request that is submitted next

    def expect(self, prompt: RoutedPrompt) -> WatchedRequests:
        self._next = prompt
        return self

    def _note(self, wire_id: str) -> None:
        prompt, self._next = self._next, None
        if prompt is not None and self.send_ticket is not None:
            self._tickets[wire_id] = self.send_ticket(prompt)

    def submit(
        self, name: str | None, request: Request, frame: bytes, state: RequestState, stream: AnswerStream, arrived: float
    ) -> None:
        super().submit(name, request, frame, state, stream, arrived)
        self._note(request.request_id)

    def take_over(self, wire_id: str, opened: OpenRequest) -> None:
        super().take_over(wire_id, opened)
        self._note(wire_id)

    def release(self, wire_id: str) -> OpenRequest:
        self._leave(wire_id)
        return super().release(wire_id)

    def forget(self, wire_id: str, tell_engine: bool) -> None:
        opened = self.by_wire_id.get(wire_id)
        if tell_engine or opened is None or opened.replays:      # part of an answer says nothing of an engine's times
            self._leave(wire_id)
        elif (ticket := self._tickets.pop(wire_id, None)) is not None:
            output = opened.state.output
            made = sum(len(answer.token_ids) for answer in output.outputs)
            usage = Usage(len(output.prompt_token_ids), made, output.num_cached_tokens)
            self.routed.finish(ticket, time.monotonic(), usage, self._whole(ticket, opened))
        super().forget(wire_id, tell_engine)

    def _whole(self, ticket: Ticket, opened: OpenRequest) -> Chain:
        """Prompt and answer: the next turn of a conversation begins with both."""
        answers = opened.state.output.outputs
        if not ticket.prompt.chain or len(answers) != 1:
            return ()
        return ticket.prompt.followed_by(token_bytes(answers[0].token_ids))

    def _leave(self, wire_id: str) -> None:
        if (ticket := self._tickets.pop(wire_id, None)) is not None:
            self.routed.leave(ticket)

    def _begin(self, opened: OpenRequest) -> None:
        super()._begin(opened)
        if (ticket := self._tickets.get(opened.request.request_id)) is not None:
            self.routed.first_token(ticket, time.monotonic())


class ReplicaLLM(AsyncLLM):
    """The front end makes requests and chooses; this one has the engine's process and what is open in it."""

    is_replica = True

    def __init__(
        self, number: int, config: EngineConfig, supervision: Supervision, module: str, placement: Placement,
        routed: ReplicaLoad, front: FrontEnd, total: LoadMeter,
    ) -> None:
        self.engine_module = module
        super().__init__(supervision=supervision, **config.flat())
        self.number = number
        self.placement = placement
        self.load = PartialLoad(total)
        self.requests = WatchedRequests(self.load, self.metrics, self._engine.send, routed)
        self._open = self.requests
        self._engine.environment = placement.environment
        self._engine.name = f"engine {number}"
        self._front = front

    async def load_tokenizer(self) -> None:
        """The front end has it."""

    def be_as(self, first: ReplicaLLM) -> None:
        """Take the sizes of the engine that was ready first: all have the same KV cache and context."""
        self._engine.sizes = first._engine.sizes

    def _take(self, message: FromEngine) -> Iterator[None] | None:
        work = super()._take(message)
        if isinstance(message, Deltas):
            self._front.engine_changed()
        return work

    def _opened(self, ready: Ready) -> None:
        super()._opened(ready)
        self._front.engine_opened(self)

    def _lost(self) -> None:
        super()._lost()
        self._front.engine_lost(self)

    def _dead(self, error: RidgelineError) -> None:
        self._front.engine_lost(self)
        super()._dead(error)
