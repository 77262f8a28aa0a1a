"""All replicas of a router, and what is counted for /metrics and /replicas."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.engine.replicas.fleet_report import FleetReply
from ridgeline.engine.replicas.learned_times import mean_pace
from ridgeline.engine.replicas.policies import Choice
from ridgeline.engine.replicas.prefix_tree import MOST_NODES, PrefixTree
from ridgeline.engine.replicas.replica_load import Habits, ReplicaLoad, Usage
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt
from ridgeline.engine.replicas.silence import Patience
from ridgeline.errors import ConfigError, Overloaded, TryAgain
from ridgeline.metrics import FIRST_TOKEN_SECONDS, Histogram
from ridgeline.process.children import erase_variable
from ridgeline.route.replica import Replica
from ridgeline.route.route_options import RouteOptions
from ridgeline.route.upstream import MOST_IDLE, Upstream
from ridgeline.server.http.admission import HeldBodies, Slots
from ridgeline.server.observe.prometheus import Families, Labels, written
from ridgeline.version import __version__

MOST_NODES_IN_ALL = 4_000_000        # of all prefix trees, in about 600 MB
MOST_BODIES = 512 * 2**20            # bytes of all long bodies: each is kept until its answer is complete
FILES = 3                            # of a request: its client, its replica, and a connection that another replica keeps idle
LOOK_PAUSE = 5.0                     # times as long as the last checks out of turn took, until the next
KEY_VARIABLE = "RIDGELINE_ROUTE_KEY"         # for all replicas; with _1, _2, … for one


class Fleet:
    def __init__(
        self, urls: Sequence[str], options: RouteOptions, keys: Sequence[str] = (), now: Callable[[], float] = time.monotonic
    ) -> None:
        habits, patience, most = Habits(), Patience(), min(MOST_NODES, MOST_NODES_IN_ALL // max(1, len(urls)))
        upstreams = [Upstream(url, key) for url, key in zip(urls, keys or [""] * len(urls), strict=True)]
        if len({each.url for each in upstreams}) < len(upstreams):
            raise ConfigError("two replicas have the same address")
        self.options = options
        self.now = now
        self.replicas = [Replica(each, ReplicaLoad(habits, PrefixTree(most)), patience, options, now) for each in upstreams]
        self.choice = Choice(options.policy, [replica.load for replica in self.replicas])
        self.slots = Slots()
        self.slots.limit = options.max_queued_requests
        self.slots.predicted_wait = lambda: self.choice.shortest_wait(self.now(), self.usable())
        self.bodies = HeldBodies(MOST_BODIES, options.max_body_bytes)
        self.stopping = False
        self.has_ended = False
        self.deadlines = set[asyncio.Timeout]()          # of the requests that are under way
        self._look: asyncio.Future[None] | None = None   # checks of those that are down, out of turn
        self._next_look = 0.0
        self.page: asyncio.Future[FleetReply] | None = None      # GET /fleet, while replicas are asked
        self.counts: Counter[str] = Counter()
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.predicted_first_token = Histogram(FIRST_TOKEN_SECONDS)

    def limit_connections(self, most: int) -> None:
        """Clients' connections, as the limit on open files allows. Connections that are kept idle may be as many: where load
        moves from some replicas to others, a router without a file would take that for failures of its replicas."""
        self.options = replace(self.options, max_connections=most)
        for each in self.replicas:
            each.upstream.most_idle = min(MOST_IDLE, most // len(self.replicas))

    def usable(self, tried: Collection[int] = ()) -> list[int]:
        now = self.now()
        return [number for number, each in enumerate(self.replicas) if number not in tried and each.is_usable(now)]

    def choose(self, prompt: RoutedPrompt, tried: Collection[int]) -> int | None:
        now, usable, again = self.now(), self.usable(tried), bool(tried)
        heard = [number for number in usable if not self.replicas[number].is_silent(now)] or usable
        good = [number for number in heard if not self.replicas[number].doubts.is_last(prompt.model, now, again)] or heard
        return self.choice.choose(prompt, now, good) if usable else None

    async def choose_any(self, prompt: RoutedPrompt, tried: Collection[int]) -> int | None:
        """Where none is left, those that are down are checked at once: one may just have been restarted."""
        number = self.choose(prompt, tried)
        is_down = any(not each.up for place, each in enumerate(self.replicas) if place not in tried)
        if number is None and is_down and self.now() >= self._next_look:
            if self._look is None or self._look.done():
                self._look = asyncio.ensure_future(self._look_again())
            await asyncio.shield(self._look)             # one for all requests that wait for it
            number = self.choose(prompt, tried)
        return number

    async def _look_again(self) -> None:
        began = self.now()
        await asyncio.gather(*(each.look_again() for each in self.replicas if not each.up))
        # Where a replica does not even refuse, most requests are told at once that there is none.
        self._next_look = self.now() + LOOK_PAUSE * (self.now() - began)

    def nothing_usable(self) -> Exception:
        """Why no replica can take a request, for its client."""
        now, up = self.now(), [each for each in self.replicas if each.up]
        if not up:
            return TryAgain("no replica of this router is up; try again later", float(self.options.health_interval))
        waits = [each.busy_until - now for each in up if each.busy_until > now]
        return Overloaded("all replicas of this router are busy; try again later", min(waits, default=1.0))

    @property
    def num_open(self) -> int:
        """Answers that run or wait, and requests whose bodies arrive."""
        return self.slots.taken + self.bodies.num_reading

    @property
    def state(self) -> str:
        if self.stopping:
            return "stopping"
        return "ok" if any(each.up for each in self.replicas) else "down"

    def end_all(self) -> None:
        """Each request ends now, with an error."""
        self.has_ended = True
        for each in self.deadlines:
            if not each.expired():                       # else its client is being told, and reads slowly
                each.reschedule(0.0)

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        if self.page is not None:
            self.page.cancel()
        for each in self.replicas:
            each.upstream.close()

    def answered(self, replica: Replica, usage: Usage | None) -> None:
        replica.counts["answers"] += 1
        if usage is not None:
            replica.counts["prompt_tokens"] += usage.prompt
            replica.counts["cached_tokens"] += usage.cached or 0
            replica.counts["generation_tokens"] += usage.completion

    # -- what others may see -------------------------------------------------------------------------------------------

    def described(self) -> list[dict[str, Any]]:
        """For GET /replicas."""
        now, otherwise = self.now(), mean_pace(each.load.times for each in self.replicas)
        rows = []
        for each in self.replicas:
            pace = each.load.times.pace(otherwise)
            rows.append({
                "url": each.url, "up": each.up, "busy_seconds": round(max(0.0, each.busy_until - now), 3),
                "waiting": len(each.load.waiting), "running": len(each.load.running), "failures_in_a_row": each.failed,
                "silent": each.is_silent(now), "late": len(each.silence.late(now)),
                "prefix_nodes": len(each.load.tree), "prefix_nodes_limit": each.load.tree.limit,
                "seconds_per_prompt_token": pace.prefill_token, "seconds_per_prompt": pace.prefill_fixed,
                "seconds_per_step": pace.step_fixed, "seconds_per_step_and_request": pace.step_row, **each.counts,
            })
        return rows

    def metrics(self) -> str:
        """GET /metrics, in Prometheus' format."""
        found = Families()

        def add(kind: str, name: str, text: str, value: Callable[[Replica], float]) -> None:
            samples: list[tuple[Labels, float]] = [({"replica": each.url}, value(each)) for each in self.replicas]
            found.add(kind, f"ridgeline:route_{name}", text, *samples)

        add("gauge", "replica_up", "1: the replica is given requests.", lambda each: int(each.up))
        add("gauge", "requests_waiting", "Requests without a first token.", lambda each: len(each.load.waiting))
        add("gauge", "requests_running", "Requests whose answer has begun.", lambda each: len(each.load.running))
        now = self.now()
        add("gauge", "requests_late", "Requests that have waited far longer than usual for the first of their answers.",
            lambda each: len(each.silence.late(now)))
        add("gauge", "replica_silent", "1: the replica does not answer, and others are chosen first.",
            lambda each: int(each.is_silent(now)))
        add("gauge", "prefix_nodes", "Nodes of the replica's prefix tree.", lambda each: len(each.load.tree))
        add("gauge", "prompt_token_seconds", "Learned seconds per uncached prompt token.",
            lambda each: each.load.times.prefill.fitted()[1] if each.load.times.prefill.weight else 0.0)
        add("counter", "prefix_corrections", "Corrections of the prefix tree.", lambda each: each.load.corrections)
        for name, text in (
            ("answers", "Complete answers."), ("failures", "Failed checks and requests."), ("busy", "Answers 429 and 503."),
            ("moved_late", "Requests that waited far too long and went to another replica."),
            ("prompt_tokens", "Prompt tokens of answers."), ("cached_tokens", "Prompt tokens that the replica had cached."),
            ("generation_tokens", "Tokens of answers."),
        ):
            add("counter", name, text, lambda each, name=name: each.counts[name])  # type: ignore[misc]
        for name, text in (
            ("retries", "Requests sent to a further replica before their answer had begun."),
            ("resumed_streams", "Streams that went on from another replica."),
            ("broken_streams", "Answers that ended with an error after they had begun."),
            ("refused", "Requests that no replica could take."),
        ):
            found.add("counter", f"ridgeline:route_{name}", text, self.counts[name])
        first = "route_first_token_seconds", "From a replica's choice to the first text.", self.first_token
        predicted = "route_predicted_first_token_seconds", "The same, as predicted.", self.predicted_first_token
        for name, text, histogram in (first, predicted):
            found.add("histogram", f"ridgeline:{name}", text, histogram)
        found.add("gauge", "ridgeline:build_info", "The version, in the label.", ({"version": __version__}, 1))
        return written(found.made, {"policy": self.options.policy})


def replica_keys(count: int, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """API keys for the replicas, by number; from the environment, and removed from it."""
    taken = {}
    for name in (KEY_VARIABLE, *(f"{KEY_VARIABLE}_{number}" for number in range(1, count + 1))):
        taken[name] = environment.pop(name, "").strip()
        if environment is os.environ:
            erase_variable(name)
        if not taken[name].isascii() or not taken[name].isprintable() or " " in taken[name]:
            raise ConfigError(f"{name} must be printable ASCII characters without blanks")
    return [taken[f"{KEY_VARIABLE}_{number}"] or taken[KEY_VARIABLE] for number in range(1, count + 1)]
