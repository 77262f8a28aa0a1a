"""Accepts connections: all that wait at once, then a few begin per turn of the event loop, health checks first.

The system hands connections out in the order in which they came, and a transport for one takes asyncio 0.2 ms. Behind a thousand
connections of one client, a health check would wait for all of them. So a connection begins when its first bytes are here: a
silent one costs a file descriptor, and is the first to be closed when there is no room. A health check begins at once, before all
that wait; a flood of them leaves one place of each turn to the other connections. What begins like a health check and does not
end waits with the others. A connection for which there is no room is told so. Knows sockets and the first bytes on them, no HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

from ridgeline.server.event_loop import FrontEndLoop
from ridgeline.server.http.idle_connections import SHARE

ACCEPTED_AT_ONCE = 256               # per turn of the event loop: 5 ms
BEGUN_AT_ONCE = 4                    # the same: each is read and answered in the turns after that, and a turn must stay short
HEARD_AT_ONCE = 128                  # connections that speak, per turn: 2 ms; one of them may be a health check
PROBES_AHEAD = 2                     # health checks that begin at once, per look at what has come
RETRY_SECONDS = 1.0                  # when the system has no file descriptor left
SILENT_SECONDS = 10.0                # after which a connection without a byte is closed; the same for a handshake
PROBES = (b"GET /health", b"HEAD /health", b"GET /ping")
READ_BYTES = 16 * 1024               # read from a connection at once; 256 KiB, as asyncio does, of a thousand are a flood
LAST_READ = 2**16                    # of a connection that is refused: with bytes unread it would be reset, and hear nothing
PROBE_BYTES, PROBE_END = 1024, b"\r\n\r\n"     # all of it is here: to wait for the rest of thousands would delay real ones
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SilentConnections:
    """Those without a byte, the oldest first; each is closed after a while. `speaks` is called with one that has bytes, or has
    ended. In an epoll object of their own, where the system has it: asyncio takes three times as long to watch a file."""

    def __init__(self, loop: asyncio.AbstractEventLoop, speaks: Callable[[socket.socket], None]) -> None:
        self._loop = loop
        self._speaks = speaks
        self._came: dict[socket.socket, float] = {}
        self._by_file: dict[int, socket.socket] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._is_timed = False                           # a timer looks after them
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), self._heard)

    def __len__(self) -> int:
        return len(self._came)

    def add(self, connection: socket.socket) -> None:
        number = connection.fileno()
        self._came[connection] = self._loop.time()
        if self._epoll is None:
            self._loop.add_reader(number, self._has_spoken, connection)
        else:
            self._by_file[number] = connection
            self._epoll.register(number, select.EPOLLIN)
        self._set_timer()

    def _heard(self) -> None:
        assert self._epoll is not None
        for number, _ in self._epoll.poll(0, HEARD_AT_ONCE):             # those that are left are found in the next turn
            if (connection := self._by_file.get(number)) is not None:    # else it has just given way to one before it
                self._has_spoken(connection)

    def _has_spoken(self, connection: socket.socket) -> None:
        self._forget(connection)
        self._speaks(connection)

    def _forget(self, connection: socket.socket) -> None:
        del self._came[connection]
        if self._epoll is None:
            self._loop.remove_reader(connection.fileno())
        else:
            del self._by_file[connection.fileno()]
            self._epoll.unregister(connection.fileno())

    def close_oldest(self) -> int:
        """Some of them. How many."""
        oldest = list(islice(self._came, max(1, len(self._came) // SHARE)))
        self._close(oldest)
        return len(oldest)

    def _close(self, connections: list[socket.socket]) -> None:
        for connection in connections:
            self._forget(connection)
            connection.close()

    def _close_old(self) -> None:
        came_before = self._loop.time() - SILENT_SECONDS
        self._close([each for each, came in self._came.items() if came <= came_before])
        self._is_timed = False
        self._set_timer()

    def _set_timer(self) -> None:
        if self._came and not self._is_timed:
            self._is_timed = True
            self._loop.call_at(next(iter(self._came.values())) + SILENT_SECONDS + 0.1, self._close_old)

    def close(self) -> None:
        self._close(list(self._came))
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()


class TlsConnection(SSLProtocol):
    """asyncio's protocol for TLS with small buffers, unless more is asked for: a thousand idle connections have a thousand of
    them. `handshake` is done when it has ended; to cancel it ends the connection."""

    max_size: int = READ_BYTES                           # type: ignore[misc]
    _ssl_buffer: bytearray
    _transport: asyncio.Transport | None

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, tls: ssl.SSLContext) -> None:
        self.handshake: asyncio.Future[None] = loop.create_future()
        self.handshake.add_done_callback(self._ended)
        super().__init__(loop, protocol, tls, self.handshake, server_side=True, ssl_handshake_timeout=int(SILENT_SECONDS))
        # Of encrypted bytes, while the protocol does not read. A record of 16 KiB may be incomplete: both must be above that.
        self._set_read_buffer_limits(high=4 * READ_BYTES, low=2 * READ_BYTES)        # type: ignore[attr-defined]

    def _ended(self, handshake: asyncio.Future[None]) -> None:
        if not handshake.cancelled():
            handshake.exception()                        # no other's concern
        elif self._transport is not None:
            self._transport.abort()

    def read_at_once(self, num_bytes: int) -> None:
        if num_bytes != len(self._ssl_buffer):
            self.max_size = num_bytes
            self._ssl_buffer = bytearray(num_bytes)
            self._ssl_buffer_view = memoryview(self._ssl_buffer)


class Acceptor:
    """For one listening socket. `room`: how many more connections there may be, beside those that wait here, and `probes_beyond`
    with health checks; `make_room` closes some that are idle. `refusal`: what a client is told for whom there is no room."""

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None,
        room: Callable[[], int], make_room: Callable[[], int] = lambda: 0, probes_beyond: int = 0,
        refusal: bytes = b"",
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._room = room
        self._make_room = make_room
        self._probes_beyond = probes_beyond
        self._refusal = refusal if tls is None else b""
        self._loop = asyncio.get_running_loop()
        self._silent = SilentConnections(self._loop, self._sort)
        self._probes: deque[socket.socket] = deque()     # the oldest first, as below
        self._others: deque[socket.socket] = deque()
        self._beginning: dict[Any, None] = {}            # handshakes, and protocols that will have a transport in a moment
        self._own = self._loop if isinstance(self._loop, FrontEndLoop) else None
        self._is_closed = False
        self._listen()

    def __len__(self) -> int:
        """Connections that were accepted and have not begun."""
        return len(self._silent) + len(self._probes) + len(self._others) + len(self._beginning)

    @property
    def _free(self) -> int:
        return self._room() - len(self)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        was_full = False
        for _ in range(ACCEPTED_AT_ONCE):                # also without room: in the system's queue they would hide health checks
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
            connection.setblocking(False)
            if self._free <= 0 and not was_full:
                was_full = True                          # once a turn: to find those that are idle takes time
                _ = (self._silent and self._silent.close_oldest()) or self._end_handshakes() or self._make_room()
            self._sort(connection)

    def _sort(self, connection: socket.socket) -> None:
        """Into the line where it belongs, by its first bytes."""
        try:
            first = connection.recv(PROBE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            first = None
        except OSError:
            first = b""
        is_probe = first is not None and self._tls is None and first.startswith(PROBES) and PROBE_END in first
        least = 0 if first and not is_probe else -self._probes_beyond
        if first:
            self._make_room_for_one(least, is_probe)
        if first == b"":
            connection.close()                           # its client has left
        elif self._free <= least:
            self._refuse(connection)
        elif first is None:
            self._silent.add(connection)
        else:
            self._line_up(connection, is_probe)

    def _line_up(self, connection: socket.socket, is_probe: bool) -> None:
        was_idle = not (self._probes or self._others)
        (self._probes if is_probe else self._others).append(connection)
        if self._own is not None:
            selector = self._own.selector
            selector.lanes[connection.fileno()] = selector.probes if is_probe else selector.crowd
            if is_probe and len(self._probes) == 1:
                self._own.ahead(self._own.call_soon, self._begin_probes)
        if was_idle:
            self._loop.call_soon(self._begin)            # those after it have then come, too

    def _make_room_for_one(self, least: int, is_probe: bool) -> None:
        """Until more than `least` is free. Those that came in the same turn may have taken all of it, and silent ones that of
        health checks, too: they give way to one that speaks, and to a health check those that have not begun."""
        while self._silent and self._free <= least:
            self._silent.close_oldest()
        if is_probe and self._others and self._free <= least:
            self._refuse(self._others.pop())

    def _refuse(self, connection: socket.socket) -> None:
        """Also one that has not spoken: most clients read what came before the reset that their request gets."""
        with suppress(OSError):
            connection.send(self._refusal)
            connection.recv(LAST_READ)
        connection.close()

    def _end_handshakes(self) -> int:
        """End some that have taken longest. How many."""
        if self._tls is None:
            return 0                                     # then one begins within a turn
        oldest = list(islice(self._beginning, max(1, len(self._beginning) // SHARE)))
        for handshake in oldest:
            self._has_begun(handshake)
            handshake.cancel()
        return len(oldest)

    def _has_begun(self, one: Any) -> None:
        self._beginning.pop(one, None)

    def _begin(self) -> None:
        probes = min(len(self._probes), BEGUN_AT_ONCE - bool(self._others))
        others = min(len(self._others), BEGUN_AT_ONCE - probes)
        for waiting, count in ((self._probes, probes), (self._others, others)):
            for _ in range(count):
                self._begin_one(waiting.popleft())
        if self._probes or self._others:
            self._loop.call_soon(self._begin)

    def _begin_probes(self) -> None:
        """Before all that waits: the first few; more than these are a flood, and wait for their turn."""
        assert self._own is not None
        for _ in range(min(len(self._probes), PROBES_AHEAD)):
            self._own.ahead(self._begin_one, self._probes.popleft())

    def _begin_one(self, connection: socket.socket) -> None:
        if self._own is not None:
            with suppress(Exception):                    # as in _begun
                protocol = self._make_protocol()
                if self._tls is None:
                    self._own.begin(connection, protocol)
                    self._beginning[protocol] = None
                    self._own.call_soon(self._has_begun, protocol)       # behind what begin() has added
                else:
                    over_tls = TlsConnection(self._own, protocol, self._tls)
                    self._own.begin(connection, over_tls)
                    self._beginning[over_tls.handshake] = None
                    over_tls.handshake.add_done_callback(self._has_begun)
            return
        task = self._loop.create_task(self._begun(connection))
        self._beginning[task] = None
        task.add_done_callback(self._has_begun)

    async def _begun(self, connection: socket.socket) -> None:
        with suppress(Exception):                        # it has closed meanwhile, or its handshake failed: no other's concern
            limit = None if self._tls is None else SILENT_SECONDS
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=limit)

    async def wait_closed(self) -> None:
        """As asyncio's servers have it: there is nothing to wait for."""

    def close(self) -> None:
        """Accept no more; those that wait here are closed."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError, ValueError):          # the socket is closed already
                self._loop.remove_reader(self._listener.fileno())
            self._silent.close()
            for waiting in (self._probes, self._others):
                while waiting:
                    waiting.popleft().close()
