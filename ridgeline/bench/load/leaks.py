"""Judges samples of a running server (taken by bench/soak): does memory grow, is anything left over, does it slow down?

The limits are the project's promises: resident memory grows by less than 1 MB a minute, no file, block or request is left
when there are no requests, p99 of the last third is at most 1.2 times that of the first, and no valid request fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MB_PER_HOUR = 60.0                   # of resident memory, by process
SLOWER = 1.2                         # p99, late against early
_BINS = 20                           # neighbouring samples are correlated: the slope is fitted to this number of means
_FEWEST = 4                          # bins needed for a slope
_Z = 1.959964                        # of the normal distribution, for 95 %

PASS, FAIL, OPEN = "pass", "fail", "not decided"


@dataclass(frozen=True, slots=True)
class Slope:
    """Least squares, in MB per hour, with its 95 % interval: infinite where there are too few samples."""

    value: float
    low: float
    high: float
    samples: int


def slope(seconds: Sequence[float], sizes: Sequence[float]) -> Slope:
    """The slope of sizes in bytes over these times."""
    points = _means(seconds, sizes)
    if len(points) < _FEWEST:
        return Slope(0.0, -math.inf, math.inf, len(seconds))
    times, values = [at / 3600 for at, _ in points], [size / 1e6 for _, size in points]
    mean_time, mean_value = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - mean_time) ** 2 for at in times)
    value = sum((at - mean_time) * (size - mean_value) for at, size in zip(times, values, strict=True)) / spread
    rest = sum((size - mean_value - value * (at - mean_time)) ** 2 for at, size in zip(times, values, strict=True))
    freedom = len(times) - 2
    half = _student(freedom) * math.sqrt(rest / freedom / spread)
    return Slope(value, value - half, value + half, len(seconds))


def _means(seconds: Sequence[float], sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Mean time and size of each of up to _BINS equal stretches of at least three samples."""
    count = min(_BINS, len(seconds) // 3)
    edges = [round(number * len(seconds) / count) for number in range(count + 1)] if count else []
    parts = [slice(start, end) for start, end in itertools.pairwise(edges)]
    return [(sum(seconds[part]) / len(seconds[part]), sum(sizes[part]) / len(sizes[part])) for part in parts]


def _student(freedom: int) -> float:
    """Student's t for 95 %: the expansion by 1/freedom, within 1 % from 4 degrees on."""
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


@dataclass(frozen=True, slots=True)
class Quiet:
    """A server without requests."""

    files: dict[str, int]            # open ones, by process
    threads: dict[str, int]
    resident: dict[str, int]         # bytes
    kv_blocks: int                   # in use
    requests: int                    # open


@dataclass(slots=True)
class Bar:
    """One promise, and what was measured."""

    name: str
    found: str
    promised: str
    verdict: str


@dataclass(slots=True)
class Verdict:
    bars: list[Bar] = field(default_factory=list)

    def add(self, name: str, found: str, promised: str, verdict: str) -> None:
        self.bars.append(Bar(name, found, promised, verdict))

    @property
    def overall(self) -> str:
        """The worst of them."""
        verdicts = {bar.verdict for bar in self.bars}
        return next((each for each in (FAIL, OPEN) if each in verdicts), PASS)

    def plain(self) -> dict[str, Any]:
        return {"overall": self.overall, "bars": [asdict(bar) for bar in self.bars]}


def judge(
    slopes: Mapping[str, Slope], before: Quiet, after: Quiet, latencies: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    errors: Mapping[str, Mapping[str, int]], restarts: int, filled: bool = True,
) -> Verdict:
    """`latencies` are seconds, early and late, by kind; `before` is the server after its warm-up. While the KV pool is not
    `filled`, growing memory may be the pool's."""
    verdict = Verdict()
    for name, each in slopes.items():
        found = f"{each.value:+.1f} MB/h ({each.low:+.1f} to {each.high:+.1f})"
        said = PASS if each.high < MB_PER_HOUR else FAIL if each.low > MB_PER_HOUR and filled else OPEN
        found += "" if filled or said == PASS else "; the KV pool was still filling"
        verdict.add(f"resident memory of the {name}", found, f"below {MB_PER_HOUR:.0f} MB/h", said)
    for name, count in before.files.items():
        now = after.files.get(name, 0)
        verdict.add(f"open files of the {name}", f"{count}, then {now}", "no more than before", _said(now <= count))
    left = f"{after.kv_blocks} KV blocks, {after.requests} requests"
    verdict.add("left at the end", left, "nothing", _said(not after.kv_blocks and not after.requests))
    for name, (early, late) in latencies.items():
        one, other = quantile(early, 0.99), quantile(late, 0.99)
        found = f"p99 {one:.3f} s, then {other:.3f} s" if early and late else "too few answers"
        said = _said(other <= SLOWER * one) if early and late else OPEN
        verdict.add(name, found, f"at most {SLOWER} times as long", said)
    failed = sum(sum(kinds.values()) for kinds in errors.values())
    verdict.add("requests that failed", str(failed), "none", _said(not failed))
    verdict.add("processes that were replaced", str(restarts), "none", _said(not restarts))
    return verdict


def _said(holds: bool) -> str:
    return PASS if holds else FAIL
