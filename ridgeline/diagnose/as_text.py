"""A diagnosis as text, from the whole to the parts: application, steps, ops, patterns, verdict, remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.bench.lab import table
from ridgeline.roofline.verdict import IDLE

_PARTS = 12                          # lines of ops


def text(tree: Mapping[str, Any]) -> str:
    code = [each for each in tree["remedies"] if each.get("is_code")]
    settings = [each for each in tree["remedies"] if not each.get("is_code")]
    sections = [
        ("application", _application(tree["application"]) if "application" in tree else ""),
        ("steps", _steps(tree["steps"]) if "steps" in tree else ""),
        ("ops and kernels", _ops(tree.get("ops"), tree.get("profiler"))),
        ("patterns in the trace", _patterns(tree.get("patterns"))),
        ("verdict", _verdict(tree["verdict"]) + _gpu(tree.get("gpu")) if "verdict" in tree else ""),
        ("what to change, largest predicted gain first", remedies(settings, tree.get("model_of_time"), "ops" in tree)),
        ("what no setting changes: work on the engine's code", remedies(code) if code else ""),
    ]
    return "\n\n".join(f"── {title} ──\n{body}" for title, body in sections if body)


def _ms(spread: Mapping[str, float]) -> str:
    known = [f"{name.upper()} {spread[name]:.1f}" for name in ("p50", "p90", "p99", "max") if spread.get(name) is not None]
    return (" / ".join(known) + " ms") if known else "no requests"


def _application(found: Mapping[str, Any]) -> str:
    lines = [
        f"TTFT {_ms(found['ttft_ms'])}",
        f"TPOT {_ms(found['tpot_ms'])}",
        f"{found['completed']} requests answered, {found['output_throughput']:.1f} output tok/s, "
        f"{found['input_throughput']:.1f} prompt tok/s",
    ]
    if found.get("slo"):
        share, span = found.get("slo_attainment"), found.get("slo_attainment_range")
        if share is not None:
            lines.append(f"SLO {found['slo']}: {share:.0%} met it, goodput {found['request_goodput']:.2f} requests/s")
        elif span is not None:
            low, high = found["request_goodput_range"]
            lines.append(f"SLO {found['slo']}: between {span[0]:.0%} and {span[1]:.0%} met it (from histograms), goodput "
                         f"{low:.2f} to {high:.2f} requests/s")
    if found.get("preemptions"):
        lines.append(f"{found['preemptions']} preemptions")
    return "\n".join(lines)


def _steps(found: Mapping[str, Any]) -> str:
    whole = found["seconds"] or 1.0
    lines = [
        f"{found['count']} steps, {found['seconds']:.2f} s: device busy {found['device'] / whole:.0%}, device idle "
        f"{found['host'] / whole:.0%}"
    ]
    if found.get("lost"):
        lines.append(f"other programs used the CPU for {found['lost'] / whole:.0%} of the time")
    rows = [
        {"phase": phase, "steps": row["steps"], "of the time": f"{row['share']:.0%}", "median ms": row["median_ms"],
         "P99 ms": row["p99_ms"], "rows": row["rows"], "gaps": f"{row['gap_share']:.0%}",
         "at the roof": f"{row['at_roof']:.0%}" if row.get("at_roof") else ""}
        for phase, row in found["phases"].items()
    ]
    lines.append(table.as_markdown(rows))
    slow = found["slowest"]
    if slow["count"]:
        causes = ", ".join(f"{cause} {count}" for cause, count in slow["causes"].items())
        lines.append(f"slowest {slow['count']} steps (1 %), {slow['share_of_time']:.0%} of the time: {causes or 'cause unknown'}")
        lines += [
            f"  step {row['step']}: {row['ms']:.1f} ms, {row['times_median']:.1f}× the median, {row['phase']}, "
            f"{row['tokens']} tokens in {row['rows']} rows: {row['cause']}"
            for row in slow["steps"][:5]
        ]
    if found.get("slow_by_cause"):                       # a server counts more causes than its step times show
        counted = ", ".join(f"{cause} {count}" for cause, count in found["slow_by_cause"].items())
        lines.append(f"steps over three times the median, counted by the engine: {counted}")
    return "\n".join(lines)


def _ops(found: Mapping[str, Any] | None, profiler: Mapping[str, Any] | None) -> str:
    if not found or not found["parts"]:
        return ""
    rows = [
        {"part": row["part"], "calls/step": row["calls_per_step"], "ms/step": row["ms_per_step"],
         "of the time": f"{row['share']:.0%}", "floor ms": row.get("floor_ms_per_step"),
         "at the roof": f"{row['at_roof']:.0%}" if "at_roof" in row else "", "GB/s": row.get("gb_s"),
         "GFLOP/s": row.get("gflop_s"), "bound": row.get("bound", "")}
        for row in found["parts"][:_PARTS]
    ]
    span = found["seconds"] or 1.0
    gaps = ", ".join(f"{name} {seconds / span:.0%}" for name, seconds in found["gaps"].items() if seconds >= 0.005 * span)
    lines = [
        table.as_markdown(rows),
        f"matrix products {found['matrix_share']:.0%} of the busy time; busy {found['busy'] / span:.0%}"
        + (f"; gaps: {gaps}" if gaps else ""),
    ]
    if profiler:
        lines.append(f"profiled {profiler['steps']} steps; {overhead(profiler['overhead'])}")
    return "\n".join(lines)


def overhead(share: float) -> str:
    if share <= 0:
        return "the profiler's own cost is within the noise"
    return f"the profiler's own cost, {share:.0%} of a step, is subtracted from the gaps"


def _patterns(found: list[dict[str, Any]] | None) -> str:
    if found is None:
        return ""
    return "\n".join(f"{each['pattern']} ({each['share']:.0%}): {each['evidence']}" for each in found) or "none found"


def _gpu(found: Mapping[str, Any] | None) -> str:
    return f"\nGPU: {found['line']}" if found else ""


def _verdict(found: Mapping[str, Any]) -> str:
    if found["term"] == IDLE:                            # what there was of steps says nothing about a load
        return f"idle: {found['why']}; send requests while diagnose watches"
    return (
        f"bound by {found['term']}: {found['why']}\n"
        f"headroom: {found['headroom']:.1f}× if every op ran at its roof with no overhead"
    )


def remedies(found: list[dict[str, Any]], model: Mapping[str, Any] | None = None, profiled: bool = True) -> str:
    lines = []
    for number, each in enumerate(found, 1):
        gain = f"{each['gain']:.2f}×" if each["gain"] else "gain unknown"
        lines.append(f"{number}. {each['what']}: {gain} ({each['from']}: {each['why']}); check: {each['trade_off']}")
    if model:
        lines.append(f"(error of the time model on the unchanged workload: {model['error']:+.0%})")
    if not lines and not profiled:
        return ("nothing found from outside. To profile kernels as well, start the server with --admin-socket PATH and give "
                "diagnose the same option")
    return "\n".join(lines) or "nothing found"
