"""The POST endpoints as raw ASGI applications: read the body, run the job, send the answer or the error.

    body ─ api/prepare ─▶ Job ─ llm.stream ─▶ AnswerStream ─ Writer ─▶ JSON or server-sent events

Each request runs under a watch for its client: a client that hangs up has its request aborted, streaming or not.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from ridgeline.engine.client.answer_stream import AnswerStream, Batch
from ridgeline.engine.client.long_work import LONG_BYTES, away_to_answer
from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest, RequestError
from ridgeline.server.api.dialects import CHAT, Dialect
from ridgeline.server.api.generation import Writer
from ridgeline.server.api.prepared import Job, Prepared
from ridgeline.server.api.prompt_parts import BYTES_PER_VALUE
from ridgeline.server.http.admission import Body
from ridgeline.server.http.body import field_names
from ridgeline.server.http.failures import as_requested, describe
from ridgeline.server.http.gate import caller_of
from ridgeline.server.http.hosts import Scope
from ridgeline.server.http.stream import (
    DIRECT,
    Binary,
    ClientGone,
    EventStream,
    Receive,
    Send,
    in_time,
    send_bytes,
    send_json,
    while_connected,
)
from ridgeline.server.observe import prometheus
from ridgeline.server.server_errors import WrongMediaType
from ridgeline.server.service import Service

T = TypeVar("T")

BYTES_PER_NUMBER = 16                # of JSON, for each number or character of an answer, with the time it takes
MOST_REPEATED = 128 * 2**20          # bytes of prompts in an answer that is not streamed: it is in memory up to three times
EVENTS_AT_ONCE = 4                   # written before the next check whether the client keeps up


class Endpoint(ABC):
    """A POST with a JSON body: reads it, watches its client, and answers errors."""

    def __init__(self, service: Service, dialect: Dialect = CHAT, prompt_field: str | None = None) -> None:
        """`prompt_field`: the body's field with the prompt, if one field has all of it."""
        self._service = service
        self._dialect = dialect
        self._prompt_field = prompt_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(self._service.bodies)
        try:
            self._service.require_ready()
            self._service.slots.check_free()             # before a byte of the body is read
            check_media_type(scope, self._dialect.any_media_type)
            async with in_time(caller_of(scope).ends):
                await body.read(receive, scope["headers"], scope.get(DIRECT))
            with self._service.slots.taking(1):          # a body that does not come holds none
                self._service.require_ready(is_new=False)
                prometheus.note_arrival(scope)
                self._service.tracing.note(scope)
                await while_connected(receive, self._answer(scope, body, send))
        except ClientGone:
            pass
        except Exception as error:
            status, said, headers = describe(error, self._prompt_field, self._dialect.names)
            await send_json(send, status, self._dialect.error(status, said), headers)
        finally:
            body.release()

    @abstractmethod
    async def _answer(self, scope: Scope, body: Body, send: Send) -> None: ...

    async def _made(self, function: Callable[[Service, Caller, bytes], Awaitable[T]], caller: Caller, body: Body) -> T:
        """What `function` makes of the body, in the time that the request has."""
        async with in_time(caller.ends):
            made: T = await self._service.reader.read(function, self._service, caller, body)
            return made


class Question(Endpoint):
    """An endpoint whose answer is one struct, or its JSON."""

    def __init__(
        self, service: Service, read: Callable[[Service, Caller, bytes], Awaitable[Any]], dialect: Dialect = CHAT,
        prompt_field: str | None = None, then: Callable[[Service, Caller, Any], Awaitable[Any]] | None = None,
    ) -> None:
        """`read`: the answer to a body; or, if the engine is needed, what `then` makes the answer of."""
        super().__init__(service, dialect, prompt_field)
        self._read = read
        self._then = then

    async def _answer(self, scope: Scope, body: Body, send: Send) -> None:
        caller = caller_of(scope)
        answer = await self._made(self._read, caller, body)
        body.release()                                   # an engine may take minutes
        if self._then is not None:
            answer = await self._then(self._service, caller, answer)
        if isinstance(answer, Binary):
            await send_bytes(send, answer)
        else:
            await send_json(send, 200, await encoded(answer))


async def encoded(answer: Any) -> bytes:
    """As JSON. Only a text or a list of numbers makes an answer long, and is looked at before it is encoded."""
    if isinstance(answer, bytes):
        return answer
    return await away_to_answer(BYTES_PER_NUMBER * num_items(answer), lambda: msgspec.json.encode(answer))


def num_items(answer: Any) -> int:
    """About how many numbers and characters an answer has, by its struct's own fields and the first items of its lists."""
    values = [getattr(answer, name) for name in getattr(answer, "__struct_fields__", ())]
    total = sum(len(value) for value in values if isinstance(value, str))
    for items in (value for value in values if isinstance(value, list) and value):
        inner = items[0]
        total += len(items) * (len(inner) if isinstance(inner, list | str) else 1 + num_items(inner))
    return total


