"""An HTTP/1.1 client towards one replica: keep-alive connections, answers read piece by piece with back-pressure.

    async with client.ask("POST", path, headers, body) as answer:
        async for piece in answer.pieces(): ...

Leaving the block before the answer is complete closes the connection, and the replica sees that its client has gone.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast
from urllib.parse import quote, urlsplit

import httptools

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.errors import ConfigError
from ridgeline.route.host_addresses import HostAddresses
from ridgeline.server.http.connection_limits import READ_BYTES

Headers = Sequence[tuple[bytes, bytes]]

CONNECT_SECONDS = 5.0
MOST_IDLE = 64                       # connections kept for the next request, where the process may have as many files open
HIGH_WATER = 256 * 1024              # bytes that wait here for a slow client before the replica is made to wait
MOST_HEAD = 256 * 1024               # bytes that come without any of a body: headers, trailers, chunk extensions
MOST_HEADERS = 100                   # a client that gets more refuses the answer, and does not say whose fault it is
_IN_PATHS = "/:@!$&'()*+,;=~"        # and letters, digits, "_.-": what a path has as it is
PIECE = LONG_BYTES                   # of a body that are written at once: a replica that reads fast takes 10 MB in 30 ms


class ReplicaFailure(Exception):
    """No connection, one that ended before the answer did, or bytes that are no answer."""


class NoConnection(ReplicaFailure):
    """It has not got the request."""


class Answer(asyncio.Protocol):
    """One connection, and the answer that is being read from it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.is_stale = False                            # it ended without a byte, as one that was idle for too long may
        self.reusable = True
        self._is_second = False                          # what is parsed now is not the answer any more
        self.unheard = 0                                 # checks in a row that the replica did not answer, without a byte here
        self._pieces: list[bytes] = []
        self._waiting = 0                                # bytes that have come and were not given out
        self._unparsed = 0                               # bytes since the last of a body
        self._error = ""
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None

    # -- for the client ------------------------------------------------------------------------------------------------

    async def send(self, head: bytes, body: Sequence[bytes]) -> None:
        """The request, as fast as the replica reads it. One that answers before it has read all gets no more of it."""
        assert self._transport is not None
        self.status, self.headers, self.complete = 0, [], False
        self._pieces.clear()
        self._waiting = self._unparsed = 0
        self._news.clear()
        self._parser = httptools.HttpResponseParser(self)
        views = (memoryview(part) for part in body)
        pieces = [view[place : place + PIECE] for view in views for place in range(0, len(view), PIECE)]
        self._transport.write(head + pieces[0] if pieces else head)
        for piece in pieces[1:]:
            await asyncio.sleep(0)                       # nothing below waits for a replica that reads as fast as this
            await self._writable.wait()
            if self._parsed_head or self._error:
                self.reusable = False                    # it would take the next request for the rest of this one
                return
            self._transport.write(piece)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, reason: str) -> None:
        self._error = reason
        self.close()
        self._news.set()
        self._writable.set()

    def give_up_standing(self) -> bool:
        """Nothing has come of it for too long. False: what has come waits for its client."""
        is_standing = self.is_read and not self.complete
        if is_standing:
            self.give_up("nothing more came of its answer, nor of any other")
        return is_standing

    @property
    def is_read(self) -> bool:
        """Whether bytes would be noticed: a connection is not read while its client does not read."""
        return not self._pieces

    def header(self, wanted: bytes) -> bytes:
        return next((value for name, value in self.headers if name == wanted), b"")

    @property
    def media_type(self) -> bytes:
        return self.header(b"content-type").partition(b";")[0].strip().lower()

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self._parsed_head:
            await self._more()

    @property
    def is_framed(self) -> bool:
        """Whether it says where it ends. Another one ends with its connection, also when that broke."""
        return bool(self.header(b"content-length")) or b"chunked" in self.header(b"transfer-encoding").lower()

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)           # a replica may send chunks of one byte
                self._pieces.clear()
                self._read_on()
                for place in range(0, len(piece), LONG_BYTES):
                    part = piece[place : place + LONG_BYTES]
                    self._waiting -= len(part)
                    yield part
                    await asyncio.sleep(0)               # thousands of events may be in it: others have their turn
            elif self.complete:
                return
            else:
                self._read_on()                          # bytes of no body may have come when much waited
                await self._more()

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def held(self) -> int:
        """Bytes that have come and were not given out."""
        return self._waiting

    async def body(self, most: int) -> bytes:
        """All of a short one."""
        if (body := await self.short_body(most)) is None:
            raise ReplicaFailure(f"its answer is larger than {most} bytes")
        return body

    async def short_body(self, most: int) -> bytes | None:
        """None: it is longer."""
        read, size = [], 0
        async for piece in self.pieces():
            size += len(piece)
            if size > most:
                return None
            read.append(piece)
        return b"".join(read)

    @property
    def _parsed_head(self) -> bool:
        return self.status >= 200

    async def _more(self) -> None:
        if self._error:
            raise ReplicaFailure(self._error)
        self._news.clear()
        await self._news.wait()

    # -- for asyncio ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)     # uvloop's is no subclass of it
        if hasattr(transport, "max_size"):               # asyncio's own have it: 256 KiB of a replica that floods take 40 ms
            transport.max_size = READ_BYTES

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self.complete:        # bytes that no request asked for
            self.close()
            return
        self.unheard = 0
        self._unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._error:                          # also behind its end: what said how long it is was wrong
                self._error, self.complete = f"its answer is not HTTP: {error}", False
            self.close()
        if self._is_second:                              # it answers twice: another client must not get that
            self.close()
        if self._unparsed > MOST_HEAD:
            self._error = f"a head of its answer is larger than {MOST_HEAD} bytes"
            self.close()
        if self._waiting > HIGH_WATER and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and not self._parsed_head and not self._error:
            self._hear_last_words()
        self.reusable = False
        if self._parsed_head and not self.complete and not self.is_framed and error is None and not self._error:
            self.complete = True                         # a body that ends with its connection
        if not self.complete and not self._error:
            self.is_stale = not self.status and not self._unparsed
            self._error = f"its connection ended{f': {error}' if error else ''}"
        self._news.set()
        self._writable.set()

    def _hear_last_words(self) -> None:
        """A replica that refuses a long body answers and closes: the next write fails, and asyncio does not read any more."""
        assert self._transport is not None
        if self._transport.get_extra_info("ssl_object") is None:
            with suppress(OSError):                      # it would wait: nothing has come
                self.data_received(os.read(self._transport.get_extra_info("socket").fileno(), MOST_HEAD))

    # -- for httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_second = self.complete                  # in one piece with the answer

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_second or self._parsed_head:         # a trailer: no header, and the client may have the headers already
            return
        if len(self.headers) == MOST_HEADERS:
            self._stop(f"its answer has more than {MOST_HEADERS} headers")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_second:
            return
        if self._parser.get_http_version() not in ("1.0", "1.1"):
            self._stop("its answer is not HTTP/1")
        codings = {value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"}
        if codings - {b"chunked"}:                       # the router asks for none, and takes none off
            self._stop(f"its answer is coded: {b', '.join(codings)[:99]!r}")
        self.status = self._parser.get_status_code()
        if not 100 <= self.status <= 599:                # no client could be told
            self._stop(f"its answer has the status {self.status}")
        if self._parsed_head:
            self._writable.set()                         # who waits to write sees the answer instead

    def on_body(self, body: bytes) -> None:
        if self._is_second:
            return
        self._pieces.append(body)
        self._waiting += len(body)
        self._unparsed = 0

    def on_message_complete(self) -> None:
        if self._is_second:
            return
        if self.status < 200:
            self.headers = []                            # the answer proper follows
            return
        self.complete = True
        self.reusable = self.reusable and self._parser.should_keep_alive()

    def _stop(self, reason: str) -> None:
        self._error = reason
        raise ReplicaFailure(reason)                     # stops the parser


class Upstream:
    """Requests to one replica."""

    def __init__(self, url: str, key: str = "") -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:                               # half an IPv6 address, or a port that is none
            parts, port = urlsplit(""), None
        is_plain = re.fullmatch(r"[!-~]+", parts.netloc) and not parts.query and not parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise ConfigError(f"{url!r} is not the address of a server, such as http://10.0.0.1:8000")
        if parts.username or parts.password:
            raise ConfigError("the address of a replica must not contain a password: the list of processes shows it")
        self._address = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._addresses = HostAddresses(*self._address)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = quote(parts.path, safe=_IN_PATHS + "%").rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"
        self._head = f"host: {parts.netloc}\r\n".encode("latin-1")
        self.key = key.encode()
        self.most_idle = MOST_IDLE
        self._idle: list[Answer] = []
        self._open: set[Answer] = set()                  # on which a request is answered

    @asynccontextmanager
    async def ask(self, method: str, path: str, headers: Headers = (), body: Sequence[bytes] = ()) -> AsyncIterator[Answer]:
        """The answer, with its head. `body`: its parts. Raises ReplicaFailure."""
        connection = await self._answered(self._head_of(method, path, headers, sum(map(len, body))), body)
        try:
            yield connection
        finally:
            self._open.discard(connection)
            # One with an answer that was not read may not be read from any more: the next answer would not be heard.
            is_idle = connection.complete and connection.is_read and connection.reusable
            if is_idle and len(self._idle) < self.most_idle:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def heard(self) -> None:
        """A check was answered."""
        for each in self._open:
            each.unheard = 0

    def unheard(self) -> None:
        """A check was not answered."""
        for each in self._open:
            each.unheard += each.is_read

    def give_up_silent(self, checks: int) -> None:
        """Ends requests that got no byte during this many checks in a row: a machine without power closes no connection."""
        for each in list(self._open):
            if each.unheard >= checks:
                each.give_up(f"nothing came from it during {checks} checks that it did not answer")

    def _head_of(self, method: str, path: str, headers: Headers, length: int) -> bytes:
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        if self.key:
            lines.append(b"authorization: Bearer " + self.key + b"\r\n")
        if method != "GET":
            lines.append(b"content-length: %d\r\n" % length)
        # A path comes decoded: what was %0D%0A in it would end the line, and begin a request with the router's own key.
        start = f"{method} {self._base}{quote(path, safe=_IN_PATHS)} HTTP/1.1\r\n".encode("ascii")
        return b"".join([start, self._head, *lines, b"\r\n"])

    async def _answered(self, head: bytes, body: Sequence[bytes]) -> Answer:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                try:
                    return await self._exchange(connection, head, body)
                except ReplicaFailure:
                    if not connection.is_stale:
                        raise
                    # A replica may close an idle connection just as it is used again: that is no failure.
        return await self._exchange(await self._connection(), head, body)

    async def _connection(self) -> Answer:
        """To the first of the host's addresses that takes one. Each has its share of the time: one may only be silent."""
        error = OSError("its name has no address")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                addresses = await self._addresses.find()
                for place, address in enumerate(addresses):
                    is_last = place + 1 == len(addresses)
                    try:
                        async with asyncio.timeout(None if is_last else CONNECT_SECONDS / len(addresses)):
                            return await self._connect(address)
                    except OSError as failure:           # a TimeoutError is one
                        error = failure
        except TimeoutError:
            raise NoConnection(f"no connection within {CONNECT_SECONDS:g} s") from None
        except OSError as failure:
            error = failure
        raise NoConnection(f"no connection: {error.strerror or error}")

    async def _connect(self, address: str) -> Answer:
        host, port = self._address
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Answer, address, port, ssl=self._tls, server_hostname=host if self._tls else None
        )
        return connection

    async def _exchange(self, connection: Answer, head: bytes, body: Sequence[bytes]) -> Answer:
        connection.unheard = 0
        self._open.add(connection)
        try:
            await connection.send(head, body)
            await connection.head()
        except BaseException:
            self._open.discard(connection)
            connection.close()
            raise
        return connection
