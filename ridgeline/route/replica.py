"""One replica: its client, its load, and whether it may be given requests.

A replica is up until several checks or requests in a row fail; a check that succeeds brings it back. One that is down is checked
as often as others, so that a restarted one does not wait. A replica that answers 429 or 503 gets no requests for the time it asks
for. One that takes requests and does not answer them is chosen last (engine/replicas/silence.py), and so is one that fails
at once (engine/replicas/doubts.py).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from ridgeline.engine.replicas.doubts import Doubts
from ridgeline.engine.replicas.replica_load import ReplicaLoad
from ridgeline.engine.replicas.silence import Patience, Silence
from ridgeline.process.log import get_logger
from ridgeline.route.route_options import RouteOptions
from ridgeline.route.upstream import ReplicaFailure, Upstream

logger = get_logger("route")

LOOK_SECONDS = 1.0                   # for a check that requests wait for
RATE_SECONDS = 1.0                   # least time between two looks at its counters
PAGE_SECONDS = 2.0                   # for its page of metrics
MOST_PAGE = 4 * 2**20                # bytes of it, which take 20 ms: an engine's page has 60 KB, and a server may have 64 engines
MOST_SAMPLES = 1000                  # of one number: one for each engine of a server
MOST_NUMBER = 2.0**53                # a larger one is not believed: sums of such have no end, and no page could show them
# Numbers of a page; all but the last two are vLLM's, too.
RUNNING, WAITING, KV_USED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
GENERATED, PROMPTED, STEPS = "vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count"
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
MFU, MBU = "ridgeline:mfu", "ridgeline:mbu"
SUMMED = (RUNNING, WAITING, GENERATED, PROMPTED, STEPS, HITS, QUERIES)       # over the engines of a server
AVERAGED = (KV_USED, MFU, MBU)
# What grows while an engine computes. A prompt's tokens count when its answer begins, and steps while it is computed.
MADE = (GENERATED, PROMPTED, STEPS)
MOST_RETRY_AFTER = 60.0              # seconds: a longer wish is not believed


class Replica:
    def __init__(
        self, upstream: Upstream, load: ReplicaLoad, patience: Patience, options: RouteOptions, now: Callable[[], float]
    ) -> None:
        self.upstream = upstream
        self.load = load
        self.silence = Silence(patience)
        self.doubts = Doubts()
        self.counts: Counter[str] = Counter()            # for /metrics
        self.up = True
        self.busy_until = 0.0
        self.failed = 0                                  # checks and requests in a row
        self._is_unheard = False                         # the last check got no answer in time
        self._was_silent = False                         # as the log knows
        self._most_failures = options.health_failures
        self._most_still = options.stall_timeout or math.inf
        self._now = now
        self._counted: tuple[float, float] | None = None         # when, and how many tokens it had made by then
        self._rate: float | None = None

    @property
    def url(self) -> str:
        return self.upstream.url

    def is_usable(self, now: float) -> bool:
        return self.up and now >= self.busy_until

    def can_take_over(self) -> bool:
        """Whether requests that another one does not answer may come here."""
        now = self._now()
        return self.is_usable(now) and not self.is_silent(now)

    def is_silent(self, now: float) -> bool:
        """Whether it had better be chosen last."""
        return self._is_unheard or self.silence.is_silent(now)

    def was_heard(self, since: float) -> bool:
        """Whether it has answered all the time: of a silence no times are learned."""
        return not self._is_unheard and since > self.silence.ended

    def answered(self) -> None:
        """A request. It does not bring back one that is down: while a server stops it finishes what it has."""
        if self.up:
            self.failed = 0

    def succeeded(self) -> None:
        """A check."""
        self.failed = 0
        if not self.up:
            # What it asked for before it was down is over, too, and what failed there: it may be another one.
            self.up, self.busy_until, self.doubts = True, 0.0, Doubts()
            logger.warning("%s is up again", self.url)

    def fail(self, reason: str) -> None:
        self.failed += 1
        self.counts["failures"] += 1
        if self.up and self.failed >= self._most_failures:
            self.up = False
            logger.warning("%s is down: %s", self.url, reason)

    def rate(self, now: float, tokens: float | None) -> float | None:
        """Tokens per second between the last two looks at its counter; None: not known, or no tokens."""
        if tokens is None:
            self._counted = self._rate = None
        elif self._counted is None or tokens < self._counted[1]:
            self._counted = now, tokens
        elif now - self._counted[0] >= RATE_SECONDS:
            self._rate = (tokens - self._counted[1]) / (now - self._counted[0]) or None
            self._counted = now, tokens
        return self._rate

    def asked_to_wait(self, retry_after: bytes) -> None:
        """It answered 429 or 503. Without a number of seconds, one second."""
        try:
            seconds = float(retry_after)
        except ValueError:
            seconds = 1.0
        self.counts["busy"] += 1
        self.busy_until = self._now() + min(MOST_RETRY_AFTER, max(0.0, seconds))

    async def check(self, seconds: float) -> None:
        """One health check. A server without /health is alive if it answers at all."""
        try:
            status = await self._health(seconds)
        except (TimeoutError, ReplicaFailure) as error:
            self._is_unheard = isinstance(error, TimeoutError)
            self.upstream.unheard()
            self.fail(str(error) or f"/health takes longer than {seconds:g} s")
            return
        if self._is_unheard:
            self._is_unheard, self.silence.ended = False, self._now()
        self.upstream.heard()
        if status == 503:                                # it loads or stops, and says so: down at once
            self.failed = self._most_failures - 1
        if status >= 500:
            self.fail(f"/health answers {status}")
        else:
            self.succeeded()

    async def look_again(self) -> None:
        """A check out of turn of one that is down, which counts only if it succeeds."""
        with suppress(TimeoutError, ReplicaFailure):
            if await self._health(LOOK_SECONDS) < 500:
                self.succeeded()

    async def _health(self, seconds: float) -> int:
        async with asyncio.timeout(seconds), self.upstream.ask("GET", "/health") as answer:
            await answer.body(2**20)
            return answer.status

    async def numbers(self) -> dict[str, float]:
        """Of its own page of metrics; nothing from one that does not answer in time, or has no such page."""
        if not self.up:
            return {}
        try:
            async with asyncio.timeout(PAGE_SECONDS), self.upstream.ask("GET", "/metrics") as answer:
                body = await answer.body(MOST_PAGE)
                return read_metrics(body) if answer.status == 200 else {}
        except (TimeoutError, ReplicaFailure):
            return {}

    async def look_at_tokens(self) -> None:
        """Where an answer in one piece is late: it may be a long one, unless its engine makes no tokens at all."""
        found = await self.numbers() if self.silence.late(self._now()) else {}
        made = sum(found.get(name, 0.0) for name in MADE) if GENERATED in found else None
        self.silence.note_tokens(self._now(), made, self._most_still)

    def give_up_silent(self) -> None:
        """Its requests go on elsewhere, unless something has come of them since the checks fail."""
        if not self.up:
            self.upstream.give_up_silent(self._most_failures)

    def move_late(self) -> None:
        """What has waited far too long for the first of its answer goes elsewhere."""
        self.silence.move_late(self._now(), self._most_still)

    def give_up_standing(self) -> None:
        """Streams that have begun end, or go on elsewhere, if nothing comes from it any more."""
        self.silence.give_up_begun(self._now(), self._most_still)

    def tell_silence(self) -> None:
        """In the log: when it falls silent, and when it does not any more."""
        now = self._now()
        if (silent := self.is_silent(now)) == self._was_silent:
            return
        self._was_silent = silent
        if silent:
            late = len(self.silence.late(now))
            logger.warning("%s is silent (late requests: %d): others are chosen first", self.url, late)
        else:
            logger.warning("%s is not silent any more", self.url)


def read_metrics(page: bytes) -> dict[str, float]:
    """By name, without a regular expression: it would hold Python's lock for as long as a second."""
    found: dict[str, list[float]] = {}
    page = b"\n" + page + b"\n"
    for name in (*SUMMED, *AVERAGED):
        start, place = b"\n" + name.encode(), 0
        for _ in range(MOST_SAMPLES):
            if (place := page.find(start, place)) < 0:
                break
            place += len(start)
            labels, blank, value = page[place : page.index(b"\n", place)].rpartition(b" ")
            if blank and (not labels or (labels.startswith(b"{") and labels.endswith(b"}"))):
                with suppress(ValueError):
                    if 0 <= (number := float(value)) <= MOST_NUMBER:     # also false for NaN
                        found.setdefault(name, []).append(number)
    return {name: sum(values) if name in SUMMED else sum(values) / len(values) for name, values in found.items()}


async def keep_checking(
    replica: Replica, interval: float, others: Sequence[Replica] = (), sleep: Callable[[float], object] = asyncio.sleep
) -> None:
    """`others`: where its requests can go on. Without one that is up they wait: the replica may only be very slow."""
    while True:
        await replica.check(max(1.0, interval))
        replica.tell_silence()
        replica.give_up_standing()
        elsewhere = [each for each in others if each.up and each is not replica]
        if elsewhere:
            replica.give_up_silent()
        if any(each.can_take_over() for each in elsewhere):
            await replica.look_at_tokens()
            replica.move_late()
        await sleep(interval)  # type: ignore[misc]
