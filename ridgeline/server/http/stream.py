"""Answers on raw ASGI: one JSON body, or server-sent events with one send for everything that is new.

An ASGI `send` has to be awaited, so each event would wake a task. Once an answer has begun, events can also be written
directly to the connection, as long as its client keeps up; server/http/connection_limits puts a Direct into the scope for that.
Knows bytes and ASGI messages, not the meaning of events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.errors import TimedOut
from ridgeline.server.unread import BEHIND

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_JSON: Headers = [(b"content-type", b"application/json")]
EVENTS = b"text/event-stream; charset=utf-8"
LINES = b"application/x-ndjson"          # one JSON object a line, as Ollama streams
_STREAMED: Headers = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),                       # proxies that know it pass each event on at once
]


class ClientGone(Exception):
    """The client left before its request was complete."""


@dataclass(frozen=True, slots=True)
class Binary:
    """An answer that is bytes instead of JSON."""

    body: bytes
    headers: Headers = field(default_factory=list)


async def send_bytes(send: Send, answer: Binary) -> None:
    about = [(b"content-type", b"application/octet-stream"), (b"content-length", str(len(answer.body)).encode())]
    await send_whole(send, 200, [*about, *answer.headers], answer.body)


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send_whole(send, status, [*_JSON, length, *headers], body)


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers, BEHIND: body.__len__})
    await send_part(send, body)


async def send_part(send: Send, body: bytes, more: bool = False, behind: Callable[[], int] | None = None) -> None:
    """A part of an answer; `more`: it is not the last. A long one is sent in pieces, as fast as its client reads. `behind`: the
    bytes that are held for the parts after it."""
    def held() -> int:
        return len(body) + (behind() if behind is not None else 0)

    if len(body) <= LONG_BYTES:
        await send({"type": "http.response.body", "body": body, "more_body": more, BEHIND: held})
        return
    for place in range(0, len(body), LONG_BYTES):
        piece = body[place : place + LONG_BYTES]
        goes_on = more or place + LONG_BYTES < len(body)
        await send({"type": "http.response.body", "body": piece, "more_body": goes_on, BEHIND: held})
        await asyncio.sleep(0)                           # nothing above waits for a client that reads as fast as this


class InPieces(Response):
    """A response of any length: sent as fast as its client reads, and counted while it does not."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send_whole(send, self.status_code, self.raw_headers, bytes(self.body))


class JsonText(InPieces):
    """A response that is JSON already."""

    media_type = "application/json"


def json_response(content: Any, status: int = 200) -> Response:
    return JsonText(msgspec.json.encode(content), status)


DIRECT = "ridgeline.direct"          # in the scope: a Direct, if there is one


class Direct(Protocol):
    """Writes parts of one answer directly to its connection."""

    @property
    def is_gone(self) -> bool:
        """The client has left, or its request was refused."""

    @property
    def is_free(self) -> bool:
        """The answer has begun and its client keeps up. Otherwise use `send`, which waits for the client."""

    def write(self, body: bytes) -> None: ...

    def read_much(self) -> None:
        """There is room for the request's body: it may be read in large parts."""


class EventStream:
    """Server-sent events, or lines. `started`: the status was sent. Events are only data, or complete (`framed`)."""

    def __init__(
        self, send: Send, headers: Headers, framed: bool = False, direct: Direct | None = None, kind: bytes = EVENTS,
        behind: Callable[[], int] | None = None,
    ) -> None:
        """`behind`: the bytes of which no events are made while the client does not read."""
        self.started = False
        self._behind = behind
        self._send = send
        self._headers = [(b"content-type", kind), *_STREAMED, *headers]
        self._framed = framed
        self._direct = direct

    @property
    def is_free(self) -> bool:
        """Whether write_now() may be called; never while a write() is still waiting."""
        return self._direct is not None and self._direct.is_free

    def write_now(self, events: list[bytes]) -> None:
        assert self._direct is not None
        self._direct.write(b"data: %b\n\n" % events[0] if len(events) == 1 and not self._framed else self._joined(events))

    async def write(self, events: list[bytes]) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers, BEHIND: self._behind})
        await send_part(self._send, self._joined(events), True, self._behind)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    def _joined(self, events: list[bytes]) -> bytes:
        if self._framed:
            return b"".join(events)
        return b"".join([b"data: %b\n\n" % event for event in events])


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, which has read the request's body; cancel it when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    try:
        if not task.cancelled():
            task.result()
    finally:
        # The error refers to this frame, and the task to the error: without this, the request's data would stay until a
        # garbage collection.
        del task, work


@asynccontextmanager
async def in_time(ends: float | None) -> AsyncIterator[None]:
    """TimedOut if what is inside takes longer than until `ends`, by time.monotonic(): for all that comes before an answer."""
    try:
        async with asyncio.timeout(None if ends is None else max(0.0, ends - time.monotonic())) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise                                        # another limit, inside
        raise TimedOut("the request was not read within this server's request_timeout") from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
