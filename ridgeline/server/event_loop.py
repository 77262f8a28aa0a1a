"""The event loop of a front end: turns are short, and what is urgent goes first.

asyncio's own loop takes every event that is there, and runs every callback that is ready before it looks at its sockets again.
With 3,000 clients that send, a turn takes 0.1 s, and a health check waits for six of them: to be accepted, to begin, to get a
transport, to be watched, to be read and to be answered. Here each turn takes a few events of clients, in order, and runs a few
callbacks; the others wait for the next turn. Listeners, health checks and the engine's messages are urgent: their callbacks, and
those that these add within `ahead`, run before all that wait. Knows file descriptors, no connections. uvloop, where it is
installed, is used as it is.
"""

from __future__ import annotations

import asyncio
import math
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context
from typing import Any

try:
    import uvloop
except ImportError:                  # optional
    uvloop = None  # type: ignore[assignment]

OF_CROWD = 16                        # events per turn: of clients' connections, …
OF_PROBES = 4                        # … and of those that began with a health check: any client can begin with one
OTHERS = 256
TURN_SECONDS = 0.005                 # of processor time
CALLBACKS, MOST_CALLBACKS = 4, 128  # per turn, besides those of urgent events; several of them are not `ahead`


class Lane:
    """File descriptors of which a turn takes `most` events. An epoll object inside that of the loop."""

    def __init__(self, most: int, outer: select.epoll) -> None:
        self.most = most
        self.epoll = select.epoll()
        outer.register(self.epoll.fileno(), select.EPOLLIN)


class CrowdSelector(selectors.BaseSelector):
    """`lanes`: those file descriptors that wait in a lane, also before they are registered. All others are taken at once."""

    def __init__(self, backlog: Callable[[], int] = lambda: 0) -> None:
        """`backlog`: how many callbacks wait."""
        self.lanes: dict[int, Lane] = {}
        self.waiting: set[int] = set()                   # whose callbacks wait: to take their events again would add them again
        self._backlog = backlog
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._in: dict[int, select.epoll] = {}           # where each is registered
        self._first = select.epoll()
        self.probes, self.crowd = Lane(OF_PROBES, self._first), Lane(OF_CROWD, self._first)
        self._by_file = {lane.epoll.fileno(): lane for lane in (self.probes, self.crowd)}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = _number(fileobj)
        if number in self._keys:
            raise KeyError(f"{fileobj!r} (file {number}) is already registered")
        lane = self.lanes.get(number)
        place = self._first if lane is None else lane.epoll
        place.register(number, _asked(events))
        self._in[number] = place
        self.waiting.discard(number)                     # what waits is cancelled: another connection had the number
        self._keys[number] = key = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        number = _number(fileobj)
        key = self._keys.pop(number)
        try:
            self._in.pop(number).unregister(number)
        except OSError:                                  # it was closed before
            pass
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = _number(fileobj)
        old = self._keys[number]
        if events != old.events:
            self._in[number].modify(number, _asked(events))
        self._keys[number] = key = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        seconds = None if timeout is None else max(0.0, math.ceil(timeout * 1e3) * 1e-3)     # epoll counts milliseconds
        try:
            found = self._first.poll(seconds, OTHERS)
        except InterruptedError:
            return []
        waiting = {self._by_file[number] for number, _ in found if number in self._by_file}
        for lane in self._by_file.values():              # the crowd last
            if lane in waiting:
                # Callbacks of more clients would only wait behind others. But those that have left are to be noticed.
                most = lane.most if lane is not self.crowd else max(lane.most // 2, lane.most - self._backlog())
                found += lane.epoll.poll(0, most)        # in order: those that are taken go to the end of its list
        ready = []
        for number, event in found:
            key = self._keys.get(number) if number not in self.waiting else None
            mask = _found(event) & key.events if key is not None else 0
            if key is not None and mask:
                ready.append((key, mask))
        return ready

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_number(fileobj)]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return _ByFile(self._keys)

    def close(self) -> None:
        self._keys.clear()
        for lane in self._by_file.values():
            lane.epoll.close()
        self._first.close()


