"""What a router shows of its replicas in GET /fleet: their own /metrics, asked with the page, and the times it has learned."""

from __future__ import annotations

import asyncio

from ridgeline.engine.replicas.fleet_report import FleetReply, FleetRow, report
from ridgeline.route.fleet import Fleet
from ridgeline.route.replica import GENERATED, HITS, KV_USED, MBU, MFU, QUERIES, RUNNING, WAITING, Replica


async def fleet_reply(fleet: Fleet) -> FleetReply:
    """All who ask while replicas are being asked get one page: each asks for it every two seconds."""
    if fleet.page is None or fleet.page.done():
        fleet.page = asyncio.ensure_future(_fleet_reply(fleet))
    return await asyncio.shield(fleet.page)


async def _fleet_reply(fleet: Fleet) -> FleetReply:
    pages = await asyncio.gather(*(each.numbers() for each in fleet.replicas))
    rows = [_row(fleet, each, found) for each, found in zip(fleet.replicas, pages, strict=True)]
    return report("servers", fleet.options.policy, rows, [each.load.times for each in fleet.replicas])


def _row(fleet: Fleet, replica: Replica, found: dict[str, float]) -> FleetRow:
    now, load = fleet.now(), replica.load
    state = "down" if not replica.up else "busy" if replica.busy_until > now else "silent" if replica.is_silent(now) else "ok"
    asked = found.get(QUERIES) or replica.counts["prompt_tokens"]
    hits = found.get(HITS, replica.counts["cached_tokens"]) if found.get(QUERIES) else replica.counts["cached_tokens"]
    return FleetRow(
        name=replica.url, state=state, running=int(found.get(RUNNING, len(load.running))),
        waiting=int(found.get(WAITING, len(load.waiting))), tokens_s=replica.rate(now, found.get(GENERATED)), busy=None,
        hit_rate=hits / asked if asked else None, kv_used=found.get(KV_USED), mfu=found.get(MFU),
        mbu=found.get(MBU), moved=replica.counts["moved"],
    )
