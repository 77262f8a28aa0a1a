"""Accepts connections: all that wait at once, then a few begin per turn of the event loop, health checks first.

The system hands connections out in the order in which they came, and a transport for one takes asyncio 0.2 ms. Behind a thousand
connections of one client, a health check would wait for all of them. A flood of health checks leaves one place of each turn to
the other connections. Knows sockets and the first bytes on them, no HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress

ACCEPTED_AT_ONCE = 256               # per turn of the event loop: 5 ms
BEGUN_AT_ONCE = 4                    # the same: each is read and answered in the turns after that, and a turn must stay short
RETRY_SECONDS = 1.0                  # when the system has no file descriptor left
PROBES = (b"GET /health", b"HEAD /health", b"GET /ping")
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """For one listening socket. `room`: how many more connections there may be, beside those that wait here."""

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None,
        room: Callable[[], int],
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._probes: deque[socket.socket] = deque()     # both: the oldest first
        self._others: deque[socket.socket] = deque()
        self._beginning: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._listen()

    def __len__(self) -> int:
        """Connections that were accepted and have not begun."""
        return len(self._probes) + len(self._others)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        was_idle = not len(self)
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                scarce = error.errno in _SCARCE
                # asyncio's own words; any other error is of this one connection, and those before it begin all the same
                told = "socket.accept() out of system resource" if scarce else "a connection could not be accepted"
                self._loop.call_exception_handler({"message": told, "exception": error})
                if not scarce:
                    break
                self._loop.remove_reader(self._listener.fileno())        # it stays readable
                self._loop.call_later(RETRY_SECONDS, self._listen)
                break
            if self._room() <= len(self):
                connection.close()
                continue
            connection.setblocking(False)
            (self._probes if self._is_probe(connection) else self._others).append(connection)
        if was_idle and len(self):
            self._begin()                                # at once, if there is nothing before it

    def _is_probe(self, connection: socket.socket) -> bool:
        """Whether a health check has arrived on it. What has not arrived yet takes its turn."""
        if self._tls is not None:
            return False
        with suppress(OSError):
            return connection.recv(16, socket.MSG_PEEK).startswith(PROBES)
        return False

    def _begin(self) -> None:
        probes = min(len(self._probes), BEGUN_AT_ONCE - bool(self._others))
        others = min(len(self._others), BEGUN_AT_ONCE - probes)
        for waiting, count in ((self._probes, probes), (self._others, others)):
            for _ in range(count):
                task = self._loop.create_task(self._begun(waiting.popleft()))
                self._beginning.add(task)
                task.add_done_callback(self._beginning.discard)
        if len(self):
            self._loop.call_soon(self._begin)

    async def _begun(self, connection: socket.socket) -> None:
        with suppress(Exception):                        # it has closed meanwhile, or its handshake failed: no other's concern
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._tls)

    async def wait_closed(self) -> None:
        """As asyncio's servers have it: there is nothing to wait for."""

    def close(self) -> None:
        """Accept no more; those that wait here are closed."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError, ValueError):          # the socket is closed already
                self._loop.remove_reader(self._listener.fileno())
            for waiting in (self._probes, self._others):
                while waiting:
                    waiting.popleft().close()
