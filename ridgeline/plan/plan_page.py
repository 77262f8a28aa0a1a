"""A plan as one self-contained page: Pareto plots as SVG and the tables. No scripts, no external assets, dark and light."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from ridgeline.plan.plan_report import text

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --back: #ffffff; --faint: #d9e0e7; --best: #c2410c; --dot: #2f6fb2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde5ee; --back: #12181f; --faint: #2b3744; --best: #fb923c; --dot: #7db7ee; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; } .axis { stroke: var(--faint); }
.dot { fill: var(--dot); opacity: .45; } .best { fill: var(--best); } .front { fill: none; stroke: var(--best); stroke-width: 2; }
pre { overflow-x: auto; font-size: 13px; } table { border-collapse: collapse; font-size: 14px; }
td, th { border-bottom: 1px solid var(--faint); padding: .25rem .6rem; text-align: right; } td:first-child { text-align: left; }
"""
_QUALITY = {
    "dB": "signal-to-noise of the worst number format, dB (a hint: measure with ridgeline eval)",
    "KL": "divergence from the unquantized model, nats (ridgeline eval)",
}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 900, 420, 70, 50, 20


def page(told: dict[str, Any]) -> str:
    """`told` with `points`, as report.fronts gives them."""
    points, unit = told["points"], told["quality_is"]
    title = f"{told['model']} on {told['device']}"
    plots = [
        ("Throughput against latency", _plot(
            points, lambda point: point["tpot"] * 1e3, "time per output token, ms", "best_latency", True)),
        ("Throughput against quality", _plot(
            [point for point in points if point["quality"] is not None], lambda point: point["quality"], _QUALITY[unit],
            "best_quality", False)),
    ]
    body = "".join(f"<h2>{name}</h2>\n{drawn}\n" for name, drawn in plots)
    best = [point for point in points if point["best_latency"] or point["best_quality"]]
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<meta name=viewport content='width=device-width'>\n"
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>\n"
        f"<p>Requests of {told['tokens_in']:,} tokens in and {told['tokens_out']:,} out. A dot is a setup: devices, formats, "
        f"batch. The line is the Pareto front: no other setup is better in both.</p>\n{body}{_table(best, unit)}\n"
        f"<h2>The whole plan</h2>\n<pre>{html.escape(text(told))}</pre>\n</html>\n"
    )


def _plot(
    points: Sequence[dict[str, Any]], across: Callable[[dict[str, Any]], float], label: str, best: str, logarithmic: bool
) -> str:
    if not points:
        return "<p>Nothing fits.</p>"
    xs = [across(point) for point in points]
    ys = [point["tok_s_device"] for point in points]
    x_of = _scale(min(xs), max(xs), _LEFT, _WIDTH - 20, logarithmic)
    y_of = _scale(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP, True)
    drawn = [f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{html.escape(label)}'>"]
    for value in _ticks(min(xs), max(xs), logarithmic):
        drawn.append(f"<line class=axis x1='{x_of(value):.1f}' x2='{x_of(value):.1f}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM}'/>"
                     f"<text x='{x_of(value):.1f}' y='{_HEIGHT - _BOTTOM + 16}' text-anchor=middle>{value:g}</text>")
    for value in _ticks(min(ys), max(ys), True):
        drawn.append(f"<line class=axis x1='{_LEFT}' x2='{_WIDTH - 20}' y1='{y_of(value):.1f}' y2='{y_of(value):.1f}'/>"
                     f"<text x='{_LEFT - 6}' y='{y_of(value) + 4:.1f}' text-anchor=end>{value:,.0f}</text>")
    drawn.append(f"<text x='{(_LEFT + _WIDTH) / 2}' y='{_HEIGHT - 12}' text-anchor=middle>{html.escape(label)}</text>")
    drawn.append(f"<text x='{_LEFT}' y='12'>output tokens per second and device</text>")
    front = sorted((x, y) for x, y, point in zip(xs, ys, points, strict=True) if point[best])
    drawn.append("<polyline class=front points='" + " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in front) + "'/>")
    for x, y, point in zip(xs, ys, points, strict=True):
        kind, size = ("best", 5) if point[best] else ("dot", 3)
        words = f"{point['label']}, batch {point['batch']}: {point['tpot'] * 1e3:.2f} ms, {y:,.0f} tok/s per device"
        drawn.append(f"<circle class={kind} cx='{x_of(x):.1f}' cy='{y_of(y):.1f}' r='{size}'><title>{html.escape(words)}"
                     "</title></circle>")
    return "\n".join([*drawn, "</svg>"])


def _scale(low: float, high: float, begin: float, end: float, logarithmic: bool) -> Callable[[float], float]:
    if logarithmic:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0

    def place(value: float) -> float:
        return begin + ((math.log(value) if logarithmic else value) - low) / span * (end - begin)

    return place


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Round numbers between the two: 1, 2 and 5 times a power of ten, or equal steps."""
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        return [value for value in found if low <= value <= high]
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-9)))
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _table(points: Sequence[dict[str, Any]], unit: str) -> str:
    rows = [
        f"<tr><td>{html.escape(point['label'])}<td>{point['batch']}<td>{point['ttft'] * 1e3:.0f}<td>{point['tpot'] * 1e3:.2f}"
        f"<td>{point['tok_s_device']:,.0f}<td>{'–' if point['quality'] is None else format(point['quality'], '.4g')}"
        + ("" if point["dollars_per_million"] is None else f"<td>{point['dollars_per_million']:.3f}")
        for point in sorted(points, key=lambda each: each["tpot"])
    ]
    priced = bool(points) and points[0]["dollars_per_million"] is not None
    head = f"<tr><th>Pareto-optimal<th>batch<th>TTFT ms<th>TPOT ms<th>tok/s per device<th>{unit}" + ("<th>$/M" if priced else "")
    return f"<table>{head}{''.join(rows)}</table>"
