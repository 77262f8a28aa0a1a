"""A diagnosis as one self-contained HTML file: the same tree as the text, with plots of steps and parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.bench.load.latency import Outcome
from ridgeline.bench.load.serve_page import gap_plot, html_table, latency_plot, limits_of
from ridgeline.diagnose.as_text import overhead
from ridgeline.report import web_page
from ridgeline.report.plots import Axis, Note, Series, axis, plot, plot_grid
from ridgeline.report.style import GREY
from ridgeline.report.web_page import beside, escaped, paragraph, prose
from ridgeline.report.words import part_name, term_name

_SHARED = 0.1                        # of the time: with more for other programs, figures are those of a busy machine
_COLOUR = {"decode": 0, "prefill": 1, "mixed": 3}    # as on the dashboard


def diagnosis_page(
    tree: Mapping[str, Any], title: str, facts: Mapping[str, Any], outcomes: Sequence[Outcome] = (),
    points: Sequence[Mapping[str, Any]] = (),
) -> str:
    """`facts`: the workload. `points`: steps, with `start`, `seconds`, `phase` and `rows`; where they are known also `flops`,
    `bytes` and `device`."""
    application, steps, machine = tree["application"], tree["steps"], tree.get("machine", {})
    answered = [outcome for outcome in outcomes if outcome.ok and outcome.events]
    limits = limits_of(application.get("slo"))
    latencies = [plot_grid([latency_plot(answered, limits), gap_plot(answered, limits)])] if answered else []
    timelines = [plot_grid([_timeline(points), *_roofline(points, machine)])] if points else []
    ops = tree.get("ops")
    patterns = [
        {"pattern": each["pattern"], "of the time": f"{each['share']:.0%}", "seen": each["evidence"]}
        for each in tree.get("patterns") or ()
    ]
    known = {name: value for name, value in facts.items() if name != "options"}
    sections = [
        ("What to change", [html_table(_remedies(tree["remedies"])) or paragraph("Nothing was found.", "quiet")]),
        ("Where the busy time goes", [html_table(_split(tree["verdict"]["parts"]))]),
        ("Application", [beside(html_table(_latencies(application)), web_page.facts(_rates(application))), *latencies]),
        ("Steps", [_lost(steps), html_table(_phases(steps)), html_table(_slowest(steps)), *timelines]),
        ("Ops and kernels", [html_table(_parts(ops)), _profiler(tree)] if ops and ops["parts"] else []),
        ("Patterns in the trace", [html_table(patterns)]),
        ("What was measured", [beside(*(
            web_page.titled(heading, web_page.facts(rows))
            for heading, rows in (
                ("Machine", _machine(machine, tree)), ("Workload", known), ("Options", facts.get("options") or {}),
            )
        ))]),
    ]
    return web_page.page(title, _lead(tree["verdict"], machine), sections)


def _lead(verdict: Mapping[str, Any], machine: Mapping[str, Any]) -> list[str]:
    term = verdict["term"]
    bound = "Idle." if term == "idle" else f"Bound by {term_name(term)}."
    room = "" if term == "idle" else f" {verdict['headroom']:.1f}× as fast if every op ran at its roof with no overhead."
    where = [paragraph(f"Measured on {machine['device']}.", "quiet")] if machine.get("device") else []
    return [f'<p class="lead"><b>{escaped(bound)}</b> {prose(_sentence(verdict["why"]))}{escaped(room)}</p>', *where]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _machine(machine: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    read, flops = machine.get("read_bytes_s"), machine.get("flops_s")
    return {
        "device": machine.get("device"), "measured read bandwidth": f"{read / 1e9:,.1f} GB/s" if read else None,
        "measured matrix rate": f"{flops / 1e9:,.1f} GFLOP/s" if flops else None,
        "ridge": f"{flops / read:.1f} FLOP per byte" if read and flops else None,
        "power and clock of the GPU": (tree.get("gpu") or {}).get("line"),
        "load average before": f"{machine['load']:.2f}" if machine.get("load") is not None else None,
    }


def _remedies(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"change": each["what"], "predicted gain": f"{each['gain']:.2f}×" if each["gain"] else "unknown",
         "from": f"{each['from']}: {each['why']}", "check": each["trade_off"]}
        for each in found
    ]


def _latencies(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    shown = {"p50": "P50", "p90": "P90", "p99": "P99", "max": "max"}
    return [
        {"latency, ms": title} | {shown[key]: value for key, value in found[name].items() if key in shown}
        for name, title in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")) if found[name]
    ]


def _rates(found: Mapping[str, Any]) -> dict[str, Any]:
    rates = {
        "requests answered": found["completed"], "output tok/s": f"{found['output_throughput']:,.1f}",
        "prompt tok/s": f"{found['input_throughput']:,.1f}", "SLO, ms": found.get("slo"),
    }
    if found.get("request_goodput") is not None:
        rates["within the SLO"] = f"{found['slo_attainment']:.0%} of the requests, {found['request_goodput']:.2f} a second"
    elif found.get("request_goodput_range"):
        (few, many), (low, high) = found["slo_attainment_range"], found["request_goodput_range"]
        rates["within the SLO"] = f"{few:.0%} to {many:.0%} of the requests (from histograms), {low:.2f} to {high:.2f} a second"
    return rates


def _lost(steps: Mapping[str, Any]) -> str:
    if not steps.get("lost"):
        return ""
    share = steps["lost"] / (steps["seconds"] or 1.0)
    return paragraph(f"Other programs used the CPU for {share:.0%} of the time.", "alarm" if share >= _SHARED else "quiet")


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
    return paragraph(said, "quiet")


def _split(parts: Mapping[str, float]) -> list[dict[str, Any]]:
    whole = sum(parts.values()) or 1.0
    return [
        {"part": part_name(name), "seconds": seconds, "share": f"{seconds / whole:.0%}"}
        for name, seconds in sorted(parts.items(), key=lambda item: -item[1]) if seconds
    ]


def _timeline(points: Sequence[Mapping[str, Any]]) -> str:
    phases = dict.fromkeys(point["phase"] for point in points)
    series = [
        Series(phase, [(point["start"], point["seconds"] * 1e3) for point in points if point["phase"] == phase], "dots",
               [f"{point['tokens']:.0f} tokens in {point['rows']:.0f} rows: {point['seconds'] * 1e3:.2f} ms"
                for point in points if point["phase"] == phase], _COLOUR.get(phase))
        for phase in phases
    ]
    heights = [height for each in series for _, height in each.points]
    return plot("Every step", series, axis("seconds", [point["start"] for point in points]), axis("ms", heights, log=True))


def _roofline(points: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> list[str]:
    """Steps under the machine's roofs, where their FLOPs and bytes are known."""
    known = [point for point in points if point.get("flops") and point.get("bytes") and point.get("device")]
    if not known or not machine.get("read_bytes_s") or not machine.get("flops_s"):
        return []
    dots = [(point["flops"] / point["bytes"], point["flops"] / point["device"] / 1e9) for point in known]
    x = axis("FLOP per byte", [min(place for place, _ in dots) / 2, max(place for place, _ in dots) * 2], log=True)
    edge = machine["flops_s"] / machine["read_bytes_s"]
    places = sorted({x.low, x.high, *([edge] if x.low < edge < x.high else [])})
    roof = [(place, min(place * machine["read_bytes_s"], machine["flops_s"]) / 1e9) for place in places]
    y = axis("GFLOP/s", [height for _, height in (*dots, *roof) if math.isfinite(height)], log=True)
    series = [Series("roof", roof, colour=GREY)]
    for phase in dict.fromkeys(point["phase"] for point in known):
        own = [dot for dot, point in zip(dots, known, strict=True) if point["phase"] == phase]
        series.append(Series(phase, own, "dots", colour=_COLOUR.get(phase)))
    return [plot("Steps under the roof", series, x, y, notes=_roof_notes(x, machine["read_bytes_s"], machine["flops_s"]))]


def _roof_notes(x: Axis, read_bytes_s: float, flops_s: float) -> list[Note]:
    """The two roofs by name, each where it is the lower one."""
    edge, notes = flops_s / read_bytes_s, []
    if x.low < edge:
        place = math.sqrt(x.low * min(edge, x.high))
        notes.append(Note((place, place * read_bytes_s / 1e9 * 0.8), f"memory {read_bytes_s / 1e9:,.1f} GB/s"))
    if x.high > edge:
        notes.append(Note((x.high, flops_s / 1e9 * 0.85), f"compute {flops_s / 1e9:,.1f} GFLOP/s"))
    return notes
