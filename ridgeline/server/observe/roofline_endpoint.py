"""`GET /roofline`: the engine's place on its machine's roofline over the last seconds; /metrics shows a part of it.

All of it is computed on request, from what the engine has reported; it costs nothing otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.errors import BadRequest
from ridgeline.gpus.clocks import shown
from ridgeline.roofline.live import WINDOW_SECONDS, Live, Utilisation
from ridgeline.roofline.step_cost import Peaks
from ridgeline.roofline.steps import PHASES, POINT
from ridgeline.roofline.verdict import Setting
from ridgeline.sizes.abilities import SHEET_NAMES
from ridgeline.sizes.hardware import data_sheet

HISTORY = ("at", "sampled_s", "tokens_s", "mfu", "mbu", "busy", "compute", "memory", "overhead", "others", "waiting", "rows")
LONGEST_SECONDS = 120.0              # the history that is kept
_RECENT_SECONDS = 300.0              # of the percentiles


def look(llm: AsyncLLM, seconds: float = WINDOW_SECONDS) -> Live:
    """The last seconds, with their verdict."""
    view = llm.roofline
    return view.live.look(time.monotonic(), view.rates, setting(llm), seconds, view.front_end)


def setting(llm: AsyncLLM) -> Setting:
    ready, stats = llm.ready, llm.roofline.stats
    if ready is None:
        return Setting()
    on = set(ready.techniques)
    return Setting(
        device=ready.device, max_rows=ready.max_num_seqs, kv_usage=1 - llm.free_blocks / max(1, ready.num_blocks),
        graphs="CUDA graphs" in on, overlap="overlap" in on, prefix_caching="prefix caching" in on,
        speculation="speculation" in on, ranks=llm.config.parallel.num_ranks, faster=stats.faster,
        untimed=stats.untimed, linear_share=stats.linear_share,
    )


def window_seconds(given: str | None) -> float:
    """The query's `seconds`."""
    if given is None:
        return WINDOW_SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= LONGEST_SECONDS:
        raise BadRequest(f"seconds must be a number from 1 to {LONGEST_SECONDS:.0f}")
    return seconds


def chosen(llm: AsyncLLM, given: str | None) -> AsyncLLM:
    """The query's `engine`; the first one without it."""
    given = "0" if given is None else given
    number = int(given) if given.isdecimal() and len(given) < 6 else -1      # "²" is a digit to Python, and no number
    if not 0 <= number < len(llm.engines):
        raise BadRequest(f"engine must be a number from 0 to {len(llm.engines) - 1}")
    return llm.engines[number]


class RooflineReply(msgspec.Struct):
    """Times in seconds; `at` is seconds before now; shares are parts of 1."""

    model: str
    state: str
    machine: dict[str, Any]          # its measured peaks, and those of the data sheet
    window: dict[str, float]
    utilisation: dict[str, Any]      # steps, tokens per second, MFU, HFU, MBU, what was wasted …
    phases: dict[str, dict[str, Any]]                    # … and the same by phase
    split: dict[str, float]          # of the busy time: compute, memory, kernels below their roof, overhead, others
    verdict: dict[str, Any]
    batch: dict[str, Any]
    kv: dict[str, Any]
    prefix: dict[str, float]
    drafts: dict[str, float]         # of speculation: how many were verified and accepted; all 0 where it is off
    latency: dict[str, dict[str, float | int | None]]    # percentiles over the last five minutes
    history: dict[str, Any]          # one row a second
    points: dict[str, Any]           # one row a step
    gpu: dict[str, Any] = {}         # mean power and clocks in the window; empty: not known, or nothing ran
    quality: str = ""                # what quantised weights cost, from their card
    engines: int = 1                 # of this server; the rest is about one of them


