"""What a router shows of its replicas in GET /fleet: their own /metrics, asked with the page, and the times it has learned."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

from ridgeline.engine.replicas.fleet_report import FleetReply, FleetRow, report
from ridgeline.route.fleet import Fleet
from ridgeline.route.replica import Replica
from ridgeline.route.upstream import ReplicaFailure

SECONDS = 2.0                        # for a replica to answer; the page is asked for every two seconds
MOST_BYTES = 8 * 2**20
MOST_NUMBER = 2.0**53                # a larger one is not believed: sums of such have no end, and no page could show them
# vLLM has the first five, too. Of a server with several engines, the first number of each pair is a sum and the second a mean.
_SUMMED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total",
           "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
_AVERAGED = ("vllm:kv_cache_usage_perc", "ridgeline:mfu", "ridgeline:mbu")
_SAMPLE = re.compile(rf"^({'|'.join(map(re.escape, (*_SUMMED, *_AVERAGED)))})(?:{{[^\n]*}})? (\S+)$", re.MULTILINE)


async def fleet_reply(fleet: Fleet) -> FleetReply:
    pages = await asyncio.gather(*(_numbers(each) for each in fleet.replicas))
    rows = [_row(fleet, each, found) for each, found in zip(fleet.replicas, pages, strict=True)]
    return report("servers", fleet.options.policy, rows, [each.load.times for each in fleet.replicas])


async def _numbers(replica: Replica) -> dict[str, float]:
    """Nothing from one that does not answer in time, or has no such page."""
    if not replica.up:
        return {}
    try:
        async with asyncio.timeout(SECONDS), replica.upstream.ask("GET", "/metrics") as answer:
            body = await answer.body(MOST_BYTES)
            return read_metrics(body.decode(errors="replace")) if answer.status == 200 else {}
    except (TimeoutError, ReplicaFailure):
        return {}


def read_metrics(text: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        with suppress(ValueError):
            if 0 <= (number := float(value)) <= MOST_NUMBER:     # also false for NaN
                found.setdefault(name, []).append(number)
    return {name: sum(values) if name in _SUMMED else sum(values) / len(values) for name, values in found.items()}


def _row(fleet: Fleet, replica: Replica, found: dict[str, float]) -> FleetRow:
    now, load = fleet.now(), replica.load
    state = "down" if not replica.up else "busy" if replica.busy_until > now else "silent" if replica.is_silent(now) else "ok"
    asked = found.get(_SUMMED[4]) or replica.counts["prompt_tokens"]
    hits = found.get(_SUMMED[3], replica.counts["cached_tokens"]) if found.get(_SUMMED[4]) else replica.counts["cached_tokens"]
    return FleetRow(
        name=replica.url, state=state, running=int(found.get(_SUMMED[0], len(load.running))),
        waiting=int(found.get(_SUMMED[1], len(load.waiting))), tokens_s=replica.rate(now, found.get(_SUMMED[2])), busy=None,
        hit_rate=hits / asked if asked else None, kv_used=found.get(_AVERAGED[0]), mfu=found.get(_AVERAGED[1]),
        mbu=found.get(_AVERAGED[2]), moved=replica.counts["moved"],
    )
