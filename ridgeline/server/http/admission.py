"""What a request holds before it is answered: memory for its body, and then a slot.

A body over 64 KiB needs leave for all of its declared length before more than its first bytes are read, so a body with leave can
always be completed. Without a declared length, it needs leave for 1 MiB when it is as long, and if it outgrows that, for the
longest there may be. A body with leave is read in large parts, so most are complete soon after their first bytes. While there
is no room, its connection is not read: the client waits, and is refused after 60 s. Leave is given to small and old bodies first.
A body that has leave and stops arriving gives way to those that wait, the longest silent first; one that arrives never does.
Silence is counted in looks of the event loop, not in seconds: a process that stood still heard no client. A slot is taken when
the body is whole. Knows ASGI messages, no requests.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from ridgeline.engine.client.long_work import LONG_BYTES, MOST_WAITING
from ridgeline.engine.client.wait_estimate import LARGE
from ridgeline.errors import BadRequest, NotNow, Overloaded
from ridgeline.server.http.stream import ClientGone, Direct, Receive

MOST_HELD = MOST_WAITING             # bytes of long bodies that are received or parsed at once: all of them may wait to be parsed
LONGEST = 16 * 2**20                 # bytes of a body without a declared length, unless told otherwise
FIRST_LEAVE = 2**20                  # bytes, for a body without a declared length
PATIENCE = 2**16                     # bytes: a body waits behind one that came a second later and is shorter by this many. Long
                                     # bodies that were begun and left give up (BODY_SECONDS) before they are ahead of short ones.
LOOK_SECONDS = 1.0                   # between two looks at the bodies that arrive or wait
SILENT_LOOKS = 3                     # looks after which a body that did not arrive gives way
GIVE_WAY_AT_ONCE = 32                # bodies
WAIT_LOOKS = 60                      # looks after which a body that waits for leave is refused
SLOW = 64                            # a body that gains less than this share of its leave between two looks cannot end in time


class Slots:
    """How many answers may run or wait at once. A request takes a slot when its body is here, before it is parsed."""

    def __init__(self) -> None:
        self.limit = 0
        self.taken = 0
        self.predicted_wait: Callable[[], float | None] = lambda: None

    def check(self, count: int) -> None:
        """BadRequest if there is never room for `count` answers: before work is done for each."""
        if count > self.limit:
            raise BadRequest(f"the request asks for {count} answers at once; at most {self.limit} can be queued here")

    def check_free(self, count: int = 1) -> None:
        """Overloaded if there is no room for `count` answers now."""
        if self.taken + count > self.limit:
            message = f"{self.taken} of {self.limit} answers are running or waiting; try again later"
            # One that asks for much is refused alone: a router would send all others away, from one server after another.
            kind = NotNow if count > LARGE * self.limit and self.taken < self.limit else Overloaded
            raise kind(message, self.predicted_wait())

    @contextmanager
    def taking(self, count: int, already: int = 0, goes_on: bool = False) -> Iterator[None]:
        """Room for `count` answers, of which `already` were taken before. `goes_on`: those places are given back in a moment, and
        these answers stay."""
        self.check(count)
        self.check_free(count - already)
        more = count if goes_on else count - already
        self.taken += more
        try:
            yield
        finally:
            self.taken -= more


class HeldBodies:
    """The bytes of all long bodies that are being received or parsed. `longest`: of one body."""

    def __init__(self, most: int = MOST_HELD, longest: int = LONGEST) -> None:
        self.most = max(most, longest)                   # a single body always fits
        self.longest = longest
        self.num_bytes = 0
        self.num_reading = 0                             # bodies of any length, on their way: their requests hold no slot yet
        self.arriving: dict[Body, None] = {}             # those that have leave and are incomplete
        self._silent: list[Body] = []                    # of those, at the last look; the longest silent is the last
        self._waiting: list[tuple[float, int, _Waiter]] = []     # a heap
        self._num_growing = 0                            # of those that wait, for their second leave
        self._numbers = count()
        self._is_looking = False

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.future.done() for *_, waiter in self._waiting)

    async def leave(self, body: Body, num_bytes: int) -> None:
        """Wait until there is room for `num_bytes` more of the body. Overloaded if others are not done with theirs for long."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(body, num_bytes, loop.create_future())
        self.arriving.pop(body, None)                    # it is not read meanwhile
        heapq.heappush(self._waiting, (loop.time() + num_bytes / PATIENCE, next(self._numbers), waiter))
        grows = body.leave > 0
        self._num_growing += grows
        self._give_leave()
        self._make_room()
        self._look_later()
        try:
            await waiter.future
        finally:
            self._num_growing -= grows
            del waiter                                   # it refers to its error, and the error to this frame

    def add(self, body: Body, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        body.leave += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._give_leave()

    def _next(self) -> _Waiter | None:
        """The first that waits, without those whose requests have ended."""
        while self._waiting:
            waiter = self._waiting[0][-1]
            if not waiter.has_ended():
                return waiter
            heapq.heappop(self._waiting)
        return None

    def _give_leave(self) -> None:
        """In order: a large body is not overtaken for ever."""
        while (waiter := self._next()) is not None and self.num_bytes + waiter.num_bytes <= self.most:
            self._let_go_on(waiter)
        if self._num_growing and waiter is not None and self.num_bytes <= self.most:
            # Those that wait for their second leave hold their first: with all the room taken by them, none could ever end. So
            # one at a time goes on beyond it.
            growing = (each for each in self._waiting if each[-1].body.leave and not each[-1].has_ended())
            if (first := min(growing, default=None)) is not None:
                self._let_go_on(first[-1])

    def _let_go_on(self, waiter: _Waiter) -> None:
        self.add(waiter.body, waiter.num_bytes)
        waiter.body.silent_looks = 0
        self.arriving[waiter.body] = None
        waiter.future.set_result(None)

    def _make_room(self) -> None:
        """The longest silent give way, as many as it takes; a few per turn of the event loop, which answers each of them."""
        for _ in range(GIVE_WAY_AT_ONCE):
            if not self._silent or self._next() is None:
                return
            silent = self._silent.pop()
            if silent in self.arriving and silent.silent_looks >= SILENT_LOOKS:      # it may have got leave since the look
                del self.arriving[silent]
                silent.give_way()
        asyncio.get_running_loop().call_soon(self._make_room)

    def _look_later(self) -> None:
        if not self._is_looking and (self._waiting or self.arriving):
            self._is_looking = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._is_looking = False
        for body in self.arriving:
            body.look()
        silent = [body for body in self.arriving if body.silent_looks >= SILENT_LOOKS]
        self._silent = sorted(silent, key=lambda body: -body.silent_looks)[::-1]             # the last gives way first
        for *_, waiter in self._waiting:
            waiter.look(self.num_bytes)
        self._waiting = [each for each in self._waiting if not each[-1].has_ended()]
        heapq.heapify(self._waiting)
        self._give_leave()                               # one that did not fit may have ended
        self._make_room()
        self._look_later()


@dataclass(slots=True, eq=False)
class _Waiter:
    """A body that waits for leave."""

    body: Body
    num_bytes: int
    future: asyncio.Future[None]
    looks: int = 0

    def has_ended(self) -> bool:
        """Its request has ended; or its client has left, which a connection that is not read tells no one."""
        if not self.future.done() and self.body.is_gone:
            self.future.set_exception(ClientGone())
        return self.future.done()

    def look(self, num_bytes: int) -> None:
        self.looks += 1
        if self.looks > WAIT_LOOKS and not self.has_ended():
            self.future.set_exception(NotNow(f"bodies of {num_bytes >> 20} MiB are being read; try again later"))


class Body:
    """A request's body. `release()` frees it as soon as the request is made: an answer may take minutes."""

    def __init__(self, held: HeldBodies) -> None:
        self.parts: list[bytes] = []                     # as they came: joining 16 MB takes 30 ms
        self.size = 0
        self.leave = 0                                   # bytes that it may have, of those that all long bodies share
        self.silent_looks = 0                            # one after the other, in which it did not arrive
        self._seen = 0                                   # its size at the last look
        self._gave_way = False
        self._held = held
        self._direct: Direct | None = None
        self._limit: asyncio.Timeout | None = None       # of the wait for more of it

    @property
    def data(self) -> bytes:
        """All of it, as one."""
        if len(self.parts) > 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0] if self.parts else b""

    @property
    def is_gone(self) -> bool:
        """Its client has left."""
        return self._direct is not None and self._direct.is_gone

    async def read(
        self, receive: Receive, headers: Iterable[tuple[bytes, bytes]] = (), direct: Direct | None = None
    ) -> None:
        """All of it; connection_limits limits its size while it arrives. Overloaded if it stops while other long ones wait."""
        self._direct = direct
        self._held.num_reading += 1
        try:
            async with asyncio.timeout(None) as self._limit:
                await self._receive(receive, headers)
        except TimeoutError:
            raise self._stopped() from None
        finally:
            self._held.num_reading -= 1
            self._held.arriving.pop(self, None)
            self._limit = None
        self._give_back(max(0, self.leave - self.size))  # of a body without a declared length

    async def _receive(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]]) -> None:
        more, declared = True, self._declared(headers)
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if self._gave_way:                           # in the same turn of the loop; its memory is another's
                raise self._stopped()
            self.parts.append(message.get("body", b""))
            self.size += len(self.parts[-1])
            more = message.get("more_body", False)
            if max(self.size, declared) > max(LONG_BYTES, self.leave):   # short ones are limited by the number of connections
                if more:
                    await self._held.leave(self, self._expected(declared) - self.leave)
                    if self._direct is not None:
                        self._direct.read_much()
                else:                                    # it is here, whatever room there is
                    self._held.add(self, self.size - self.leave)

    def _expected(self, declared: int) -> int:
        """Its declared length; if it has none, a usual one, and the longest there may be if that was too little."""
        usual = self._held.longest if self.leave else min(FIRST_LEAVE, self._held.longest)
        return max(declared or usual, self.size)

    @staticmethod
    def _declared(headers: Iterable[tuple[bytes, bytes]]) -> int:
        """0 if it has no declared length."""
        declared = next((value for name, value in headers if name == b"content-length"), b"")
        is_coded = any(name == b"transfer-encoding" for name, _ in headers)
        return int(declared) if declared.isdigit() and not is_coded else 0

    def look(self) -> None:
        """Note whether it has arrived since the last look."""
        self.silent_looks = 0 if self.size - self._seen >= max(1, self.leave // SLOW) else self.silent_looks + 1
        self._seen = self.size

    def give_way(self) -> None:
        """Its memory is given back now, and freed when its reader is told in the loop's next turn."""
        if self._limit is not None and not self._gave_way:
            self._limit.reschedule(0.0)
        self._gave_way = True
        self._give_back(self.leave)

    @staticmethod
    def _stopped() -> Overloaded:
        return NotNow("the body stopped arriving while others waited for its memory; try again later")

    def release(self) -> None:
        self.parts, self.size = [], 0
        self._give_back(self.leave)

    def _give_back(self, num_bytes: int) -> None:
        self.leave -= num_bytes
        if num_bytes:
            self._held.give_back(num_bytes)
