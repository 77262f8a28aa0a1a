"""The HTML report of `bench serve`: tables and plots in one self-contained file, without scripts.

Plots: for each point the distributions of its latencies and its timeline; over all points, goodput, throughput and latency
against the rate.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Sequence
from typing import Any

from ridgeline.bench.lab import price, table
from ridgeline.bench.lab.plots import Series, axis, distribution, plot
from ridgeline.bench.lab.sweep import middle
from ridgeline.bench.load import client_check
from ridgeline.bench.load.latency import Outcome

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2024; --quiet: #60666e; --rule: #dfe3e8; --alarm: #b3261e;
  --c0: #1f6feb; --c1: #d9730d; --c2: #2e8b57; --c3: #a33ea1; --c4: #8a6d00; --c5: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e6e8ea; --quiet: #9aa1a9; --rule: #32383e;
  --alarm: #ff8a80; --c0: #6ea8fe; --c1: #f0a35e; --c2: #5fd38d; --c3: #dd8ddb; --c4: #d9c24a; --c5: #ff7f6e; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1340px;
  padding: 24px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 6px 0; } .quiet { color: var(--quiet); } .alarm { color: var(--alarm); font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: 4px 10px; text-align: right; white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.plots { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 2px; } svg { display: block; height: auto; width: 100%; }
svg text { fill: var(--quiet); font-size: 11px; } .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; } .dot { stroke: none; fill-opacity: .75; }
.legend { display: flex; flex-wrap: wrap; font-size: 13px; gap: 4px 16px; }
.swatch { border-radius: 2px; display: inline-block; height: 10px; margin-right: 5px; width: 10px; }
""" + "".join(
    f".line.s{n} {{ stroke: var(--c{n}); }} .dot.s{n} {{ fill: var(--c{n}); }} .swatch.s{n} {{ background: var(--c{n}); }}\n"
    for n in range(6)
)


def report(made: dict[str, Any], runs: Sequence[Sequence[Outcome]]) -> str:
    """`made` is the record; `runs` the requests of each point's last run."""
    points, workload = made["figures"]["points"], made["workload"]
    body = [
        f"<h1>{escaped(workload['model'] or 'a model')} under load</h1>",
        f'<p class="quiet">{escaped(workload["url"])}{escaped(workload["endpoint"])}, {escaped(made["date"])}. '
        f"Latencies count from the intended time of sending. Tokens counted by: "
        f"{escaped(workload['tokens_counted_by'])}. Quality: {escaped(made['quality'])}.</p>",
        *(f'<p class="alarm">{escaped(client_check.verdict(middle(point["figures"]["client"])))}</p>'
          for point in points if point["figures"]["client"]["is_bottleneck"]),
        html_table([_summary(point) for point in points]),
        *_sweep(points, workload),
    ]
    for point, outcomes in zip(points, runs, strict=True):
        body += _point(point, outcomes)
    body += ["<h2>Workload and machine</h2>", html_table(_facts(made))]
    return page("bench serve", body)


