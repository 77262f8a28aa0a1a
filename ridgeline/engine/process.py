"""The engine core in a process of its own: `python -m ridgeline.engine.process SETTINGS`.

It loads, says Ready, and then steps while there is work; between steps it takes what the front end has sent. Text and
clients are the front end's business (engine/async_llm). Frames that cannot be decoded are counted and dropped. When the
front end is gone this process ends too, and takes the directory of their sockets with it.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import zmq

from ridgeline.config import EngineConfig
from ridgeline.engine.core import EngineCore
from ridgeline.engine.ipc import (
    FROM_ENGINE,
    TO_ENGINE,
    Abort,
    Add,
    DecodeError,
    Deltas,
    Failed,
    ForgetPrefixes,
    FromEngine,
    Loading,
    PrefixesForgotten,
    Ready,
    Refused,
    Shutdown,
    ToEngine,
)
from ridgeline.errors import ConfigError, ModelError, RequestError, RidgelineError, one_line
from ridgeline.log import get_logger
from ridgeline.messages import TokenDelta

logger = get_logger("engine")

_IDLE_MS = 500                       # how often an idle engine looks whether its front end is still there
_FRAMES_PER_STEP = 1024              # a flood of requests must not keep the running ones from their next step
_LOADING_SECONDS = 0.1               # between two reports of progress


class FrontEndGone(Exception):
    pass


class FrontEndLink:
    """The two sockets to the front end, and the knowledge whether it lives."""

    def __init__(self, folder: Path, parent: int) -> None:
        self.bad_frames = 0
        self._folder = folder
        self._parent = parent
        self._context = zmq.Context()
        self._from_front = self._context.socket(zmq.PULL)
        self._from_front.connect(f"ipc://{folder / 'to-engine'}")
        self._to_front = self._context.socket(zmq.PUSH)
        self._to_front.setsockopt(zmq.SNDTIMEO, _IDLE_MS)
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

    def receive(self, wait: bool) -> list[ToEngine]:
        """What has arrived; with `wait`, as soon as something has or the idle time is over."""
        messages: list[ToEngine] = []
        timeout = _IDLE_MS if wait else 0
        while len(messages) < _FRAMES_PER_STEP and self._from_front.poll(timeout):
            timeout = 0
            try:
                messages.append(TO_ENGINE.decode(self._from_front.recv()))
            except DecodeError as error:
                self.bad_frames += 1
                logger.warning("dropped a frame from the front end (%d so far): %s", self.bad_frames, error)
        return messages

    def close(self) -> None:
        self._context.destroy(linger=2000)               # a last word still leaves

    def abandon(self) -> None:
        """There is nobody to talk to, and nobody else to clean up."""
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineLoop:
    def __init__(self, core: EngineCore, link: FrontEndLink) -> None:
        self._core = core
        self._link = link
        self._told = self._fullness()                    # what the front end knows of how full we are

    def run(self) -> None:
        """Until the front end says Shutdown."""
        core, link = self._core, self._link
        while True:
            link.check()
            busy = core.has_work or core.prepare()
            for message in link.receive(wait=not busy):
                if isinstance(message, Shutdown):
                    return
                self._obey(message)
            deltas = core.step() if core.has_work else []
            self._tell(deltas)

    def _obey(self, message: Add | Abort | ForgetPrefixes) -> None:
        if isinstance(message, Abort):
            self._core.abort(message.request_id, message.index)
            return
        if isinstance(message, ForgetPrefixes):
            self._link.send(PrefixesForgotten(self._core.scheduler.manager.forget_prefixes()))
            return
        try:
            self._core.add(message.request)
        except RequestError as error:
            self._link.send(Refused(message.request.request_id, str(error)))
        except Exception:                                # one request's fault must not end the others
            logger.exception("request %s could not be added", message.request.request_id)
            self._link.send(Refused(message.request.request_id, "the engine could not take this request"))

    def _tell(self, deltas: list[TokenDelta]) -> None:
        """One message per step, and one when only the fullness changed (after an abort, say)."""
        fullness = self._fullness()
        if deltas or fullness != self._told:
            self._told = fullness
            self._link.send(Deltas(deltas, *fullness))

    def _fullness(self) -> tuple[int, int]:
        scheduler = self._core.scheduler
        return scheduler.num_running, scheduler.manager.num_free


def load(options: dict[str, object], link: FrontEndLink) -> EngineCore:
    """The core, ready to step, with news of its loading to the front end."""
    started = reported = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal reported
        link.check()
        if time.monotonic() - reported > _LOADING_SECONDS or done >= total:
            reported = time.monotonic()
            link.send(Loading(done, total))

    core = EngineCore.start(EngineConfig.of(**options), progress)
    config = core.config
    ready = Ready(
        model=str(config.model_path),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=config.model.vocab_size,
        dtype=config.dtype,
        device=config.device,
        num_blocks=core.scheduler.manager.num_free,
        block_size=config.options.cache.block_size,
        seconds=time.monotonic() - started,
    )
    # What lives now lives for ever: the collector need not look at it again in the middle of a step.
    gc.collect()
    gc.freeze()
    link.send(ready)
    return core


def run(options: dict[str, object], link: FrontEndLink) -> int:
    """Load and serve; the exit code. 1: a fault. 2: it cannot start with these options."""
    core = None
    try:
        core = load(options, link)
        EngineLoop(core, link).run()
        return 0
    except FrontEndGone:
        raise
    except Exception as error:
        if not isinstance(error, RidgelineError):
            logger.exception("the engine failed")
        refused = core is None and isinstance(error, (ConfigError, ModelError))
        link.send(Failed(one_line(error), config=refused))
        return 2 if refused else 1
    finally:
        if core is not None:
            core.close()


def main(settings: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # Ctrl-C is the front end's to handle
    given = json.loads(settings)
    link = FrontEndLink(Path(given["folder"]), given["parent"])
    try:
        code = run(given["options"], link)
    except FrontEndGone:
        link.abandon()
        return 0
    link.close()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
