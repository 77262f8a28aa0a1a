"""Long bodies are read in processes of their own: parsed, checked, rendered and tokenised.

A decoder of JSON, a regular expression or a copy of 16 MB holds Python's lock for tens of milliseconds, in whichever thread it
runs, and as long again for every program that takes this one's core. Health checks and streams of other clients would wait. What
comes back is short: token ids, and the request without its prompt. A process (server/body_process; of a router,
route/facts_process) is started by the first long body and ends after a while without one. While it cannot be started, long bodies
are read in threads of this process; the time until the next try doubles.

A body of 60 KB with 2,000 items takes 30 ms, and a hundred clients may send one each. Such a body is read here if it is the only
one, which saves the start of a process; else in a process too, which it does not share with bodies of megabytes. All other bodies
are read here, a few per turn of the event loop. Knows frames and errors; the functions that read are given.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from ridgeline import errors
from ridgeline.engine.client.long_work import HUGE_WORK, LONG_BYTES, LongWork, away_if_long
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import RidgelineError, TryAgain
from ridgeline.metrics import SPENT
from ridgeline.process.framed_child import FramedChild, ask_another_if_stopped, read_frame, write_frame
from ridgeline.process.log import get_logger
from ridgeline.process.orphans import end_with_parent
from ridgeline.process.platform import return_freed_memory
from ridgeline.server import server_errors
from ridgeline.server.api.openai.responses_store import NeedsStored, ResponseStore, Stored
from ridgeline.server.give_back import give_back_large_blocks
from ridgeline.server.http.admission import Body

logger = get_logger("server")

MANY_BYTES = 2**18                   # of a body, or of stored responses that it refers to
MANY_TEXT = 2**11                    # bytes of a body whose answer has every word of it: 1 ms
MANY_PARTS = 2_000                   # strings, lists and objects: up to 6 ms; a body with more is long whatever its bytes
PARTS_PER_TURN = 2_000               # of bodies that are read here
OWN_PARTS = 100                      # what a request takes besides its body's parts, in parts
ANSWER_SECONDS = 60.0                # for a body to be read; the first one also waits for imports and the tokenizer
IDLE_SECONDS = 60.0                  # without a long body, until the process ends
FIRST_RETRY_SECONDS = 1.0            # after a start that failed; twice as long after each one more …
LAST_RETRY_SECONDS = 60.0            # … up to this
PIPE_BYTES = 2**20                   # in a pipe of 64 KB, a body of 16 MB would wait 256 times for the other process to run
MODULE = "ridgeline.server.body_process"                 # a server's process; a router has another

Reads = Callable[[Any, Caller, bytes], Awaitable[Any]]
Answers = Callable[["Task", bytes], Awaitable["Made"]]


class CannotStart(Exception):
    """There is no process to read long bodies, and none is to be started yet."""


class Recalled(msgspec.Struct):
    """A stored response that a body refers to."""

    name: str
    key: int
    response: bytes
    input: bytes
    before: bytes
    items: tuple[str, ...]

    @classmethod
    def of(cls, name: str, entry: Stored) -> Recalled:
        return cls(name, entry.key, entry.response, entry.input, entry.before, entry.items)


class Task(msgspec.Struct):
    """The first part of a question to the process; the body's bytes follow it."""

    function: str
    key: int                         # the number of the caller's API key
    recalled: list[Recalled] | None  # None: ask for those that the body refers to


class Failure(msgspec.Struct, tag=True):
    """An error that the function has raised."""

    kind: str
    message: str
    field: str = ""
    retry_after: float | None = None
    details: dict[str, Any] | None = None


class Wanted(msgspec.Struct, tag=True):
    """The body refers to stored responses: they are to be sent with it."""

    name: str | None
    items: list[str]


class Made(msgspec.Struct, tag=True):
    """What the function has returned: an answer as JSON, or what is known of the request as msgpack."""

    result: bytes
    is_answer: bool
    tokenising: float                # CPU seconds


