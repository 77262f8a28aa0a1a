"""Sends requests at their times and collects their outcomes.

Open loop: every conversation starts at its time, whatever the server does. Closed loop: a fixed number of users, each sending
the next request when the answer has arrived; a request's intended time is then the moment its user was free. A later turn of
a conversation is due after the answer before it and the think time.

With a concurrency limit an open-loop request may have to wait. Its intended time does not change.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.bench.load.latency import Outcome
from ridgeline.bench.load.prompts import Conversation, Turn


class Asks(Protocol):
    async def ask(
        self, turns: list[Turn], answers: list[str], outcome: Outcome, clock_start: float, keep_text: bool = False,
        now: Callable[[], float] | None = None,
    ) -> object: ...


@dataclass(slots=True)
class Load:
    """One run against a target."""

    target: Asks
    concurrency: int | None = None   # most requests under way
    on_done: Callable[[Outcome], None] = lambda outcome: None
    outcomes: list[Outcome] = field(default_factory=list)
    _clock: float = 0.0
    _places: asyncio.Semaphore | None = None

    def now(self) -> float:
        return time.perf_counter() - self._clock

    async def open_loop(self, planned: Iterable[tuple[float, Conversation]]) -> list[Outcome]:
        """Conversations at their times, in order."""
        async with self._running():
            async with asyncio.TaskGroup() as group:
                for when, conversation in planned:
                    await self._sleep_until(when)
                    group.create_task(self._converse(conversation, when))
        return self.outcomes

    async def closed_loop(self, conversations: Iterator[Conversation], users: int, until: float | None) -> list[Outcome]:
        """`users` at once; each takes the next conversation when it is through with one. No new one after `until`."""

        async def user() -> None:
            while until is None or self.now() < until:
                conversation = next(conversations, None)
                if conversation is None:
                    return
                await self._converse(conversation, self.now())

        async with self._running():
            async with asyncio.TaskGroup() as group:
                for _ in range(users):
                    group.create_task(user())
        return self.outcomes

    async def _converse(self, conversation: Conversation, intended: float) -> None:
        answers: list[str] = []
        several = len(conversation.turns) > 1
        for number, turn in enumerate(conversation.turns):
            if number:
                intended += turn.think
                await self._sleep_until(intended)
            outcome = Outcome(intended, due=self.now())
            self.outcomes.append(outcome)
            if self._places is not None:
                async with self._places:
                    await self._ask(conversation.turns[: number + 1], answers, outcome, several)
            else:
                await self._ask(conversation.turns[: number + 1], answers, outcome, several)
            self.on_done(outcome)
            if not outcome.ok:
                return                                   # a conversation with a gap is another one
            answers.append(outcome.text)
            intended = outcome.ended

    async def _ask(self, turns: list[Turn], answers: list[str], outcome: Outcome, keep_text: bool) -> None:
        outcome.sent = self.now()
        await self.target.ask(turns, answers, outcome, self._clock, keep_text, time.perf_counter)

    async def _sleep_until(self, when: float) -> None:
        """Never too early: uvloop's timers are rounded to milliseconds, down too."""
        while (left := when - self.now()) > 0:
            await asyncio.sleep(left)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """The clock starts; what exists is out of the collector's way, so that it does not stop the run for long."""
        if self.concurrency is not None:
            self._places = asyncio.Semaphore(self.concurrency)
        gc.collect()
        gc.freeze()
        self._clock = time.perf_counter()
        try:
            yield
        finally:
            gc.unfreeze()
