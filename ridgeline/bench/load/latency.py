"""Computes latencies, throughput and goodput from the outcomes of requests.

    TTFT    first token − start
    TPOT    (last token − first token) / (tokens − 1)
    ITL     between two events of an answer, over all answers
    E2EL    last token − start

The token that ends an answer has no text, but servers count it: its time is that of the finish reason. Other tokens without text
(half a character, a special token) count where the server sends an event for them. What a reader sees is under `as_seen`: the
first chunk of any kind, the first text, and the time between two events with text.

A request's start is its intended time of sending. A client that waits for a slow server before it sends the next request would
leave out the wait that its users have (coordinated omission). The same latencies from the actual time of sending are under
`from_send`. Percentiles interpolate linearly, as numpy's do.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ridgeline.errors import ConfigError

MOST_GROWTH = 0.1                    # of the offered requests may pile up: more is a queue that only gets longer
LEAST_OFFERED = 30                   # requests without which that is not asked: ten in each third of the run

PERCENTILES = (50, 90, 95, 99)
SLO_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2el", "e2e": "e2el"}


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds from the start of the run."""

    intended: float                  # when it was to be sent
    due: float = 0.0                 # when the client got round to it
    sent: float = 0.0                # after waiting for a place under --max-concurrency
    ended: float = 0.0
    events: array[float] = field(default_factory=lambda: array("d"))     # when each event with tokens was read
    stopped: float = 0.0             # when an ending token was read, which has no text
    first_chunk: float = 0.0         # when the answer's first event was read, whatever it holds
    shown: array[float] = field(default_factory=lambda: array("d"))      # when each event with visible text was read
    tokens_in: int = 0
    cached: int = 0                  # of them, found in the server's prefix cache
    tokens_out: int = 0
    error: str = ""                  # its kind; empty: answered
    detail: str = ""
    text: str = ""                   # kept only where something needs it

    @property
    def ok(self) -> bool:
        return not self.error

    def start(self, from_send: bool = False) -> float:
        return self.sent if from_send else self.intended

    def ttft(self, from_send: bool = False) -> float:
        return self.events[0] - self.start(from_send)

    @property
    def last(self) -> float:
        """When the last token came."""
        return max(self.events[-1], self.stopped)

    def e2el(self, from_send: bool = False) -> float:
        return self.last - self.start(from_send)

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.last - self.events[0]) / (self.tokens_out - 1) if self.tokens_out > 1 else None

    def gaps(self) -> list[float]:
        return _between(self.events)

    def text_gaps(self) -> list[float]:
        return _between(self.shown)


