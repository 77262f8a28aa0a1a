"""The HTML report of `bench serve`: tables and plots in one self-contained file, without scripts.

Plots: for each point the distributions of its latencies and its timeline; over all points, goodput, throughput and latency
against the rate. Limits of the SLO are drawn into them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ridgeline.bench.lab import price, table
from ridgeline.bench.lab.sweep import middle
from ridgeline.bench.load import client_check
from ridgeline.bench.load.latency import Outcome, parse_slo
from ridgeline.report import web_page
from ridgeline.report.plots import Limit, Series, axis, distribution, plot, plot_grid
from ridgeline.report.web_page import paragraph

Limits = dict[str, float]            # of the SLO, in ms, by the latency's name


def report(made: dict[str, Any], runs: Sequence[Sequence[Outcome]]) -> str:
    """`made` is the record; `runs` the requests of each point's last run."""
    points, workload, machine = made["figures"]["points"], made["workload"], made["machine"]
    limits = limits_of(workload["slo"])
    client = f"{machine['cpu']}, {machine['cores']} cores"
    lead = [
        paragraph(f"{workload['url']}{workload['endpoint']}, {made['date']}. Client: {client}.", "quiet"),
        paragraph(f"Latencies count from the intended time of sending. Tokens counted by: {workload['tokens_counted_by']}. "
                  f"Quality: {made['quality']}.", "quiet"),
        *(paragraph(client_check.verdict(middle(point["figures"]["client"])), "alarm")
          for point in points if point["figures"]["client"]["is_bottleneck"]),
    ]
    sections = [
        ("Summary", [html_table([_summary(point) for point in points]), _goodput(made)]),
        ("Over the sweep", _sweep(points, limits)),
    ]
    sections += [(f"{_named(point)} ({point['process']})", _point(point, outcomes, limits))
                 for point, outcomes in zip(points, runs, strict=True)]
    facts = workload | {"client": client, "ridgeline": made["versions"]["ridgeline"], "commit": made["commit"]}
    sections.append(("Workload and machine", [web_page.facts(facts)]))
    return web_page.page(f"{workload['model'] or 'a model'} under load", lead, sections)


def limits_of(slo: str | None) -> Limits:
    found = parse_slo([slo]) if slo else None
    return {name: limit * 1e3 for name, limit in found.limits} if found else {}


def _goodput(made: dict[str, Any]) -> str:
    best = made["figures"].get("best_goodput")
    if not best:
        return ""
    slo = made["workload"]["slo"]
    if not best["request_goodput"]:
        return paragraph(f"No request met the SLO {slo} (ms), at any setting.", "alarm")
    return paragraph(f"Most requests within the SLO {slo} (ms): {best['request_goodput']:.2f} requests/s at {_named(best)}.")


def _summary(point: dict[str, Any]) -> dict[str, Any]:
    found = point["figures"]
    cells: dict[str, Any] = {
        "setting": _named(point), "answered": found["completed"], "failed": found["failed"],
        "requests/s": found["request_throughput"], "input tok/s": found["input_throughput"],
        "output tok/s": found["output_throughput"],
    }
    if "request_goodput" in found:
        cells |= {"goodput, requests/s": found["request_goodput"], "met the SLO": f"{middle(found['slo_attainment']):.1%}"}
    cells |= {
        f"{title} {percent.upper()}, ms": found[name].get(percent)
        for name, title in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
        for percent in ("p50", "p99")
    }
    return cells


def _line(across: Sequence[float], points: Sequence[dict[str, Any]], name: str, path: Sequence[str]) -> Series:
    """One figure of all points, by the path of its names."""
    found = []
    for place, point in zip(across, points, strict=True):
        value: Any = point["figures"]
        for part in path:
            value = value.get(part, {}) if isinstance(value, dict) else {}
        if value not in ({}, None):
            found.append((place, middle(value)))
    found.sort()
    return Series(name, found, "line+dots", [f"{number:g}" for _, number in found])


def _sweep(points: list[dict[str, Any]], limits: Limits) -> list[str]:
    """Figures against the rate, or against the number of users; nothing for a single point."""
    rates = [point["setting"]["request_rate"] for point in points]
    by_rate = all(isinstance(rate, int | float) for rate in rates)
    across = [float(rate) for rate in rates] if by_rate else [point["setting"]["max_concurrency"] or 0 for point in points]
    if len(set(across)) < 2:
        return []
    label = "offered rate, requests/s" if by_rate else "concurrency"
    x = axis(label, across)
    line = functools.partial(_line, across, points)
    served = [line("answered", ["request_throughput"])]
    if by_rate:
        served.insert(0, Series("offered", sorted((place, place) for place in across)))
    if limits:
        served.append(line("within the SLO (goodput)", ["request_goodput"]))
    first = [line(f"TTFT {percent.upper()}", ["ttft_ms", percent]) for percent in ("p50", "p90", "p99")]
    later = [line(f"TPOT {percent.upper()}", ["tpot_ms", percent]) for percent in ("p50", "p90", "p99")]
    first_y = axis("ms", _heights(first) + _only(limits, "ttft"), log=True)
    later_y = axis("ms", _heights(later) + _only(limits, "tpot"))
    plots = [
        plot("Rate and goodput", served, x, axis("requests/s", _heights(served))),
        plot("Time to first token", first, x, first_y, _drawn(limits, "ttft")),
        plot("Time per output token", later, x, later_y, _drawn(limits, "tpot")),
    ]
    return [plot_grid(plots)]


