"""`ridgeline bench serve URL`: puts load on any OpenAI-compatible server and measures the latencies of its users.

Finds out what the server supports (`target.py`), warms it up, sends prompts (`prompts.py`) at their times (`arrivals.py`,
`generator.py`), and computes figures (`latency.py`) for a table, a record, and a page (`serve_page.py`). Does not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ridgeline.bench.lab import price, sustain, table
from ridgeline.bench.lab.machine_log import Watch
from ridgeline.bench.lab.peak_memory import own_peak, server_peak
from ridgeline.bench.lab.record import record, write
from ridgeline.bench.lab.sweep import merged, middle, parse_share
from ridgeline.bench.load import client_check, server_check
from ridgeline.bench.load.client_check import ClientCheck
from ridgeline.bench.load.generator import Load
from ridgeline.bench.load.http_client import HttpClient
from ridgeline.bench.load.latency import (
    LEAST_OFFERED,
    MOST_GROWTH,
    Outcome,
    backlog_growth,
    figures,
    timeline,
)
from ridgeline.bench.load.prompts import PromptSource
from ridgeline.bench.load.serve_options import Plan, Setting, add_arguments, headers, plan
from ridgeline.bench.load.serve_page import report
from ridgeline.bench.load.server_check import ServerCheck
from ridgeline.bench.load.target import Target
from ridgeline.errors import ConfigError, EngineDead
from ridgeline.gpus import nvml
from ridgeline.process.progress import progress_bar
from ridgeline.report.columns import fitted
from ridgeline.server.event_loop import new_event_loop
from ridgeline.server.lifecycle import raise_file_limit
from ridgeline.text.tokenizer import Tokenizer

__all__ = ["add_arguments", "run"]

MOST_CACHED = 0.05                   # of the tokens of random prompts: more means that they are not new to the server
_LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}
_LOCAL = ("127.0.0.1", "::1", "localhost")


def run(args: argparse.Namespace) -> int:
    asked = plan(args)
    most = parse_share(args.max_failed, "--max-failed")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        made, points = runner.run(_bench(asked))
    if args.out:
        write(made, Path(args.out))
    if args.html:
        Path(args.html).parent.mkdir(parents=True, exist_ok=True)
        Path(args.html).write_text(report(made, points))
    if args.format == "md":
        print(fitted("\n".join(lines(made))))
    else:
        print(table.rendered([row(point) for point in made["figures"]["points"]], args.format, made))
    if failure := too_many_failed(made["figures"]["points"], most):
        print(f"ridgeline: error: {failure}", file=sys.stderr)
        return 1
    return 0


async def _bench(asked: Plan) -> tuple[dict[str, Any], list[list[Outcome]]]:
    """The record, and every request of each point's last run."""
    args = asked.args
    url, local, port = base_url(args.url)
    client = HttpClient(url, headers(args), not args.insecure)
    target = Target(
        client, asked.path, args.model, asked.extra, timeout=args.timeout,
        tokenizer=Tokenizer.load(args.tokenizer) if args.tokenizer else None,
    )
    generated = asked.dataset != "custom"
    await target.meet(args.ignore_eos if args.ignore_eos is not None else generated)
    target.quality = args.quality or target.quality
    most = max((setting.concurrency for setting in asked.settings), default=0)
    raise_file_limit(most or 4096)
    points: list[dict[str, Any]] = []
    last_runs: list[list[Outcome]] = []
    with Watch() if local else nullcontext() as watch:
        for number, setting in enumerate(asked.settings):
            try:
                point, outcomes = await _point(asked, target, setting, number, watch)
            except asyncio.CancelledError:                   # Ctrl-C: what is measured already is kept
                if not points:
                    raise
                print(f"interrupted: {len(points)} of {len(asked.settings)} settings were measured", file=sys.stderr)
                break
            points.append(point)
            last_runs.append(outcomes)
            if args.format == "md":
                print(fitted(progress_line(point)), flush=True)
    client.close()
    found = {"points": points} | _best(points)
    peak = {"client": own_peak(), "server_bytes": server_peak(port) if local else None}
    gpu = nvml.facts(nvml.visible()) if local else None
    return record("serve", _workload(asked, target, url), found, target.quality, gpu, peak), last_runs


