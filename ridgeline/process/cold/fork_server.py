"""A process that imports once what many workers need, and is then copied into them (fork), so that they are ready at once.

    server = ForkServer(MODULE, 16, environment)       # imports in a process of its own
    worker = server.worker()                           # when its `ready()` is true: worker.ask(…), as of any FramedChild

The module calls `serve`. Workers have a socket each and share the memory of what was imported. They end with the server, and
the server with the thread that started it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ridgeline.process.children import start_child
from ridgeline.process.framed_child import FramedChild, read_frame, write_frame
from ridgeline.process.log import get_logger
from ridgeline.process.orphans import end_at_once

logger = get_logger("process")

THREADS_END = 2.0                    # seconds: a thread that was joined is in the system's list for a moment more


class _Fork:
    """A worker's process, as FramedChild holds one. It is the server's child."""

    def __init__(self, server: subprocess.Popen[bytes], stream: IO[bytes]) -> None:
        self.stdin: IO[bytes] | None
        self.stdout: IO[bytes] | None
        self.stdin, self.stdout = os.fdopen(os.dup(stream.fileno()), "wb", buffering=0), stream      # waited for apart
        self.pid = 0                                     # until it has told
        self._server = server

    def poll(self) -> int | None:
        return self._server.poll()

    def kill(self) -> None:
        """The server waits for no worker, so a number stays its worker's for as long as the server lives."""
        if self.pid and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Only its parent can."""


class Worker(FramedChild):
    """Used by one thread at a time."""

    def __init__(self, process: _Fork) -> None:
        self._fork = process
        self.hold(process)

    @property
    def alive(self) -> bool:
        return self.end.alive and super().alive

    def ready(self) -> bool:
        """It says so with the number of its process. Does not wait."""
        if not self._fork.pid and self.end.alive:
            try:
                self.receive()
            except EOFError:                             # the server could not import, or not fork: one worker gets the reason
                self.end()
            said = (self.unasked() or b"0").decode(errors="replace")
            if said.isdigit():
                self._fork.pid = int(said)
            else:
                logger.info("no copies of a process were made for work: %s", said)
                self.end()
        return bool(self._fork.pid) and self.end.alive

    def receive(self) -> None:
        try:
            super().receive()
        except ConnectionResetError:                     # it died with a question unread
            raise EOFError from None


class ForkServer:
    def __init__(self, module: str, workers: int, environment: Mapping[str, str]) -> None:
        """OSError if the process cannot be started."""
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._free: list[IO[bytes]] = []                 # sockets of workers that are still to be had
        theirs: list[socket.socket] = []
        try:
            for _ in range(workers):
                ours, their = socket.socketpair()
                theirs.append(their)
                self._free.append(os.fdopen(ours.detach(), "r+b", buffering=0))
            numbers = [each.fileno() for each in theirs]
            self.process = start_child(
                module, *map(str, numbers), environment=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, pass_fds=numbers,
            )
        except BaseException:
            _close(self._free)
            raise
        finally:
            for each in theirs:
                each.close()
        self.end = weakref.finalize(self, _end, self.process, self._free)

    def worker(self) -> Worker | None:
        """One for this caller alone; None: all are taken. OSError: this process may open no more files."""
        with self._lock:
            return Worker(_Fork(self.process, self._free.pop(0))) if self._free and self.end.alive else None


def _end(process: subprocess.Popen[bytes], free: list[IO[bytes]]) -> None:
    """With its workers and what they have started. Sockets in use stay: threads may be about to use them."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)       # its session is its own (children.py)
    process.wait()
    _close([*free, *filter(None, [process.stdin])])


def _close(streams: Sequence[IO[bytes]]) -> None:
    for each in streams:
        with suppress(OSError):
            each.close()


# ── the process itself ───────────────────────────────────────────────────────────────────────────────────────────────


def serve(
    sockets: Sequence[int], prepare: Callable[[], None], answer: Callable[[bytes], bytes],
    chore: Callable[[], None] = lambda: None,
) -> None:
    """`prepare` imports, and must leave no thread behind: a copy has only the thread that forks, and the others' locks as they
    were. With another thread nothing is forked. The last worker does the `chore` before it is ready. All end with the parent's
    pipe."""
    end_at_once()
    if select.select([0], [], [], 0)[0]:                 # the parent had ended before
        return
    here, left = os.getpid(), list(sockets)
    try:
        prepare()
        gc.freeze()                                      # a collection would write to all pages, and they would be copied
        until = time.monotonic() + THREADS_END
        while _other_threads() and time.monotonic() < until:
            time.sleep(0.01)
        while left:
            if others := _other_threads():
                raise RuntimeError(f"it has {len(others)} threads besides its first: {', '.join(others)}")
            if not os.fork():
                _work(left, here, answer, lambda: None if left[1:] else chore())
            os.close(left.pop(0))
    except Exception as error:                           # no more processes may be started, say: those that are there serve
        with os.fdopen(left[0], "r+b", buffering=0, closefd=False) as stream, suppress(OSError):
            write_frame(stream, f"{type(error).__name__}: {error}".encode())
    for each in left:
        os.close(each)
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _other_threads() -> list[str]:
    """By name; those that libraries have begun are there, too."""
    found = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    with suppress(OSError):
        numbers = [number for number in os.listdir("/proc/self/task") if int(number) != os.getpid()]
        found = [Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in numbers]
    return found


def _work(sockets: Sequence[int], server: int, answer: Callable[[bytes], bytes], begin: Callable[[], None]) -> None:
    """Serves the first socket; does not return."""
    try:
        end_at_once()
        for each in (0, *sockets[1:]):
            os.close(each)
        os.open(os.devnull, os.O_RDONLY)                 # as standard input, whose number is the lowest that is free
        begin()
        with os.fdopen(sockets[0], "r+b", buffering=0) as stream:
            write_frame(stream, str(os.getpid()).encode())
            while os.getppid() == server and (asked := read_frame(stream)) is not None:
                write_frame(stream, answer(asked))
    finally:
        os._exit(0)
