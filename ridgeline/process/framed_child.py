"""A child process that answers requests on its standard streams, and never blocks its caller.

A frame is a length of four bytes, then that many bytes; one goes to the child, one comes back. Every wait has a deadline, for
writing too: a child that swaps neither reads nor answers. One that misses its deadline is killed; one that was stopped (SIGSTOP)
is killed after two looks at its state, since it would miss any deadline.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from ridgeline.errors import TryAgain
from ridgeline.process.children import start_child
from ridgeline.process.log import get_logger

logger = get_logger("process")
T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20
_PARTS_AT_ONCE = 64                  # in one call of the system
LOOK_SECONDS = 1.0                   # without a byte from or to the child, until its state is looked at


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Writes everything, also where the pipe takes only part at a time."""
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[stream.write(rest) :]
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None: the other side has closed the pipe."""
    head = _read(stream, _LENGTH.size)
    return None if head is None else _read(stream, _LENGTH.unpack(head)[0])


def _read(stream: IO[bytes], size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            return None
        data += part
    return data


class Stopped(TimeoutError):
    """The child was stopped by a signal. What it was asked is not the cause, so another child can be asked the same: see
    ask_another_if_stopped."""


class Process(Protocol):
    """What is used here of a Popen."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> Any: ...


class FramedChild:
    """`python -m module arguments…`, as its owner holds it. One caller at a time. OSError if it cannot be started."""

    def __init__(self, module: str, *arguments: str, pipe_bytes: int = 0, **options: Any) -> None:
        """`pipe_bytes`: how much the pipes hold, where the system lets them; 0: its default."""
        pipe = subprocess.PIPE
        self.hold(start_child(module, *arguments, stdin=pipe, stdout=pipe, bufsize=0, **options), pipe_bytes)

    def hold(self, process: Process, pipe_bytes: int = 0) -> None:
        """A process that was started otherwise (cold/fork_server.py)."""
        self.process = process
        self.end = weakref.finalize(self, _end, self.process)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._target, self._source = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._target, False)
        os.set_blocking(self._source, False)
        if pipe_bytes and hasattr(fcntl, "F_SETPIPE_SZ"):
            for each in (self._target, self._source):
                with suppress(OSError):                  # more than this user may have
                    fcntl.fcntl(each, fcntl.F_SETPIPE_SZ, pipe_bytes)
        self._unwritten: deque[memoryview] = deque()
        self._received = bytearray()
        self._owed = 0                                   # answers under way that no caller waits for any more

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, frame: bytes | Sequence[bytes], seconds: float, patient: bool = True) -> bytes:
        """The answer to a frame, given as one or in parts. EOFError if the child is gone, TimeoutError after `seconds`, Stopped
        before that; the child was ended then.

        A caller that is not `patient` only gives up waiting: the child stays, and its late answer is dropped.
        """
        if not self.end.alive:                           # the numbers of its pipes may be another file's by now
            raise EOFError
        deadline = time.monotonic() + seconds
        parts = [frame] if isinstance(frame, bytes) else frame
        self._unwritten += map(memoryview, (_LENGTH.pack(sum(map(len, parts))), *filter(None, parts)))
        self._owed += 1
        try:
            while self._owed:
                answer = self._next_answer(deadline, patient)
                self._owed -= 1
            return answer
        except TimeoutError:
            if patient:
                self.end()
            raise
        except EOFError:
            self.end()
            raise

    def unasked(self) -> bytes | None:
        """A frame that the child sends of itself, as when it is ready; None: not yet, or it is gone. Does not wait."""
        if self.end.alive:
            with suppress(EOFError):
                self.receive()
        return self._complete()

    def _next_answer(self, deadline: float, patient: bool) -> bytes:
        poller = select.poll()                           # select() knows only the first 1,024 descriptors
        poller.register(self._source, select.POLLIN)
        if self._unwritten:
            poller.register(self._target, select.POLLOUT)
        was_stopped = False
        while (answer := self._complete()) is None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            ready = poller.poll(min(left, LOOK_SECONDS) * 1000 + 1)
            if not ready:
                is_stopped = patient and self._is_stopped()
                if is_stopped and was_stopped:           # not only for a moment, as under a debugger or `kill -STOP 0`
                    raise Stopped
                was_stopped = is_stopped
            for descriptor, _ in ready:
                if descriptor == self._source:
                    self.receive()
                elif not self._write():
                    poller.unregister(self._target)
        return answer

    def _is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] == b"T"

    def _complete(self) -> bytes | None:
        """The first whole frame of what has been received."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        answer = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return answer

    def receive(self) -> None:
        """What is there to be read. EOFError: the child has closed its end."""
        with suppress(BlockingIOError):
            part = os.read(self._source, _READ_BYTES)
            if not part:
                raise EOFError
            self._received += part

    def _write(self) -> bool:
        """False: there is nothing left to write, or no one to read it."""
        try:
            written = os.writev(self._target, list(islice(self._unwritten, _PARTS_AT_ONCE)))
            while self._unwritten and written >= len(self._unwritten[0]):
                written -= len(self._unwritten.popleft())
            if written:
                self._unwritten[0] = self._unwritten[0][written:]
        except BlockingIOError:
            return True
        except OSError:                                  # the child is gone; what it has answered can still be read
            self._unwritten.clear()
        return bool(self._unwritten)


def ask_another_if_stopped(ask: Callable[[], T], purpose: str) -> T:
    """What `ask` returns; it starts a child if none is alive. It is called again, once, if the child was stopped by a signal, and
    TryAgain says so if the next one was stopped, too. `purpose`: what the process does, as in "renders chat templates"."""
    try:
        return ask()
    except Stopped:
        logger.warning("the process that %s was stopped by a signal; another process takes over its work", purpose)
    try:
        return ask()
    except Stopped:
        raise TryAgain(f"the process that {purpose} was stopped by a signal; try again later", 1.0) from None


def _end(process: Process) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
