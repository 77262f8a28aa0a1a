"""Plots as inline SVG: lines, points and steps over two axes. Colours are the page's CSS variables, so plots follow its
dark or light mode."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
MOST_POINTS = 2000                   # of a scatter: more are thinned out evenly

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    kind: str = "line"               # "line", "step", "dots", or "line+dots"
    labels: Sequence[str] = ()       # shown when the mouse rests on a dot


@dataclass(slots=True)
class Axis:
    label: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    def place(self, value: float) -> float:
        """0 to 1 along the axis."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def _log_axis(label: str, low: float, high: float) -> Axis:
    start, end = math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-12)
    end = max(end, start + 1)
    within = [10.0**power * step for power in range(start, end + 1) for step in (1, 2, 5)]
    lower = max([tick for tick in within if tick <= low], default=10.0**start)
    upper = min([tick for tick in within if tick >= high and tick > lower], default=10.0**end)
    ticks = [tick for tick in within if lower <= tick <= upper * 1.0001]
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if math.isclose(math.log10(tick), round(math.log10(tick)), abs_tol=1e-9)]
    return Axis(label, lower, upper, True, ticks)


def axis(label: str, values: Sequence[float], log: bool = False, zero: bool = True) -> Axis:
    """An axis over these values, with ticks at round numbers."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not known:
        return Axis(label, 0.1 if log else 0.0, 1.0, log, [0.1, 1.0] if log else [0.0, 1.0])
    low, high = min(known), max(known)
    if log:
        return _log_axis(label, low, high)
    low = min(0.0, low) if zero else low
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / 5)
    first = math.floor(low / step) * step
    count = math.ceil((high - first) / step - 1e-9)
    return Axis(label, first, first + count * step, False, [first + number * step for number in range(count + 1)])


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if rough <= power * step * 1.000001)


def number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"


def plot(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """One plot as an SVG element, with a legend where there are several series."""
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(point: Point) -> tuple[float, float]:
        across, up = x.place(point[0]), y.place(point[1])
        return LEFT + inner_width * min(1.0, max(0.0, across)), TOP + inner_height * (1 - min(1.0, max(0.0, up)))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in x.ticks:
        place = LEFT + inner_width * x.place(tick)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{TOP + inner_height}"/>')
        parts.append(f'<text x="{place:.1f}" y="{TOP + inner_height + 16}" text-anchor="middle">{number(tick)}</text>')
    for tick in y.ticks:
        place = TOP + inner_height * (1 - y.place(tick))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    parts.append(f'<text x="{LEFT + inner_width / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x.label)}</text>')
    middle = TOP + inner_height / 2
    parts.append(
        f'<text transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle">{html.escape(y.label)}</text>'
    )
    for place, each in enumerate(series):
        parts.append(_drawn(each, place % 6, at))
    parts.append("</svg>")
    legend = "".join(
        f'<span><i class="swatch s{place % 6}"></i>{html.escape(each.name)}</span>' for place, each in enumerate(series)
    )
    shown = f'<p class="legend">{legend}</p>' if len(series) > 1 else ""
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{''.join(parts)}{shown}</figure>"


def _drawn(series: Series, colour: int, at: object) -> str:
    assert callable(at)
    points = [point for point in series.points if all(math.isfinite(each) for each in point)]
    if not points:
        return ""
    drawn = ""
    if "line" in series.kind or series.kind == "step":
        path = []
        for place, point in enumerate(points):
            across, up = at(point)
            if place and series.kind == "step":
                path.append(f"H{across:.1f}")
            path.append(f"{'L' if place else 'M'}{across:.1f} {up:.1f}")
        drawn += f'<path class="line s{colour}" d="{"".join(path)}"/>'
    if "dots" in series.kind:
        every = max(1, len(points) // MOST_POINTS)
        for place in range(0, len(points), every):
            across, up = at(points[place])
            said = series.labels[place] if place < len(series.labels) else ""
            title = f"<title>{html.escape(said)}</title>" if said else ""
            radius = 3.5 if "line" in series.kind else 2
            drawn += f'<circle class="dot s{colour}" cx="{across:.1f}" cy="{up:.1f}" r="{radius}">{title}</circle>'
    return drawn


def distribution(values: Sequence[float], most: int = 300) -> list[Point]:
    """The share of values at or below each value, thinned out to `most` points."""
    ordered = sorted(values)
    count = len(ordered)
    places = range(count) if count <= most else sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
    return [(ordered[place], (place + 1) / count) for place in places]
