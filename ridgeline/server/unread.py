"""Answers that wait for their clients: one account of their bytes, over all connections.

Each connection holds little: a buffer of some KiB, and the rest of the answer that is being sent. But thousands of clients may
ask and not read. So connections whose clients do not keep up are counted together with all that waits behind their buffers. While
that is little, a client may take its time; above PATIENT_BYTES it must read at PACE, and above MOST_UNREAD some are closed at
once. What would take longest, at the pace of its client so far, is closed first. A client that reads nothing for WRITE_SECONDS is
disconnected in any case. Knows transports, no requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from ridgeline.process.log import get_logger

PATIENT_BYTES = 32 * 2**20           # that may wait for slow clients, whatever their pace
MOST_UNREAD = 512 * 2**20            # that may wait at all
SPARE_SECONDS = 2.0                  # for which a client may read nothing, above PATIENT_BYTES …
PACE = 256 * 1024                    # … and bytes that it must read per second on average: 2 Mbit/s
WRITE_SECONDS = 60.0                 # for which a client may read nothing at all
LOOK_SECONDS = 0.5
LOG_SECONDS = 10.0                   # between two lines in the log

BEHIND = "ridgeline.behind"          # in an ASGI message: a function that counts the bytes of its answer which are still held

logger = get_logger("server")


class Unread:
    """All connections whose clients do not keep up."""

    def __init__(
        self, patient: int = PATIENT_BYTES, most: int = MOST_UNREAD, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_bytes = 0                               # as of the last look, and of what came since
        self.num_closed = 0
        self._patient = patient
        self._most = most
        self._clock = clock
        self._waiting: set[Waiting] = set()
        self._is_watched = False
        self._logged_on = -LOG_SECONDS
        self._num_logged = 0

    def begin(self, waiting: Waiting) -> None:
        """Its client does not keep up from now on."""
        self.num_bytes += waiting.begin(self._clock())
        self._waiting.add(waiting)
        if self.num_bytes > self._most:
            self._close(self._waiting, self._most * 7 // 8)      # with room for the next, which would look at all again
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._watch)

    def end(self, waiting: Waiting) -> None:
        """It has read, or left."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self.num_bytes -= waiting.num_bytes
            waiting.earn(self._clock())

    def look(self) -> None:
        """Close connections until what waits is within the bounds."""
        self.num_bytes, now = 0, self._clock()
        for each in self._waiting:
            each.num_bytes = each.size()                 # an answer grows while its client does not read
            self.num_bytes += each.num_bytes
        for each in [each for each in self._waiting if now - each.since > WRITE_SECONDS]:
            self._give_up(each)
        if self.num_bytes > self._patient:
            self._close((each for each in self._waiting if each.is_late(now)), self._patient)

    def _watch(self) -> None:
        self.look()
        self._is_watched = bool(self._waiting)
        if self._waiting:
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._watch)

    def _close(self, some: Iterable[Waiting], bound: int) -> None:
        now = self._clock()
        for each in sorted(some, key=lambda each: each.seconds_left(now), reverse=True):
            if self.num_bytes <= bound:
                break
            self._give_up(each)
            self.num_closed += 1
        if self.num_closed > self._num_logged and now >= self._logged_on + LOG_SECONDS:
            count, self._num_logged, self._logged_on = self.num_closed - self._num_logged, self.num_closed, now
            logger.warning(
                "%d connections were closed: more than %d MiB of answers waited for clients that did not read them", count,
                bound >> 20,
            )

    def _give_up(self, waiting: Waiting) -> None:
        self.end(waiting)
        waiting.close()


class Waiting:
    """One connection, while its client keeps up and while it does not."""

    __slots__ = ("_buffered", "_read", "_spare", "_taken", "_transport", "_waited", "behind", "num_bytes", "sent", "since")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.behind: Callable[[], int] | None = None     # see BEHIND
        self.num_bytes = 0                               # when it was looked at last
        self.since = 0.0                                 # when its client last kept up
        self.sent = 0                                    # bytes of its answers since it last read
        self._transport = transport
        self._buffered = 0                               # bytes, when it began to wait
        self._taken = 0                                  # of those that were sent before, by the system: as good as read
        self._spare = SPARE_SECONDS
        self._read, self._waited = PACE * SPARE_SECONDS, SPARE_SECONDS   # bytes and seconds, as if a client had kept PACE before

    def begin(self, now: float) -> int:
        self.since, self._buffered, self.num_bytes = now, self._transport.get_write_buffer_size(), self.size()
        self._taken = max(0, self.sent - self._buffered)
        return self.num_bytes

    def size(self) -> int:
        return self._transport.get_write_buffer_size() + (self.behind() if self.behind is not None else 0)

    def seconds_left(self, now: float) -> float:
        """Until all is read, at the pace of its client so far."""
        return self.num_bytes * (self._waited + now - self.since) / self._read

    def is_late(self, now: float) -> bool:
        return now - self.since > self._spare

    def earn(self, now: float) -> None:
        """The buffer was read. A client that reads in drops uses up its seconds, although it never pauses for long."""
        read = self._taken + max(0, self._buffered - self._transport.get_write_buffer_size())
        self._spare = max(0.0, min(SPARE_SECONDS, self._spare - (now - self.since) + read / PACE))
        self._read += read
        self._waited += now - self.since
        self.sent = 0

    def close(self) -> None:
        self._transport.abort()
