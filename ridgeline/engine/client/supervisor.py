"""Starts the engine's process, watches it, restarts it when it dies or hangs, and ends it.

engine/client/watchdog defines when an engine counts as hung and how often it is restarted. Knows no requests: a Listener is
called when an engine is ready, when it is lost, and when open requests must be sent to a new one.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.engine.client.engine_child import NO_SIZES, NO_VARIABLES, EngineChild
from ridgeline.engine.client.watchdog import Pulse, Restarts, Supervision, loading_limit
from ridgeline.engine.ipc import Alive, Deltas, Failed, FromEngine, Loading, Ready
from ridgeline.errors import ConfigError, EngineDead, RidgelineError, one_line
from ridgeline.process.log import get_logger

logger = get_logger("async_llm")


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks, called on the event loop."""

    take: Callable[[FromEngine], Iterator[None] | None]  # every message that is not about the process itself
    opened: Callable[[Ready], None]                      # an engine is ready for requests
    lost: Callable[[], None]                             # it is lost; may be called twice
    replay: Callable[[bool], None]                       # a new one is ready; True: it is the last restart allowed
    died: Callable[[RidgelineError], None]               # no further engine will be started
    num_waiting: Callable[[], int]                       # requests that wait for an engine, for the log


class Supervisor:
    """`module` is what runs in the engine's process."""

    def __init__(self, module: str, config: EngineConfig, rules: Supervision, listener: Listener) -> None:
        self.module = module
        self.rules = rules
        self.process: EngineChild | None = None          # None: never started
        self.pulse = Pulse(rules.silence)
        self.is_up = False                               # the process is ready and not known to be gone
        self.num_restarts = 0
        self.on_loading: Callable[[int, int], None] = lambda done, total: None
        self._config = config
        self.sizes: Mapping[str, int] = NO_SIZES         # of the first engine that was ready, for those after it
        self.environment: Mapping[str, str] = NO_VARIABLES       # more variables for its process
        self.name = "the engine"                         # in the log
        self._greeting: bytes | None = None              # a frame for each engine while it starts
        self._listener = listener
        self._supervising: asyncio.Task[None] | None = None
        self._died: asyncio.Future[RidgelineError] | None = None

    async def start(self, meanwhile: Callable[[], Awaitable[None]], changed: Callable[[], str] = str) -> None:
        """Start an engine and wait until it is ready and `meanwhile` is done. `changed`: why no further engine could go on where
        this one ends; empty if one could. After any error, call shutdown()."""
        loop = asyncio.get_running_loop()
        self._died = loop.create_future()
        began = time.monotonic()
        try:
            process = self._launch()
        except Exception as error:
            raise ConfigError(_not_started(error)) from None
        await meanwhile()
        lost = await self._loaded(process, None)
        if lost is not None:
            self.die(lost)
        self.require_alive()
        self._open(process)                              # last of all: from here on requests are accepted
        self._supervising = loop.create_task(self._supervise(process, loading_limit(time.monotonic() - began), changed))
        self._supervising.add_done_callback(self._supervision_ended)

    @property
    def is_alive(self) -> bool:
        """Started, and neither dead nor shut down. It may be on its way back."""
        return self._died is not None and not self._died.done()

    @property
    def state(self) -> str:
        """ok: a step was finished lately, or there is nothing to do. Else stalled, restarting or dead."""
        if self._died is not None and self._died.done():
            return "dead"
        if not self.is_up:
            return "restarting"
        return "stalled" if self.pulse.stopped else "ok"

    async def died(self) -> RidgelineError:
        """Wait for the engine's final end; the reason."""
        if self._died is None:
            raise EngineDead("the engine was not started")
        return await asyncio.shield(self._died)

    def require_alive(self) -> None:
        if self._died is not None and self._died.done():
            raise self._died.result()

    def die(self, error: RidgelineError) -> None:
        """The first reason counts."""
        if self._died is not None and not self._died.done():
            self._died.set_result(error)
            self._listener.died(error)

    def send(self, frame: bytes) -> None:
        """While no engine runs, frames are dropped: replay() sends the open requests to the next engine."""
        if self.is_up and self.process is not None:
            self.process.send(frame)

    def greet(self, frame: bytes) -> None:
        """A frame for the engine that starts now or next, and for each after it."""
        self._greeting = frame
        if self.process is not None:
            self.process.greet(frame)

    async def shutdown(self) -> None:
        self.die(EngineDead("the engine was shut down"))
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        if self.process is not None:
            gently, self.is_up = self.is_up, False
            await self.process.stop(gently)

    # -- one engine ----------------------------------------------------------------------------------------------------

    def _launch(self) -> EngineChild:
        self.process = EngineChild(self.module, self._config, self._take, self._lost, self.sizes, self.environment)
        if self._greeting is not None:
            self.process.greet(self._greeting)
        return self.process

    def _take(self, message: FromEngine) -> Iterator[None] | None:
        process = self.process
        assert process is not None                       # the sender of this message
        if isinstance(message, Deltas):
            self.pulse.stepped()
        elif isinstance(message, Alive):
            self.pulse.turned(message.steps, message.busy)
            return None
        elif isinstance(message, Loading):
            self.on_loading(message.done, message.total)
            return None
        elif isinstance(message, Failed):
            process.lose(ConfigError(message.reason) if message.config else EngineDead(message.reason))
            return None
        elif isinstance(message, Ready) and not process.ready.done():
            process.ready.set_result(message)
        return self._listener.take(message)

    async def _loaded(self, process: EngineChild, limit: float | None) -> RidgelineError | None:
        """Wait until the process is ready, or say why it is not."""
        assert self._died is not None
        news: list[asyncio.Future[Any]] = [process.ready, process.lost, self._died]
        await asyncio.wait(news, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if process.lost.done():
            return process.lost.result()
        return None if process.ready.done() else EngineDead(f"the engine was not ready after {limit:.0f} s")

    def _open(self, process: EngineChild) -> None:
        self.pulse = Pulse(self.rules.silence)
        self.is_up = True
        self.sizes = self.sizes or process.ready.result().sizes
        self._listener.opened(process.ready.result())

    def _lost(self) -> None:
        self.is_up = False                               # _supervise is woken by the same news, a moment later
        self._listener.lost()

    # -- one after another ---------------------------------------------------------------------------------------------

    async def _supervise(self, process: EngineChild, limit: float, changed: Callable[[], str]) -> None:
        """Replace a lost engine, as often as the rules allow."""
        restarts = Restarts(self.rules)
        while True:
            lost: RidgelineError | None = await self._until_lost(process)
            self._lost()
            while lost is not None:
                delay = restarts.next_delay()
                if delay is None:
                    often = f", after {restarts.recent} restarts" if restarts.recent else ""
                    self.die(type(lost)(f"{lost}{often}"))
                    return
                waiting = self._listener.num_waiting()
                logger.error("%s stopped (%s) and is restarted; %d open requests will resume", self.name, lost, waiting)
                await process.stop(at_once=True)
                await asyncio.sleep(delay)
                try:
                    if why := await _said_within(limit, changed):
                        self.die(EngineDead(f"{lost}; {why}"))
                        return
                    process = self._launch()
                except EngineDead as error:
                    lost = error
                except Exception as error:               # no folder, no descriptor, no process left: perhaps in a moment
                    lost = EngineDead(_not_started(error))
                else:
                    lost = await self._loaded(process, limit)
            self.num_restarts += 1
            self._open(process)
            logger.info("%s runs again; %d open requests resume", self.name, self._listener.num_waiting())
            self._listener.replay(restarts.recent >= self.rules.max_restarts)

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """Without supervision a lost engine would never be replaced: any other end than a shutdown is the engine's end."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the supervision of the engine failed", exc_info=error)
        self.die(EngineDead(f"the supervision of the engine ended: {one_line(error)}" if error else "the engine was shut down"))

    async def _until_lost(self, process: EngineChild) -> RidgelineError:
        """Return when the process is gone, or hangs."""
        tick = min(1.0, max(0.05, self.rules.silence / 8))
        while True:
            began = time.monotonic()
            await asyncio.wait([process.lost], timeout=tick)
            if process.lost.done():
                return process.lost.result()
            if time.monotonic() - began > 2 * tick + 1:
                self.pulse.beat()                        # this process was held up itself: messages may wait to be read
            elif self.pulse.stopped:
                self._lost()
                logger.error("no message from %s for %.1f s; its stacks follow", self.name, self.pulse.silent_for)
                await process.show_stacks()
                return EngineDead(f"the engine hung for {self.pulse.silent_for:.0f} s")


async def _said_within(limit: float, changed: Callable[[], str]) -> str:
    """A network's file system may not answer, for ever."""
    try:
        async with asyncio.timeout(limit):
            return await asyncio.to_thread(changed)
    except TimeoutError:
        raise EngineDead(f"the model's files could not be looked at within {limit:.0f} s") from None


def _not_started(error: Exception) -> str:
    scarce = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
    advice = "; raise the limit on open files (ulimit -n)" if scarce else ""
    return f"the engine's process cannot be started: {one_line(error)}{advice}"