class Broken(msgspec.Struct, tag=True):
    """The function has failed by a mistake of ours."""

    traceback: str


Reply = Failure | Wanted | Made | Broken
TO_REPLY = msgspec.msgpack.Decoder(Reply)
_ERRORS: Mapping[str, type[RidgelineError]] = {
    each.__name__: each for module in (errors, server_errors) for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, RidgelineError)
}

_ABOUT = ("field", "retry_after", "details")             # what an error may say besides its message


def failure_of(error: RidgelineError) -> Failure:
    """The error as plain data. A subclass that only one endpoint knows is sent as the class that it extends."""
    kind = next(each for each in type(error).__mro__ if each.__name__ in _ERRORS)
    known = {name: value for name in _ABOUT if (value := getattr(error, name, None)) is not None}
    return Failure(kind.__name__, str(error), **known)


def error_of(failure: Failure) -> RidgelineError:
    error = _ERRORS[failure.kind](failure.message)
    for name in _ABOUT:
        if (value := getattr(failure, name)) is not None:
            setattr(error, name, value)
    return error


def name_of(function: Reads) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', '')}"


def num_parts(parts: Iterable[bytes]) -> int:
    """About how many values a body has: by its strings and brackets, and by its commas where they are more."""
    quotes = brackets = commas = 0
    for part in parts:
        quotes += part.count(b'"')
        brackets += part.count(b"[") + part.count(b"{")
        commas += part.count(b",")
    return max(quotes // 2 + brackets, commas // 4)


def is_long(parts: Iterable[bytes], size: int, answers: bool = False) -> bool:
    """Whether a body takes too long to be read in this process. `answers`: so would its answer, of every word of the body."""
    return size > (MANY_TEXT if answers else MANY_BYTES) or num_parts(parts) > MANY_PARTS


class FewPerTurn:
    """Lets work on bodies begin, a few per turn of the event loop. `most`: parts of bodies. Of one loop at a time."""

    def __init__(self, most: int = PARTS_PER_TURN) -> None:
        self._most = self._left = most
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.Handle | None = None         # begins the loop's next turn

    async def turn(self, parts: int) -> None:
        """Wait until there is time for as many parts."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._forget(loop)
        if self._next is None:
            self._next = loop.call_soon(self._begin_turn, loop)
        if self._waiting or parts > self._left:
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append((future, parts))
            await future
        else:
            self._left -= parts

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """The last loop has ended, with whatever waited in it."""
        if self._next is not None:
            self._next.cancel()
        self._loop, self._next, self._left = loop, None, self._most
        self._waiting.clear()

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._most
        while self._waiting and (self._left == self._most or self._waiting[0][1] <= self._left):
            future, parts = self._waiting.popleft()
            if not future.done():                        # else its client has left
                future.set_result(None)
                self._left -= parts
        self._next = loop.call_soon(self._begin_turn, loop) if self._left != self._most else None


class BodyReader:
    """Reads every body in this process: long ones in threads. The part of LongBodies that needs no process."""

    def __init__(self) -> None:
        self._turns = FewPerTurn()

    async def read(self, function: Reads, service: Any, caller: Caller, body: Body) -> Any:
        parts = num_parts(body.parts) if body.size <= MANY_BYTES else PARTS_PER_TURN     # to count those of 16 MB takes 55 ms
        await self._turns.turn(OWN_PARTS + parts)
        return await function(service, caller, body.data)

    def close(self) -> None:
        """Nothing runs."""


class ReadingProcess:
    """One process that reads bodies, one after the other. `module`: what it runs; `work`: the thread that asks it; `on_start` is
    called after each start, also one that failed."""

    def __init__(self, module: str, settings: Callable[[], bytes], work: LongWork, on_start: Callable[[], None]) -> None:
        self._module = module
        self._settings = settings
        self._work = work
        self._on_start = on_start
        self._child: FramedChild | None = None
        self._in_use = threading.Lock()                  # held while a thread asks the child: its pipes stay open
        self._reading = 0
        self._idle: asyncio.TimerHandle | None = None
        self._failed_starts = 0                          # since the last one that worked
        self._start_after = 0.0

    @property
    def is_running(self) -> bool:
        """Or is being started."""
        return self._child is not None or self._reading > 0

    @property
    def can_start(self) -> bool:
        """Or so it seems: the last start has not failed."""
        return not self._failed_starts

    async def ask(self, name: str, caller: Caller, body: Body, recalled: list[Recalled] | None) -> Reply:
        task = msgspec.msgpack.encode(Task(name, caller.key, recalled))
        parts = [len(task).to_bytes(4, "little"), task, *body.parts]
        self._reading += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            return await self._work.run(lambda: self._answer(parts), sum(map(len, parts)))     # recalled responses, too
        finally:
            self._reading -= 1
            if not self._reading:
                self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_idle)

    def _answer(self, parts: list[bytes]) -> Reply:
        """In a thread: it waits in system calls, which do not hold Python's lock."""
        with self._in_use:
            try:
                reply: Reply = TO_REPLY.decode(ask_another_if_stopped(lambda: self._ask_child(parts), "reads long requests"))
            except TimeoutError:
                raise TryAgain(f"the request was not read within {ANSWER_SECONDS:g} s; try again later", 1.0) from None
            except EOFError:
                logger.warning("the process that reads long requests has ended; the next one starts another")
                raise TryAgain("the process that read the request has ended; try again later", 1.0) from None
        if isinstance(reply, Broken):
            raise RuntimeError(f"in the process that reads long requests: {reply.traceback}")
        return reply

    def _ask_child(self, parts: list[bytes]) -> bytes:
        if self._child is None or not self._child.alive:
            self._child = self._started()
        return self._child.ask(parts, ANSWER_SECONDS)

    def _started(self) -> FramedChild:
        if self._child is not None:
            self._child.end()
            self._child = None
        if time.monotonic() < self._start_after:
            raise CannotStart
        try:
            child = FramedChild(self._module, stderr=subprocess.DEVNULL, pipe_bytes=PIPE_BYTES)
            child.ask([self._settings()], ANSWER_SECONDS)
        except (OSError, EOFError) as error:             # no memory or file for it; it ended, or did not answer
            seconds = min(FIRST_RETRY_SECONDS * 2**self._failed_starts, LAST_RETRY_SECONDS)
            self._failed_starts += 1
            self._start_after = time.monotonic() + seconds
            self._on_start()
            why = getattr(error, "strerror", None) or type(error).__name__
            logger.warning("the process that reads long requests cannot be started (%s); next try in %g s", why, seconds)
            raise CannotStart from None
        self._failed_starts, self._start_after = 0, 0.0
        self._on_start()
        return child

    def _end_idle(self) -> None:
        if self._reading:
            return
        if self._in_use.locked():                        # its client was given up, the thread still waits
            self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_idle)
        else:
            self.close()

    def close(self) -> None:
        """A thread that asks the child keeps its pipes: it finds them at their end, and closes them."""
        if not self._in_use.acquire(blocking=False):
            if (child := self._child) is not None:
                child.process.kill()
            return
        try:
            child, self._child = self._child, None
            if child is not None:
                child.end()
        finally:
            self._in_use.release()


