"""Limits on what one client may cost (sizes, times, numbers), and the HTTP protocol that enforces them.

uvicorn with httptools reads headers of any size and waits for a slow client for ever. LimitedProtocol adds the missing limits
below the application: a connection that exceeds one gets an error and is closed, before the application sees it. Knows no
routes, models or requests.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ridgeline.errors import BadRequest, Overloaded
from ridgeline.server.http.error_bodies import body_for, error_body
from ridgeline.server.http.stream import DIRECT
from ridgeline.server.options import ServerOptions

MAX_URL = 8 * 1024
MAX_HEADER = 16 * 1024               # name and value of one header
MAX_HEADERS = 100
MAX_HEAD = 64 * 1024                 # all headers together
HEAD_SECONDS = 10.0                  # from the connection, or a request's first byte, to the end of its headers
BODY_SECONDS = 28.0                  # from there to the end of the body: refused and closed within 30 s
WRITE_SECONDS = 60.0                 # a client that reads nothing for this long is disconnected
WRITE_BUFFER = 16 * 1024             # bytes buffered for a client, beside the system's own buffer
LINGER_SECONDS = 1.0                 # for a refused client to read the error before the connection closes
LINGERING = 8                        # connections beyond the limit that are sent an error; others are closed at once


class Slots:
    """How many answers may run or wait at once. A request takes a slot before its body is read."""

    def __init__(self) -> None:
        self.limit = 0
        self.taken = 0
        self.predicted_wait: Callable[[], float | None] = lambda: None

    @contextmanager
    def taking(self, count: int, already: int = 0) -> Iterator[None]:
        """Room for `count` answers, of which `already` were taken before."""
        if count > self.limit:
            raise BadRequest(f"the request asks for {count} answers at once; at most {self.limit} can be queued here")
        if self.taken + count - already > self.limit:
            message = f"{self.taken} of {self.limit} answers are running or waiting; try again later"
            raise Overloaded(message, self.predicted_wait())
        self.taken += count - already
        try:
            yield
        finally:
            self.taken -= count - already


class LimitExceeded(Exception):
    """Raised in the parser's callbacks to stop it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class DirectWrites:
    """Writes parts of an answer's body to its connection without ASGI; see server/http/stream.Direct.

    The same bytes as uvicorn's own `send` would write, in the middle of a body that `send` has begun and will end.
    """

    __slots__ = ("_cycle", "bytes_out")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.bytes_out = 0

    @property
    def is_free(self) -> bool:
        cycle = self._cycle
        return cycle.response_started and not cycle.response_complete and not cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        cycle = self._cycle
        if not cycle.disconnected:                       # else the endpoint will be cancelled
            self.bytes_out += len(body)
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if cycle.chunked_encoding else body)


class UntilClose:
    """uvicorn's `send` for HTTP/1.0, which has no chunked encoding: an answer without a length ends with its connection."""

    __slots__ = ("_cycle", "_has_length", "_send")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                cycle.chunked_encoding = False
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))    # any length is right
        await self._send(message)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Use `limited_protocol(options)` to bind the options."""

    options: ServerOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = 0                               # bytes since the parser's last callback
        self._head_bytes = 0
        self._body_bytes = 0
        self._hosts = 0
        self._is_coded = False                           # it has a Transfer-Encoding
        self._limit: LimitExceeded | None = None
        self._refused = False
        self.url = b""
        self._in_message = False                         # a request has begun to arrive and is incomplete
        self._deadline: TimerHandle | None = None
        self._write_deadline: TimerHandle | None = None

    # -- the connection ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        if len(self.connections) > self.options.max_connections + LINGERING:
            self._refused = True
            transport.abort()
        elif len(self.connections) > self.options.max_connections:
            self._refuse(503, f"all {self.options.max_connections} connections of this server are in use; try again later")
        else:
            self._expect_within(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._cancel_write_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unparsed += len(data)
        super().data_received(data)
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_within(HEAD_SECONDS)            # bytes before a request, such as empty lines
        # An endless header, chunk extension or trailer: the parser buffers it without a callback.
        if self._unparsed > MAX_HEAD and not self._refused:
            self._refuse(431, f"a part of the request's head is larger than {MAX_HEAD} bytes")

    def send_400_response(self, msg: str) -> None:
        """Called when the parser stopped: at invalid HTTP, or because a callback stopped it."""
        if self._limit is not None:
            self._refuse(self._limit.status, str(self._limit))
        else:
            self._refuse(400, "this is not a valid HTTP request")

    # -- the parser's callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unparsed = self._head_bytes = self._body_bytes = self._hosts = 0
        self._is_coded = False
        self._in_message = True
        self._expect_within(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._unparsed = 0
        if len(self.url) > MAX_URL:
            self._stop(414, f"the URL is longer than {MAX_URL} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unparsed = 0
        size = len(name) + len(value)
        self._head_bytes += size
        if size > MAX_HEADER:
            self._stop(431, f"a header is larger than {MAX_HEADER} bytes")
        if len(self.headers) >= MAX_HEADERS:
            self._stop(431, f"there are more than {MAX_HEADERS} headers")
        if self._head_bytes > MAX_HEAD:
            self._stop(431, f"the headers are larger than {MAX_HEAD} bytes")
        lower = name.lower()
        if lower == b"content-length" and value.strip().isdigit():
            self._check_body(int(value))                 # refuse a body that will be too large before it arrives
        elif lower == b"host":
            self._hosts += 1
            if self._hosts > 1:                          # a proxy in front may have used the other one
                self._stop(400, "the request needs one Host header")
        elif lower == b"transfer-encoding":
            self._is_coded = True
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1") or (version == "1.0" and self._is_coded):
            self._stop(400, "the request must be HTTP/1.1, or HTTP/1.0 without transfer codings")
        self._expect_within(BODY_SECONDS)
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            scope: MutableMapping[str, Any] = cast(Any, self.scope)
            scope[DIRECT] = DirectWrites(self.cycle)     # before its task runs
            if version == "1.0":
                cast(Any, self.cycle).send = UntilClose(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_bytes += len(body)
        self._check_body(self._body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._in_message = False
        self._cancel_deadline()
        super().on_message_complete()

    def _check_body(self, size: int) -> None:
        if size > self.options.max_body_bytes:
            self._stop(413, f"the body is larger than {self.options.max_body_bytes} bytes")

    def _stop(self, status: int, message: str) -> None:
        self._limit = LimitExceeded(status, message)
        raise self._limit

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expect_within(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self._too_slow, seconds)

    def _too_slow(self, seconds: float) -> None:
        if self._in_message:
            self._refuse(408, f"the request was not complete after {seconds:g} s")
        else:
            self.transport.close()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_deadline()

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    # -- refusal -------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Send the error, read nothing more, and close. An application that works on the request sees a disconnect."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._cancel_deadline()
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if not (answering and cycle.response_started):
            kind = "overloaded_error" if status == 503 else "invalid_request_error"
            body = body_for(self._path(), self.headers or (), status, error_body(message, kind))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            retry = b"retry-after: 1\r\n" if status == 503 else b""
            self.transport.write(STATUS_LINE[status] + retry + head + body)
        if answering:
            cycle.disconnected = True
            cycle.message_event.set()
        # Closing with unread bytes would reset the connection, and the client might not see the error.
        self.flow.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _path(self) -> str:
        """The path, as far as it is known."""
        return self.url.partition(b"?")[0].decode("latin-1")


def limited_protocol(options: ServerOptions) -> type[LimitedProtocol]:
    return type("LimitedProtocol", (LimitedProtocol,), {"options": options})
