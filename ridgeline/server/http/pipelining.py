"""Requests in line on one connection: how many may wait, and in which turn they begin.

HTTP/1.1 lets a client send the next request before it has read the last answer. uvicorn parses and queues all of them: 46 bytes
of memory for each byte sent. Here a connection is read only while few requests wait, and requests that waited begin a few at a
time, so that a thousand connections with long lines do not hold up a request that just came. Knows where requests end, not
what they ask for.
"""

from __future__ import annotations

import asyncio
import math
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn.protocols.http.flow_control import FlowControl

MAX_IN_LINE = 4                      # requests that wait behind the one being answered; more are left in the socket
TURNS_AT_ONCE = 4                    # connections whose requests leave their lines per turn of the event loop
SMALL_READ = 4 * 1024                # bytes that are parsed as soon as they come; more, outside of a body, take their turn
PIECE = 512                          # least bytes of a chunked body that are parsed at once: it may be full of empty lines …
MOST_PIECE = 16 * 1024               # … and most: it may be full of chunks, which take a microsecond each


@dataclass(slots=True)
class Arriving:
    """The request that is being received, or was received last."""

    begins_until: float = 0.0        # of a new connection: its first bytes may be here, and are read in a moment
    in_message: bool = False         # it has begun to arrive and is incomplete
    in_body: bool = False
    is_coded: bool = False           # it has a Transfer-Encoding
    is_offer: bool = False           # its head is complete and valid, and offers another protocol: see begin_again
    tail: bytes = b""                # its last bytes: an empty line may end with the next ones
    length: int | None = None        # the body's declared length
    hosts: int = 0
    headers: int = 0                 # trailers among them
    head_bytes: int = 0
    body_bytes: int = 0
    heard: float = 0.0               # when its last bytes came
    chunks: int = 0                  # pieces of the body that the parser found

    def end_of_part(self, data: bytes, place: int) -> int:
        """Where the part that begins at `place` ends: with a head, with a body, or at an empty line of a chunked body, which
        may be its end. So no part has many requests."""
        if self.in_body and self.length is not None:
            return min(len(data), place + max(1, self.length - self.body_bytes))
        before = self.tail
        found = (before + data[place:place + 3]).find(b"\r\n\r\n") if before else -1
        if found >= 0:                                   # it began in what came before
            end = place + found + 4 - len(before)
        else:
            found = data.find(b"\r\n\r\n", place)
            end = len(data) if found < 0 else found + 4
        return min(len(data), max(end, place + PIECE), place + MOST_PIECE) if self.in_body else end


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its side, although bytes that came before are unread."""
    return _polled(transport, select.POLLRDHUP)


def has_bytes(transport: asyncio.Transport) -> bool:
    """Whether bytes of the client are here, which the event loop has not read yet."""
    return _polled(transport, select.POLLIN)


def _polled(transport: asyncio.Transport, event: int) -> bool:
    asked = select.poll()
    asked.register(transport.get_extra_info("socket").fileno(), event)
    return bool(asked.poll(0))


class LineFlow(FlowControl):
    """uvicorn's flow control; while the line is full, uvicorn itself does not resume reading either. Knows for how long the
    connection was not read: no client is late for that."""

    def __init__(self, transport: asyncio.Transport, now: Callable[[], float]) -> None:
        super().__init__(transport)
        self.is_full = False
        self.resumed_at = -math.inf                      # never: the clock may have begun a minute ago
        self._now = now
        self._paused_at = 0.0
        self._seconds = 0.0                              # of all pauses that have ended

    @property
    def paused_seconds(self) -> float:
        """In all, since the connection began."""
        return self._seconds + (self._now() - self._paused_at if self.read_paused else 0.0)

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused_at = self._now()
            super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_full:
            self._seconds, self.resumed_at = self.paused_seconds, self._now()
            super().resume_reading()

    def set_full(self, is_full: bool) -> None:
        self.is_full = is_full
        if is_full:
            self.pause_reading()
        else:
            self.resume_reading()


class Turns:
    """Work on requests that waited, a little per turn of the event loop: a request that just came goes first."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, work: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_soon(self._begin, loop)
        self._waiting.append(work)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(TURNS_AT_ONCE, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            loop.call_soon(self._begin, loop)
