"""Writes answers to their connections, around uvicorn's own `send`: parts without ASGI, what is held of an answer while it is
sent, and the last answer before a connection closes. Knows uvicorn's requests, no routes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ridgeline.server.unread import BEHIND, Waiting


class DirectWrites:
    """Writes parts of an answer's body to its connection without ASGI; see server/http/stream.Direct.

    The same bytes as uvicorn's own `send` would write, in the middle of a body that `send` has begun and will end.
    """

    __slots__ = ("_cycle", "_read_much", "bytes_out")

    def __init__(self, cycle: RequestResponseCycle, read_much: Callable[[], None]) -> None:
        """`read_much`: a method of its connection."""
        self._cycle = weakref.ref(cycle)                 # it holds the scope, which holds this
        self._read_much = weakref.WeakMethod(read_much)
        self.bytes_out = 0

    def read_much(self) -> None:
        if (read_much := self._read_much()) is not None and not self.is_gone:
            read_much()

    @property
    def is_gone(self) -> bool:
        cycle = self._cycle()
        return cycle is None or cycle.disconnected

    @property
    def is_free(self) -> bool:
        cycle = self._cycle()
        if cycle is None:
            return False
        return cycle.response_started and not cycle.response_complete and not cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        cycle = self._cycle()
        # Else the endpoint will be cancelled. A write to a transport that is closing would be a line in the log, by asyncio.
        if cycle is not None and not cycle.disconnected and not cycle.transport.is_closing():
            self.bytes_out += len(body)
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if cycle.chunked_encoding else body)


class CountedAnswer:
    """uvicorn's `send`, with a note of what is held of the answer while it waits for the client."""

    __slots__ = ("_cycle", "_waiting")

    def __init__(self, cycle: RequestResponseCycle, waiting: Waiting) -> None:
        self._cycle = weakref.ref(cycle)                 # it holds this
        self._waiting = waiting

    async def __call__(self, message: Any) -> None:
        if (cycle := self._cycle()) is not None:
            await self._send(cycle, message)

    async def _send(self, cycle: RequestResponseCycle, message: Any) -> None:
        self._waiting.behind = message.get(BEHIND)
        try:
            if cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._waiting.behind = None              # all that is left will be in the connection's buffer
            self._waiting.sent += len(message.get("body", b""))
            await RequestResponseCycle.send(cycle, message)
        finally:
            if cycle.disconnected:
                self._waiting.behind = None


class LastAnswer(CountedAnswer):
    """uvicorn's `send` for the last answer of a connection: its client has said so, or speaks HTTP/1.0.

    HTTP/1.0 has no chunked encoding: an answer without a length ends with its connection. An answer that comes before its
    request is complete (a wrong path or key, no room) would be lost: to close a connection with bytes that were not read resets
    it. `drop_the_rest` closes it instead, once the answer is written: `send` may wait for the client to read before it writes.
    """

    __slots__ = ("_drop_the_rest", "_has_length", "_is_arriving", "_is_old")

    def __init__(
        self, cycle: RequestResponseCycle, waiting: Waiting, is_old: bool, is_arriving: Callable[[], bool],
        drop_the_rest: Callable[[], None],
    ) -> None:
        """`is_old`: HTTP/1.0; `is_arriving`: whether the request is incomplete."""
        super().__init__(cycle, waiting)
        self._is_arriving = weakref.WeakMethod(is_arriving)      # of its connection, which holds it, too
        self._drop_the_rest = weakref.WeakMethod(drop_the_rest)
        self._is_old = is_old
        self._has_length = True

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle()
        if cycle is None:
            return
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            self._has_length = not self._is_old or any(name.lower() == b"content-length" for name, _ in headers)
            if not self._has_length:
                cycle.chunked_encoding = False
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))    # any length is right
        is_end = message["type"] == "http.response.body" and not message.get("more_body")
        is_arriving = self._is_arriving() if is_end else None
        cycle.keep_alive = lingers = is_arriving is not None and is_arriving()   # its head has said that the connection closes
        await self._send(cycle, message)
        if lingers and (drop_the_rest := self._drop_the_rest()) is not None:
            drop_the_rest()