class _ByFile(Mapping[Any, selectors.SelectorKey]):
    """Keys by number; a lookup also takes file objects, as asyncio's does since Python 3.13."""

    def __init__(self, keys: dict[int, selectors.SelectorKey]) -> None:
        self._keys = keys

    def __getitem__(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_number(fileobj)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _number(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else int(fileobj.fileno())


def _asked(events: int) -> int:
    return (events & selectors.EVENT_READ and select.EPOLLIN) | (events & selectors.EVENT_WRITE and select.EPOLLOUT)


def _found(event: int) -> int:
    """An error or an end is read, and written, as far as that was asked for."""
    read, write = event & ~select.EPOLLOUT, event & ~select.EPOLLIN
    return (read and selectors.EVENT_READ) | (write and selectors.EVENT_WRITE)


class ReadyQueue(deque[asyncio.Handle]):
    """The callbacks that are ready. asyncio runs as many per turn as the length says when the turn begins. Short turns cost more
    for each callback, so there are as many as take TURN_SECONDS, by what those of earlier turns took."""

    def __init__(self) -> None:
        super().__init__()
        self.urgent = 0                                  # at the front, of this turn's events
        self.most = CALLBACKS                            # of the others
        self._each = TURN_SECONDS / CALLBACKS            # seconds of one, lately
        self._began, self._planned = 0.0, 0

    def end_turn(self, now: float) -> None:
        """`now`: processor time. One turn of slow callbacks is enough for fewer of them in the next."""
        if self._planned:
            each = (now - self._began) / self._planned
            self._each = max(each, self._each + (each - self._each) / 8, 1e-9)
            self.most = min(max(int(TURN_SECONDS / self._each), CALLBACKS), MOST_CALLBACKS)

    def begin_turn(self, now: float) -> None:
        self._began, self._planned = now, len(self)

    @property
    def size(self) -> int:
        return super().__len__()

    def __len__(self) -> int:
        return min(super().__len__(), self.urgent + self.most)


class FrontEndLoop(asyncio.SelectorEventLoop):
    _ready: ReadyQueue

    def __init__(self) -> None:
        queue = ReadyQueue()
        self.selector = CrowdSelector(lambda: queue.size)
        super().__init__(self.selector)
        self._ready = queue
        self._from_threads: deque[asyncio.Handle] = deque()

    def _process_events(self, event_list: list[tuple[selectors.SelectorKey, int]]) -> None:
        """asyncio calls it once per turn, before the callbacks run."""
        now = time.thread_time()
        self._ready.end_turn(now)
        lanes, crowd = self.selector.lanes, self.selector.crowd
        urgent = [event for event in event_list if lanes.get(event[0].fd) is not crowd]
        process: Callable[..., None] = super()._process_events           # type: ignore[misc]
        self._ready.urgent = self.ahead(process, urgent)
        while self._from_threads:
            self._ready.append(self._from_threads.popleft())
        of_crowd = [event for event in event_list if lanes.get(event[0].fd) is crowd]
        process(of_crowd)
        if of_crowd and self._ready.size > len(self._ready):             # some of them are not for this turn
            numbers = {key.fd for key, _ in of_crowd}
            self.selector.waiting |= numbers
            self._ready.append(asyncio.Handle(self.selector.waiting.difference_update, (numbers,), self))
        self._ready.begin_turn(now)

    def ahead(self, work: Callable[..., Any], *args: Any) -> int:
        """Do `work`; the callbacks that it adds run before those that wait. How many."""
        added: deque[asyncio.Handle] = deque()
        waiting, self._ready = self._ready, added        # type: ignore[assignment]
        try:
            work(*args)
        finally:
            self._ready = waiting
            waiting.extendleft(reversed(added))
        return len(added)

    def call_soon_threadsafe(                                  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None,
    ) -> asyncio.Handle:
        """Those of other threads wait for a turn to begin: amid `ahead` one would overtake what its thread added before."""
        if threading.get_ident() == self._thread_id:           # type: ignore[attr-defined]
            return super().call_soon_threadsafe(callback, *args, context=context)
        self._check_closed()                                   # type: ignore[attr-defined]
        handle = asyncio.Handle(callback, args, self, context)
        self._from_threads.append(handle)
        self._write_to_self()                                  # type: ignore[attr-defined]
        return handle

    def begin(self, connection: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        """Give an accepted connection a transport, as connect_accepted_socket() does, without a task for it."""
        self._make_socket_transport(connection, protocol)      # type: ignore[attr-defined]

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:     # type: ignore[override]
        """In no lane, though a connection had the number before: transports do not use this."""
        self.selector.lanes.pop(_number(fd), None)
        super().add_reader(fd, callback, *args)


def new_event_loop() -> asyncio.AbstractEventLoop:
    if uvloop is not None:
        return uvloop.new_event_loop()
    return FrontEndLoop() if hasattr(select, "epoll") else asyncio.new_event_loop()
