"""Requests in line on one connection: how many may wait, and in which turn they begin.

HTTP/1.1 lets a client send the next request before it has read the last answer. uvicorn parses and queues all of them: 46 bytes
of memory for each byte sent. Here a connection is read only while few requests wait, and requests that waited begin a few at a
time, so that a thousand connections with long lines do not hold up a request that just came. Knows connections, no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl

MAX_IN_LINE = 4                      # requests that wait behind the one being answered; more are left in the socket
TURNS_AT_ONCE = 4                    # requests that leave their lines per turn of the event loop


class LineFlow(FlowControl):
    """uvicorn's flow control; while the line is full, uvicorn itself does not resume reading either."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()

    def set_full(self, is_full: bool) -> None:
        self.is_full = is_full
        if is_full:
            self.pause_reading()
        else:
            self.resume_reading()


class InLine(Protocol):
    def next_in_line(self) -> None:
        """Begin the connection's next request."""


class Turns:
    """Connections whose next request may begin, in the order in which their last answers ended."""

    def __init__(self) -> None:
        self._waiting: deque[InLine] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, connection: InLine, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_soon(self._begin, loop)
        self._waiting.append(connection)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(TURNS_AT_ONCE, len(self._waiting))):
            self._waiting.popleft().next_in_line()
        if self._waiting:
            loop.call_soon(self._begin, loop)
