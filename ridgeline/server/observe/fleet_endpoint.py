"""`GET /fleet`: the engines of this server side by side; one row where there is one engine."""

from __future__ import annotations

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.replicas.fleet_report import FleetReply, FleetRow, report
from ridgeline.engine.replicas.learned_times import LearnedTimes
from ridgeline.engine.replicas.replica_llm import ReplicaLLM
from ridgeline.engine.replicas.replicated_llm import POLICY
from ridgeline.server.observe.roofline_endpoint import look


def fleet(llm: AsyncLLM) -> FleetReply:
    engines = llm.engines
    times = [each.requests.routed.times if isinstance(each, ReplicaLLM) else LearnedTimes() for each in engines]
    rows = [_row(number, each) for number, each in enumerate(engines)]
    return report("engines", POLICY if len(engines) > 1 else "", rows, times)


def _row(number: int, engine: AsyncLLM) -> FleetRow:
    found, ready, metrics = look(engine), engine.ready, engine.metrics
    asked, used = metrics.counter("prefix_queries"), found.total
    blocks = ready.num_blocks if ready else 0
    return FleetRow(
        name=f"engine {number}", state=engine.state, running=engine.running, waiting=engine.load.waiting_answers,
        tokens_s=used.sampled_s if used.steps else None,
        busy=min(1.0, found.window.busy / found.seconds) if found.seconds else None,
        hit_rate=metrics.counter("prefix_hits") / asked if asked else None,
        kv_used=1 - engine.free_blocks / blocks if blocks and engine.state == "ok" else None,
        mfu=used.mfu if used.steps else None, mbu=used.mbu if used.steps else None,
        restarts=engine.num_restarts, moved=engine.num_moved,
        device=engine.placement.device if isinstance(engine, ReplicaLLM) else ready.device if ready else "",
    )
