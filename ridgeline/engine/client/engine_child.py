"""The engine's process as seen from the client: the child process, its two sockets, its last messages.

The process runs engine/core/engine_process, with engine/core/frontend_socket at the other end of the sockets.
engine/client/supervisor decides when to start one; engine/client/async_llm handles its messages.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from io import RawIOBase
from types import MappingProxyType

import zmq

from ridgeline.config import EngineConfig
from ridgeline.engine.ipc import (
    FROM_ENGINE,
    SHOW_STACKS,
    TO_ENGINE,
    DecodeError,
    FromEngine,
    Ready,
    Shutdown,
    SocketDir,
    new_context,
)
from ridgeline.errors import EngineDead, RidgelineError
from ridgeline.process import spare_files
from ridgeline.process.children import child_environment, signal_main_thread, start_child
from ridgeline.process.log import get_logger
from ridgeline.process.memory_kills import OutOfMemoryKills

logger = get_logger("async_llm")

NO_SIZES: Mapping[str, int] = MappingProxyType({})
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_CONNECT_SECONDS = 0.02              # between two tries to send the first frame
_TURN_SECONDS = 0.005                # of processor time; messages are handled for at most this long before other tasks run
_STOP_SECONDS = (1.0, 0.5)           # for an engine to exit when asked, and when sent SIGTERM; then it is killed
_LAST_WORDS_SECONDS = 1.0            # for reading the messages that a dead engine left
_WITH_WORDS = (1, 2)                 # exit codes of an engine that has said why (engine/core/loop.py)
_WORDS_SECONDS = 0.02                # between two looks for them
_STACKS_SECONDS = 10.0               # for a hung engine to write its stacks and end; one that is stuck in a driver does neither


class EngineChild:
    """The child process and its sockets. Calls back on the event loop, with each message and when the process is lost.

    A large message is handled piece by piece: the iterator that `on_message` returns is run to its end, and other tasks may
    run in between. `sizes` are those that the engine before it reported; `environment` is added to a child's usual one.
    `lost` is the reason why the process is unusable: it ended, reported a failure, or was stopped.
    """

    def __init__(
        self,
        module: str,
        config: EngineConfig,
        on_message: Callable[[FromEngine], Iterator[None] | None],
        on_lost: Callable[[], None],
        sizes: Mapping[str, int] = NO_SIZES,
        environment: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.lost: asyncio.Future[RidgelineError] = self._loop.create_future()
        self._exited = asyncio.Event()
        self._work: Iterator[None] | None = None         # the rest of the newest message
        self._bad_frames = 0
        with spare_files.lent(), ExitStack() as undo:    # a failure leaves nothing behind
            self._sockets = SocketDir()
            undo.callback(self._sockets.close)
            context = new_context()
            undo.callback(context.destroy, linger=0)
            self._to_engine = context.socket(zmq.PUSH)
            self._to_engine.setsockopt(zmq.SNDHWM, 0)    # at most one per open request, and those are limited elsewhere
            self._to_engine.bind(self._sockets.address("to-engine"))
            self._from_engine = context.socket(zmq.PULL)
            self._from_engine.bind(self._sockets.address("from-engine"))
            self._more = _always_readable()
            undo.callback(self._more.close)
            settings = {"options": config.flat(), "folder": str(self._sockets.path), "parent": os.getpid(), "sizes": dict(sizes)}
            self._kills = OutOfMemoryKills()
            self._child = start_child(module, json.dumps(settings), environment={**child_environment(), **environment})
            # Also without stop(): at the latest when the interpreter ends.
            self._cleanup = weakref.finalize(self, _abandon, self._child, self._sockets, self._more)
            undo.callback(self._cleanup)
            self._watch_for_end(undo)
            self._loop.add_reader(self._fd, self._read)
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def _fd(self) -> int:
        return int(self._from_engine.FD)

    def send(self, frame: bytes) -> None:
        try:
            self._to_engine.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            pass                                         # the process is gone, which is reported in a moment

    def greet(self, frame: bytes) -> None:
        """Send a frame as soon as the process, which may be importing still, has connected its end of the socket."""
        try:
            self._to_engine.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            if not self.lost.done():
                self._loop.call_later(_CONNECT_SECONDS, self.greet, frame)
        except zmq.ZMQError:
            pass                                         # the process is gone

    def lose(self, why: RidgelineError) -> None:
        """The first reason counts. No further messages are received; those that have arrived are still handled."""
        if not self.lost.done():
            self.lost.set_result(why)
            self._stop_reading()                         # an unread socket would wake the event loop for ever
            for _ in self._work or ():
                pass
            self._on_lost()

    async def show_stacks(self) -> None:
        """Have the process write its stacks to the log and end. A stopped one is woken for it."""
        self.lose(EngineDead("the engine's process hung"))
        signal_main_thread(self._child, SHOW_STACKS)
        self._child.send_signal(signal.SIGCONT)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), _STACKS_SECONDS)

    async def stop(self, gently: bool = False, at_once: bool = False) -> None:
        """Return when the process is gone and its sockets are closed."""
        self.lose(EngineDead("the engine's process was stopped"))
        if self._cleanup.alive:
            if at_once:
                self._child.kill()
            elif gently:
                self.send(TO_ENGINE.encode(Shutdown()))
            else:
                self._child.terminate()
            for force, seconds in zip((self._child.terminate, self._child.kill), _STOP_SECONDS, strict=True):
                try:
                    await asyncio.wait_for(self._exited.wait(), seconds)
                    break
                except TimeoutError:
                    force()
            await self._exited.wait()
            self._from_engine.context.destroy(linger=0)
            self._cleanup()

    def _read(self) -> None:
        """Take what has arrived. The descriptor signals changes only, so leave nothing unread without coming back."""
        if self._from_engine.closed or self.lost.done():
            return
        until = time.thread_time() + _TURN_SECONDS
        while self._take_next():
            if self.lost.done():
                return
            if time.thread_time() >= until:
                # As call_soon, but the front end's loop takes descriptors before the callbacks of its clients, of which
                # hundreds may wait.
                self._loop.add_reader(self._more, self._read)
                return
        self._loop.remove_reader(self._more)

    def _stop_reading(self) -> None:
        for each in (self._fd, self._more):
            self._loop.remove_reader(each)

    def _take_next(self) -> bool:
        """A piece of the message in hand, or the next message; False when there is none."""
        if self._work is not None:
            if next(self._work, self) is self:
                self._work = None
            return True
        try:
            frame = self._from_engine.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            self._work = self._on_message(FROM_ENGINE.decode(frame))
        except DecodeError as error:
            self._bad_frames += 1
            logger.warning("dropped a frame from the engine (%d so far): %s", self._bad_frames, error)
        except Exception:                                # the messages after it must still be read
            logger.exception("a message from the engine could not be handled")
        return True

    def _watch_for_end(self, undo: ExitStack) -> None:
        """By a descriptor of the process, which becomes readable at its end. A thread that waits for it would do, too, but
        Thread.start() waits for ever for a thread that dies of a lack of memory before its first line."""
        try:
            process = os.pidfd_open(self._child.pid)
        except (OSError, AttributeError) as error:       # a kernel or a Python without them
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            threading.Thread(target=self._wait_for_end, name="engine-exit", daemon=True).start()
        else:
            undo.callback(os.close, process)
            self._loop.add_reader(process, self._has_ended, process)
            undo.callback(self._loop.remove_reader, process)

    def _has_ended(self, process: int) -> None:
        self._loop.remove_reader(process)
        os.close(process)
        self._ended(self._child.wait())

    def _wait_for_end(self) -> None:
        """In a thread."""
        code = self._child.wait()
        try:
            self._loop.call_soon_threadsafe(self._ended, code)
        except RuntimeError:
            pass                                         # the event loop is closed: there is no one to inform

    def _ended(self, code: int, until: float | None = None) -> None:
        """Its last words say more than its exit code. They are written when it ends, but on a busy machine not read by ZeroMQ's
        thread in this process yet."""
        until = until or time.monotonic() + _LAST_WORDS_SECONDS
        while not self._from_engine.closed and not self.lost.done() and time.monotonic() < until and self._take_next():
            pass
        if code in _WITH_WORDS and not self._from_engine.closed and not self.lost.done() and time.monotonic() < until:
            self._loop.call_later(_WORDS_SECONDS, self._ended, code, until)
            return
        self.lose(EngineDead(f"the engine's process {self._kills.how_it_ended(code)}"))
        self._exited.set()


def _always_readable() -> RawIOBase:
    """The reading end of a pipe without another end."""
    reading, writing = os.pipe()
    os.close(writing)
    return open(reading, "rb", buffering=0)


def _abandon(child: subprocess.Popen[bytes], sockets: SocketDir, more: RawIOBase) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()
    sockets.close()
    more.close()
