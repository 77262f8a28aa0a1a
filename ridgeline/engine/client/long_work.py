"""Threads for the CPU work of long requests, apart from all other threads: parsing, rendering and tokenising megabytes.

Short requests never wait behind it. It has a bound of its own: when too much waits, or for too long, a request is refused and may
come again later. Work whose client has left is not begun, and ends at its next checkpoint if it has begun. The threads are
daemons: a process that ends does not wait for them. Knows asyncio and threads, no requests.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ridgeline.errors import NotNow, TimedOut

LONG_BYTES = 64 * 1024               # work on more bytes, or characters, than these is long; …
HUGE_BYTES = 2**20                   # … on more than these it has a thread of its own, and other long work does not wait for it
THREADS = 2                          # more would only take turns: Python code runs in one thread at a time
MOST_WAITING = 128 * 2**20           # bytes of work that may wait: eight of the longest bodies, or a thousand long prompts
WAIT_SECONDS = 60.0                  # until work is begun
WORK_SECONDS = 60.0                  # until it is done

T = TypeVar("T")
_current = threading.local()         # its `job`: the one that this thread works on


class GivenUp(Exception):
    """Raised at a checkpoint in work that is no longer wanted. No reader waits for it."""


class _Job:
    __slots__ = ("future", "is_taken", "is_wanted", "loop", "num_bytes", "work")

    def __init__(self, work: Callable[[], Any], num_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.work: Callable[[], Any] | None = work
        self.num_bytes = num_bytes
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.is_taken = False                            # begun by a thread, or given up before that
        self.is_wanted = True

    def tell(self, made: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(made)
        else:
            self.future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def _outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `work` makes or raises. An error refers to its frames and their callers': none of them may keep the job, which
    refers to the error, or both would wait for a garbage collection."""
    try:
        return work(), None
    except BaseException as error:                       # also a library's panic: the thread goes on with the next job
        return None, error


class LongWork:
    def __init__(
        self, threads: int = THREADS, most_waiting: int = MOST_WAITING, wait_seconds: float = WAIT_SECONDS,
        work_seconds: float = WORK_SECONDS,
    ) -> None:
        self.waiting = 0                                 # bytes of the jobs that no thread has begun
        self.num_done = 0
        self._most_waiting = most_waiting
        self._wait_seconds, self._work_seconds = wait_seconds, work_seconds
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._threads = self._idle_places = threads      # and those of them that are not started yet
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T], num_bytes: int = 1, is_answer: bool = False) -> T:
        """Do `work` on `num_bytes` in one of the threads. Overloaded if it cannot begin in time, TimedOut if it does not end
        in time. The first in line may be of any size. `is_answer`: what it works on was computed: it is not refused, keeps out no
        other work, and waits for as long as its client does."""
        if is_answer:
            num_bytes = 0                                # its memory is taken already
        if self.waiting and self.waiting + num_bytes > self._most_waiting and not is_answer:
            raise NotNow(f"long requests of {self.waiting:,} bytes are waiting to be read; try again later")
        self._start_thread()
        job = _Job(work, num_bytes, asyncio.get_running_loop())
        del work
        with self._lock:
            self.waiting += num_bytes
        self._jobs.put(job)
        try:
            await self._ended(job, None if is_answer else self._wait_seconds)
            result: T = job.future.result()
            return result
        finally:
            job.is_wanted = False
            if not job.future.cancel() and not job.future.cancelled():
                job.future.exception()                   # nothing to tell when its reader was cancelled meanwhile
            if self._take(job):                          # no thread has begun it, and none will
                job.work = None
            del job                                      # it refers to the error, and the error to this frame

    def _start_thread(self) -> None:
        """Unless all are started. Where the system has none to give, those that run do the work; the next job tries again."""
        if self._idle_places:
            try:
                threading.Thread(target=self._serve, name="long-work", daemon=True).start()
            except RuntimeError:
                if self._idle_places == self._threads:
                    raise NotNow("the system has no thread to read long requests; try again later") from None
            else:
                self._idle_places -= 1

    async def _ended(self, job: _Job, wait_seconds: float | None) -> None:
        work_seconds = self._work_seconds
        await asyncio.wait((job.future,), timeout=wait_seconds)
        if not job.future.done() and job.is_taken:
            await asyncio.wait((job.future,), timeout=work_seconds)
        if not job.future.done():
            if job.is_taken:
                raise TimedOut(f"the request was not read within {work_seconds:g} s; send a shorter one")
            raise NotNow(f"the request waited for {wait_seconds:g} s to be read; try again later")

    def _take(self, job: _Job) -> bool:
        """False: it was taken before."""
        with self._lock:
            if job.is_taken:
                return False
            job.is_taken = True
            self.waiting -= job.num_bytes
            return True

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            if self._take(job):
                _current.job = job
                work, job.work = job.work, None
                assert work is not None
                made, error = _outcome(work)
                _current.job = None
                self.num_done += 1
                with suppress(RuntimeError):             # the loop has closed
                    job.loop.call_soon_threadsafe(job.tell, made, error)
                del work, made, error
            del job


SHORT_WORK = LongWork()              # asyncio's threads are more than cores: the event loop would wait in line behind them
CHATS = LongWork()                   # short ones: they wait for the process of their template, and texts do not wait behind them
LONG_WORK = LongWork()
HUGE_WORK = LongWork(threads=1)


def checkpoint() -> None:
    """In long work, between two of its parts: GivenUp if the result is not wanted any more."""
    job: _Job | None = getattr(_current, "job", None)
    if job is not None and not job.is_wanted:
        raise GivenUp


def is_away() -> bool:
    """Whether this is one of the threads for long work."""
    return getattr(_current, "job", None) is not None


def num_done() -> int:
    """How much long work was done so far."""
    return LONG_WORK.num_done + HUGE_WORK.num_done


async def away_if_long(num_bytes: int, work: Callable[[], T]) -> T:
    """Do `work` on `num_bytes`: here if they are few, in a thread for long work otherwise."""
    return await _long(num_bytes, work) if num_bytes > LONG_BYTES else work()


async def away_to_answer(num_bytes: int, work: Callable[[], T]) -> T:
    """As away_if_long(), for an answer that was computed: it waits until a thread has time."""
    try:
        return await _long(num_bytes, work, True) if num_bytes > LONG_BYTES else work()
    except NotNow:                                       # the system has no thread at all
        return work()


async def away(num_bytes: int, work: Callable[[], T], short: LongWork = SHORT_WORK) -> T:
    """Do `work` on `num_bytes` in a thread: of those for `short` requests, or of those for long work."""
    return await (_long(num_bytes, work) if num_bytes > LONG_BYTES else short.run(work, num_bytes))


async def _long(num_bytes: int, work: Callable[[], T], is_answer: bool = False) -> T:
    return await (HUGE_WORK if num_bytes > HUGE_BYTES else LONG_WORK).run(work, num_bytes, is_answer)