def _only(limits: Limits, *names: str) -> list[float]:
    return [limits[name] for name in names if name in limits]


def _drawn(limits: Limits, *names: str, across: bool = False) -> list[Limit]:
    return [Limit(limits[name], f"SLO {name.upper()} {limits[name]:g} ms", across) for name in names if name in limits]


def _point(point: dict[str, Any], outcomes: Sequence[Outcome], limits: Limits) -> list[str]:
    found = point["figures"]
    answered = [outcome for outcome in outcomes if outcome.ok]
    said = [html_table(_percentiles(found))]
    if found["errors"]:
        kinds = ", ".join(f"{kind}: {table.cell(count)}" for kind, count in found["errors"].items())
        said.append(paragraph(f"errors: {kinds}. {point.get('first_error', '')}", "alarm"))
    if found.get("kept_up") is False:
        said.append(paragraph(f"the server did not keep up with {middle(found['offered_rate']):.2f} requests/s", "alarm"))
    said.append(paragraph(client_check.verdict(middle(found["client"])), "quiet"))
    for name, text in (("sustain", lambda: point["sustain"]["verdict"]), ("cost", lambda: price.line(middle(found["cost"])))):
        if name in point or name in found:
            said.append(paragraph(text(), "quiet"))
    if answered:
        said.append(plot_grid([
            latency_plot(answered, limits), gap_plot(answered, limits), _over_time(point), _requests_over_time(answered, limits),
        ]))
    return said


def _percentiles(found: dict[str, Any]) -> list[dict[str, Any]]:
    """From the intended time, and from sending."""
    rows = []
    for name, title in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2el_ms", "E2EL")):
        for tree, where in ((found, ""), (found["from_send"], ", from sending")):
            if tree.get(name):
                spread = {shown: tree[name][shown.lower()] for shown in ("P50", "P90", "P95", "P99", "max")}
                rows.append({"latency, ms": title + where} | spread)
    return rows


def latency_plot(answered: Sequence[Outcome], limits: Limits) -> str:
    series = [
        Series("TTFT", distribution([outcome.ttft() * 1e3 for outcome in answered])),
        Series("TTFT, from sending", distribution([outcome.ttft(True) * 1e3 for outcome in answered])),
        Series("E2EL", distribution([outcome.e2el() * 1e3 for outcome in answered])),
        Series("E2EL, from sending", distribution([outcome.e2el(True) * 1e3 for outcome in answered])),
    ]
    return _shares("Latency", series, limits, "ttft", "e2el")


def gap_plot(answered: Sequence[Outcome], limits: Limits) -> str:
    series = [
        Series("TPOT", distribution([outcome.tpot * 1e3 for outcome in answered if outcome.tpot is not None])),
        Series("ITL", distribution([gap * 1e3 for outcome in answered for gap in outcome.gaps()])),
    ]
    return _shares("Between tokens", series, limits, "tpot", "itl")


def _shares(title: str, series: Sequence[Series], limits: Limits, *names: str) -> str:
    places = [value for each in series for value, _ in each.points] + _only(limits, *names)
    x, y = axis("ms", places, log=True), axis("share at or below", [0.0, 1.0])
    return plot(title, series, x, y, _drawn(limits, *names, across=True))


def _over_time(point: dict[str, Any]) -> str:
    rows = point["timeline"]
    steps = [(row["at_s"], row["output_throughput"]) for row in rows]
    if len(steps) > 1:                                   # draw the last stretch to its end
        steps.append((2 * steps[-1][0] - steps[-2][0], steps[-1][1]))
    series = [Series("output tok/s", steps, "step")]
    x = axis("seconds", [place for place, _ in steps])
    return plot("Output tokens per second", series, x, axis("tok/s", _heights(series)))


def _requests_over_time(answered: Sequence[Outcome], limits: Limits) -> str:
    labels = [
        f"{outcome.tokens_in} in, {outcome.tokens_out} out: first token after {outcome.ttft() * 1e3:.0f} ms, "
        f"all after {outcome.e2el() * 1e3:.0f} ms"
        for outcome in answered
    ]
    series = [
        Series("TTFT", [(outcome.intended, outcome.ttft() * 1e3) for outcome in answered], "dots", labels),
        Series("E2EL", [(outcome.intended, outcome.e2el() * 1e3) for outcome in answered], "dots", labels),
    ]
    x = axis("intended time of sending, seconds", [outcome.intended for outcome in answered])
    y = axis("ms", _heights(series) + _only(limits, "ttft", "e2el"), log=True)
    return plot("Every request", series, x, y, _drawn(limits, "ttft", "e2el"))


def _heights(series: Sequence[Series]) -> list[float]:
    return [height for each in series for _, height in each.points if math.isfinite(height)]


def html_table(rows: Sequence[dict[str, Any]]) -> str:
    return web_page.table(rows, table.cell)


def _named(point: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in point["setting"].items() if value is not None)
