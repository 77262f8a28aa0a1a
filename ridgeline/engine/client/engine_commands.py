"""Commands to the running engine that are not requests: switch a technique, reset the prefix cache, profile steps.

The engine answers commands of one kind in order, so each kind has a queue of callers that wait. Knows no requests.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ridgeline.engine.client.supervisor import Supervisor
from ridgeline.engine.ipc import TO_ENGINE, ForgetPrefixes, PrefixesForgotten, Profile, Profiled, Switch, Switched
from ridgeline.errors import BadRequest, RidgelineError

LOST = "the engine was lost before it answered; try again"


class EngineCommands:
    def __init__(self, engine: Supervisor) -> None:
        self._engine = engine
        self._switched: dict[str, bool] = {}             # techniques as last switched, for engines started later
        self._switching: deque[asyncio.Future[str]] = deque()    # switch() calls without an answer yet
        self._resetting: deque[asyncio.Future[bool]] = deque()   # reset_prefix_cache() calls without an answer yet
        self._profiling: asyncio.Future[Profiled] | None = None  # the profile() call without an answer yet

    async def reset_prefix_cache(self) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resetting.append(answer)
        self._engine.send(TO_ENGINE.encode(ForgetPrefixes()))
        return await answer

    async def switch(self, technique: str, on: bool) -> None:
        if not self._engine.is_up:
            raise BadRequest("the engine is restarting; try again later")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._switching.append(answer)
        self._engine.send(TO_ENGINE.encode(Switch(technique, on)))
        if refused := await answer:
            raise BadRequest(refused)
        self._switched[technique] = on

    async def profile(self, steps: int) -> Profiled:
        if not self._engine.is_up or self._profiling is not None:
            raise BadRequest("the engine is restarting, or another profile is running; try again later")
        self._profiling = asyncio.get_running_loop().create_future()
        try:
            self._engine.send(TO_ENGINE.encode(Profile(steps)))
            found = await self._profiling
        finally:
            self._profiling = None
        if found.refused:
            raise BadRequest(found.refused)
        return found

    # -- the engine's answers, and its life --------------------------------------------------------------------------------

    def answered(self, message: Switched | PrefixesForgotten | Profiled) -> None:
        """A caller may have gone meanwhile: its future is done then."""
        if isinstance(message, Profiled):
            if self._profiling is not None and not self._profiling.done():
                self._profiling.set_result(message)
        elif isinstance(message, PrefixesForgotten):
            if not (waiting := self._resetting.popleft()).done():
                waiting.set_result(message.done)
        elif self._switching and not (asked := self._switching.popleft()).done():
            asked.set_result(message.refused)

    def opened(self) -> None:
        """A new engine runs: it is switched as the last one was."""
        for technique, on in self._switched.items():
            self._switching.append(asyncio.get_running_loop().create_future())   # no caller waits for this answer
            self._engine.send(TO_ENGINE.encode(Switch(technique, on)))

    def lost(self) -> None:
        self.answered(Profiled("", {}, refused=LOST))
        while self._switching:
            if not (waiting := self._switching.popleft()).done():
                waiting.set_result(LOST)

    def replayed(self) -> None:
        for waiting in self._resetting:
            if not waiting.done():
                waiting.set_result(True)                 # the new engine has cached no prefixes
        self._resetting.clear()

    def failed(self, error: RidgelineError) -> None:
        for waiting in self._resetting:
            if not waiting.done():
                waiting.set_exception(error)
