"""What an engine said before it ended is the reason, also where it is read after the end was noticed. It is read first."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import zmq

from ridgeline.engine.client import engine_child
from ridgeline.engine.client.engine_child import EngineChild, _always_readable
from ridgeline.engine.ipc import FROM_ENGINE, Failed, FromEngine
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.process.memory_kills import OutOfMemoryKills
from ridgeline.server.event_loop import MOST_CALLBACKS, FrontEndLoop


class LateSocket:
    """ZeroMQ's thread has not read the only frame at the first looks."""

    closed = False

    def __init__(self, looks: int) -> None:
        self._frames: list[Any] = [None] * looks + [FROM_ENGINE.encode(Failed("no such file", config=True))]
        self.FD = os.open(os.devnull, os.O_RDONLY)

    def recv(self, flags: int) -> bytes:
        frame = self._frames.pop(0) if self._frames else None
        if frame is None:
            raise zmq.Again
        return bytes(frame)


@pytest.mark.parametrize(("code", "looks", "reason"), [
    (2, 0, "no such file"), (2, 3, "no such file"), (1, 3, "no such file"), (-9, 3, "was killed"),
])
def test_the_last_words_are_waited_for_where_there_are_some(code: int, looks: int, reason: str) -> None:
    """An engine that was killed has said nothing, and is replaced at once."""
    async def scene() -> RidgelineError:
        child: Any = object.__new__(EngineChild)
        child._loop, child._work, child._bad_frames = asyncio.get_running_loop(), None, 0
        child.lost, child._exited, child._kills = child._loop.create_future(), asyncio.Event(), OutOfMemoryKills()
        child._from_engine, child._on_lost, child._more = LateSocket(looks), lambda: None, _always_readable()

        def take(message: FromEngine) -> None:
            assert isinstance(message, Failed)
            child.lose(ConfigError(message.reason))

        child._on_message = take
        child._ended(code)
        assert child._exited.is_set() == (not looks or code < 0)
        await asyncio.wait_for(child._exited.wait(), 60)
        os.close(child._fd)
        child._more.close()
        return child.lost.result()

    assert reason in str(asyncio.run(scene()))


def test_messages_that_take_many_turns_do_not_wait_for_the_clients_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of what had arrived was read behind all callbacks that waited: streams stood still while many clients asked for
    pages that take milliseconds each."""
    monkeypatch.setattr(engine_child, "_TURN_SECONDS", 0.0)          # each message takes all of a turn
    frames, ran, seen = [FROM_ENGINE.encode(Failed("x"))] * 4, 0, []

    class Socket:
        closed = False

        def recv(self, flags: int) -> bytes:
            if not frames:
                raise zmq.Again
            return frames.pop()

    def others() -> None:
        nonlocal ran
        ran += 1

    async def scene() -> None:
        child: Any = object.__new__(EngineChild)
        child._loop, child._work, child._from_engine = asyncio.get_running_loop(), None, Socket()
        child.lost, child._more, child._on_message = child._loop.create_future(), _always_readable(), lambda m: seen.append(ran)
        for _ in range(30 * MOST_CALLBACKS):
            child._loop.call_soon(others)
        child._read()
        while ran < 30 * MOST_CALLBACKS:
            await asyncio.sleep(0)
        assert not child._loop.remove_reader(child._more), "it would wake the event loop for ever"
        child._more.close()

    with asyncio.Runner(loop_factory=FrontEndLoop) as runner:
        runner.run(asyncio.wait_for(scene(), 60))
    assert len(seen) == 4 and seen[-1] <= 4 * MOST_CALLBACKS
