"""Summarises a trace as the numbers that patterns look at.

The time from the first kernel to the last is divided once, so that no time has two causes:

    seconds = busy + gaps        busy: by part of the step, own times; a collective's only where nothing else ran
    gaps    = allocation         during an allocation from the driver
            + waiting            inside a step, after a call that blocked until the device had finished
            + host               between the last kernel of a step and the first of the next, by what the host did
            + launch             inside a step, between two kernels

If other programs had the CPU for part of a step, only the rest is divided, and the lost time is kept separately. With several
ranks these are means over the ranks; their step times are kept as well.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ridgeline.gpus.clocks import Clocks
from ridgeline.roofline.trace import Span, Trace, Work, own_times
from ridgeline.sizes.abilities import Factors

MICRO = 1e-6
_OVERLAPS = 0.3                      # of a gap that a call must cover to be its cause
_LARGE = 2**20                       # bytes of a piece of memory that is worth counting


@dataclass(frozen=True, slots=True)
class PartFacts:
    """An op, or kernels of one kind, over the whole trace."""

    seconds: float                   # own time
    calls: int
    floor: float = 0.0               # at the roof of each, predicted; 0: not known
    flops: float = 0.0
    bytes: float = 0.0
    computes: float = 0.0            # of the floor, where computing binds


@dataclass(frozen=True, slots=True)
class Facts:
    device: str
    seconds: float
    steps: int
    busy: float
    parts: Mapping[str, PartFacts]
    launch: float = 0.0              # the gaps, by cause
    waiting: float = 0.0
    allocation: float = 0.0
    host: Mapping[str, float] = field(default_factory=dict)      # … between steps, by what the host did
    kernels: int = 0
    kernel_seconds: float = 0.0      # the median one
    waits: int = 0                   # calls that block, inside steps
    allocations: int = 0             # calls to the driver, but for those of the first step
    taken: int = 0                   # large pieces of memory taken from torch's allocator, but for those of the first step
    memory_usual: float = 0.0        # bytes in use, the median …
    memory_peak: float = 0.0
    collectives: float = 0.0         # seconds of them in all; those that nothing hides are in parts["communication"]
    rank_steps: Sequence[Sequence[float]] = ()           # seconds of each rank's own work, by step
    flops_s: float = 0.0             # the device's peaks; 0: not known
    read_bytes_s: float = 0.0
    preemptions: int = 0             # what the scheduler counted
    recomputed: float = 0.0          # part of the tokens
    kv_usage: float = 0.0
    rows: float = 0.0                # sequences in a step
    lost: float = 0.0                # share of the time in which other programs had the CPU; not in `seconds`
    faster: Factors = field(default_factory=dict)        # narrower formats that the engine could still use on this device …
    untimed: Sequence[str] = ()      # … those of them whose gain is a data sheet's …
    linear_share: float = 1.0        # … and the share of the weights that they narrow
    clocks: Clocks | None = None     # of the GPU; None: not known

    @property
    def gaps(self) -> float:
        return max(0.0, self.seconds - self.busy)

    @property
    def between(self) -> float:
        return sum(self.host.values())

    @property
    def matrix_share(self) -> float:
        """The share of matrix products in the busy time: linears, head, experts and attention."""
        products = sum(self.parts[name].seconds for name in ("linears and head", "experts", "attention") if name in self.parts)
        return products / self.busy if self.busy else 0.0

    def share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Gaps:
    launch: float = 0.0
    waiting: float = 0.0
    allocation: float = 0.0
    host: dict[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> float:
        return self.launch + self.waiting + self.allocation + sum(self.host.values())


def _mean_host(each: Sequence[Facts]) -> dict[str, float]:
    names = dict.fromkeys(name for one in each for name in one.host)
    return {name: sum(one.host.get(name, 0.0) for one in each) / len(each) for name in names}


def facts_of(
    traces: Sequence[Trace], costs: Mapping[str, PartFacts] | None = None, profiler: float = 0.0,
    kept: Sequence[float] = (), **known: Any,
) -> Facts:
    """`costs`: by part, the cost model's floor, FLOPs and bytes of the traced steps. `profiler`: seconds that profiling took,
    all of it between ops, where its marks are. `kept`: the share of each step in which the process had a CPU. `known`:
    further fields."""
    traces = [trace for trace in traces if trace.work]
    if not traces:
        return Facts("", 0.0, 0, 0.0, {}, **known)
    each = [_of_rank(trace, kept) for trace in traces]
    count = len(each)
    parts = {name: _mean_part([one.parts.get(name) for one in each]) for one in each for name in one.parts}
    parts |= {
        name: replace(cost, seconds=parts[name].seconds, calls=parts[name].calls)
        for name, cost in (costs or {}).items() if name in parts
    }

    def mean(name: str) -> float:
        return sum(float(getattr(one, name)) for one in each) / count

    def most(name: str) -> Any:
        return max(getattr(one, name) for one in each)

    profiler = min(max(0.0, profiler), mean("launch"))
    return Facts(
        each[0].device, mean("seconds") - profiler, each[0].steps, mean("busy"), parts, launch=mean("launch") - profiler,
        waiting=mean("waiting"), allocation=mean("allocation"),
        host=_mean_host(each),
        kernels=each[0].kernels, kernel_seconds=each[0].kernel_seconds, waits=most("waits"), allocations=most("allocations"),
        taken=most("taken"), memory_usual=most("memory_usual"),
        memory_peak=most("memory_peak"), collectives=mean("collectives"),
        rank_steps=[one.rank_steps[0] for one in each] if count > 1 else (), **known,
    )


def _part_of_step(kept: Sequence[float], step: int) -> float:
    return kept[step] if 0 <= step < len(kept) else 1.0


def _parts_of(ordered: Sequence[Work], collectives: Sequence[Work], kept: Sequence[float]) -> dict[str, PartFacts]:
    """A collective that overlaps other work costs nothing: the others' own times are counted first."""
    parts: dict[str, PartFacts] = {}
    own = dict(zip(map(id, ordered), own_times(ordered), strict=True)) | _exposed(collectives, ordered)
    for each in sorted([*ordered, *collectives], key=lambda each: each.start):
        seconds = own[id(each)] * MICRO * _part_of_step(kept, each.step)
        before = parts.get(each.part, PartFacts(0.0, 0))
        parts[each.part] = PartFacts(before.seconds + seconds, before.calls + 1)
    return parts


