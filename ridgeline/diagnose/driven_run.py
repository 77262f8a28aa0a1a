"""Drives a workload through an engine's core and logs every step: its times, its rows, and causes of slow steps.

The same loop drives an engine that computes and one that only plans (what_if.py), so both see the same requests in the same
order: all at once, or a fixed number at a time, the next one sent when an answer ends.
"""

from __future__ import annotations

import gc
import random
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.bench.load.latency import Outcome
from ridgeline.bench.workload.workloads import Asked
from ridgeline.engine.core.core import EngineCore
from ridgeline.errors import EngineDead
from ridgeline.messages import Request, StepPlan, StepResult, TokenDelta, TokenDeltas
from ridgeline.metrics import HAPPENED, MANY_FAULTS
from ridgeline.roofline.parts import StepRows
from ridgeline.roofline.slow import StepTimes
from ridgeline.roofline.steps import PHASES, StepRecorder
from ridgeline.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with prompts of one length, optionally with a common prefix, and answers of one length or of a range."""

    prompts: int = 8
    tokens_in: int = 128
    tokens_out: int = 64
    shared: int = 0                  # of tokens_in, those that every prompt begins with
    shortest: int = 0                # answers vary from this length to tokens_out; 0: all equal
    concurrency: int = 0             # requests in flight at once; 0: all of them
    seed: int = 1

    def asked(self, vocab: int) -> Asked:
        rng = random.Random(f"diagnose-{self.seed}")
        shared = [rng.randrange(vocab) for _ in range(self.shared)]
        lengths = [rng.randint(self.shortest or self.tokens_out, self.tokens_out) for _ in range(self.prompts)]
        return [
            (shared + [rng.randrange(vocab) for _ in range(self.tokens_in - self.shared)], length) for length in lengths
        ]

    @property
    def at_once(self) -> int:
        return min(self.concurrency or self.prompts, self.prompts)


class StepLog(StepRecorder):
    """The engine's recorder, which also keeps every single step."""

    def __init__(self, core: EngineCore, reads: Callable[[int], tuple[int, int]] | None) -> None:
        super().__init__(core.recorder.shape, core.recorder.dtype, reads, core.recorder.linear_dtype)
        self.rows = StepRows()
        self.times: list[StepTimes] = []
        self.between = 0.0                               # since the last step, outside of the engine
        self._core = core
        self._on_gpu = core.config.device == "cuda"
        self._clock_began = self._collecting = 0.0
        self._start = time.monotonic()
        self._marks = self._now()

    def __enter__(self) -> StepLog:
        gc.callbacks.append(self._collects)
        self._core.recorder = self
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._collects)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._clock_began = time.monotonic()
        else:
            self._collecting += time.monotonic() - self._clock_began

    def _now(self) -> tuple[float, ...]:
        """Counters that only grow: prompt tokens, preemptions, compiled kernels, captured graphs, allocations, CPU time, time."""
        counters = self._core.scheduler.counters
        if self._on_gpu:
            allocated = torch.cuda.memory_stats().get("num_device_alloc", 0)
        else:
            allocated = resource.getrusage(resource.RUSAGE_SELF).ru_minflt // MANY_FAULTS
        return (counters.prompt_tokens, counters.preemptions, HAPPENED["kernel_compile"], HAPPENED["graph_recording"],
                allocated, time.thread_time(), time.monotonic())

    def took(self, result: StepResult, waiting: int, goes_on: bool) -> None:
        plan, since = self._plans[0], self._since
        super().took(result, waiting, goes_on)
        now = self._now()
        prompts, preemptions, compiled, recorded, allocated, on_processor, wall = (
            after - before for after, before in zip(now, self._marks, strict=True)
        )
        seconds = now[-1] - since
        tokens, rows = plan.total_tokens, len(plan.rows)
        self.times.append(StepTimes(
            now[-1] - self._start, seconds, result.device_seconds, phase_of(plan), tokens, rows, self.between,
            self._collecting, int(prompts), int(preemptions), int(compiled), int(recorded), int(allocated),
            0.0 if self._on_gpu else max(0.0, min(wall, seconds) - on_processor),
        ))
        self.rows.add(plan, result)
        self._marks, self._collecting, self.between = now, 0.0, 0.0


def phase_of(plan: StepPlan) -> str:
    """As the recorder defines it: rows with one token decode, the others prefill."""
    if plan.total_tokens == len(plan.rows):
        return PHASES[1]
    return PHASES[2 if int(plan.num_tokens.min()) == 1 else 0]


def _take(outcome: Outcome, delta: TokenDelta, now: float) -> bool:
    """Notes a delta; has the request ended?"""
    if delta.error:
        raise EngineDead(f"a request of the workload failed: {delta.error}")
    if delta.token_ids:
        outcome.events.append(now)
        outcome.tokens_out += len(delta.token_ids)
    outcome.cached = max(outcome.cached, delta.num_cached_tokens)
    if delta.finish_reason is not None:
        outcome.ended = now
    return delta.finish_reason is not None


def drive(
    core: EngineCore, asked: Asked, at_once: int, salt: str = "", step: Callable[[], TokenDeltas] | None = None,
    most_steps: int | None = None, **params: Any,
) -> list[Outcome]:
    """Answer all requests, `at_once` of them in flight. `step` replaces the core's own step, for a profiler around it.

    After `most_steps` the remaining requests are aborted.
    """
    step = step or core.step
    log = core.recorder if isinstance(core.recorder, StepLog) else None
    waiting = deque(enumerate(asked))
    outcomes: dict[str, Outcome] = {}
    start = ended = time.perf_counter()
    left, steps = 0, 0

    def send() -> None:
        nonlocal left
        while waiting and left < at_once:
            number, (prompt, tokens_out) = waiting.popleft()
            now = time.perf_counter() - start
            wanted = SamplingParams(**{"temperature": 0, "max_tokens": tokens_out, "ignore_eos": True} | params)
            request_id = f"{salt}{number}"
            outcomes[request_id] = Outcome(now, now, now, tokens_in=len(prompt))
            core.add(Request(request_id, prompt, wanted, cache_salt=salt))
            left += 1

    send()
    while core.has_work and (most_steps is None or steps < most_steps):
        if log is not None:
            log.between += time.perf_counter() - ended
        deltas = step()
        ended = time.perf_counter()
        steps += 1
        left -= sum(_take(outcomes[delta.request_id], delta, ended - start) for delta in deltas)
        if waiting:
            send()
    for request_id, outcome in outcomes.items():
        if not outcome.ended:
            core.abort(request_id)
    while core.has_work:                                 # steps in flight finish before the next run begins
        core.step()
    return list(outcomes.values())