async def _point(
    asked: Plan, target: Target, setting: Setting, number: int, watch: Watch | None
) -> tuple[dict[str, Any], list[Outcome]]:
    source, args = asked.source(setting, target.words), asked.args
    first_pass = None
    if args.first_pass:
        first_pass, *_ = await _run_once(asked, target, setting, source, f"{args.seed}-{number}-first", watch)
    await _warm_up(asked, target, setting, source)
    runs: list[dict[str, Any]] = []
    failed: Outcome | None = None
    for repeat in range(args.repeats):
        # Every run has prompts of its own: none finds in a prefix cache what another left there.
        found, outcomes, check = await _run_once(asked, target, setting, source, f"{args.seed}-{number}-{repeat}", watch)
        runs.append(found | {"client": check})
        failed = failed or next((outcome for outcome in outcomes if not outcome.ok), None)
    together = merged(runs)
    together["client"]["reasons"] = list(dict.fromkeys(reason for run in runs for reason in run["client"]["reasons"]))
    together["client"]["is_bottleneck"] = bool(together["client"]["reasons"])
    point: dict[str, Any] = {
        "setting": setting.named(), "process": asked.arrivals(setting).name if not asked.closed(setting) else "closed loop",
        "runs": len(runs), "figures": together, "timeline": timeline(outcomes),
    }
    if first_pass is not None:
        point["first_pass"] = first_pass
    if args.sustain is not None:
        names = ("output_throughput", "request_throughput", "ttft_ms")
        stretches = sustain.stretches(outcomes)
        series = {name: [(at["at_s"], at[name]) for at in stretches if name in at] for name in names}
        machine = runs[-1].get("machine", {})
        unknown = sustain.UNTOLD if watch is not None else "the server's machine is another, whose clocks are not known here"
        point["sustain"] = sustain.account(series, args.sustain, machine, unknown)
    if args.save_detailed:
        point["detailed"] = detailed(outcomes)
    if failed is not None:
        point["first_error"] = failed.detail if failed.detail.startswith(failed.error) else f"{failed.error}: {failed.detail}"
    return point, outcomes


async def _warm_up(asked: Plan, target: Target, setting: Setting, source: PromptSource) -> None:
    count = asked.args.num_warmups
    conversations = itertools.islice(asked.conversations(source, "warm-up"), count)
    outcomes = await Load(target).closed_loop(conversations, min(count, setting.concurrency or count), None)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if len(failed) == len(outcomes):
        raise EngineDead(f"every warm-up request failed ({failed[0].error}): {' '.join(failed[0].detail.split())[:300]}")


async def _run_once(
    asked: Plan, target: Target, setting: Setting, source: PromptSource, seed: str, watch: Watch | None
) -> tuple[dict[str, Any], list[Outcome], dict[str, Any]]:
    closed = asked.closed(setting)
    planned = [] if closed else asked.planned(setting, source, seed)
    total = len(planned) if not closed else asked.count() if asked.duration is None else 0
    _, local, port = base_url(asked.args.url)
    with progress_bar(label(setting), wanted=not asked.args.no_progress) as tick:
        load = Load(target, None if closed else setting.concurrency or None, _counter(tick, total))
        served = ServerCheck(port if local else None)
        begin = time.time()
        async with ClientCheck() as check:
            with served:
                if closed:
                    conversations = asked.conversations(source, seed)
                    outcomes = await load.closed_loop(conversations, setting.concurrency, asked.duration)
                else:
                    outcomes = await load.open_loop(planned)
        end = time.time()
    await target.count_texts(outcomes)
    found = figures(outcomes, asked.slo)
    if not found["total_input_tokens"]:                  # a server that does not count prompts: unknown, and not nothing
        found |= dict.fromkeys(("total_input_tokens", "input_throughput", "total_token_throughput"))
    if planned and (span := planned[-1][0] - planned[0][0]) > 0:
        found["offered_rate"] = (len(planned) - 1) / span        # n requests have n − 1 gaps
        if (growth := backlog_growth(outcomes)) is not None:
            found |= {"backlog_growth": growth, "kept_up": growth <= MOST_GROWTH}
    if spent := served.figures(found["total_output_tokens"]):
        found["server"] = spent
    found |= _machine_and_cost(asked, found, watch, begin, end)
    return found, outcomes, check.figures(outcomes)


def _machine_and_cost(
    asked: Plan, found: dict[str, Any], watch: Watch | None, begin: float, end: float
) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if watch is not None and (machine := watch.between(begin, end)):
        more["machine"] = machine
    watts = watch.watts(begin, end) if watch is not None else None
    if cost := price.cost(
        asked.args.price, found["duration_s"], found["total_input_tokens"] or 0, found["total_output_tokens"],
        None if watts is None else watts * found["duration_s"],
    ):
        more["cost"] = cost
    return more