def document(
    llm: AsyncLLM, model: str, state: str, seconds: float = WINDOW_SECONDS, quality: str = ""
) -> RooflineReply:
    """The answer of GET /roofline."""
    now, view, ready, metrics = time.monotonic(), llm.roofline, llm.ready, llm.metrics
    found = look(llm, seconds)
    verdict, stats = found.verdict, view.stats
    num_blocks = ready.num_blocks if ready else 0
    asked, hit = metrics.counter("prefix_queries"), metrics.counter("prefix_hits")
    drafted, accepted = metrics.counter("draft_tokens"), metrics.counter("accepted_tokens")
    return RooflineReply(
        model=model,
        state=state,
        quality=quality,
        machine=_machine(llm),
        gpu=shown(found.window.clocks),
        window={"seconds": found.seconds, "busy": found.window.busy, "device": found.window.device},
        utilisation=_utilisation(found.total),
        phases={phase: _utilisation(used) for phase, used in found.phases.items()},
        split=found.split,
        verdict={
            "term": verdict.term, "share": verdict.share, "headroom": verdict.headroom, "why": verdict.why,
            "next": verdict.next,
            "changes": [
                {"what": change.what, "gain": change.gain, "trade_off": change.trade_off} for change in verdict.changes
            ],
            "parts": dict(verdict.parts),
        },
        batch={
            "running": llm.running, "waiting": metrics.engine.waiting, "max_rows": ready.max_num_seqs if ready else 0,
            "waiting_mean": found.window.waiting, "predicted_wait": llm.predicted_wait(),
        },
        kv={
            "blocks": num_blocks, "free": llm.free_blocks, "block_size": ready.block_size if ready else 0,
            "dtype": ready.kv_dtype if ready else "", "used": 1 - llm.free_blocks / num_blocks if num_blocks else 0.0,
            "held": stats.held, "cached": stats.cached,
        },
        drafts={"verified": drafted, "accepted": accepted, "rate": accepted / drafted if drafted else 0.0},
        prefix={"queries": asked, "hits": hit, "rate": hit / asked if asked else 0.0},
        latency={
            "first_token": _percentiles(metrics.recent_first_token, now),
            "per_output_token": _percentiles(metrics.recent_per_output_token, now),
        },
        history={"fields": HISTORY, "values": [[now - at, *rest] for at, *rest in view.live.history(view.rates)]},
        points={
            "fields": POINT, "phases": PHASES, "values": [[now - at, *rest] for at, *rest in list(view.points)],
        },
    )


def _machine(llm: AsyncLLM) -> dict[str, Any]:
    """What was measured, beside the data sheet."""
    stats, rates, ready = llm.roofline.stats, llm.roofline.rates, llm.ready
    sheet = data_sheet(stats.device) if stats.device else None
    name = SHEET_NAMES.get(stats.dtype, stats.dtype)
    return {
        "device": stats.device, "kind": ready.device if ready else "", "dtype": stats.dtype,
        "weight_bytes": stats.weight_bytes, "kv_bytes": stats.kv_bytes, "measured": stats.measured,
        "read_bytes_s": rates.read_bytes_s, "flops_s": rates.flops_s, "all_flops_s": stats.flops_s,
        "ridge": Peaks(rates.read_bytes_s, rates.flops_s).ridge if rates.read_bytes_s else None,
        "launch_s": stats.launch_s, "host_launch_s": stats.host_launch_s,
        "data_sheet": None if sheet is None else {
            "name": sheet.name, "read_bytes_s": sheet.bandwidth, "flops_s": sheet.rate(name), "ridge": sheet.ridge(name),
            "all_flops_s": {
                dtype: sheet.flops[SHEET_NAMES.get(dtype, dtype)] for dtype in stats.flops_s
                if SHEET_NAMES.get(dtype, dtype) in sheet.flops
            },
        },
    }


def _utilisation(used: Utilisation) -> dict[str, Any]:
    return {
        "steps": used.steps, "tokens_per_second": used.sampled_s, "computed_tokens_per_second": used.tokens_s,
        "rows": used.rows, "mfu": used.mfu, "hfu": used.hfu, "mbu": used.mbu, "peaks_doubtful": used.is_doubtful,
        "flops_per_byte": used.intensity,
        "wasted": {"padding": used.padding, "recomputation": used.recomputation, "rejected_drafts": used.rejected},
    }


def _percentiles(recent: Iterable[tuple[float, float]], now: float) -> dict[str, float | int | None]:
    """Of the requests of the last five minutes, 512 at most."""
    values = sorted(seconds for at, seconds in list(recent) if now - at <= _RECENT_SECONDS)
    found: dict[str, float | int | None] = {"count": len(values)}
    for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        found[name] = values[min(len(values) - 1, int(part * len(values)))] if values else None
    return found
