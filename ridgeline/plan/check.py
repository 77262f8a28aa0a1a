"""`ridgeline plan --check`: compares predicted with measured figures of benchmark records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.plan.operation import Traffic, operate
from ridgeline.plan.prediction import Setup, closed_loop, decode_seconds, workload_seconds
from ridgeline.plan.records import MeasuredRow, Record

BAR = 0.15                           # allowed error of TPOT and throughput that were not fitted
BARRED = ("TPOT", "output tok/s")
WIDE = 1.15                          # runs of one figure that differ by as much as the bar allows are noted in the table


_HEAD = ["record", "workload", "figure", "measured", "predicted", "error", ""]
_SUM = "TPOT and throughput that were not fitted:"


@dataclass(frozen=True, slots=True)
class Checked:
    record: str
    workload: str
    figure: str
    measured: float
    predicted: float
    fitted: bool                     # was this figure one of those that the constants were fitted on?
    spread: float = 1.0              # the record's highest run over its lowest

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def barred(self) -> bool:
        return self.figure in BARRED and not self.fitted

    @property
    def note(self) -> str:
        words = ["fitted"] * self.fitted + [f"its runs differ {self.spread:.2f}×"] * (self.spread >= WIDE)
        return ", ".join(words)


def check(record: Record, fitted: bool = False) -> list[Checked]:
    """`fitted`: the constants were fitted on this record (except for workloads that fit.py leaves out)."""
    return [figure for row in record.rows for figure in _row(record, row, fitted)]


def _row(record: Record, row: MeasuredRow, fitted: bool) -> list[Checked]:
    fitted = fitted and len(set(row.asked)) == 1
    setup, limits = record.setup, (record.budget, record.max_rows, row.shared)
    if row.step_seconds is not None:
        step = decode_seconds(setup, len(row.asked), row.parts_context)
        return [Checked(record.name, row.workload, "TPOT", row.step_seconds, step, fitted)]
    total = workload_seconds(setup, row.asked, *limits, row.level)
    uniform = len(set(row.asked)) == 1 and not row.shared
    found = []
    tokens_out = sum(out for _, out in row.asked)
    if row.output_tok_s and tokens_out > len(row.asked):
        spread = row.spread.get("output_tok_s", 1.0)
        found.append(Checked(record.name, row.workload, "output tok/s", row.output_tok_s, tokens_out / total, fitted, spread))
    if uniform:
        first = workload_seconds(setup, [(tokens_in, 1) for tokens_in, _ in row.asked], *limits)
        if row.first_seconds:
            spread = row.spread.get("first_tokens_s", 1.0)
            found.append(Checked(record.name, row.workload, "first tokens", row.first_seconds, first, fitted, spread))
        if row.tpot_seconds:
            each = (total - first) / (row.asked[0][1] - 1)
            spread = row.spread.get("decode_tok_s", 1.0)
            tpot_fitted = fitted and not row.is_mostly_prompts
            found.append(Checked(record.name, row.workload, "TPOT", row.tpot_seconds, each, tpot_fitted, spread))
    return found


MOST_CACHED = 0.02                   # of the prompts: a closed loop with more cached tokens is not simulated


def check_serve(name: str, points: Sequence[tuple[str, Mapping[str, Any], int]], setup: Setup) -> list[Checked]:
    """Points of a record of `bench serve`, by name. With a number of users (closed loop) the requests are simulated step by
    step; with 0 the server has as many requests in flight as it had on average.

    That average is the rate times the time of a request (Little's law); lengths and the hit rate are the measured ones.
    """
    found = []
    for workload, figures, users in points:
        count = figures["completed"]
        tokens_in, tokens_out = figures["total_input_tokens"], figures["total_output_tokens"]
        if not count or not tokens_in or tokens_out <= count or not figures["tpot_ms"]:
            continue
        traffic = Traffic(round(tokens_in / count), round(tokens_out / count), figures["cached_input_tokens"] / tokens_in)
        if users and traffic.hit_rate <= MOST_CACHED:
            loop = closed_loop(setup, [(traffic.tokens_in, traffic.tokens_out)] * round(count), users)
            tpot, tok_s = loop.tpot, tokens_out / loop.seconds
        else:
            in_flight = figures["request_throughput"] * figures["e2el_ms"]["mean"] / 1e3
            point = operate(setup, max(1, round(in_flight)), traffic)
            tpot, tok_s = point.tpot, point.tok_s
        found += [
            Checked(name, workload, "TPOT", figures["tpot_ms"]["mean"] / 1e3, tpot, False),
            Checked(name, workload, "output tok/s", figures["output_throughput"], tok_s, False),
        ]
    return found


def worst(found: Sequence[Checked]) -> float:
    """The largest error of the figures with a limit: TPOT and throughput that were not fitted."""
    return max((abs(each.error) for each in found if each.barred), default=0.0)


def text(found: Sequence[Checked], markdown: bool = False) -> str:
    rows = [list(_HEAD)]
    for each in found:
        scale, unit = (1.0, "") if each.figure.endswith("tok/s") else (1e3, ", ms")
        numbers = [f"{value * scale:,.2f}" for value in (each.measured, each.predicted)]
        rows.append([
            each.record, each.workload, each.figure + unit, *numbers, f"{each.error:+.1%}", each.note,
        ])
    if markdown:
        rows.insert(1, ["---"] * 3 + ["---:"] * 3 + ["---"])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
    else:
        widths = [max(len(row[column]) for row in rows) for column in range(7)]
        lines = ["  ".join(
            cell.rjust(width) if column in (3, 4, 5) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip() for row in rows]
    barred = [each for each in found if each.barred]
    if barred:
        inside = sum(abs(each.error) <= BAR for each in barred)
        lines += ["", f"{_SUM} {inside} of {len(barred)} within {BAR:.0%}, the worst "
                      f"off by {worst(found):.1%}"]
    return "\n".join(lines)


def put_into(page: str, found: Sequence[Checked]) -> str:
    """The page with its table, up to the summary line, replaced by this one."""
    lines = page.splitlines()
    head = "| " + " | ".join(_HEAD) + " |"
    first = next((place for place, line in enumerate(lines) if line == head), None)
    last = next((place for place, line in enumerate(lines) if line.startswith(_SUM)), None)
    if first is None or last is None or last < first:
        raise ConfigError(f"the page has no table that begins with {head!r} and ends with a line {_SUM!r}")
    return "\n".join([*lines[:first], text(found, markdown=True), *lines[last + 1 :]]) + "\n"
