"""The live roofline of a running engine over the last seconds.

The engine's process and the front end each keep one. It takes sums that only grow (roofline/steps) and keeps one sample of them
per second; the difference of two samples is a window, which has utilisations and a verdict.

    MFU   FLOPs of useful tokens / (busy time × the measured matrix rate)
    HFU   the same including wasted work: padding, recomputation after preemptions, rejected drafts
    MBU   bytes of weights and KV / (busy time × the measured bandwidth)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ridgeline.metrics import RooflineStats
from ridgeline.roofline.steps import PHASES, REMEMBERED, SUMS, PhaseSums
from ridgeline.roofline.verdict import (
    BUSY,
    COMPUTE,
    IMPLEMENTATION,
    KV,
    OVERHEADS,
    WEIGHTS,
    Setting,
    Verdict,
    Window,
    judge,
)

SAMPLES = 121                        # one a second: two minutes
WINDOW_SECONDS = 10.0
_SAMPLE_SECONDS = 1.0
_SECONDS = SUMS.index("seconds")

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

    @classmethod
    def of(cls, sums: PhaseSums, rates: Rates) -> Utilisation:
        busy = sums.seconds or 1.0
        done = sums.flops + sums.padding_flops
        useful = sums.flops - sums.recomputed_flops - sums.rejected_flops
        moved = sums.weights + sums.kv_read + sums.kv_written
        most = busy * rates.flops_s
        return cls(
            int(sums.steps), sums.seconds, sums.device, sums.tokens / busy, sums.sampled / busy,
            sums.rows / max(sums.steps, 1.0), useful / most if most else 0.0, done / most if most else 0.0,
            moved / (busy * rates.read_bytes_s) if rates.read_bytes_s else 0.0,
            sums.flops / (moved + sums.activations) if moved else 0.0,
            *(part / done if done else 0.0 for part in (sums.padding_flops, sums.recomputed_flops, sums.rejected_flops)),
        )


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
            "kernels": parts[IMPLEMENTATION], "overhead": overhead, "others": others,
        }
        return {name: seconds / whole for name, seconds in found.items()}

    def line(self) -> str:
        """For a log."""
        total, verdict = self.total, self.verdict
        shown = (
            f"roofline: {total.sampled_s:.0f} tok/s, {total.tokens_s - total.sampled_s:.0f} prompt tok/s, "
            f"{total.rows:.1f} rows, {self.window.waiting:.1f} waiting; MFU {total.mfu:.1%}, MBU {total.mbu:.1%}; "
            f"bound by {verdict.term} ({verdict.share:.0%}), headroom {verdict.headroom:.1f}x"
        )
        return f"{shown}; next: {verdict.next}" if verdict.next else shown


class LiveRoofline:
    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self._newest: _Sample | None = None

    def take(self, at: float, sums: Sums) -> None:
        """Sums as they are at a moment. Smaller ones than before are another engine's, or of other peaks."""
        now = (at, {phase: np.array(sums.get(phase, ()) or [0.0] * len(SUMS)) for phase in PHASES})
        if self._newest is not None and any((now[1][phase] < self._newest[1][phase] - 1e-9).any() for phase in PHASES):
            self._samples.clear()
        if not self._samples:                            # all of it happened just before
            self._samples.append((at - max(_busy(now), _SAMPLE_SECONDS), {phase: np.zeros(len(SUMS)) for phase in PHASES}))
        elif at - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append(now)
        self._newest = now

    def look(self, now: float, rates: Rates, setting: Setting, seconds: float = WINDOW_SECONDS) -> Live:
        """The last seconds until now; of an engine that works, not beyond the moment when it began to."""
        if self._newest is None or now - self._newest[0] >= seconds:                         # nothing happened since
            return _judged(seconds, {phase: PhaseSums() for phase in PHASES}, rates, setting)
        first = self._first(now, seconds)
        sums = {phase: PhaseSums(*(self._newest[1][phase] - first[1][phase]).tolist()) for phase in PHASES}
        return _judged(max(now - first[0], 1e-3), sums, rates, setting)

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
        found = []
        for (before, old), (at, new) in pairwise(self._samples):
            sums = _together({phase: PhaseSums(*(new[phase] - old[phase]).tolist()) for phase in PHASES})
            used, seconds = Utilisation.of(sums, rates), at - before
            busy = sums.seconds or 1.0
            memory = sums.on_weights + sums.on_kv + sums.on_activations
            overhead, others = _overhead(window_of(seconds, sums).parts())
            found.append([
                at, sums.sampled / seconds, sums.tokens / seconds, used.mfu, used.mbu, min(1.0, sums.seconds / seconds),
                min(1.0, sums.on_compute / busy), min(1.0, memory / busy), min(1.0, overhead / busy),
                min(1.0, others / busy), sums.queued / busy, used.rows,
            ])
        return found


def _overhead(parts: Mapping[str, float]) -> tuple[float, float]:
    """Seconds in which the device waited, and those that other programs had."""
    return sum(parts[name] for name in OVERHEADS if name != "shared_machine"), parts.get("shared_machine", 0.0)


def _busy(sample: _Sample) -> float:
    return sum(float(values[_SECONDS]) for values in sample[1].values())


class LiveView:
    """The front end's copy of its engine's roofline: the newest report, the last steps, and the windows."""

    def __init__(self) -> None:
        self.live = LiveRoofline()
        self.stats = RooflineStats({})
        self.points: deque[list[float]] = deque(maxlen=REMEMBERED)

    def take(self, now: float, stats: RooflineStats) -> None:
        if not stats.held:                               # as last reported
            stats.held, stats.cached = self.stats.held, self.stats.cached
        if stats.measured != self.stats.measured:        # predicted with other peaks
            self.points.clear()
        self.stats = stats
        self.points.extend(stats.points)
        self.live.take(now, stats.phases)

    @property
    def rates(self) -> Rates:
        stats = self.stats
        return Rates(stats.read_bytes_s, stats.flops_s.get(stats.dtype, stats.flops_s.get("float32", 0.0)))


def window_of(seconds: float, sums: PhaseSums, io: float = 0.0, communication: float | None = None) -> Window:
    """`communication`: where a profile knows better than the steps."""
    busy, communication = sums.seconds, sums.communication if communication is None else communication
    return Window(
        seconds=max(seconds, busy), busy=busy, device=sums.device, on_compute=sums.on_compute, on_weights=sums.on_weights,
        on_kv=sums.on_kv, on_activations=sums.on_activations, io=io, communication=communication, launch=sums.launch,
        waiting=sums.queued / busy if busy else 0.0, running=sums.rows / sums.steps if sums.steps else 0.0,
        steps=int(sums.steps),
    )


def _together(phases: Mapping[str, PhaseSums]) -> PhaseSums:
    total = PhaseSums()
    for sums in phases.values():
        total.add(np.array(sums.values()))
    return total


def _judged(seconds: float, phases: dict[str, PhaseSums], rates: Rates, setting: Setting) -> Live:
    total = _together(phases)
    window = window_of(seconds, total)
    return Live(
        seconds, Utilisation.of(total, rates),
        {phase: Utilisation.of(sums, rates) for phase, sums in phases.items() if sums.steps}, window,
        judge(window, setting),
    )