def _counter(tick: Callable[[int, int], None], total: int) -> Callable[[Outcome], None]:
    done = itertools.count(1)
    return lambda outcome: tick(number := next(done), max(total, number))


def base_url(url: str) -> tuple[str, bool, int]:
    """The server without /v1, whether it runs on this machine, and its port."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port if parts.port is not None else 443 if parts.scheme == "https" else 80
    except ValueError:
        raise ConfigError(f"{url!r} has an invalid host or port; an address looks like http://127.0.0.1:8000") from None
    path = parts.path.rstrip("/").removesuffix("/v1")
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), parts.hostname in _LOCAL, port


def _workload(asked: Plan, target: Target, url: str) -> dict[str, Any]:
    args = asked.args
    return {
        "url": url.rpartition("@")[2], "server": target.owner, "model": target.model, "endpoint": target.path,
        "dataset": asked.dataset, "dataset_path": Path(args.dataset_path).name if args.dataset_path else None,
        "prefix_len": args.prefix_len, "num_prefixes": args.num_prefixes, "prompt_format": args.prompt_format,
        "turns": args.turns if asked.dataset == "multi_turn" else "1", "think_time": args.think_time,
        "num_prompts": asked.count() if asked.duration is None else None, "duration": asked.duration,
        "burstiness": str(args.burstiness), "range_ratio": args.random_range_ratio, "seed": args.seed,
        "warm_ups": args.num_warmups, "repeats": args.repeats, "slo": str(asked.slo) if asked.slo else None,
        "fields": asked.extra | target.optional, "tokens_counted_by": target.counted_by,
        "prompt_lengths_by": target.words.source,
        "clock": "client, from each request's intended time of sending; under from_send from the sending itself",
    }


def failed_share(found: dict[str, Any]) -> float:
    """Of the requests of a point, all its runs together."""
    return float(middle(found["failed"]) / max(1.0, middle(found["requests"])))


def too_many_failed(points: list[dict[str, Any]], most: float) -> str:
    """What is wrong with the worst point, if more of its requests failed than may; its figures are those of survivors."""
    worst = max(points, key=lambda point: failed_share(point["figures"]))
    if (share := failed_share(worst["figures"])) <= most:
        return ""
    found = middle(worst["figures"])
    named = ", ".join(f"{name} {each}" for name, each in worst["setting"].items() if each is not None)
    first = " ".join(worst.get("first_error", "").split())[:200]
    return (f"{share:.0%} of the requests failed ({found['failed']:g} of {found['requests']:g}, with {named}): the figures are "
            f"those of the others; the first error: {first}. --max-failed {most:.0%} is the most that may")


def _best(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The setting with the highest goodput."""
    with_goodput = [point for point in points if "request_goodput" in point["figures"]]
    if not with_goodput:
        return {}
    best = max(with_goodput, key=lambda point: middle(point["figures"]["request_goodput"]))
    return {"best_goodput": {"setting": best["setting"], "request_goodput": middle(best["figures"]["request_goodput"])}}


def detailed(outcomes: list[Outcome]) -> dict[str, list[Any]]:
    """Every request, by column: times in seconds from the run's start."""
    return {
        "intended_s": [round(outcome.intended, 6) for outcome in outcomes],
        "sent_s": [round(outcome.sent, 6) for outcome in outcomes],
        "first_token_s": [round(outcome.events[0], 6) if outcome.events else None for outcome in outcomes],
        "ended_s": [round(outcome.ended, 6) for outcome in outcomes],
        "input_tokens": [outcome.tokens_in for outcome in outcomes],
        "output_tokens": [outcome.tokens_out for outcome in outcomes],
        "itls_ms": [[round(gap * 1e3, 3) for gap in outcome.gaps()] for outcome in outcomes],
        "error": [outcome.error for outcome in outcomes],
    }


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def label(setting: Setting) -> str:
    named = {name: each for name, each in setting.named().items() if each is not None}
    return ", ".join(f"{name} {each}" for name, each in named.items())


def row(point: dict[str, Any]) -> dict[str, Any]:
    """A point as a row of the table."""
    setting, found = point["setting"], point["figures"]
    cells: dict[str, Any] = {
        "rate": setting["request_rate"], "concurrency": setting["max_concurrency"], "in": setting["input_len"],
        "out": setting["output_len"], "done": found["completed"], "failed": found["failed"],
        "failed %": f"{failed_share(found):.0%}" if middle(found["failed"]) else "",
        "req/s": found["request_throughput"], "in tok/s": found["input_throughput"], "out tok/s": found["output_throughput"],
    }
    if "request_goodput" in found:
        cells |= {"goodput/s": found["request_goodput"]}
    for name, title in _LATENCIES.items():
        for percent in ("p50", "p99"):
            cells[f"{title} {percent.upper()} ms"] = found[name].get(percent)
    return cells


