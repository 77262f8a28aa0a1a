"""The live roofline of a running engine over the last seconds.

The engine's process and the front end each keep one. It takes sums that only grow (roofline/steps) and keeps one sample of them
per second; the difference of two samples is a window, which has utilisations and a verdict.

    MFU   FLOPs of useful tokens / (busy time × the measured matrix rate), each op at the rate of its own format
    HFU   the same including wasted work: padding, recomputation after preemptions, rejected drafts
    MBU   bytes of weights and KV / (busy time × the measured bandwidth)

None is above 1. A window that beat the peaks says that these are doubtful: they were measured beside other programs, and are
measured again when the engine has no work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ridgeline.gpus.clocks import SUMS as GPU_SUMS
from ridgeline.gpus.clocks import Clocks
from ridgeline.metrics import SPENT, RooflineStats
from ridgeline.roofline.steps import PHASES, REMEMBERED, SUMS, PhaseSums
from ridgeline.roofline.verdict import (
    BUSY,
    CLOCK,
    COMPUTE,
    IMPLEMENTATION,
    KV,
    OVERHEADS,
    SHARED,
    WEIGHTS,
    Setting,
    Verdict,
    Window,
    judge,
)

SAMPLES = 121                        # one a second: two minutes
MOST_HEADROOM = 100                  # a larger ratio is no figure to act on
WINDOW_SECONDS = 10.0
_SAMPLE_SECONDS = 1.0
_BEATEN = 1.02                       # of a peak: beyond the noise of a clock
_SECONDS = SUMS.index("seconds")

_GPU = "gpu"                         # the key of its sums, beside the phases
_Sample = tuple[float, dict[str, np.ndarray]]    # when, and by phase
Sums = Mapping[str, Sequence[float]]             # by phase, in the order of SUMS


@dataclass(frozen=True, slots=True)
class Rates:
    """A device's peak rates, for utilisation."""

    read_bytes_s: float = 0.0        # 0: not known
    flops_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Of a window, or of one phase in it."""

    steps: int
    busy: float                      # seconds
    device: float
    tokens_s: float                  # computed, by busy second …
    sampled_s: float                 # … and of answers
    rows: float                      # sequences in a step
    mfu: float
    hfu: float
    mbu: float
    intensity: float                 # FLOPs per byte
    padding: float                   # parts of the FLOPs that were computed
    recomputation: float
    rejected: float
    is_doubtful: bool = False        # the steps were faster than the peaks allow

    @classmethod
    def of(cls, sums: PhaseSums, rates: Rates) -> Utilisation:
        busy = sums.seconds or 1.0
        done = sums.flops + sums.padding_flops
        useful = sums.flops - sums.recomputed_flops - sums.rejected_flops
        moved = sums.weights + sums.kv_read + sums.kv_written
        rate = sums.flops / sums.compute if sums.compute else rates.flops_s      # the mean of the ops'
        most = busy * rate
        mfu, hfu = (useful / most, done / most) if most else (0.0, 0.0)
        mbu = moved / (busy * rates.read_bytes_s) if rates.read_bytes_s else 0.0
        return cls(
            int(sums.steps), sums.seconds, sums.device, sums.tokens / busy, sums.sampled / busy,
            sums.rows / max(sums.steps, 1.0), min(1.0, mfu), min(1.0, hfu), min(1.0, mbu),
            sums.flops / (moved + sums.activations) if moved else 0.0,
            sums.padding_flops / (done or 1.0), sums.recomputed_flops / (done or 1.0), sums.rejected_flops / (done or 1.0),
            max(hfu, mbu) > _BEATEN,
        )


def shown_headroom(times: float) -> str:
    """Beyond MOST_HEADROOM the roof is a rounding error of the busy time: a tiny model, or an engine that stood still."""
    return f"{times:.1f}x" if times <= MOST_HEADROOM else f"over {MOST_HEADROOM}x"


@dataclass(frozen=True, slots=True)
class Live:
    """A window, judged."""

    seconds: float
    total: Utilisation
    phases: dict[str, Utilisation]   # of those that had steps
    window: Window
    verdict: Verdict

    @property
    def split(self) -> dict[str, float]:
        """The busy time in shares of 1, grouped as the verdict groups it: compute and memory at the roof, kernels below their
        roof, overhead, in which the device waits, and what other programs took."""
        parts = self.verdict.parts
        whole = sum(parts.values()) or 1.0
        overhead, others = _overhead(parts)
        found = {
            "compute": parts[COMPUTE], "memory": parts[WEIGHTS] + parts[KV] + parts["activations"],
            "kernels": parts[IMPLEMENTATION] + parts[CLOCK], "overhead": overhead, "others": others,
        }
        return {name: seconds / whole for name, seconds in found.items()}

    def line(self) -> str:
        """For a log."""
        total, verdict = self.total, self.verdict
        shown = (
            f"roofline: {total.sampled_s:.0f} tok/s, {total.tokens_s - total.sampled_s:.0f} prompt tok/s, "
            f"{total.rows:.1f} rows, {self.window.waiting:.1f} waiting; "
        )
        if total.is_doubtful:
            return shown + "peaks doubtful: steps were faster than they allow; they are measured again when there is no work"
        shown += (
            f"MFU {total.mfu:.1%}, MBU {total.mbu:.1%}; "
            f"bound by {verdict.term} ({verdict.share:.0%}), headroom {shown_headroom(verdict.headroom)}"
        )
        clocks = self.window.clocks
        shown += f"; {clocks.limited_by}: {clocks.line}" if clocks is not None and clocks.limited_by else ""
        return f"{shown}; next: {verdict.next}" if verdict.next else shown


class LiveRoofline:
    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self._newest: _Sample | None = None
        self._rates: Rates | None = None                 # those of the rows of the history, by where each begins and ends
        self._rows: dict[tuple[float, float], list[float]] = {}

    def take(self, at: float, sums: Sums, gpu: Sequence[float] = ()) -> None:
        """Sums as they are at a moment. Smaller ones than before are another engine's, or of other peaks. `gpu`: sums of its
        power and clocks (gpus/clocks)."""
        now = (at, {phase: np.array(sums.get(phase, ()) or [0.0] * len(SUMS)) for phase in PHASES})
        now[1][_GPU] = np.array(gpu or [0.0] * len(GPU_SUMS))
        if self._newest is not None and any((now[1][phase] < self._newest[1][phase] - 1e-9).any() for phase in PHASES):
            self._samples.clear()
        if not self._samples:                            # all of it happened just before
            before = {phase: np.zeros(len(SUMS)) for phase in PHASES} | {_GPU: now[1][_GPU]}
            self._samples.append((at - max(_busy(now), _SAMPLE_SECONDS), before))
        elif at - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append(now)
        self._newest = now

    def look(
        self, now: float, rates: Rates, setting: Setting, seconds: float = WINDOW_SECONDS, front_end: FrontEndLoad | None = None
    ) -> Live:
        """The last seconds until now; of an engine that works, not beyond the moment when it began to."""
        if self._newest is None or now - self._newest[0] >= seconds:                         # nothing happened since
            return _judged(seconds, {phase: PhaseSums() for phase in PHASES}, rates, setting, _parts_of(front_end, now, seconds))
        first = self._first(now, seconds)
        sums = {phase: PhaseSums(*(self._newest[1][phase] - first[1][phase]).tolist()) for phase in PHASES}
        clocks = Clocks.of((self._newest[1][_GPU] - first[1][_GPU]).tolist())
        length = max(now - first[0], 1e-3)
        return _judged(length, sums, rates, setting, _parts_of(front_end, now, length), clocks)

    def _first(self, now: float, seconds: float) -> _Sample:
        """Where the window begins."""
        assert self._newest is not None
        later = self._newest
        if now - later[0] < 2 * _SAMPLE_SECONDS:         # it works
            for sample in reversed(self._samples):
                gone = later[0] - sample[0]
                if gone >= _SAMPLE_SECONDS / 2 and _busy(later) - _busy(sample) < BUSY * gone:
                    break                                # until then there was little to do
                later = sample
                if now - sample[0] >= seconds:
                    return sample
            if now - later[0] >= _SAMPLE_SECONDS:
                return later
        return next((sample for sample in reversed(self._samples) if now - sample[0] >= seconds), self._samples[0])

    def history(self, rates: Rates) -> list[list[float]]:
        """Per sample but the first: its moment, tokens of answers and all tokens per second, MFU, MBU, the part of the
        time that was busy, parts of the busy time for computing, memory, overhead and other programs, requests that waited,
        rows of a step."""
        if rates != self._rates:
            self._rates, self._rows = rates, {}
        # What lies between two samples stays the same: pages ask every second, and all of it takes tens of milliseconds.
        self._rows = {
            (old[0], new[0]): self._rows.get((old[0], new[0])) or _history_row(old, new, rates)
            for old, new in pairwise(self._samples)
        }
        return list(self._rows.values())


def _history_row(before: _Sample, after: _Sample, rates: Rates) -> list[float]:
    sums = _together({phase: PhaseSums(*(after[1][phase] - before[1][phase]).tolist()) for phase in PHASES})
    used, seconds = Utilisation.of(sums, rates), after[0] - before[0]
    busy = sums.seconds or 1.0
    memory = sums.on_weights + sums.on_kv + sums.on_activations
    overhead, others = _overhead(window_of(seconds, sums).parts())
    return [
        after[0], sums.sampled / seconds, sums.tokens / seconds, used.mfu, used.mbu, min(1.0, sums.seconds / seconds),
        min(1.0, sums.on_compute / busy), min(1.0, memory / busy), min(1.0, overhead / busy),
        min(1.0, others / busy), sums.queued / busy, used.rows,
    ]


def _overhead(parts: Mapping[str, float]) -> tuple[float, float]:
    """Seconds in which the device waited, and those that other programs had."""
    return sum(parts[name] for name in OVERHEADS if name != SHARED), parts[SHARED]


def _busy(sample: _Sample) -> float:
    return sum(float(sample[1][phase][_SECONDS]) for phase in PHASES)


class FrontEndLoad:
    """How busy the front end's process is: CPU seconds of its event loop, and of tokenising in any thread. Used by the loop."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=SAMPLES)

    def sample(self, now: float) -> None:
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append((now, self._clock(), SPENT["tokenising"]))

    def shares(self, now: float, seconds: float) -> tuple[float, float]:
        """Of about the last seconds: the loop's, and the tokeniser's. 0 until a second was seen."""
        self.sample(now)
        at, computing, tokenising = next(
            (each for each in reversed(self._samples) if now - each[0] >= seconds), self._samples[0]
        )
        if now - at < _SAMPLE_SECONDS:
            return 0.0, 0.0
        return (self._clock() - computing) / (now - at), (SPENT["tokenising"] - tokenising) / (now - at)


