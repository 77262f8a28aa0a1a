"""The engines of a fleet side by side: what several cost against one, and which of them is slow although it answers.

    scaling tax = 1 − Σ tokens/s / (engines · tokens/s of the best one)          of engines that had work, while they had it
    slowness    = an engine's seconds of a decode step / the median of the others', at the same number of rows;
                  or the same of seconds per prompt token, if that is more

The times of steps are learned from answers (learned_times), so they include whatever delays an engine: a throttled GPU, a busy
core, a lossy link. Health checks notice none of these. Knows numbers only; the front end and the router make the rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.engine.replicas.learned_times import LearnedTimes

STRAGGLER = 1.25                     # slowness above which an engine holds the fleet back
GRAY = 2.0                           # … and above which it counts as failing, though it says it is well
FEWEST = 3.0                         # answers, by weight, before a time is compared


class FleetRow(msgspec.Struct):
    """One engine, or one server behind a router. None: not known."""

    name: str
    state: str                       # ok, or why it gets no requests
    running: int
    waiting: int
    tokens_s: float | None           # of answers, while it had work
    busy: float | None               # share of the last seconds in which it had work
    hit_rate: float | None           # prompt tokens found in its prefix cache, since its start
    kv_used: float | None
    mfu: float | None
    mbu: float | None
    step_seconds: float | None = None            # of a decode step at the rows that the fleet has now
    prompt_token_seconds: float | None = None
    slowness: float | None = None    # against the median of the others
    verdict: str = ""                # straggler, gray failure, or nothing
    restarts: int = 0
    moved: int = 0                   # requests that went on elsewhere
    device: str = ""


class FleetReply(msgspec.Struct):
    """The answer of GET /fleet."""

    kind: str                        # engines of one front end, or servers behind a router
    policy: str
    rows: list[FleetRow]
    tokens_s: float                  # of those that had work
    best_tokens_s: float
    scaling_tax: float | None        # None: fewer than two had work
    notes: list[str]


def report(kind: str, policy: str, rows: list[FleetRow], times: Sequence[LearnedTimes]) -> FleetReply:
    """`times` belong to the rows, in their order."""
    _compare(rows, times)
    working = [each.tokens_s for each in rows if each.tokens_s]
    best, total = max(working, default=0.0), sum(working)
    tax = 1 - total / (len(working) * best) if len(working) > 1 else None
    return FleetReply(kind, policy, rows, total, best, tax, [note for each in rows if (note := _note(each))])


def _compare(rows: list[FleetRow], times: Sequence[LearnedTimes]) -> None:
    active = [each.running for each in rows if each.running]
    usual = statistics.fmean(active) if active else 1.0
    for row, each in zip(rows, times, strict=True):
        if each.decode.weight >= FEWEST:
            fixed, per_row = each.decode.fitted()
            row.step_seconds = fixed + per_row * usual
        if each.prefill.weight >= FEWEST:
            row.prompt_token_seconds = each.prefill.fitted()[1]
    steps: Callable[[FleetRow], float | None] = lambda row: row.step_seconds  # noqa: E731
    prompts: Callable[[FleetRow], float | None] = lambda row: row.prompt_token_seconds  # noqa: E731
    for row in rows:
        found = [ratio for of in (steps, prompts) if (ratio := _against_others(row, rows, of)) is not None]
        row.slowness = max(found, default=None)
        if row.slowness is not None and row.slowness > STRAGGLER:
            row.verdict = "gray failure" if row.slowness > GRAY and row.state == "ok" else "straggler"


def _against_others(row: FleetRow, rows: list[FleetRow], of: Callable[[FleetRow], float | None]) -> float | None:
    own, others = of(row), [value for each in rows if each is not row and (value := of(each))]
    return own / statistics.median(others) if own and others else None


def _note(row: FleetRow) -> str:
    if row.state == "silent":
        return f"{row.name} takes requests and does not answer them: others are chosen first"
    if row.state != "ok":
        return f"{row.name} gets no requests: {row.state}"
    if not row.verdict:
        return ""
    return f"{row.name} is {row.slowness:.1f} times as slow as the others ({row.verdict}): check its clocks, cores and link"