def _between(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, between the two nearest ones."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float], scale: float = 1e3) -> dict[str, float]:
    """P50 to P99 and the maximum, in milliseconds; the mean stands beside them and never alone."""
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return {}
    found = {f"p{percent}": quantile(ordered, percent / 100) for percent in PERCENTILES}
    return found | {"max": ordered[-1], "mean": sum(ordered) / len(ordered)}


# ── service-level objectives ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds, by name. A request meets it when it was answered and exceeds none."""

    limits: tuple[tuple[str, float], ...]

    def met(self, outcome: Outcome) -> bool:
        return outcome.ok and all(self.value(outcome, name) <= limit for name, limit in self.limits)

    @staticmethod
    def value(outcome: Outcome, name: str) -> float:
        if name == "ttft":
            return outcome.ttft()
        if name == "e2el":
            return outcome.e2el()
        if name == "tpot":
            return outcome.tpot or 0.0                   # one token has no time per further token
        return max(outcome.gaps(), default=0.0)          # itl: the longest gap

    def __str__(self) -> str:
        return ",".join(f"{name}:{limit * 1e3:g}" for name, limit in self.limits)


def parse_slo(words: Sequence[str]) -> Slo | None:
    """`ttft:500,tpot:50`, in milliseconds, in one word or several."""
    limits: dict[str, float] = {}
    for part in (part.strip() for word in words for part in word.split(",") if part.strip()):
        name, _, number = part.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name.lower() not in SLO_NAMES or not (0 < limit < math.inf):
            raise ConfigError(f"{part!r} is not an objective such as ttft:500, tpot:50, itl:200 or e2el:10000, in milliseconds")
        if SLO_NAMES[name.lower()] in limits:
            raise ConfigError(f"the objective {name} is given twice")
        limits[SLO_NAMES[name.lower()]] = limit / 1e3
    return Slo(tuple(limits.items())) if limits else None


# ── figures of a run ─────────────────────────────────────────────────────────────────────────────────────────────────


def _latencies(answered: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "ttft_ms": spread(outcome.ttft() for outcome in answered),
        "tpot_ms": spread(outcome.tpot for outcome in answered if outcome.tpot is not None),
        "itl_ms": spread(gap for outcome in answered for gap in outcome.gaps()),
        "e2el_ms": spread(outcome.e2el() for outcome in answered),
        "as_seen": {
            "first_chunk_ms": spread(outcome.first_chunk - outcome.start() for outcome in answered if outcome.first_chunk),
            "first_text_ms": spread(outcome.shown[0] - outcome.start() for outcome in answered if outcome.shown),
            "text_gap_ms": spread(gap for outcome in answered for gap in outcome.text_gaps()),
        },
        "from_send": {
            "ttft_ms": spread(outcome.ttft(True) for outcome in answered),
            "e2el_ms": spread(outcome.e2el(True) for outcome in answered),
        },
    }


def figures(outcomes: Sequence[Outcome], slo: Slo | None) -> dict[str, Any]:
    """Everything about one run. Its duration is from the first intended sending to the last answer's end."""
    answered = [outcome for outcome in outcomes if outcome.ok]
    begin = min((outcome.intended for outcome in outcomes), default=0.0)
    duration = max(1e-9, max((outcome.ended for outcome in outcomes), default=0.0) - begin)
    tokens_in = sum(outcome.tokens_in for outcome in answered)
    tokens_out = sum(outcome.tokens_out for outcome in answered)
    events = sum(len(outcome.events) for outcome in answered)
    found: dict[str, Any] = {
        "duration_s": duration, "requests": len(outcomes), "completed": len(answered),
        "failed": len(outcomes) - len(answered),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
        "total_input_tokens": tokens_in, "total_output_tokens": tokens_out,
        "cached_input_tokens": sum(outcome.cached for outcome in answered),
        "request_throughput": len(answered) / duration, "input_throughput": tokens_in / duration,
        "output_throughput": tokens_out / duration, "total_token_throughput": (tokens_in + tokens_out) / duration,
        **_latencies(answered),
        "tokens_per_event": tokens_out / events if events else 0.0,
        "most_concurrent": most_concurrent(outcomes),
    }
    if slo is not None:
        met = sum(slo.met(outcome) for outcome in outcomes)
        found["request_goodput"] = met / duration
        found["slo_attainment"] = met / max(1, len(outcomes))
    return found


def most_concurrent(outcomes: Sequence[Outcome]) -> int:
    """How many requests were under way at once, at most."""
    changes = sorted([(outcome.sent, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes])
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def backlog_growth(outcomes: Sequence[Outcome]) -> float | None:
    """The share of offered requests that pile up: 0.2 where a server answers eight of every ten.

    How many were under way on average in the last third of the time in which requests came, less that of the third before
    it, over the requests of a third. None where the run is too short to tell: LEAST_OFFERED requests must have come, answers
    must take less than half of it, and chance must not do as much (1.5 standard deviations, if requests came and went
    independently). More than all cannot pile up, though a burst at the end may look so.
    """
    begins = sorted(outcome.intended for outcome in outcomes)
    if len(begins) < LEAST_OFFERED:
        return None
    third = (begins[-1] - begins[0]) / 3
    usual = quantile(sorted(outcome.ended - outcome.intended for outcome in outcomes), 0.5)
    if 3 * third <= 2 * usual:
        return None

    def under_way(begin: float) -> float:
        spans = (min(outcome.ended, begin + third) - max(outcome.intended, begin) for outcome in outcomes)
        return sum(span for span in spans if span > 0) / third

    before, last = under_way(begins[0] + third), under_way(begins[0] + 2 * third)
    growth, by_chance = (last - before) / (len(begins) / 3), 1.5 * math.sqrt(last + before) / (len(begins) / 3)
    return None if by_chance > max(growth, MOST_GROWTH) else min(growth, 1.0)


def timeline(outcomes: Sequence[Outcome], parts: int = 60) -> list[dict[str, float]]:
    """The run cut into equal stretches: output events and answers per second, TTFT of what was to be sent then."""
    end = max((outcome.ended for outcome in outcomes), default=0.0)
    if not end:
        return []
    width = end / parts
    rows: list[dict[str, Any]] = [{"at_s": number * width, "tokens": 0.0, "answers": 0.0, "ttft": []} for number in range(parts)]

    def row(when: float) -> dict[str, Any]:
        return rows[min(parts - 1, max(0, int(when / width)))]

    for outcome in outcomes:
        if not outcome.ok:
            continue
        weight = outcome.tokens_out / len(outcome.events)
        for when in outcome.events:
            row(when)["tokens"] += weight
        row(outcome.ended)["answers"] += 1
        row(outcome.intended)["ttft"].append(outcome.ttft())
    return [
        {
            "at_s": each["at_s"], "output_throughput": each["tokens"] / width, "request_throughput": each["answers"] / width,
            **({"ttft_ms": quantile(sorted(each["ttft"]), 0.5) * 1e3} if each["ttft"] else {}),
        }
        for each in rows
    ]
