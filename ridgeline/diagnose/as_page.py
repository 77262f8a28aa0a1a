"""A diagnosis as one self-contained HTML file: the same tree as the text, with plots of steps and parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.bench.lab.plots import Series, axis, plot
from ridgeline.bench.load.latency import Outcome
from ridgeline.bench.load.serve_page import escaped, gap_plot, html_table, latency_plot, page, plot_grid
from ridgeline.diagnose.as_text import overhead


def diagnosis_page(
    tree: Mapping[str, Any], title: str, facts: Mapping[str, Any], outcomes: Sequence[Outcome] = (),
    points: Sequence[Mapping[str, Any]] = (),
) -> str:
    """`facts`: workload and machine. `points`: steps, with `start`, `seconds`, `phase` and `rows`; where they are known also
    `flops`, `bytes` and `device`."""
    verdict = tree["verdict"]
    body = [
        f"<h1>{escaped(title)}</h1>",
        f'<p><b>Bound by {escaped(verdict["term"])}.</b> {escaped(verdict["why"])}; '
        f"headroom: {verdict['headroom']:.1f}× if every op ran at its roof with no overhead.</p>",
        "<h2>What to change</h2>", html_table(_remedies(tree["remedies"])),
        "<h2>Application</h2>", html_table(_application(tree["application"])),
    ]
    if outcomes:
        answered = [outcome for outcome in outcomes if outcome.ok and outcome.events]
        body.append(plot_grid([latency_plot(answered), gap_plot(answered)]))
    body += ["<h2>Steps</h2>", html_table(_phases(tree["steps"])), html_table(_slowest(tree["steps"]))]
    if points:
        body.append(plot_grid([_timeline(points), *_roofline(points, tree.get("machine", {}))]))
    ops = tree.get("ops")
    if ops and ops["parts"]:
        body += ["<h2>Ops and kernels</h2>", html_table(_parts(ops)), _profiler(tree)]
    if tree.get("patterns"):
        rows = [
            {"pattern": each["pattern"], "of the time": f"{each['share']:.0%}", "seen": each["evidence"]}
            for each in tree["patterns"]
        ]
        body += ["<h2>Patterns in the trace</h2>", html_table(rows)]
    body += ["<h2>Where the busy time goes</h2>", html_table(_split(verdict["parts"]))]
    known = [{"what": name, "value": str(value)} for name, value in facts.items() if value not in (None, "", {})]
    return page("diagnose", [*body, "<h2>Workload and machine</h2>", html_table(known)])


def _remedies(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"change": each["what"], "predicted gain": f"{each['gain']:.2f}×" if each["gain"] else "unknown",
         "from": f"{each['from']}: {each['why']}", "check": each["trade_off"]}
        for each in found
    ]


def _application(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"ms": title, **{key.upper(): found[name].get(key) for key in ("p50", "p90", "p99", "max")}}
        for name, title in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
    ]
    rows.append({"ms": "output tok/s", "P50": found["output_throughput"]})
    if found.get("request_goodput") is not None:
        rows.append({"ms": f"goodput, requests/s, under {found['slo']}", "P50": found["request_goodput"]})
    return rows


def _phases(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"phase": phase, "steps": row["steps"], "of the time": f"{row['share']:.0%}", "median ms": row["median_ms"],
         "P99 ms": row["p99_ms"], "rows": row["rows"], "gaps": f"{row['gap_share']:.0%}",
         "at the roof": f"{row['at_roof']:.0%}" if row.get("at_roof") else None}
        for phase, row in found["phases"].items()
    ]


def _slowest(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"slowest 1 %": f"step {row['step']}", "ms": row["ms"], "× median": row["times_median"], "phase": row["phase"],
         "tokens": row["tokens"], "cause": row["cause"]}
        for row in found["slowest"]["steps"]
    ]


def _parts(ops: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"part": row["part"], "calls/step": row["calls_per_step"], "ms/step": row["ms_per_step"],
         "of the time": f"{row['share']:.0%}", "floor ms": row.get("floor_ms_per_step"),
         "at the roof": f"{row['at_roof']:.0%}" if "at_roof" in row else None, "GB/s": row.get("gb_s"),
         "GFLOP/s": row.get("gflop_s"), "bound": row.get("bound")}
        for row in ops["parts"]
    ]


def _profiler(tree: Mapping[str, Any]) -> str:
    ops, profiler = tree["ops"], tree.get("profiler")
    said = f"Matrix products are {ops['matrix_share']:.0%} of the busy time."
    if profiler:
        said += f" Profiled {profiler['steps']} steps; {overhead(profiler['overhead'])}."
    return f'<p class="quiet">{escaped(said)}</p>'


def _split(parts: Mapping[str, float]) -> list[dict[str, Any]]:
    whole = sum(parts.values()) or 1.0
    return [
        {"part": name, "seconds": seconds, "share": f"{seconds / whole:.0%}"}
        for name, seconds in sorted(parts.items(), key=lambda item: -item[1]) if seconds
    ]


def _timeline(points: Sequence[Mapping[str, Any]]) -> str:
    phases = dict.fromkeys(point["phase"] for point in points)
    series = [
        Series(phase, [(point["start"], point["seconds"] * 1e3) for point in points if point["phase"] == phase], "dots",
               [f"{point['tokens']:.0f} tokens in {point['rows']:.0f} rows: {point['seconds'] * 1e3:.2f} ms"
                for point in points if point["phase"] == phase])
        for phase in phases
    ]
    heights = [height for each in series for _, height in each.points]
    return plot("Every step", series, axis("seconds", [point["start"] for point in points]), axis("ms", heights, log=True))


def _roofline(points: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> list[str]:
    """Steps under the machine's roof, where their FLOPs and bytes are known."""
    known = [point for point in points if point.get("flops") and point.get("bytes") and point.get("device")]
    if not known or not machine.get("read_bytes_s") or not machine.get("flops_s"):
        return []
    dots = [(point["flops"] / point["bytes"], point["flops"] / point["device"] / 1e9) for point in known]
    low, high = min(place for place, _ in dots) / 2, max(place for place, _ in dots) * 2
    edge = machine["flops_s"] / machine["read_bytes_s"]
    places = sorted({low, high, *([edge] if low < edge < high else [])})
    roof = [(place, min(place * machine["read_bytes_s"], machine["flops_s"]) / 1e9) for place in places]
    heights = [height for _, height in (*dots, *roof) if math.isfinite(height)]
    x = axis("FLOP per byte", [low, high], log=True)
    series = [Series("roof", roof), Series("steps", dots, "dots")]
    return [plot("Steps under the roof", series, x, axis("GFLOP/s", heights, log=True))]
