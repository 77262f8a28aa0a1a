"""What an engine said before it ended is the reason, also where it is read after the end was noticed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import zmq

from ridgeline.engine.client.engine_child import EngineChild
from ridgeline.engine.ipc import FROM_ENGINE, Failed, FromEngine
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.process.memory_kills import OutOfMemoryKills


class LateSocket:
    """ZeroMQ's thread has not read the only frame at the first looks."""

    closed = False

    def __init__(self, looks: int) -> None:
        self._frames: list[Any] = [None] * looks + [FROM_ENGINE.encode(Failed("no such file", config=True))]

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
        child._fd = os.open(os.devnull, os.O_RDONLY)
        child.lost, child._exited, child._kills = child._loop.create_future(), asyncio.Event(), OutOfMemoryKills()
        child._from_engine, child._on_lost = LateSocket(looks), lambda: None

        def take(message: FromEngine) -> None:
            assert isinstance(message, Failed)
            child.lose(ConfigError(message.reason))

        child._on_message = take
        child._ended(code)
        assert child._exited.is_set() == (not looks or code < 0)
        await asyncio.wait_for(child._exited.wait(), 60)
        os.close(child._fd)
        return child.lost.result()

    assert reason in str(asyncio.run(scene()))
