"""Answers on raw ASGI: one JSON body, or server-sent events with one send for everything that is new.

Knows bytes and ASGI messages; what the events mean is server/protocol's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_JSON: Headers = [(b"content-type", b"application/json")]
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),                       # proxies that know it pass each event on at once
]


class ClientGone(Exception):
    """The client left before its request was whole."""


async def read_body(receive: Receive) -> bytes:
    """The request's body; its size is limited below us, while it arrives."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


class EventStream:
    """Server-sent events. `started` tells whether a status can still be chosen. Events are data, or whole (`framed`)."""

    def __init__(self, send: Send, headers: Headers, framed: bool = False) -> None:
        self.started = False
        self._send = send
        self._headers = headers
        self._framed = framed

    async def write(self, events: list[bytes]) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *self._headers]})
        body = b"".join(events if self._framed else [b"data: %b\n\n" % event for event in events])
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


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
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
