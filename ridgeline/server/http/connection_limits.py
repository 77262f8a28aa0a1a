"""Limits on what one client may cost (sizes, times, numbers), and the HTTP protocol that enforces them.

uvicorn with httptools reads headers of any size and waits for a slow client for ever. LimitedProtocol adds the missing limits
below the application: a connection that exceeds one gets an error and is closed, before the application sees it. Knows no
routes, models or requests.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ridgeline.server.answer_writes import CountedAnswer, DirectWrites, LastAnswer
from ridgeline.server.event_loop import FrontEndLoop
from ridgeline.server.http.accepting import READ_BYTES, TlsConnection
from ridgeline.server.http.error_bodies import all_in_use, refusal
from ridgeline.server.http.idle_connections import make_room
from ridgeline.server.http.pipelining import MAX_IN_LINE, SMALL_READ, Arriving, LineFlow, Turns, has_bytes, has_left
from ridgeline.server.http.stream import DIRECT
from ridgeline.server.options import ServerOptions
from ridgeline.server.unread import Unread, Waiting

MAX_URL = 8 * 1024
MAX_HEADER = 16 * 1024               # name and value of one header
MAX_HEADERS = 100
MAX_HEAD = 64 * 1024                 # all headers together
HEAD_SECONDS = 10.0                  # from the connection, or a request's first byte, to the end of its headers
BODY_SECONDS = 28.0                  # from there to the end of the body: refused and closed within 30 s
WRITE_BUFFER = 16 * 1024             # bytes buffered for a client, beside the system's own buffer
LINGER_SECONDS = 1.0                 # for a refused client to read the error before the connection closes
FIRST_READ_SECONDS = 0.1             # from the connection to the first read of bytes that came with it, on a busy machine
LEFT_SECONDS = 1.0                   # how often a connection that is not read is asked whether its client has left
SILENT_SECONDS = 3.0                 # without a byte of a body, after which its connection may give way to others
LINGERING = 8                        # connections beyond the limit that may ask for health; others are refused unheard
PROBES_BEYOND = 2                    # and beyond these, connections on which a health check came
PROBED = (b"/health", b"/ping")      # what a health check asks for
BODY_READ_BYTES = 256 * 1024         # of a long body that has leave (admission.py): few turns, and its client's end is seen soon
FEW_CHUNKS = 1_000                   # chunks of a body that may be of any size; further ones are …
SMALL_CHUNK = 64                     # … at least this many bytes on average: each costs a microsecond of the event loop
CHUNKS_AT_ONCE = 1_000               # of a body; then other connections get a turn


class UpgradeOffered(Exception):
    """Raised in the parser's callbacks to stop it: it would not read the body."""


