"""The engine's end of the sockets to its front end, and a check that the front end is alive.

Knows frames and one process id; what the messages mean is the business of engine/core/loop.py. No torch.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path

import zmq

from ridgeline.engine.ipc import FROM_ENGINE, TO_ENGINE, DecodeError, FromEngine, ToEngine, new_context
from ridgeline.process.log import get_logger

logger = get_logger("engine")

IDLE_MS = 500                        # how often an idle engine looks whether its front end is still there
# A flood of requests must not keep the running ones from their next step: neither many small ones, nor few that are long to read.
# One with a bias for each of 1,024 tokens takes 1 ms, and a client may send 400 of them at once.
_FRAMES_PER_STEP, _SECONDS_PER_STEP = 1024, 0.01


class FrontEndGone(Exception):
    pass


class FrontEndLink:
    """The two sockets to the front end, and the knowledge whether it lives."""

    def __init__(self, folder: Path, parent: int) -> None:
        self.bad_frames = 0
        self._folder = folder
        self._parent = parent
        self._context = new_context()
        self._from_front = self._context.socket(zmq.PULL)
        self._from_front.connect(f"ipc://{folder / 'to-engine'}")
        self._to_front = self._context.socket(zmq.PUSH)
        self._to_front.setsockopt(zmq.SNDTIMEO, IDLE_MS)
        self._to_front.connect(f"ipc://{folder / 'from-engine'}")

    def check(self) -> None:
        if os.getppid() != self._parent:
            raise FrontEndGone

    def send(self, message: FromEngine) -> None:
        """Waits while the front end does not keep up, for as long as there is one."""
        frame = FROM_ENGINE.encode(message)
        while True:
            try:
                self._to_front.send(frame)
                return
            except zmq.Again:
                self.check()

    def receive(self, wait: bool, most_ms: int = IDLE_MS) -> list[ToEngine]:
        """What has arrived, as far as there is time for it before a step; with `wait`, as soon as something has or `most_ms` are
        over, and then all of it."""
        messages: list[ToEngine] = []
        timeout = most_ms if wait else 0
        until = math.inf if wait else time.monotonic() + _SECONDS_PER_STEP
        while len(messages) < _FRAMES_PER_STEP and self._from_front.poll(timeout):
            timeout = 0
            try:
                messages.append(TO_ENGINE.decode(self._from_front.recv()))
            except DecodeError as error:
                self.bad_frames += 1
                logger.warning("dropped a frame from the front end (%d so far): %s", self.bad_frames, error)
            if time.monotonic() >= until:
                break
        return messages

    def close(self) -> None:
        self._context.destroy(linger=2000)               # the last message is still sent

    def abandon(self) -> None:
        """The front end is gone: close the sockets and remove their folder in its place."""
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
