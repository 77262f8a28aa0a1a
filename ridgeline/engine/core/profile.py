"""torch's profiler around an engine's steps: marks steps, what the loop does in them, and every op.

The marks are there only while it runs. Offline, the caller uses `step` instead of the core's own and gets the trace. A running
engine (`LiveProfile`) does the same for some steps when its operator asks, and leaves the trace in a private folder. The caller
measures what profiling costs, by timing the same steps without it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.ipc import Profiled
from ridgeline.messages import StepPlan, StepResult, TokenDeltas
from ridgeline.ops.registry import set_mark, set_nvtx
from ridgeline.roofline.parts import StepRows, part_costs
from ridgeline.roofline.steps import PHASES, POINT
from ridgeline.roofline.trace import OP, PHASE, STEP
from ridgeline.roofline.vectorised import StepCosts

MOST_STEPS = 256                     # of a running engine: some ten thousand kernels
_LONGEST_SECONDS = 30.0              # then a live profile ends with what it has
_COMPARED = 128                      # steps before it, with which its own are compared
# What the engine's loop calls: on which of the core's objects, and as what it is marked.
_PHASES = (
    ("scheduler", "schedule", "schedule"), ("executor", "submit", "launch"), ("executor", "sample", "sample"),
    ("executor", "collect", "collect"), ("scheduler", "update", "update"),
)


def _marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


class StepProfiler:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._on_gpu = core.config.device == "cuda"
        self._kept: list[tuple[Any, str, Any]] = []
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        # A CPU's allocator is called hundreds of times a step: that would be what the trace shows.
        self._profiler = profile(activities=activities, profile_memory=self._on_gpu, acc_events=True)
        self.step: Callable[[], TokenDeltas] = _marked(STEP, core.step)

    def __enter__(self) -> StepProfiler:
        for owner_name, method, name in _PHASES:
            owner = getattr(self._core, owner_name)
            self._kept.append((owner, method, vars(owner).get(method)))
            setattr(owner, method, _marked(PHASE + name, getattr(owner, method)))
        if not self._on_gpu:                             # a GPU's kernels have names of their own
            set_mark(lambda name, function: _marked(OP + name, function))
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        for owner, method, before in self._kept:
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
        if not self._on_gpu:
            set_nvtx(self._core.config.options.execution.nvtx)

    def write(self, path: Path) -> None:
        """The Chrome trace, once it has ended."""
        self._profiler.export_chrome_trace(str(path))

    def document(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self.write(path)
            found: dict[str, Any] = json.loads(path.read_text())
        return found


class LiveProfile:
    """The next steps of a running engine. `step` in the place of the core's own until `is_over`, then `finish`."""

    def __init__(self, core: EngineCore, steps: int) -> None:
        self._core = core
        self._left = min(max(1, steps), MOST_STEPS)
        self._began = time.monotonic()
        self._rows = StepRows()
        core.recorder.fold()
        self._before = list(core.recorder.points)[-_COMPARED:]
        self._counted = core.recorder.num_points
        self._profiler = StepProfiler(core)
        self._profiler.__enter__()
        self._plans: dict[int, StepPlan] = {}
        self._planned, self._took = core.recorder.planned, core.recorder.took
        vars(core.recorder).update(planned=self._plan, took=self._take)

    def _plan(self, plan: StepPlan) -> None:
        self._plans[plan.step] = plan
        self._planned(plan)

    def _take(self, result: StepResult, waiting: int, goes_on: bool) -> None:
        if (plan := self._plans.pop(result.step, None)) is not None:     # None: planned before the profile began
            self._rows.add(plan, result)
        self._took(result, waiting, goes_on)

    def step(self) -> TokenDeltas:
        self._left -= 1
        return self._profiler.step()

    @property
    def is_over(self) -> bool:
        return self._left <= 0 or time.monotonic() - self._began > _LONGEST_SECONDS

    def finish(self) -> Profiled:
        recorder = self._core.recorder
        for name in ("planned", "took"):
            del vars(recorder)[name]
        self._profiler.__exit__()
        if not self._rows.counts:
            return Profiled("", {}, refused="the engine had nothing to do: there was no step to profile")
        recorder.fold()
        try:
            path = self._written()
        except (OSError, RuntimeError) as error:         # a full disk costs the trace, not the engine and its requests
            return Profiled("", {}, refused=f"the trace cannot be written: {getattr(error, 'strerror', None) or error}")
        costs: dict[str, dict[str, float]] = {}
        if recorder.peaks is not None:
            rates = recorder.peaks.read_bytes_s, recorder.rates(recorder.peaks)
            model = getattr(getattr(self._core.executor, "runner", None), "model", None)
            steps = self._rows.costs(StepCosts(recorder.shape, getattr(model, "weight_reads", None)))
            costs = {part: asdict(cost) for part, cost in part_costs(steps, *rates).items()}
        during = list(recorder.points)[-max(1, recorder.num_points - self._counted) :]
        return Profiled(str(path), costs, _overhead(self._before, during))

    def _written(self) -> Path:
        """The trace's file. Raises OSError or RuntimeError, and leaves nothing behind then."""
        path = Path(tempfile.mkdtemp(prefix="ridgeline-profile-")) / "trace.json"
        try:
            self._profiler.write(path)
            if not path.exists():                        # torch renames it at its end, and does not say when it cannot write
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} in {tempfile.gettempdir()}, or it was not writable")
        except BaseException:
            shutil.rmtree(path.parent, ignore_errors=True)
            raise
        return path


def _overhead(before: list[list[float]], during: list[list[float]]) -> float:
    """How much longer decode steps of the same number of rows took, the median; 0 where there is nothing to compare."""
    phase, rows, seconds = (POINT.index(name) for name in ("phase", "rows", "seconds"))

    def decodes(points: list[list[float]], count: float) -> list[float]:
        return [point[seconds] for point in points if PHASES[int(point[phase])] == "decode" and point[rows] == count]

    ratios = []
    for count in {point[rows] for point in during}:
        one, other = decodes(before, count), decodes(during, count)
        if one and other:
            ratios += [each / statistics.median(one) for each in other]
    return float(np.median(ratios)) - 1 if ratios else 0.0