def _parts_of(front_end: FrontEndLoad | None, now: float, seconds: float) -> tuple[float, float]:
    """Seconds of the window."""
    if front_end is None:
        return 0.0, 0.0
    loop, tokenising = front_end.shares(now, seconds)
    return loop * seconds, tokenising * seconds


class LiveView:
    """The front end's copy of its engine's roofline: the newest report, the last steps, and the windows."""

    def __init__(self) -> None:
        self.live = LiveRoofline()
        self.front_end = FrontEndLoad()
        self.stats = RooflineStats({})
        self.points: deque[list[float]] = deque(maxlen=REMEMBERED)

    def take(self, now: float, stats: RooflineStats) -> None:
        if not stats.held:                               # as last reported
            stats.held, stats.cached = self.stats.held, self.stats.cached
        if stats.measured != self.stats.measured:        # predicted with other peaks
            self.points.clear()
        self.stats = stats
        self.points.extend(stats.points)
        self.front_end.sample(now)
        self.live.take(now, stats.phases, stats.gpu)

    @property
    def rates(self) -> Rates:
        stats = self.stats
        return Rates(stats.read_bytes_s, stats.flops_s.get(stats.dtype, stats.flops_s.get("float32", 0.0)))


def window_of(seconds: float, sums: PhaseSums) -> Window:
    busy = sums.seconds
    return Window(
        seconds=max(seconds, busy), busy=busy, device=sums.device, on_compute=sums.on_compute, on_weights=sums.on_weights,
        on_kv=sums.on_kv, on_activations=sums.on_activations, communication=sums.communication, launch=sums.launch,
        lost=sums.lost, waiting=sums.queued / busy if busy else 0.0, running=sums.rows / sums.steps if sums.steps else 0.0,
        steps=int(sums.steps),
    )


def _together(phases: Mapping[str, PhaseSums]) -> PhaseSums:
    total = PhaseSums()
    for sums in phases.values():
        total.add(np.array(sums.values()))
    return total


def _judged(
    seconds: float, phases: dict[str, PhaseSums], rates: Rates, setting: Setting, front_end: tuple[float, float],
    clocks: Clocks | None = None,
) -> Live:
    total = _together(phases)
    window = replace(window_of(seconds, total), front_end=front_end[0], tokenising=front_end[1], clocks=clocks)
    return Live(
        seconds, Utilisation.of(total, rates),
        {phase: Utilisation.of(sums, rates) for phase, sums in phases.items() if sums.steps}, window,
        judge(window, setting),
    )