def progress_line(point: dict[str, Any]) -> str:
    found = point["figures"]
    named = ", ".join(f"{name} {each}" for name, each in point["setting"].items() if each is not None)
    text = f"{named}: {middle(found['request_throughput']):.2f} requests/s, {middle(found['output_throughput']):,.0f} tok/s out"
    if "request_goodput" in found:
        text += f", goodput {middle(found['request_goodput']):.2f}/s"
    return text


def lines(made: dict[str, Any]) -> list[str]:
    """The record as a page of text."""
    points, workload = made["figures"]["points"], made["workload"]
    said = ["", table.as_markdown([row(point) for point in points])]
    for point in points:
        said += _point_lines(point, workload)
    counted = workload["tokens_counted_by"]
    exact = "an assumption: one token per event" if counted == "events" else "exact"
    said += ["", f"tokens counted by: {counted} ({exact}); prompt lengths by: {workload['prompt_lengths_by']}"]
    if best := made["figures"].get("best_goodput"):
        said.append(goodput_line(best, workload["slo"]))
    return said


def _point_lines(point: dict[str, Any], workload: dict[str, Any]) -> list[str]:
    found = point["figures"]
    named = ", ".join(f"{name} {each}" for name, each in point["setting"].items() if each is not None)
    said = ["", f"{named} ({point['process']})", table.as_markdown(latency_rows(found))]
    if found["errors"]:
        kinds = ", ".join(f"{kind}: {table.cell(count)}" for kind, count in found["errors"].items())
        said.append(f"errors: {kinds}; the first of them: {point.get('first_error', '')[:200]}")
        said.append(f"{failed_share(found):.0%} of the requests failed: latencies and throughput are those of the others")
    if found.get("kept_up") is False:
        said.append(
            f"the server did not keep up with the {middle(found['offered_rate']):.2f} requests/s that were offered: "
            f"{middle(found['backlog_growth']):.0%} of them piled up"
        )
    elif "offered_rate" in found and "kept_up" not in found:
        said.append("too short to say whether the server keeps up with this rate: "
                    f"that takes {LEAST_OFFERED} requests at least, answers that "
                    "take less than half of the run, and more than chance")
    if (share := cached_share(found)) > MOST_CACHED and workload["dataset"] == "random" and not workload["prefix_len"]:
        said.append(f"{share:.0%} of the prompt tokens came from the server's prefix cache, which has seen these prompts "
                    "before: another --seed makes others")
    said.append(client_check.verdict(middle(found["client"])))
    if "server" in found:
        said.append(server_check.line(middle(found["server"])))
    if "first_pass" in point:
        said.append(first_pass_line(point["first_pass"], found))
    if "sustain" in point:
        said.append(point["sustain"]["verdict"])
    if "cost" in found:
        said.append(price.line(middle(found["cost"])))
    return said


def first_pass_line(first: dict[str, Any], found: dict[str, Any]) -> str:
    """The load before any warm-up beside the same load after it."""
    share = first["output_throughput"] / (middle(found["output_throughput"]) or 1)
    ttft, later = first["ttft_ms"].get("p99"), middle(found["ttft_ms"].get("p99"))
    times = f"; TTFT P99 {ttft:,.0f} ms, later {later:,.0f}" if ttft is not None and later is not None else ""
    return f"first pass: {first['output_throughput']:,.0f} tok/s out, {share:.1%} of the passes after it{times}"


def goodput_line(best: dict[str, Any], slo: str) -> str:
    if not best["request_goodput"]:
        return f"no request met {slo}: goodput is 0 at every setting"
    named = ", ".join(f"{name} {each}" for name, each in best["setting"].items() if each is not None)
    return f"best goodput under {slo}: {best['request_goodput']:.2f} requests/s at {named}"


def cached_share(found: dict[str, Any]) -> float:
    """Cached share of the prompt tokens, as far as the server reports it."""
    return float(middle(found["cached_input_tokens"]) / (middle(found["total_input_tokens"]) or 1))


def latency_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Percentiles by latency, from the intended time and from sending."""
    rows: list[dict[str, Any]] = []
    for name, title in _LATENCIES.items():
        for where, tree in (("", found), (", from sending", found["from_send"])):
            if tree.get(name):
                rows.append({"ms": title + where} | {key: tree[name][key] for key in ("p50", "p90", "p95", "p99", "max")})
    return rows