def page(title: str, body: Sequence[str]) -> str:
    """One self-contained HTML file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _summary(point: dict[str, Any]) -> dict[str, Any]:
    found = point["figures"]
    cells: dict[str, Any] = {
        "setting": _named(point), "answered": found["completed"], "failed": found["failed"],
        "requests/s": found["request_throughput"], "input tok/s": found["input_throughput"],
        "output tok/s": found["output_throughput"],
    }
    if "request_goodput" in found:
        cells |= {"goodput, requests/s": found["request_goodput"], "met": f"{middle(found['slo_attainment']):.1%}"}
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


def _sweep(points: list[dict[str, Any]], workload: dict[str, Any]) -> list[str]:
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
    if workload["slo"]:
        served.append(line(f"goodput under {workload['slo']}", ["request_goodput"]))
    first = [line(f"TTFT {percent.upper()}", ["ttft_ms", percent]) for percent in ("p50", "p90", "p99")]
    later = [line(f"TPOT {percent.upper()}", ["tpot_ms", percent]) for percent in ("p50", "p90", "p99")]
    plots = [
        plot("Rate and goodput", served, x, axis("requests/s", _heights(served))),
        plot("Time to first token", first, x, axis("ms", _heights(first), log=True)),
        plot("Time per output token", later, x, axis("ms", _heights(later))),
    ]
    return ["<h2>Over the sweep</h2>", plot_grid(plots)]


def _point(point: dict[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    found = point["figures"]
    answered = [outcome for outcome in outcomes if outcome.ok]
    said = [f"<h2>{escaped(_named(point))} ({escaped(point['process'])})</h2>"]
    rows = []
    for name, title in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2el_ms", "E2EL")):
        for tree, where in ((found, ""), (found["from_send"], ", from sending")):
            if tree.get(name):
                rows.append({"ms": title + where} | {key.upper(): tree[name][key] for key in ("p50", "p90", "p95", "p99", "max")})
    said.append(html_table(rows))
    if found["errors"]:
        kinds = ", ".join(f"{kind}: {table.cell(count)}" for kind, count in found["errors"].items())
        said.append(f'<p class="alarm">errors: {escaped(kinds)}. {escaped(point.get("first_error", ""))}</p>')
    if found.get("kept_up") is False:
        said.append(f'<p class="alarm">the server did not keep up with {middle(found["offered_rate"]):.2f} requests/s</p>')
    said.append(f'<p class="quiet">{escaped(client_check.verdict(middle(found["client"])))}</p>')
    for name, text in (("sustain", lambda: point["sustain"]["verdict"]), ("cost", lambda: price.line(middle(found["cost"])))):
        if name in point or name in found:
            said.append(f'<p class="quiet">{escaped(text())}</p>')
    if answered:
        said.append(plot_grid([latency_plot(answered), gap_plot(answered), _over_time(point), _requests_over_time(answered)]))
    return said


def latency_plot(answered: Sequence[Outcome]) -> str:
    series = [
        Series("TTFT", distribution([outcome.ttft() * 1e3 for outcome in answered])),
        Series("TTFT, from sending", distribution([outcome.ttft(True) * 1e3 for outcome in answered])),
        Series("E2EL", distribution([outcome.e2el() * 1e3 for outcome in answered])),
        Series("E2EL, from sending", distribution([outcome.e2el(True) * 1e3 for outcome in answered])),
    ]
    x = axis("ms", [value for each in series for value, _ in each.points], log=True)
    return plot("Latency: share of requests at or below", series, x, axis("share", [0.0, 1.0]))


def gap_plot(answered: Sequence[Outcome]) -> str:
    series = [
        Series("TPOT", distribution([outcome.tpot * 1e3 for outcome in answered if outcome.tpot is not None])),
        Series("ITL", distribution([gap * 1e3 for outcome in answered for gap in outcome.gaps()])),
    ]
    x = axis("ms", [value for each in series for value, _ in each.points], log=True)
    return plot("Between tokens: share at or below", series, x, axis("share", [0.0, 1.0]))


def _over_time(point: dict[str, Any]) -> str:
    rows = point["timeline"]
    steps = [(row["at_s"], row["output_throughput"]) for row in rows]
    if len(steps) > 1:                                   # draw the last stretch to its end
        steps.append((2 * steps[-1][0] - steps[-2][0], steps[-1][1]))
    series = [Series("output tok/s", steps, "step")]
    x = axis("seconds", [place for place, _ in steps])
    return plot("Output tokens per second", series, x, axis("tok/s", _heights(series)))


def _requests_over_time(answered: Sequence[Outcome]) -> str:
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
    return plot("Every request", series, x, axis("ms", _heights(series), log=True))


def _heights(series: Sequence[Series]) -> list[float]:
    return [height for each in series for _, height in each.points if math.isfinite(height)]


def plot_grid(plots: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def html_table(rows: Sequence[dict[str, Any]]) -> str:
    names = table.columns(rows)
    head = "".join(f"<th>{escaped(name)}</th>" for name in names)
    cells = ("".join(f"<td>{escaped(table.cell(row.get(name)))}</td>" for name in names) for row in rows)
    lines = "".join(f"<tr>{each}</tr>" for each in cells)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _facts(made: dict[str, Any]) -> list[dict[str, Any]]:
    known = made["workload"] | {"client": f"{made['machine']['cpu']}, {made['machine']['cores']} cores"}
    known |= {"ridgeline": made["versions"]["ridgeline"], "commit": made["commit"]}
    return [{"what": name, "value": str(value)} for name, value in known.items() if value not in (None, "", {})]


def _named(point: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in point["setting"].items() if value is not None)


def escaped(value: Any) -> str:
    return html.escape(str(value))