def _of_rank(trace: Trace, kept: Sequence[float]) -> Facts:
    work = trace.work
    begin, end = work[0].start, max(each.end for each in work)
    ordered = [each for each in work if not each.is_collective]
    collectives = [each for each in work if each.is_collective]
    parts = _parts_of(ordered, collectives, kept)
    gaps = _gaps(trace, kept)
    busy = sum(part.seconds for part in parts.values())
    seconds = busy + gaps.whole if kept else (end - begin) * MICRO
    lengths = [each.end - each.start for each in ordered] or [0.0]
    settled = trace.steps[1].start if len(trace.steps) > 1 else begin    # the first step may set up what the others use
    memory = [each for each in trace.memory if each.at >= settled]
    totals = [each.total for each in memory] or [0]
    return Facts(
        trace.device, seconds, max(1, len(trace.steps)), busy, parts,
        gaps.launch, gaps.waiting, gaps.allocation, gaps.host,
        kernels=len(work), kernel_seconds=statistics.median(lengths) * MICRO, waits=_inside(trace.waits, trace.steps),
        allocations=sum(call.start >= settled for call in trace.allocations),
        taken=sum(each.bytes >= _LARGE for each in memory),
        memory_usual=statistics.median(totals), memory_peak=max(totals),
        collectives=sum(each.end - each.start for each in collectives) * MICRO,
        rank_steps=[_by_step(work, len(trace.steps))],
    )