class Generation(Endpoint):
    """An endpoint that generates tokens."""

    def __init__(
        self, service: Service, prepare: Callable[[Service, Caller, bytes], Awaitable[Prepared | bytes]],
        dialect: Dialect = CHAT, prompt_field: str | None = None,
    ) -> None:
        """`prepare`: the request, ready to run; or its answer, where there is nothing to generate."""
        super().__init__(service, dialect, prompt_field)
        self._prepare = prepare

    async def _answer(self, scope: Scope, body: Body, send: Send) -> None:
        with self._service.tracing.request():
            await self._generate(scope, body, send)

    async def _generate(self, scope: Scope, body: Body, send: Send) -> None:
        caller = caller_of(scope)
        prepared = await self._made(self._prepare, caller, body)
        body.release()
        if isinstance(prepared, bytes):
            await send_json(send, 200, prepared)
            return
        jobs = [prepared.job(self._service)]
        del prepared
        await self._run(scope, caller, jobs.pop(), send)     # which alone holds it: see below

    async def _run(self, scope: Scope, caller: Caller, job: Job, send: Send) -> None:
        count = len(job.prompts) * job.params.n
        with self._service.slots.taking(count, already=1):
            stream = await self._start(caller, job)
            try:
                if job.request.stream:
                    dialect = self._dialect
                    direct, behind = scope.get(DIRECT), partial(bytes_behind, stream, job.writer)
                    events = EventStream(send, job.headers, dialect.framed, direct, dialect.stream_kind, behind)
                    await self._send_events(stream, job, events)
                    return
                check_repeated(job, stream.outputs)
                whole = await self._whole(stream, job)
            finally:
                self._end(job, stream)
            headers = job.headers
            del stream, job                              # a client may take its time to read: only the bytes wait for it
            await send_json(send, 200, whole, headers)

    async def _whole(self, stream: AnswerStream, job: Job) -> bytes:
        outputs = await stream.complete()
        whole = await away_to_answer(size_of(job.writer, outputs), lambda: job.writer.body(outputs))
        if prometheus.wants_timings(job.request.return_timings):
            whole = prometheus.with_timings(whole, self._service.llm, outputs)
        return whole

    async def _start(self, caller: Caller, job: Job) -> AnswerStream:
        caller = prometheus.switched(self._service.llm, caller, job.request.techniques)
        caller = caller.expecting_first_token(job.request.ttft_deadline_ms)
        with job.request.naming_its_grammar():
            return await self._service.llm.stream(
                job.prompts, job.params, priority=job.request.priority or 0, cache_salt=job.request.cache_salt or "",
                arrived=prometheus.arrived(), must_fit="" if self._dialect.clips else job.request.length_field, caller=caller,
            )

    def _end(self, job: Job, stream: AnswerStream) -> None:
        prometheus.note_in_log(self._service.llm, stream.outputs)
        self._service.tracing.ran(job.headers[0][1].decode(), job.params, stream.outputs)
        stream.close()
        stream.error = None                              # it refers to this frame: no cycle for the garbage collector

    async def _send_events(self, stream: AnswerStream, job: Job, events: EventStream) -> None:
        """Nothing is sent before the first tokens: until then a failure can still have its own status.

        Later tokens are written as they arrive, without waking this task. Only the end wakes it, and tokens that a slow
        client cannot take yet.
        """
        written = partial(job.writer.events, stream.outputs)
        if prometheus.wants_timings(job.request.return_timings) and not self._dialect.framed:
            written = partial(self._timed_events, stream, job)
        if job.params.logprobs is not None:
            written = partial(without_logprobs, written, stream)

        def deliver(batch: Batch) -> bool:
            if not events.is_free or job.writer.bytes_of_prompts(stream.outputs, batch) > LONG_BYTES:
                return False
            if new := written(batch):
                events.write_now(new)
            return True

        stream.deliver_to(deliver)
        try:
            async for batch in stream:
                # A slow client's tokens wait as deltas, which are short but for their log-probabilities; a few at a time become
                # events. The first of a choice also has what is known of the prompt's tokens.
                is_long = size_of_new(job.writer, stream.outputs, batch) > LONG_BYTES
                at_once = 1 if is_long else EVENTS_AT_ONCE
                for place in range(0, len(batch), at_once):
                    few = batch[place : place + at_once]
                    size = size_of_new(job.writer, stream.outputs, few) if is_long else 0
                    if new := await away_to_answer(size, partial(written, few)):
                        await events.write(new)
                    await asyncio.sleep(0)               # nothing above waits for a client that reads again, or has left
            await self._send_last(stream, job, events)
        except Exception as error:
            if not events.started:
                raise
            status, body, _ = describe(error, names=self._dialect.names)
            await events.write([self._dialect.error_event(job.writer, status, body)])
        await events.end()

    async def _send_last(self, stream: AnswerStream, job: Job, events: EventStream) -> None:
        size = job.writer.last_bytes(stream.outputs)
        last = iter(job.writer.last_events(stream.outputs))
        if size <= LONG_BYTES:
            await events.write(list(last))
            return
        while new := await away_to_answer(size, partial(next, last, None)):    # one is made when the one before is sent
            await events.write([new])

    def _timed_events(self, stream: AnswerStream, job: Job, batch: Batch) -> list[bytes]:
        """With the request's times in the last event."""
        new = job.writer.events(stream.outputs, batch)
        if new and any(delta.finish_reason for _, delta in batch) and all(output.finished for output in stream.outputs):
            new[-1] = prometheus.with_timings(new[-1], self._service.llm, stream.outputs)
        return new


