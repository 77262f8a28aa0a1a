"""Plots as inline SVG: lines, points and steps over two axes, with limits and notes. Colours are the page's CSS variables, so
plots follow its dark or light mode."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ridgeline.report.style import SERIES

HEIGHT = 230                         # pixels of the plot itself
ACROSS = 1000                        # units of its width in lines, which are stretched to the page's
RADIUS = 3.5
FEW_TICKS = 6
SAME = 0.004                         # of an axis: lines that are never further apart look like one
MOST_POINTS = 2000                   # of a scatter: more are thinned out evenly

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    kind: str = "line"               # "line", "step", "dots", "pale dots" or "line+dots"
    labels: Sequence[str] = ()       # shown when the mouse rests on a dot
    colour: int | None = None        # of the style's; None: the next one


@dataclass(frozen=True, slots=True)
class Limit:
    """A straight line through the whole plot, such as an SLO."""

    value: float
    text: str
    across: bool = False             # is it a value of the horizontal axis?


@dataclass(frozen=True, slots=True)
class Note:
    point: Point
    text: str


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


def plot(title: str, series: Sequence[Series], x: Axis, y: Axis, limits: Sequence[Limit] = (), notes: Sequence[Note] = ()) -> str:
    """One plot as a figure, with a legend where there are several series. Places across are percentages and heights are pixels:
    so text and dots keep their size at any width, and only lines are stretched."""
    shown = _numbered(_told_apart([each for each in series if each.points], x, y))
    parts = [f'<svg height="{HEIGHT}" role="img" aria-label="{html.escape(title)}">', *_ticks(x, y)]
    # Lines differ in their dashes too, so that two that run on top of each other can be told apart.
    dashes = {each.name: place for place, each in enumerate(each for each in shown if _is_line(each))}
    lines = "".join(_line(each, dashes[each.name], x, y) for each in shown if _is_line(each))
    if lines:
        box = f'viewBox="0 0 {ACROSS} {HEIGHT}" preserveAspectRatio="none" width="100%" height="{HEIGHT}"'
        parts.append(f"<svg {box}>{lines}</svg>")
    parts += [_dots(each, x, y) for each in sorted(shown, key=lambda each: each.kind == "line+dots")]
    parts += [_limit(each, x, y) for each in limits]
    parts += [_said(*each.point, each.text, "said", x, y) for each in notes]
    legend = "".join(f"<li>{_swatch(each, dashes.get(each.name, 0))}{html.escape(each.name)}</li>" for each in shown)
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<p class="unit">{html.escape(y.label)}</p><div class="canvas">{"".join(parts)}</svg></div>'
        f'<p class="unit x">{html.escape(x.label)}</p>'
        + (f'<ul class="legend">{legend}</ul>' if len(series) > 1 else "") + "</figure>"
    )


def plot_grid(plots: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>' if plots else ""


def _numbered(series: Sequence[Series]) -> list[Series]:
    return [each if each.colour is not None else replace(each, colour=place % SERIES) for place, each in enumerate(series)]


def _told_apart(series: Sequence[Series], x: Axis, y: Axis) -> list[Series]:
    """Lines that cannot be told from an earlier one are left out, and the legend names both."""
    found: list[Series] = []
    for each in series:
        same = next((place for place, other in enumerate(found) if _same(each, other, x, y)), None)
        if same is None:
            found.append(each)
        else:
            found[same] = replace(found[same], name=f"{found[same].name} = {each.name}")
    return found


def _same(one: Series, other: Series, x: Axis, y: Axis) -> bool:
    if one.kind == "dots" or one.kind != other.kind or len(one.points) != len(other.points) or not one.points:
        return False
    pairs = zip(one.points, other.points, strict=True)
    return all(abs(x.place(a) - x.place(c)) < SAME and abs(y.place(b) - y.place(d)) < SAME for (a, b), (c, d) in pairs)


def _across(value: float, x: Axis) -> float:
    return min(1.0, max(0.0, x.place(value)))


def _up(value: float, y: Axis) -> float:
    return HEIGHT * (1 - min(1.0, max(0.0, y.place(value))))


def _ticks(x: Axis, y: Axis) -> list[str]:
    """On a narrow page every second label is left out where there are many."""
    parts = []
    for number_of, tick in enumerate(x.ticks):
        place = f"{100 * x.place(tick):.2f}%"
        fine = ' class="fine"' if len(x.ticks) > FEW_TICKS and number_of % 2 else ""
        parts.append(f'<line class="grid" x1="{place}" x2="{place}" y1="0" y2="{HEIGHT}"/>')
        parts.append(f'<text{fine} x="{place}" y="{HEIGHT + 17}" text-anchor="middle">{number(tick)}</text>')
    for tick in y.ticks:
        height = _up(tick, y)
        parts.append(f'<line class="grid" x1="0%" x2="100%" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="-8" y="{height + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    return parts


def _known(series: Series) -> list[tuple[int, Point]]:
    return [(place, point) for place, point in enumerate(series.points) if all(math.isfinite(each) for each in point)]


def _is_line(series: Series) -> bool:
    return "line" in series.kind or series.kind == "step"


def _line(series: Series, dash: int, x: Axis, y: Axis) -> str:
    path = []
    for place, (_, (across, up)) in enumerate(_known(series)):
        here = ACROSS * _across(across, x)
        if place and series.kind == "step":
            path.append(f"H{here:.1f}")
        path.append(f"{'L' if place else 'M'}{here:.1f} {_up(up, y):.1f}")
    return f'<path class="line s{series.colour} d{dash % SERIES}" d="{"".join(path)}"/>'


def _dots(series: Series, x: Axis, y: Axis) -> str:
    if "dots" not in series.kind:
        return ""
    points = _known(series)
    pale = " pale" if series.kind == "pale dots" else ""
    drawn = []
    for place, (across, up) in points[:: max(1, len(points) // MOST_POINTS)]:
        said = series.labels[place] if place < len(series.labels) else ""
        title = f"<title>{html.escape(said)}</title>" if said else ""
        at = f'cx="{100 * _across(across, x):.2f}%" cy="{_up(up, y):.1f}"'
        drawn.append(f'<circle class="dot s{series.colour}{pale}" {at} r="{RADIUS}">{title}</circle>')
    return "".join(drawn)


def _limit(limit: Limit, x: Axis, y: Axis) -> str:
    if limit.across:
        place = _across(limit.value, x)
        drawn = f'<line class="limit" x1="{100 * place:.2f}%" x2="{100 * place:.2f}%" y1="0" y2="{HEIGHT}"/>'
        return drawn + _text_at(place, 12, limit.text, "limit-said")
    height = _up(limit.value, y)
    drawn = f'<line class="limit" x1="0%" x2="100%" y1="{height:.1f}" y2="{height:.1f}"/>'
    return drawn + _text_at(1.0, height - 6 if height > 20 else height + 16, limit.text, "limit-said")


def _said(across: float, up: float, text: str, kind: str, x: Axis, y: Axis) -> str:
    return _text_at(_across(across, x), _up(up, y), text, kind)


def _text_at(place: float, height: float, text: str, kind: str) -> str:
    """Beside a place, on the side where there is more room."""
    side, anchor = (7, "start") if place < 0.5 else (-7, "end")
    at = f'x="{100 * place:.2f}%" dx="{side}" y="{height:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {at}>{html.escape(text)}</text>'


def _swatch(series: Series, dash: int) -> str:
    line = f'<path class="line s{series.colour} d{dash % SERIES}" d="M1 5h24"/>' if _is_line(series) else ""
    dot = f'<circle class="dot s{series.colour}" cx="13" cy="5" r="{RADIUS}"/>' if "dots" in series.kind else ""
    return f'<svg viewBox="0 0 26 10" aria-hidden="true">{line}{dot}</svg>'


def distribution(values: Sequence[float], most: int = 300) -> list[Point]:
    """The share of values at or below each value, thinned out to `most` points."""
    ordered = sorted(values)
    count = len(ordered)
    places = range(count) if count <= most else sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
    return [(ordered[place], (place + 1) / count) for place in places]
