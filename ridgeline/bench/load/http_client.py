"""A light HTTP/1.1 client for load generation: asyncio protocols, keep-alive connections, streamed bodies.

Not httpx or aiohttp: neither is a dependency, and both cost tens of microseconds per chunk, so the client would be the
bottleneck. httptools, which the server needs anyway, parses in C; what is left in Python is one call per read and one per
event. Every piece of a body is stamped with the time at which its bytes were read.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from ridgeline.errors import ConfigError

Sink = Callable[[bytes, float], None]        # a piece of a body, and when it was read
_MOST_ERROR_BYTES = 64 * 1024                # of a body that is kept without a sink's asking


_MOST_BYTES = 64 * 2**20                     # of a whole answer, or of an event: what is measured may be no such server …
_MOST_EVENTS = 1_000_000                     # … and may never end


def bearer(key: str) -> dict[str, str]:
    """The header with an API key; none without one. A key from a file may end with a line break. The error does not show it."""
    key = key.strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError("the API key must be printable ASCII characters")
    return {"authorization": f"Bearer {key}"} if key else {}


def _written(lines: Mapping[str, str]) -> str:
    if any("\n" in text or "\r" in text for line in lines.items() for text in line):
        raise ConfigError("a header must not contain line breaks")
    written = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    if max(map(ord, written)) > 255:
        raise ConfigError("a header must not contain characters beyond Latin-1")
    return written


class HttpFailure(Exception):
    """No whole answer came: `kind` is a word for a table, the text says more."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail or kind)
        self.kind = kind


@dataclass(slots=True)
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise HttpFailure("bad answer", f"no JSON: {self.body[:120].decode('utf-8', 'replace')}") from None


class _Exchange:
    """One request and its answer on a connection."""

    __slots__ = ("body", "done", "reply", "sink", "started")

    def __init__(self, done: asyncio.Future[None], sink: Sink | None) -> None:
        self.reply = Reply()
        self.body = bytearray()
        self.done = done
        self.sink = sink
        self.started = False                             # something of the answer has come


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.exchange: _Exchange | None = None
        self.reusable = True
        self._parser: Any = None
        self._now = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)     # uvloop's is no subclass of it

    def start(self, exchange: _Exchange, request: bytes) -> None:
        assert self._transport is not None
        self.exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self.exchange is None:                            # data without a request: the connection is useless
            self.close()
            return
        self.exchange.started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("bad answer", f"not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        exchange = self.exchange
        if exchange is not None and exchange.started and exchange.reply.headers.get("content-length") is None:
            if exchange.reply.status and "chunked" not in exchange.reply.headers.get("transfer-encoding", ""):
                self.on_message_complete()                   # a body that ends with its connection
                return
        self._fail("cut short" if exchange is not None and exchange.started else "connection closed", str(error or ""))

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        self.exchange.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self.exchange is not None
        self.exchange.reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        exchange = self.exchange
        assert exchange is not None
        if exchange.sink is not None and exchange.reply.status == 200:
            try:
                exchange.sink(body, self._now)
            except HttpFailure as failure:
                self._fail(failure.kind, str(failure))
                self.close()
        elif exchange.sink is None or len(exchange.body) < _MOST_ERROR_BYTES:
            exchange.body += body
            if len(exchange.body) > _MOST_BYTES:
                self._fail("bad answer", f"it has more than {_MOST_BYTES >> 20} MiB")
                self.close()

    def on_message_complete(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        if 100 <= exchange.reply.status < 200:
            return                                           # the answer proper follows
        self.exchange = None
        if self._parser is None or not self._parser.should_keep_alive():
            self.reusable = False
        if not exchange.done.done():
            exchange.done.set_result(None)

    def _fail(self, kind: str, detail: str) -> None:
        exchange, self.exchange = self.exchange, None
        self.reusable = False
        if exchange is not None and not exchange.done.done():
            exchange.done.set_exception(HttpFailure(kind, detail))


class HttpClient:
    """Requests to one server. As many connections as there are requests under way; idle ones are used again."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, verify: bool = True) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._ssl: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._ssl = ssl.create_default_context()
            if not verify:
                self._ssl.check_hostname, self._ssl.verify_mode = False, ssl.CERT_NONE
        self.base = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self.base}"      # without a password
        lines = {"host": parts.netloc.rpartition("@")[2], "accept": "*/*", "user-agent": "ridgeline-bench"}
        lines |= {name.lower(): value for name, value in (headers or {}).items()}
        self._head = _written(lines)
        self._idle: list[_Connection] = []
        self.opened = 0                                      # connections, in all

    async def get(self, path: str) -> Reply:
        return await self._ask("GET", path, b"", None)

    async def post(self, path: str, body: bytes, sink: Sink | None = None) -> Reply:
        """With a sink, the body of an answer with status 200 goes there piece by piece; else it is in the reply."""
        return await self._ask("POST", path, body, sink)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _ask(self, method: str, path: str, body: bytes, sink: Sink | None) -> Reply:
        content = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if method == "POST" else ""
        request = f"{method} {self.base}{path} HTTP/1.1\r\n{self._head}{content}\r\n".encode("latin-1") + body
        while True:
            connection, fresh = await self._connection()
            exchange = _Exchange(asyncio.get_running_loop().create_future(), sink)
            connection.start(exchange, request)
            try:
                await exchange.done
            except HttpFailure:
                # A server may close an idle connection just as it is used again: that is not a failure, so try again.
                if fresh or exchange.started:
                    raise
                continue
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            exchange.reply.body = bytes(exchange.body)
            return exchange.reply

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, False
        try:
            _, made = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port, ssl=self._ssl, server_hostname=self._host if self._ssl else None
            )
        except (OSError, UnicodeError) as error:         # a label of more than 63 letters is no OSError
            raise HttpFailure("no connection", getattr(error, "strerror", None) or str(error)) from None
        self.opened += 1
        return made, True


class EventStream:
    """A sink that cuts server-sent events out of pieces of a body and hands on what stands behind `data:`."""

    __slots__ = ("_count", "_on_event", "_rest")

    def __init__(self, on_event: Sink) -> None:
        self._on_event = on_event
        self._rest = bytearray()
        self._count = 0

    def __call__(self, piece: bytes, when: float) -> None:
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"")    # a cut between the two leaves a lone one
        if self._rest:                                       # searched once: a long event comes in a thousand pieces
            begin = len(self._rest) - 1
            self._rest += piece
            if len(self._rest) > _MOST_BYTES:
                raise HttpFailure("bad answer", f"it has an event of more than {_MOST_BYTES >> 20} MiB")
            if self._rest.find(b"\n\n", begin) < 0:
                return
            piece = bytes(self._rest)
        *events, rest = piece.split(b"\n\n")
        self._rest = bytearray(rest)
        self._count += len(events)
        if self._count > _MOST_EVENTS:
            raise HttpFailure("bad answer", f"it has more than {_MOST_EVENTS:,} events")
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                self._on_event(event[5:].strip(), when)
            else:
                lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    self._on_event(b"\n".join(lines), when)