class LimitExceeded(Exception):
    """Raised in the parser's callbacks to stop it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _read_nothing() -> None:
    """What a transport reads once its connection is lost."""


def end_request(cycle: RequestResponseCycle) -> None:
    """Its application sees a disconnect."""
    cycle.disconnected = True
    cycle.message_event.set()


def begin_again(protocol: HttpToolsProtocol) -> bytes:
    """The whole head, for a new parser, without its offer to change to another protocol, which a server may ignore. The
    parser takes what follows such a head for that protocol: the body would be lost, and read as a request of its own. Java's
    client offers HTTP/2 on every new connection."""
    old, headers = protocol.parser, protocol.headers
    kept = [each for each in headers if each[0] not in (b"upgrade", b"http2-settings", b"connection")]
    words = [word.strip() for name, value in headers if name == b"connection" for word in value.lower().split(b",")]
    kept += [(b"connection", word) for word in (b"close", b"keep-alive") if word in words]
    first = b"%b %b HTTP/%b" % (old.get_method(), protocol.url, old.get_http_version().encode())
    protocol.parser = httptools.HttpRequestParser(protocol)
    protocol.parser.set_dangerous_leniencies(lenient_data_after_close=True)      # as uvicorn has it
    return b"\r\n".join([first, *(b"%b: %b" % each for each in kept), b"", b""])


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Use `limited_protocol(options)` to bind the options."""

    options: ServerOptions
    turns: Turns
    unread: Unread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = 0                               # bytes since the parser's last callback
        self._arriving = Arriving()
        self._limit: LimitExceeded | None = None
        self._refused = False
        self._answered: RequestResponseCycle | None = None       # the request that is answered; `cycle` is the last that came
        self.url = b""
        self._unread = b""                               # received, and not parsed while the line is full
        self._is_watched = False                         # a timer looks whether the client has left
        self._is_beyond = False                          # there was no room for it: it may ask for the server's health
        self._deadline: TimerHandle | None = None

    # -- the connection ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = LineFlow(transport, self.loop.time)
        self._waiting = Waiting(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self._read_at_once(READ_BYTES)
        self._arriving.begins_until = self.loop.time() + FIRST_READ_SECONDS
        most = self.options.max_connections
        if len(self.connections) > most:
            make_room(self.connections)
        if len(self.connections) > most + LINGERING + PROBES_BEYOND:
            self._refused = True
            transport.abort()
        else:
            self._is_beyond = len(self.connections) > most
            self._expect_within(LINGER_SECONDS if self._is_beyond else HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self.unread.end(self._waiting)
        self._waiting.behind = None
        super().connection_lost(exc)
        if self._answered is not None:
            end_request(self._answered)                  # uvicorn tells the last request in line only
        self._unset_keepalive_if_required()
        # A request refers to its connection: without this, both and all that is in line would wait for a garbage collection.
        self.pipeline.clear()
        self._unread = b""
        self.cycle = self.scope = self.headers = self._answered = cast(Any, None)
        if hasattr(self.transport, "_read_ready_cb"):    # asyncio's own transports refer to themselves by it for ever
            cast(Any, self.transport)._read_ready_cb = _read_nothing

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._arriving.begins_until = 0.0
        flow = cast(LineFlow, self.flow)
        if flow.is_full:
            self._unread += data                         # at most one read: reading is paused
        elif self._is_abandoned:
            self.transport.abort()                       # the system may hold megabytes more of it, and of a thousand others
        elif len(data) <= SMALL_READ or (self._arriving.in_body and self._arriving.length is not None):
            self._parse(data)
        else:
            self._parse_in_turn(data)

    def _parse_in_turn(self, data: bytes) -> None:
        self._unread = data
        cast(LineFlow, self.flow).set_full(True)
        self.turns.wait(self._parse_unread, self.loop)

    def _read_at_once(self, num_bytes: int) -> None:
        over_tls = getattr(self.transport, "_ssl_protocol", None)
        if isinstance(over_tls, TlsConnection):
            over_tls.read_at_once(num_bytes)
        elif hasattr(self.transport, "max_size"):        # asyncio's own transports have it
            self.transport.max_size = num_bytes

    def _read_much(self) -> None:
        """A long body has leave."""
        if self._arriving.in_body:
            self._read_at_once(BODY_READ_BYTES)

    def _parse(self, data: bytes) -> None:
        """Request by request, until the line is full: the rest waits as it is, and nothing more is read."""
        place, chunks = 0, self._arriving.chunks
        while place < len(data) and not self._refused and not self.transport.is_closing():
            if len(self.pipeline) >= MAX_IN_LINE * (1 + self._arriving.in_message):   # preferably between two requests
                self._unread = data[place:]
                cast(LineFlow, self.flow).set_full(True)
                self._cancel_deadline()                  # it is this server that waits
                return
            if self._arriving.is_coded and self._arriving.chunks > chunks + CHUNKS_AT_ONCE:
                self._parse_in_turn(data[place:])
                return
            end = self._arriving.end_of_part(data, place)
            self._unparsed += end - place
            part = data if end - place == len(data) else data[place:end]
            before = self._arriving.tail
            super().data_received(part)
            self._arriving.tail = (before + part[-3:])[-3:]
            place = end
            # An endless header, chunk extension or trailer: the parser buffers it without a callback.
            if self._unparsed > MAX_HEAD and not self._refused:
                self._refuse(431, f"a part of the request's head is larger than {MAX_HEAD} bytes")
        if self._refused or self.transport.is_closing():
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_within(HEAD_SECONDS)            # bytes before a request, such as empty lines

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if isinstance(self.loop, FrontEndLoop) and self.url.startswith(PROBED):
            self.loop.ahead(super()._start_asgi_task, cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self.pipeline or self._unread:
            self.turns.wait(self._next_in_line, self.loop)
        elif self._refused and not self.transport.is_closing():
            self._send_refusal()
        else:
            super().on_response_complete()

    def _next_in_line(self) -> None:
        if not self._is_answering:                       # what was received meanwhile may have begun the next
            super().on_response_complete()
        self._parse_unread()

    def _start_watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self.loop.call_later(LEFT_SECONDS, self._watch_line)

    def _watch_line(self) -> None:
        """A connection is not read while requests or an error wait in its line, or a long body waits for memory (admission.py),
        so its end is not noticed by reading."""
        waits = self.pipeline or cast(LineFlow, self.flow).is_full or (self._arriving.in_body and self.flow.read_paused)
        if self.transport.is_closing() or not waits:
            self._is_watched = False
        elif has_left(self.transport):
            self.transport.abort()
        else:
            self.loop.call_later(LEFT_SECONDS, self._watch_line)

    def _parse_unread(self) -> None:
        flow = cast(LineFlow, self.flow)
        if flow.is_full and not self._refused and not self.transport.is_closing():
            unread, self._unread = self._unread, b""
            flow.set_full(False)
            if self._arriving.in_message and self._deadline is None:
                self._expect_within(BODY_SECONDS)
            self._parse(unread)

    def send_400_response(self, msg: str) -> None:
        """Called when the parser stopped: at invalid HTTP, or because a callback stopped it."""
        if self._limit is not None:
            self._refuse(self._limit.status, str(self._limit))
        elif self._arriving.is_offer:                    # else the head is wrong: what has come of it may be valid
            super().data_received(begin_again(self))
        else:
            self._refuse(400, "this is not a valid HTTP request")

    # -- the parser's callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unparsed = 0
        self._arriving = Arriving()
        self._arriving.in_message = True
        self._expect_within(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._unparsed = 0
        if len(self.url) > MAX_URL:
            self._stop(414, f"the URL is longer than {MAX_URL} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unparsed = 0
        size = len(name) + len(value)
        self._arriving.headers += 1
        self._arriving.head_bytes += size
        if size > MAX_HEADER:
            self._stop(431, f"a header is larger than {MAX_HEADER} bytes")
        if self._arriving.headers > MAX_HEADERS:
            self._stop(431, f"there are more than {MAX_HEADERS} headers")
        if self._arriving.head_bytes > MAX_HEAD:
            self._stop(431, f"the headers are larger than {MAX_HEAD} bytes")
        if self._arriving.in_body:
            return                                       # a trailer: the headers count, which a proxy in front has seen
        lower = name.lower()
        if lower == b"content-length" and value.strip().isdigit():
            self._arriving.length = int(value)
            self._check_body(self._arriving.length)               # refuse a body that will be too large before it arrives
        elif lower == b"host":
            self._arriving.hosts += 1
            if self._arriving.hosts > 1:                          # a proxy in front may have used the other one
                self._stop(400, "the request needs one Host header")
        elif lower == b"transfer-encoding":
            self._arriving.is_coded = True
            if value.strip().lower() != b"chunked":               # the parser takes "gzip, chunked", and decodes the chunks only
                self._stop(400, "the only transfer coding is chunked")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if any(name == b"upgrade" for name, _ in self.headers):
            self._arriving.is_offer = True
            raise UpgradeOffered
        if self.parser.get_method() == b"CONNECT":                # the parser reads no body of it: that would be a request
            self._stop(400, "this server is not a proxy")
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1") or (version == "1.0" and self._arriving.is_coded):
            self._stop(400, "the request must be HTTP/1.1, or HTTP/1.0 without transfer codings")
        most = self.options.max_connections
        if self._is_beyond and len(self.connections) > most and not self.url.startswith(PROBED):
            self._stop(503, all_in_use(most))
        self._expect_within(BODY_SECONDS)
        self._arriving.heard = self.loop.time()
        self._arriving.in_body = True
        if self._arriving.is_coded:
            self._arriving.length = None
        super().on_headers_complete()
        if self.pipeline:
            self._start_watch()
        if self.cycle is not None and self.cycle.scope is self.scope:
            scope: MutableMapping[str, Any] = cast(Any, self.scope)
            scope[DIRECT] = DirectWrites(self.cycle, self._read_much)     # before its task runs
            self.cycle.waiting_for_100_continue &= version != "1.0"      # such a client would take the 100 for its answer
            if self.cycle.keep_alive:
                cast(Any, self.cycle).send = CountedAnswer(self.cycle, self._waiting)
            else:
                ends = self._is_arriving, self._drop_the_rest
                cast(Any, self.cycle).send = LastAnswer(self.cycle, self._waiting, version == "1.0", *ends)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        now = self._arriving
        now.heard = self.loop.time()
        now.body_bytes += len(body)
        now.chunks += 1
        self._check_body(now.body_bytes)
        if now.is_coded and now.chunks > FEW_CHUNKS and now.body_bytes < SMALL_CHUNK * now.chunks:
            self._stop(400, f"the chunks of the body are too small; send at least {SMALL_CHUNK} bytes in each")
        super().on_body(body)
        if self.flow.read_paused:
            self._start_watch()

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._arriving.in_message = self._arriving.in_body = False
        self._read_at_once(READ_BYTES)
        self._cancel_deadline()
        super().on_message_complete()

    def _check_body(self, size: int) -> None:
        if size > self.options.max_body_bytes:
            self._stop(413, f"the body is larger than {self.options.max_body_bytes} bytes")

    def _stop(self, status: int, message: str) -> None:
        self._limit = LimitExceeded(status, message)
        raise self._limit

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expect_within(self, seconds: float, allowed: float | None = None) -> None:
        """`allowed`: what the client is told, if it has got more time meanwhile."""
        self._cancel_deadline()
        paused = cast(LineFlow, self.flow).paused_seconds
        self._deadline = self.loop.call_later(seconds, self._too_slow, allowed or seconds, paused)

    def _too_slow(self, seconds: float, paused: float) -> None:
        """`paused`: the seconds in which the connection was not read, when the time began."""
        more = self._seconds_of_ours(paused)
        if more > 0:
            self._expect_within(more, seconds)
        elif self._arriving.in_message:
            self._refuse(408, f"the request was not complete after {seconds:g} s")
        else:
            self.transport.close()

    def _seconds_of_ours(self, paused: float) -> float:
        """In which this server did not read a body (admission.py): its client gets them back."""
        if not self._arriving.in_body or has_left(self.transport):
            return 0.0
        flow = cast(LineFlow, self.flow)
        return max(flow.paused_seconds - paused, LEFT_SECONDS if flow.read_paused else 0.0)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread.begin(self._waiting)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.end(self._waiting)

    @property
    def idle_since(self) -> float | None:
        """Since when it waits for its client (idle_connections.py): for the head of a request, or for the rest of a body that has
        stopped. None while a request is read or answered."""
        if self._refused or self.transport.is_closing() or self.loop.time() < self._arriving.begins_until:
            return None
        if self._unread or self.pipeline or self.transport.get_write_buffer_size():
            return None
        if self._arriving.in_body:
            return self._silent_since
        if self._is_answering:
            return None
        if self.timeout_keep_alive_task is not None:
            return self.timeout_keep_alive_task.when() - self.timeout_keep_alive
        return None if self._deadline is None else self._deadline.when() - (LINGER_SECONDS if self._is_beyond else HEAD_SECONDS)

    @property
    def _silent_since(self) -> float | None:
        """Since when the body has stopped; None if it has not for long, or is not read, or its answer has begun."""
        heard, cycle = max(self._arriving.heard, cast(LineFlow, self.flow).resumed_at), self.cycle
        is_silent = self.loop.time() >= heard + SILENT_SECONDS and not self.flow.read_paused and not has_bytes(self.transport)
        if not is_silent or cycle is None:               # None: the connection has just ended
            return None
        return heard if cycle.response_complete or not cycle.response_started else None

    @property
    def _is_abandoned(self) -> bool:
        """A body is arriving for which no answer has begun, and its client has left."""
        is_arriving = self._arriving.in_body and self.cycle is not None and not self.cycle.response_started
        return is_arriving and has_left(self.transport)

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def give_way(self) -> None:
        """Nothing is buffered. Over TLS close() would wait for the client's own end, with the socket open."""
        self._refused = True                             # what still arrives is not read
        self.transport.abort()

    # -- refusal -------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Read nothing more, send the error after the answers to the requests before it, and close."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._cancel_deadline()
        self._unread = b""
        self._limit = LimitExceeded(status, message)
        own = self._own_cycle()
        if self.pipeline and self.pipeline[0][0] is own:
            self.pipeline.popleft()                      # the newest; it has not begun
        before = self._answered
        if not self.pipeline and (before is None or before is own or before.response_complete):
            self._send_refusal()
        else:
            cast(LineFlow, self.flow).set_full(True)
            self._start_watch()

    def _is_arriving(self) -> bool:
        return self._arriving.in_message and not self._refused and not self.transport.is_closing()

    def _drop_the_rest(self) -> None:
        """After the last answer, if its request was still arriving: what comes is read and dropped until the client closes."""
        self._refused = True
        self._unread = b""
        self._cancel_deadline()
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
            cast(LineFlow, self.flow).set_full(False)
            if self.transport.can_write_eof():           # TLS cannot
                with suppress(OSError):                  # the client has gone
                    self.transport.write_eof()

    def _own_cycle(self) -> RequestResponseCycle | None:
        """Of the request that is arriving, if its headers are complete."""
        is_here = self.cycle is not None and self.cycle.scope is self.scope and self._arriving.in_message
        return self.cycle if is_here else None

    def _send_refusal(self) -> None:
        """An application that works on the refused request sees a disconnect."""
        assert self._limit is not None
        status, own = self._limit.status, self._own_cycle()
        if own is None or not own.response_started:
            self.transport.write(refusal(status, str(self._limit), self._path(), self.headers or ()))
        if own is not None and not own.response_complete:
            end_request(own)
        # Closing with unread bytes would reset the connection, and the client might not see the error.
        cast(LineFlow, self.flow).set_full(False)
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _path(self) -> str:
        """The path, as far as it is known."""
        return self.url.partition(b"?")[0].decode("latin-1")


def limited_protocol(options: ServerOptions) -> type[LimitedProtocol]:
    return type("LimitedProtocol", (LimitedProtocol,), {"options": options, "turns": Turns(), "unread": Unread()})