def bytes_behind(stream: AnswerStream, writer: Writer) -> int:
    """About how much memory a stream takes whose client does not read: what no events are made of yet, and what its last events
    have again."""
    return stream.num_bytes() + writer.last_bytes(stream.outputs)


def without_logprobs(written: Callable[[Batch], list[bytes]], stream: AnswerStream, batch: Batch) -> list[bytes]:
    """Events; the log-probabilities that they have are not kept for the end of the answer."""
    new = written(batch)
    for prompt, delta in batch:
        if (kept := stream.outputs[prompt].outputs[delta.index].logprobs) is not None:
            kept.clear()
    return new


def check_repeated(job: Job, outputs: list[RequestOutput]) -> None:
    """Whether the prompts that the choices repeat are short enough to be held until all of them are written."""
    repeated = job.params.n * sum(map(job.writer.prompt_bytes, outputs))
    if repeated > MOST_REPEATED:
        raise BadRequest(
            f"{job.params.n} answers would repeat {repeated:,} bytes of their prompts, and at most {MOST_REPEATED:,} can be; "
            "ask for fewer answers (n), do not ask for the prompt (echo, return_token_ids), or set stream",
            field="n",
        )


def size_of(writer: Writer, outputs: list[RequestOutput]) -> int:
    """About how many bytes of JSON the answers are worth in time; what choices repeat of their prompt is made once."""
    texts = sum(writer.bytes_of_text(answer) for output in outputs for answer in output.outputs)
    return BYTES_PER_VALUE * num_values(outputs) + sum(map(writer.prompt_bytes, outputs)) + texts


def size_of_new(writer: Writer, outputs: list[RequestOutput], batch: Batch) -> int:
    """About how many bytes of JSON the events of a batch are worth in time."""
    told = (delta.logprobs for _, delta in batch if delta.logprobs)
    values = sum(len(each) * (1 + len(each[0])) for each in told)
    texts = sum(writer.bytes_of_text(delta) for _, delta in batch)
    return writer.bytes_of_prompts(outputs, batch) + texts + BYTES_PER_VALUE * values


def num_values(outputs: list[RequestOutput]) -> int:
    """About how many numbers and texts the answers will have for their tokens' log-probabilities."""
    values = 0
    for output in outputs:
        for answer in output.outputs:
            values += len(answer.token_ids) * (1 + len(answer.logprobs[0]) if answer.logprobs else 0)
    return values


class Invocations(Endpoint):
    """SageMaker's one path for all requests: the body's fields decide which endpoint answers."""

    def __init__(self, service: Service, endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints`: by the field that only their requests have."""
        super().__init__(service)
        self._endpoints = endpoints

    async def _answer(self, scope: Scope, body: Body, send: Send) -> None:
        given = await self._made(field_names, caller_of(scope), body)
        chosen = next((endpoint for name, endpoint in self._endpoints.items() if name in given), None)
        if chosen is None:
            raise BadRequest(f"the body needs one of {', '.join(self._endpoints)}, which says what kind of request it is")
        try:
            await chosen._answer(scope, body, send)
        except RequestError as error:
            raise as_requested(error, chosen._prompt_field, chosen._dialect.names) from None


# A browser sends one of these with every request of a page.
_BROWSER_HEADERS = frozenset({b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode"})


def check_media_type(scope: Scope, any_kind: bool = False) -> None:
    """`any_kind`: a client that is no browser may leave the type out, as Ollama's examples for curl do."""
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    free = any_kind and not any(name in _BROWSER_HEADERS for name, _ in scope["headers"])
    if not free and kind.split(b";")[0].strip().lower() != b"application/json":
        raise WrongMediaType("the body must be JSON and say so: Content-Type: application/json")
    if any(name == b"content-encoding" and value.strip().lower() != b"identity" for name, value in scope["headers"]):
        raise WrongMediaType("the body must not be compressed: Content-Encoding is not supported")
