"""A plan as one self-contained page: Pareto plots as SVG and the tables. No scripts, no external assets, dark and light."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.plan.plan_report import TAKEN, divided, summary, text
from ridgeline.plan.search import MEMORY, NOT_TIMED, NOT_YET, UNKNOWN, YES
from ridgeline.process import platform
from ridgeline.report import web_page
from ridgeline.report.plots import Limit, Series, axis, plot, plot_grid
from ridgeline.report.style import GREY
from ridgeline.report.web_page import beside, paragraph
from ridgeline.sizes.ledger import GIB

_QUALITY = {
    "dB": "signal-to-noise of the worst number format, dB (a hint: measure with ridgeline eval)",
    "KL": "divergence from the unquantized model, nats (ridgeline eval)",
}
_NOT_HERE = "not in this engine yet"
_PER_DEVICE = "output tok/s per device"
Row = Mapping[str, Any]


def page(told: dict[str, Any]) -> str:
    """`told` with `points`, as plan_report.fronts gives them."""
    points, unit = told["points"], told["quality_is"]
    judged = [point for point in points if point["quality"] is not None]
    plots = [
        _plot("Throughput against latency", points, lambda point: point["tpot"] * 1e3, "time per output token (TPOT), ms",
              "best_latency", _limits(told)),
        _plot("Throughput against quality", judged, lambda point: point["quality"], _QUALITY[unit], "best_quality"),
    ]
    best = [point for point in points if point["best_latency"] or point["best_quality"]]
    front = sorted(best, key=lambda each: each["tpot"])
    explained = paragraph("A dot is a setup: devices, formats, batch. On the line are the Pareto-optimal ones: no other setup is "
                          f"better in both. Setups in grey need a format or a number of devices that is {_NOT_HERE}.", "quiet")
    sections = [
        ("Memory", [beside(web_page.facts(_memory(told)), web_page.table(_ledger(told)))]),
        ("One setup, by batch", [web_page.table([_point(each) for each in told.get("batches", ())])]),
        ("Service-level objective", _objective(told)),
        ("Every setup", [explained, plot_grid(plots) if points else paragraph("Nothing fits.", "alarm")]),
        ("Pareto-optimal setups", [web_page.table(
            [_setup(point) | _point(point) | {unit: _short(point["quality"])} for point in front]
        )]),
        ("Cards", _cards(told)),
        ("By number of devices", [web_page.table([_ranks(row) for row in told["by_ranks"]])]),
        ("Techniques, each by itself", [web_page.table([_technique(row) for row in told["techniques"]])]),
        ("Use cases", [web_page.table([_use(name, found) for name, found in told.get("objectives", {}).items()])]),
        ("Number formats", [web_page.table([_format(told, name, how) for name, how in told["formats"].items()])]),
        ("As text", [web_page.folded("The whole plan as the command prints it", web_page.verbatim(text(told)))]),
    ]
    return web_page.page(f"{told['model']} on {_device(told)}", _lead(told), sections)


def _cards(told: dict[str, Any]) -> list[str]:
    """Measured quality beside predicted and measured throughput of one request."""
    rows = []
    for card in told.get("cards", ()):
        alone = [point["tok_s"] for point in told["points"]
                 if point["weights"] == card["format"] and point["batch"] == 1 and point["ranks"] == 1]
        measured = card["decode_tok_s"]
        rows.append({
            "card": card["model"], "format": card["format"], "KL": _short(card["kl"]), "top-1 flips": f"{card['flips']:.1%}",
            f"predicted tok/s, one request on {told['device']}": _rate(max(alone)) if alone else "–",
            "measured tok/s, one request": "–" if measured is None else f"{_rate(measured)} on {card['machine']}",
        })
    return [web_page.table(rows)] if rows else []


def _device(told: Row) -> str:
    """A CPU is always the machine that this runs on."""
    if told["kind"] == "cpu":
        return f"{platform.cpu_name()}, {platform.cpu_count()} cores"
    return f"{told['devices']} × {told['device']}"


def _lead(told: dict[str, Any]) -> list[str]:
    kv = told["kv_dtype"] if told["kv"] == "auto" else told["kv"]
    first, *rest = (f"{line[:1].upper()}{line[1:]}." for line in summary(told))
    said = [
        paragraph(first, "lead" if told["fits"] else "alarm"), *map(paragraph, rest),
        paragraph(f"{told['parameters'] / 1e9:.2f} G parameters, weights in {told['weights']}"
                  f"{', 2:4 sparse' if told['sparse'] else ''}, KV in {kv}. Requests "
                  f"of {told['tokens_in']:,} tokens in and {told['tokens_out']:,} out.", "quiet"),
    ]
    lacking = told["missing"]
    said += [paragraph(f"{', '.join(lacking)}: {_NOT_HERE}; only planned.", "alarm")] * bool(lacking)
    busy = f"Other programs had {told['taken']:.0%} of this machine's cores while it was measured: it may be faster when quiet."
    return said + [paragraph(busy, "alarm")] * (told["taken"] > TAKEN)


def _memory(told: Row) -> dict[str, str]:
    book, context = told["textbook"], told["tokens_in"] + told["tokens_out"]
    return {
        "usable on one device": f"{told['usable'] / GIB:.1f} GiB",
        "KV per token": f"{told['kv_bytes_per_token'] / 1024:,.1f} KiB",
        f"requests of {context:,} tokens that fit": f"{told['largest_batch']:,}",
        "longest single request": f"{told['longest_context']:,} tokens",
        "batch from which compute limits (ridge)": f"{told['compute_limited_batch']:,}",
        "batch with 90 % of the throughput": f"{told['saturation_batch']:,}" if "saturation_batch" in told else "",
        "textbook, weights and KV alone": f"{book['tok_s']:,.3g} tok/s at batch 1 by bandwidth, {book['batch']:,} requests by "
                                          "memory",
    }


def _ledger(told: Row) -> list[dict[str, str]]:
    parts = told["ledger"] | {"left": told["usable"] - sum(told["ledger"].values())}
    return [{"GiB of one device": name, "GiB": f"{size / GIB:.2f}"} for name, size in parts.items()]


def _point(point: Row) -> dict[str, str]:
    cost = {"$/M tokens": f"{point['dollars_per_million']:.3f}"} if point["dollars_per_million"] is not None else {}
    return {
        "batch": f"{point['batch']:,}", "TTFT, ms": f"{point['ttft'] * 1e3:,.1f}", "TPOT, ms": f"{point['tpot'] * 1e3:,.2f}",
        "tok/s": _rate(point["tok_s"]), "tok/s per device": _rate(point["tok_s_device"]),
        "requests/s": f"{point['requests_s']:,.2f}", **cost,
    }


def _setup(point: Row) -> dict[str, str]:
    lacking = point["missing"]
    return {"setup": f"{point['label']} ({', '.join(lacking)}: {_NOT_HERE})" if lacking else point["label"]}


def _objective(told: Row) -> list[str]:
    """What meets the SLO here, and how many devices a rate of requests needs."""
    said = []
    limits = [f"{name.upper()} at most {limit * 1e3:g} ms" for name, limit in (told.get("slo") or {}).items()]
    if limits and "within_slo" in told:
        within = told["within_slo"]
        end = ": met at best with" if within else ": not met, even one request alone is too slow or does not fit."
        said += [paragraph(", ".join(limits) + end, "" if within else "alarm")]
        said += [web_page.table([_setup(within) | _point(within)])] if within else []
    rows = [
        {"requests/s": f"{row['rate']:g}", "devices": str(row["devices"]), "replicas": str(row["replicas"]),
         **_setup(row["point"]),
         "requests each": f"{row['point']['batch']:,}", "load": f"{row['load']:.0%}",
         **({"$ an hour": f"{row['dollars_per_hour']:,.2f}"} if row["dollars_per_hour"] is not None else {})}
        for row in told.get("deployments", ())
    ]
    return said + [web_page.table(rows)] * bool(rows)


def _ranks(row: Row) -> dict[str, str]:
    one, many = row["one"], row["many"]
    return {
        "division": divided(row), "TPOT of one request, ms": f"{one['tpot'] * 1e3:,.2f}",
        "largest batch": f"{many['batch']:,}", "tok/s": _rate(many["tok_s"]),
        "tok/s per device": _rate(many["tok_s_device"]), "in this engine": "not yet" if one["missing"] else "yes",
    }


def _technique(row: Row) -> dict[str, str]:
    known = row["in_this_engine"] not in UNKNOWN
    factors = {title: "fits" if row[name] is None else f"{row[name]:.2f}×" if known else "?"
               for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("tok_s", "tok/s"))}
    return {"technique": row["technique"], **factors, "largest batch": f"{row['largest_batch']:,}",
            "exact": "yes" if row["exact"] else "no", "in this engine": row["in_this_engine"]}


def _use(name: str, found: Row) -> dict[str, str]:
    best = found["best"]
    said = {"use": name, "wanted": f"{found['what']} ({found['tokens_in']:,} tokens in, {found['tokens_out']:,} out)"}
    if best is None:
        return said | {"setup": "no setup meets it"}
    figures = {key: value for key, value in _point(best).items() if key not in ("tok/s", "requests/s")}
    return said | _setup(best) | figures | {"options": found["options"]}


def _format(told: Row, name: str, how: str) -> dict[str, str]:
    lists = {NOT_YET: "missing_formats", MEMORY: "memory_formats", NOT_TIMED: "untimed_formats"}
    here = next((said for said, names in lists.items() if name in told[names]), YES)
    return {"weights in": name, f"on {told['device']}": how, "in this engine": here}


def _rate(tok_s: float) -> str:
    return f"{tok_s:,.0f}" if tok_s >= 100 else f"{tok_s:.1f}"


def _short(quality: float | None) -> str:
    return "–" if quality is None else f"{quality:.4g}"


# ── plots ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _limits(told: Row) -> list[Limit]:
    tpot = (told.get("slo") or {}).get("tpot")
    return [Limit(tpot * 1e3, f"SLO TPOT {tpot * 1e3:g} ms", across=True)] if tpot else []


def _plot(
    title: str, points: Sequence[Row], across: Callable[[Row], float], label: str, best: str, limits: Sequence[Limit] = (),
) -> str:
    here = [point for point in points if not point[best] and not point["missing"]]
    lacking = [point for point in points if not point[best] and point["missing"]]
    front = sorted((point for point in points if point[best]), key=across)
    series = [
        replace(_series("Pareto-optimal", front, across, "line+dots"), colour=1),
        replace(_series("other setups", here, across, "pale dots"), colour=0),
        replace(_series(_NOT_HERE, lacking, across, "pale dots"), colour=GREY),
    ]
    xs = [across(point) for point in points]
    logarithmic = best == "best_latency" or (bool(xs) and min(xs) > 0 and max(xs) / min(xs) > 20)
    x = axis(label, xs + [each.value for each in limits], log=logarithmic, zero=False)
    return plot(title, series, x, axis(_PER_DEVICE, [point["tok_s_device"] for point in points], log=True), limits)


def _series(name: str, points: Sequence[Row], across: Callable[[Row], float], kind: str) -> Series:
    labels = [
        f"{point['label']}, batch {point['batch']}: {point['tpot'] * 1e3:.2f} ms, {point['tok_s_device']:,.0f} tok/s per device"
        for point in points
    ]
    return Series(name, [(across(point), point["tok_s_device"]) for point in points], kind, labels)