def _exposed(collectives: Sequence[Work], others: Sequence[Work]) -> dict[int, float]:
    """Of each collective, the time in which nothing else ran."""
    found: dict[int, float] = {}
    place, reached = 0, float("-inf")
    for each in collectives:
        start, hidden = max(each.start, reached), 0.0
        reached = max(reached, each.end)
        while place < len(others) and others[place].end <= start:
            place += 1
        covered = start
        for number in range(place, len(others)):
            other = others[number]
            if other.start >= each.end:
                break
            low, high = max(other.start, covered), min(other.end, each.end)
            hidden += max(0.0, high - low)
            covered = max(covered, high)
        found[id(each)] = max(0.0, each.end - start - hidden)
    return found


def _gaps(trace: Trace, kept: Sequence[float]) -> _Gaps:
    """Idle time of the device, by cause."""
    found, reached, step = _Gaps(), trace.work[0].start, trace.work[0].step
    allocations, waits, phases = (_Calls(calls) for calls in (trace.allocations, trace.waits, trace.phases))
    for each in trace.work:
        if each.start > reached:
            gap = Span("", reached, each.start)
            part = _part_of_step(kept, each.step)
            length = (gap.end - gap.start) * MICRO * part
            if _covers(allocations.around(gap), gap) >= _OVERLAPS:
                found.allocation += length
            elif each.step != step:
                _blame(found.host, phases.around(gap), gap, part)
            elif any(call.end <= gap.end + 1 for call in waits.around(gap)):
                found.waiting += length
            else:
                found.launch += length
        reached, step = max(reached, each.end), max(step, each.step)
    return found


class _Calls:
    """Finds the spans that touch an interval, by bisection."""

    def __init__(self, calls: Sequence[Span]) -> None:
        self._calls = calls
        self._starts = [call.start for call in calls]
        self._longest = max((call.end - call.start for call in calls), default=0.0)

    def around(self, gap: Span) -> list[Span]:
        low, high = bisect.bisect_left(self._starts, gap.start - self._longest), bisect.bisect_left(self._starts, gap.end)
        return [call for call in self._calls[low:high] if call.end > gap.start]


def _covers(calls: Sequence[Span], gap: Span) -> float:
    covered = sum(max(0.0, min(call.end, gap.end) - max(call.start, gap.start)) for call in calls)
    return covered / (gap.end - gap.start)


def _blame(host: dict[str, float], inside: Sequence[Span], gap: Span, part: float) -> None:
    """Divide a gap between steps by what the host was doing; phases may lie in each other, the innermost counts."""
    edges = sorted({gap.start, gap.end} | {
        min(max(edge, gap.start), gap.end) for phase in inside for edge in (phase.start, phase.end)
    })
    for low, high in pairwise(edges):
        around = [phase for phase in inside if phase.start <= low and phase.end >= high]
        name = min(around, key=lambda phase: phase.end - phase.start).name if around else "elsewhere"
        host[name] = host.get(name, 0.0) + (high - low) * MICRO * part


def _inside(calls: Sequence[Span], steps: Sequence[Span]) -> int:
    if not steps:
        return len(calls)
    starts = [step.start for step in steps]
    places = (bisect.bisect_right(starts, call.start) - 1 for call in calls)
    return sum(place >= 0 and call.start < steps[place].end for place, call in zip(places, calls, strict=True))


def _by_step(work: Sequence[Work], steps: int) -> list[float]:
    found = [0.0] * max(1, steps)
    for each in work:
        if not each.is_collective and each.step < len(found):
            found[max(0, each.step)] += (each.end - each.start) * MICRO
    return found


def _mean_part(each: Sequence[PartFacts | None]) -> PartFacts:
    known = [one for one in each if one is not None]
    return PartFacts(sum(one.seconds for one in known) / len(each), round(sum(one.calls for one in known) / len(known)))