class LongBodies(BodyReader):
    """Reads long bodies in processes. `results`: by name, the functions that may run there and the types of what they return;
    `settings`: what a process is told first; `stored`: the responses that a body may refer to."""

    def __init__(
        self, results: Mapping[str, Any], settings: Callable[[], bytes], stored: ResponseStore, module: str = MODULE
    ) -> None:
        super().__init__()
        self._decoders = {name: None if kind is bytes else msgspec.msgpack.Decoder(kind) for name, kind in results.items()}
        self._stored = stored
        self.huge = ReadingProcess(module, settings, HUGE_WORK, self._note_start)    # for more than MANY_BYTES, recalled ones too
        self.other = ReadingProcess(module, settings, LongWork(threads=1), self._note_start)
        self._note_start()
        self._alone = False                              # a long body is read here

    def _note_start(self) -> None:
        """Without one of the processes, long conversations are read here, too."""
        self._stored.most_recalled = MANY_BYTES if self.huge.can_start and self.other.can_start else math.inf

    async def read(self, function: Reads, service: Any, caller: Caller, body: Body) -> Any:
        name = name_of(function)
        wanted: Wanted | None = None
        process = self.huge if body.size > MANY_BYTES else self.other
        try:
            if name not in self._decoders or not is_long(body.parts, body.size, self._decoders[name] is None):
                return await super().read(function, service, caller, body)
            if body.size <= LONG_BYTES and not (self._alone or process.is_running):
                return await self._read_alone(function, service, caller, body)
        except NeedsStored as needs:                     # a short body that continues a long conversation
            wanted = Wanted(needs.name, needs.items)
        try:
            reply = wanted or await process.ask(name, caller, body, None)
            if isinstance(reply, Wanted):
                reply = await self._ask_with_stored(reply, process, name, caller, body)
        except CannotStart:
            return await super().read(function, service, caller, body)     # others wait for a moment; better than no answer
        if isinstance(reply, Failure):
            raise error_of(reply)
        assert isinstance(reply, Made)
        SPENT["tokenising"] += reply.tokenising
        decoder = self._decoders[name]
        if decoder is None or reply.is_answer:
            return reply.result
        return await away_if_long(len(reply.result), partial(decoder.decode, reply.result))

    async def _ask_with_stored(self, wanted: Wanted, process: ReadingProcess, name: str, caller: Caller, body: Body) -> Reply:
        """What is recalled is read with the body: bodies of 60 KB do not wait for a long conversation."""
        entries = self._stored.referred(wanted.name, wanted.items, caller.key)
        if body.size + sum(each.size for each in entries.values()) > MANY_BYTES:
            process = self.huge
        return await process.ask(name, caller, body, [Recalled.of(*each) for each in entries.items()])

    async def _read_alone(self, function: Reads, service: Any, caller: Caller, body: Body) -> Any:
        """In its turn: some functions end without a pause, and each body of a crowd would find itself alone."""
        self._alone = True
        try:
            return await super().read(function, service, caller, body)
        finally:
            self._alone = False

    def close(self) -> None:
        self.huge.close()
        self.other.close()


# -- in the process that is asked --------------------------------------------------------------------------------------


def answer_bodies(begin: Callable[[bytes], Answers]) -> None:
    """Answer frames on the standard streams until the asking process ends. `begin` is given the first frame, what is to be known
    before, and makes what answers the others: bodies."""
    end_with_parent(os.getppid())
    give_back_large_blocks()
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    answers = begin(first)
    write_frame(target, b"")
    with asyncio.Runner() as runner:
        while (frame := read_frame(source)) is not None:
            size = int.from_bytes(frame[:4], "little")
            task = msgspec.msgpack.decode(frame[4 : 4 + size], type=Task)
            reply = runner.run(_reply(answers, task, frame[4 + size :]))
            del frame
            write_frame(target, msgspec.msgpack.encode(reply))
            del reply
            return_freed_memory()


async def _reply(answers: Answers, task: Task, body: bytes) -> Reply:
    try:
        return await answers(task, body)
    except NeedsStored as needs:
        return Wanted(needs.name, needs.items)
    except RidgelineError as error:
        return failure_of(error)
    except Exception:                                    # a bug: it is logged over there, and the next body is read all the same
        return Broken(traceback.format_exc(limit=-8))
