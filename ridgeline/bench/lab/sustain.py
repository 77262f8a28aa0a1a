"""`bench … --sustain MIN`: repeats the same work for minutes, to find drift, falling clocks and throttling.

The run is cut into stretches. Drift is the median of the last fifth over that of the first fifth, minus one. It is reported
if it exceeds 3 % and three standard errors, estimated from neighbouring stretches. The slope is the Theil–Sen estimator (the
median over all pairs), which is robust against single bad stretches.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ridgeline.bench.lab.machine_log import Watch, throttled
from ridgeline.bench.lab.record import percentiles
from ridgeline.bench.load.latency import Outcome, timeline
from ridgeline.errors import ConfigError

LEAST_STRETCHES = 5                  # so that there is a first and a last fifth
LEAST_ANSWERS = 10                   # of a server, on average per stretch: fewer are mostly noise
DRIFTED = 0.03                       # a larger change is called drift …
CHANCE = 3.0                         # … if it is also larger than this number of standard errors of the noise between stretches
UNTOLD = "this machine does not report its clocks"
_MOST_PAIRS = 400                    # stretches that the slope is taken over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sustain", type=float, metavar="MIN", help="run for this number of minutes, and report drift, clocks and throttling"
    )


def check(minutes: float | None) -> None:
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"--sustain must be above 0 minutes, got {minutes:g}")


def repeat(
    run: Callable[[], Mapping[str, float]], minutes: float, watch: Watch, on_stretch: Callable[[float], None] = lambda done: None
) -> dict[str, Any]:
    """Call `run`, which returns figures by name, until the time is over; then say how they changed."""
    begin = time.time()
    end = begin + 60 * minutes
    series: dict[str, list[tuple[float, float]]] = {}
    stretches = 0
    while time.time() < end or stretches < LEAST_STRETCHES:
        figures = run()
        stretches += 1
        now = time.time()
        for name, value in figures.items():
            series.setdefault(name, []).append((now - begin, float(value)))
        on_stretch(min(1.0, (now - begin) / (end - begin)))
    return account(series, (time.time() - begin) / 60, watch.between(begin, time.time()))


def stretches(outcomes: Sequence[Outcome], most: int = 60) -> list[dict[str, float]]:
    """A server's run cut into equal stretches with enough answers each; none if there are too few. The first and the last, in
    which a run fills up and drains, are left out."""
    answers = sum(outcome.ok for outcome in outcomes)
    parts = min(most, answers // LEAST_ANSWERS)
    return timeline(outcomes, parts)[1:-1] if parts >= LEAST_STRETCHES + 2 else []


def account(
    series: Mapping[str, Sequence[tuple[float, float]]], minutes: float, machine: dict[str, Any], unknown: str = UNTOLD
) -> dict[str, Any]:
    """How figures changed over time, and what the machine did. A series is (seconds, value) by stretch."""
    found: dict[str, Any] = {
        "minutes": minutes,
        "figures": {name: drift(points) for name, points in series.items() if len(points) >= LEAST_STRETCHES},
        "machine": machine, "throttled": throttled(machine),
    }
    found["verdict"] = verdict(found, unknown)
    return found


def drift(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    values = [value for _, value in points]
    fifth = max(1, len(values) // 5)
    first, last = statistics.median(values[:fifth]), statistics.median(values[-fifth:])
    return {
        **percentiles(values), "stretches": len(values), "first": first, "last": last,
        "drift": last / first - 1 if first else 0.0, "noise": noise(values, fifth) / first if first else 0.0,
        "per_hour": slope(points) * 3600,
    }


def noise(values: Sequence[float], fifth: int) -> float:
    """The standard error of the difference of two medians of `fifth` stretches each, from differences of neighbours; a median
    of normal numbers has 1.25 times the standard error of their mean."""
    steps = [abs(after - before) for before, after in itertools.pairwise(values)]
    one = 0.886 * statistics.mean(steps) if steps else 0.0               # the mean |a − b| of normal numbers is 2σ/√π
    return float((1.25 if fifth > 2 else 1.0) * one * (2 / fifth) ** 0.5)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Median change per second over all pairs of stretches."""
    some = points[:: max(1, len(points) // _MOST_PAIRS)]
    rates = [(b - a) / (later - sooner) for (sooner, a), (later, b) in itertools.combinations(some, 2) if later > sooner]
    return statistics.median(rates) if rates else 0.0


def verdict(found: dict[str, Any], unknown: str = UNTOLD) -> str:
    drifted = [
        f"{name} {values['drift']:+.1%}" for name, values in found["figures"].items()
        if abs(values["drift"]) > max(DRIFTED, CHANCE * values["noise"])
    ]
    said = f"drifted: {', '.join(drifted)}" if drifted else f"steady: no drift above {DRIFTED:.0%} and the noise"
    if not found["figures"]:
        said = (f"too short to detect drift: this needs {LEAST_STRETCHES} stretches (of a server, {LEAST_ANSWERS} answers each) "
                "without fill-up and drain")
    if found["throttled"]:
        said += f"; throttled by {', '.join(found['throttled'])}"
    elif not found["machine"]:
        said += f"; {unknown}"
    return f"{found['minutes']:.1f} minutes, {said}"
