"""Metrics of a running server as plain numbers: histograms, the engine's own counters, a request's times.

Observing is on the path of every token and every step, so it is a bisection and two additions; names, labels and text
are in server/observe/prometheus.py. Knows no sockets, no scheduler and no torch. All times are `time.monotonic()`, which
processes of one machine share, so a time that the engine took can be subtracted from one that the front end took.

    front end   arrived ──── sent ─┐                                                ┌─ first token ──── … ─── e2e
    engine                         └─ queue ─▶ started ── prefill ──▶ first step's end ── decode ──▶ last step's end
"""

from __future__ import annotations

import resource
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# vLLM's buckets, and more of them below, where a fast model lives: a tenth of a second says nothing about a step of 3 ms.
_MILLISECONDS = (0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009)
STEP_SECONDS = (
    *_MILLISECONDS, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
FIRST_TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
REQUEST_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0,
    20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
REQUEST_TOKENS = tuple(float(first * 10**power) for power in range(6) for first in (1, 2, 5)) + (1e6,)
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

FINISH_REASONS = ("stop", "length", "abort", "error")
WASTE_CAUSES = ("padding", "recomputation", "late", "rejected")

HAPPENED: Counter[str] = Counter()   # rare events of this process that delay a step, counted where they happen
SPENT: dict[str, float] = {"tokenising": 0.0}    # CPU seconds of this process, by kind of work

_RECENT = 512                        # requests whose times are kept one by one
_STEPS = 64                          # whose median a step is compared with …
_EVERY = 16                          # … and after how many steps that median is taken anew
_SLOW = 3.0                          # times the median
MANY_FAULTS = (16 << 20) // resource.getpagesize()      # page faults that count as an allocation: 16 MiB


class Histogram:
    """Counts by bucket. `bounds` are upper ends, inclusive; one more count is for what lies beyond."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def plus(self, counts: Sequence[int], total: float) -> Histogram:
        """This one and what another of the same buckets has counted."""
        both = Histogram(self.bounds)
        both.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        both.sum = self.sum + total
        return both


# -- the engine's process ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RooflineStats:
    """What the engine recorded of its steps. Sums and points are those of roofline/steps; this module only carries them."""

    phases: dict[str, list[float]]   # by phase, sums over all steps since the engine started or its peaks changed
    points: list[list[float]] = field(default_factory=list)      # the steps since the last report, the newest of them
    device: str = ""                 # its name; what follows is measured, but for the dtype
    dtype: str = ""
    read_bytes_s: float = 0.0        # 0: not known yet
    flops_s: dict[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    host_launch_s: float = 0.0
    measured: str = ""
    weight_bytes: float = 0.0        # per element, as a step of one row reads them
    kv_bytes: float = 0.0
    faster: dict[str, list[tuple[float, float]]] = field(default_factory=dict)   # narrower formats (verdict.Factors) …
    untimed: list[str] = field(default_factory=list)     # … those of them whose gain is a data sheet's …
    linear_share: float = 1.0        # … and the share of the weights that they narrow
    gpu: list[float] = field(default_factory=list)       # sums of its power and clocks (gpus/clocks); empty: not known
    # The KV cache as a row of cells, in percent of their blocks: held by sequences, and kept by the prefix cache alone.
    # Empty: as last reported.
    held: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


@dataclass(slots=True)
class EngineStats:
    """What the engine reports to the front end a few times a second. Counters count from the engine's start."""

    running: int                     # sequences that have a row
    waiting: int
    free_blocks: int
    counters: dict[str, int]
    slow_steps: dict[str, int]       # by cause
    step_seconds: list[int] = field(default_factory=lambda: [0] * (len(STEP_SECONDS) + 1))       # counts by bucket
    step_seconds_sum: float = 0.0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    step_tokens_sum: float = 0.0
    roofline: RooflineStats | None = None

    @classmethod
    def empty(cls) -> EngineStats:
        return cls(0, 0, 0, {}, {})


@dataclass(slots=True)
class Step:
    """One step as the engine's loop saw it."""

    seconds: float                   # from the end of the step before, or from when there was work again, to its end
    between: float                   # of these, before the step began: requests taken in, frames sent, garbage collected
    collecting: float                # seconds of garbage collection in all that
    tokens: int
    prompt_tokens: int
    preemptions: int
    compiled: int                    # kernels
    recorded: int                    # CUDA graphs captured
    device: float = 0.0              # seconds on the device
    computing: float = 0.0           # seconds that this thread was on a core …
    waiting: float = 0.0             # … and in the run queue: other programs had the cores
    faults: int = 0                  # pages mapped …
    read_faults: int = 0             # … and read from a disk
    allocated: int = 0               # pieces of memory from the device's driver
    added: int = 0                   # requests taken in
    is_first: bool = False           # the first step of its size and kind in this process


# Why a step was slow: the first cause that holds, of a step and half of the time it took beyond the median. What was measured
# comes before what is only likely: a step with prompts may be slow for another reason.
_CAUSES: tuple[tuple[str, Callable[[Step, float], bool]], ...] = (
    ("garbage_collection", lambda step, half: step.collecting > half),
    ("kernel_compile", lambda step, half: step.compiled > 0),
    ("graph_recording", lambda step, half: step.recorded > 0),
    ("allocation", lambda step, half: step.allocated > 0 or step.faults >= MANY_FAULTS),
    ("disk_reads", lambda step, half: step.read_faults > 0),         # of the model's file, or of swapped memory
    ("processor_taken", lambda step, half: step.waiting > half),
    ("new_requests", lambda step, half: step.between > half and step.added > 0),
    ("between_steps", lambda step, half: step.between > half),       # sending results, reporting
    ("preemption", lambda step, half: step.preemptions > 0),
    ("first_of_its_kind", lambda step, half: step.is_first),         # libraries load their kernels when they are first called
    ("prompt_tokens", lambda step, half: step.prompt_tokens > 0),
    ("device", lambda step, half: step.device > step.seconds - half),        # clocks, or another program on the GPU
    ("host_work", lambda step, half: step.computing > half),         # planning and packing
)
SLOW_CAUSES = (*(name for name, _ in _CAUSES), "unknown")


def slow_cause(step: Step, median: float) -> str:
    half = (step.seconds - median) / 2
    return next((name for name, holds in _CAUSES if holds(step, half)), "unknown")


class StepWatch:
    """Step times, and which of them were slow and why. A step is slow when it takes three times the running median."""

    def __init__(self) -> None:
        self.seconds = Histogram(STEP_SECONDS)
        self.tokens = Histogram(STEP_TOKENS)
        self.slow: dict[str, int] = {}
        self.median = 0.0                                # 0: not known yet
        self._last: deque[float] = deque(maxlen=_STEPS)
        self._until_median = _EVERY

    def is_slow(self, seconds: float) -> bool:
        return bool(self.median) and seconds > _SLOW * self.median

    def observe(self, step: Step) -> str:
        """The cause when the step was slow, else nothing."""
        seconds = step.seconds
        self.seconds.observe(seconds)
        self.tokens.observe(step.tokens)
        cause = ""
        if self.is_slow(seconds):
            cause = slow_cause(step, self.median)
            self.slow[cause] = self.slow.get(cause, 0) + 1
        self._last.append(seconds)
        self._until_median -= 1
        if not self._until_median:
            self._until_median = _EVERY
            self.median = sorted(self._last)[len(self._last) // 2]
        return cause


# -- the front end -----------------------------------------------------------------------------------------------------


class RequestTimes:
    """One request's times. Answers are counted apart; 0 stands for what has not happened."""

    __slots__ = ("arrived", "first", "first_seen", "last", "num_prompt", "off", "sent", "started", "tokens")

    def __init__(self, arrived: float, sent: float, num_prompt: int, num_answers: int) -> None:
        self.arrived = arrived                           # the front end has all of the request, as text or token ids
        self.sent = sent                                 # it is on its way to the engine
        self.num_prompt = num_prompt
        self.started = 0.0                               # the first step that computes something of it begins
        self.first = [0.0] * num_answers                 # the step that sampled the first token ended
        self.first_seen = 0.0                            # the first token of any answer reached the front end
        self.last = [0.0] * num_answers                  # the step that sampled the newest token ended
        self.tokens = [0] * num_answers
        self.off: tuple[str, ...] = ()                   # techniques that this request was denied

    @property
    def queue(self) -> float:
        return max(0.0, self.started - self.sent) if self.started else 0.0

    def prefill(self, index: int = 0) -> float:
        return max(0.0, self.first[index] - self.started) if self.started and self.first[index] else 0.0

    def decode(self, index: int = 0) -> float:
        return self.last[index] - self.first[index]


class ServingMetrics:
    """All values of /metrics, without names. One per front end; it outlives engines that are restarted."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.aborted = 0                                 # requests that their client cancelled
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token = Histogram(STEP_SECONDS)
        self.per_output_token = Histogram(STEP_SECONDS)
        self.e2e = Histogram(REQUEST_SECONDS)
        self.queue = Histogram(REQUEST_SECONDS)
        self.prefill = Histogram(REQUEST_SECONDS)
        self.decode = Histogram(REQUEST_SECONDS)
        self.inference = Histogram(REQUEST_SECONDS)
        self.request_prompt_tokens = Histogram(REQUEST_TOKENS)
        self.request_generation_tokens = Histogram(REQUEST_TOKENS)
        self.recent_first_token: deque[tuple[float, float]] = deque(maxlen=_RECENT)      # (when, seconds)
        self.recent_per_output_token: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self.engine = EngineStats.empty()                # the newest of the engine that lives now
        self._before = EngineStats.empty()               # what engines before it had counted

    # -- a request's life ----------------------------------------------------------------------------------------------

    def sent(self, num_prompt: int, num_answers: int, arrived: float = 0.0) -> RequestTimes:
        now = time.monotonic()
        return RequestTimes(arrived or now, now, num_prompt, num_answers)

    def started(self, times: RequestTimes, at: float) -> None:
        """Its first step began. Said again, after a preemption or by another engine, it changes nothing."""
        if not times.started:
            times.started = at

    def took(self, times: RequestTimes, index: int, num_tokens: int, at: float) -> None:
        """An answer's new tokens, sampled by a step that ended at `at`. On the path of every token."""
        last = times.last[index]
        if last:
            gap = at - last
            inter = self.inter_token                     # Histogram.observe, without the call
            inter.counts[bisect_left(inter.bounds, gap)] += 1
            inter.sum += gap
        elif num_tokens:
            self._first(times, index, at)
        else:
            return                                       # it ended without a token
        times.last[index] = at
        times.tokens[index] += num_tokens
        self.generation_tokens += num_tokens

    def _first(self, times: RequestTimes, index: int, at: float) -> None:
        now = time.monotonic()
        times.first[index] = at
        if not times.first_seen:
            times.first_seen = now
            self.started(times, at)                      # an engine that does not report it has no queue
            self.prompt_tokens += times.num_prompt
        self.first_token.observe(now - times.arrived)
        self.recent_first_token.append((now, now - times.arrived))

    def answered(self, times: RequestTimes, index: int, reason: str) -> None:
        """An answer is whole."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        tokens = times.tokens[index]
        self.e2e.observe(time.monotonic() - times.arrived)
        self.request_prompt_tokens.observe(times.num_prompt)
        self.request_generation_tokens.observe(tokens)
        if not times.first[index]:
            return
        prefill, decode = times.prefill(index), times.decode(index)
        self.queue.observe(times.queue)
        self.prefill.observe(prefill)
        self.decode.observe(decode)
        self.inference.observe(prefill + decode)
        if tokens > 1:
            self.per_output_token.observe(decode / (tokens - 1))
            self.recent_per_output_token.append((time.monotonic(), decode / (tokens - 1)))

    def left(self, times: RequestTimes, num_unfinished: int, error: bool) -> None:
        """A request ended before its answers did: it failed, or its client has gone."""
        self.finished["error" if error else "abort"] += num_unfinished
        self.aborted += not error

    # -- the engine ----------------------------------------------------------------------------------------------------

    def engine_started(self) -> None:
        """Another engine counts from nothing: what the last one had counted is kept."""
        now, before = self.engine, self._before
        self._before = EngineStats(
            0, 0, 0, _sum(before.counters, now.counters), _sum(before.slow_steps, now.slow_steps),
            [a + b for a, b in zip(before.step_seconds, now.step_seconds, strict=True)],
            before.step_seconds_sum + now.step_seconds_sum,
            [a + b for a, b in zip(before.step_tokens, now.step_tokens, strict=True)],
            before.step_tokens_sum + now.step_tokens_sum,
        )
        self.engine = EngineStats.empty()

    def counter(self, name: str) -> int:
        """What all engines have counted so far."""
        return self._before.counters.get(name, 0) + self.engine.counters.get(name, 0)

    def slow_steps(self, cause: str) -> int:
        return self._before.slow_steps.get(cause, 0) + self.engine.slow_steps.get(cause, 0)

    @property
    def step_seconds(self) -> Histogram:
        empty, now, before = Histogram(STEP_SECONDS), self.engine, self._before
        return empty.plus(before.step_seconds, before.step_seconds_sum).plus(now.step_seconds, now.step_seconds_sum)

    @property
    def step_tokens(self) -> Histogram:
        empty, now, before = Histogram(STEP_TOKENS), self.engine, self._before
        return empty.plus(before.step_tokens, before.step_tokens_sum).plus(now.step_tokens, now.step_tokens_sum)


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one | other}
