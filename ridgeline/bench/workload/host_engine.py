"""`bench host --shape NAME`: what the host spends on a step of a real engine, while its device computes.

The calls of the core's step are timed in steady decode steps, the device's own time is not: `collect`, where the host waits for
it, is left out. Weights are dummy ones, and the engine is the one that is served: on a GPU its steps are CUDA graphs, so
launching them is part of what is measured.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ridgeline.bench.lab.record import percentiles
from ridgeline.bench.workload.bench_engine import Engine
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.errors import ConfigError

PROMPT = 100
_WARM_STEPS = 20                     # that do not count
# Of the core's step, in this order; sampling belongs to launching.
_CALLS = ("plan", "pack", "sample", "collect", "update", "record")


def engine_steps(shape: str, layers: int | None, running: list[int], steps: int) -> dict[str, Any]:
    """By number of rows, milliseconds of a decode step on the host."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": max(running),
               "max_model_len": PROMPT + steps + 2 * _WARM_STEPS}  # fmt: skip
    engine = Engine(str(write_shape(shape, layers)), **options)
    try:
        return {f"running_{count}": _steps(engine, count, steps) for count in running}
    finally:
        engine.close()


def _steps(engine: Engine, running: int, steps: int) -> dict[str, Any]:
    rng = random.Random(0)
    vocab = engine.config.model.vocab_size
    # Different lengths, so that block borders do not fall on the same step for all.
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT - number % 16)] for number in range(running)]
    engine.serve([(prompt, _WARM_STEPS) for prompt in prompts])
    engine.settle()
    clock = StepClock(engine, running)
    with clock.watching():
        engine.serve([(prompt, steps + 2 * _WARM_STEPS) for prompt in prompts])
    kept = clock.steps[_WARM_STEPS : _WARM_STEPS + steps]
    if len(kept) < steps // 2:
        raise ConfigError(f"of {steps} steps only {len(kept)} had all {running} rows: KV blocks are too few, so take fewer rows")
    times = {f"{name}_ms": percentiles([each[name] for each in kept]) for name in (*_CALLS, "step", "host")}
    together = [each["plan"] + each["pack"] + each["sample"] for each in kept]
    return times | {"plan_and_pack_ms": percentiles(together), "steps": len(kept)}


class StepClock:
    """Milliseconds of every step in which all rows decode, by call."""

    def __init__(self, engine: Engine, running: int) -> None:
        self.steps: list[dict[str, float]] = []
        self._core = engine.core
        self._running = running
        self._now: dict[str, float] = {}
        self._decodes = False                            # are all rows in the step that was planned, with a token each?

    @contextmanager
    def watching(self) -> Iterator[None]:
        core = self._core
        calls: list[tuple[Any, str, Callable[..., Any]]] = [
            (owner, method, functools.partial(self._timed, name, getattr(owner, method)))
            for name, owner, method in (
                ("plan", core.scheduler, "schedule"), ("pack", core.executor, "submit"), ("sample", core.executor, "sample"),
                ("collect", core.executor, "collect"), ("update", core.scheduler, "update"), ("record", core.recorder, "took"),
            )
        ]  # fmt: skip
        calls.append((core.recorder, "planned", functools.partial(self._planned, core.recorder.planned)))
        calls.append((core, "step", functools.partial(self._step, core.step)))
        before = [vars(owner).get(method) for owner, method, _ in calls]
        for owner, method, timed in calls:
            setattr(owner, method, timed)
        try:
            yield
        finally:
            for (owner, method, _), own in zip(calls, before, strict=True):
                if own is None:
                    delattr(owner, method)
                else:
                    setattr(owner, method, own)

    def _timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        value = call(*args)
        self._now[name] = self._now.get(name, 0.0) + (time.perf_counter() - start) * 1e3
        return value

    def _planned(self, call: Callable[..., Any], plan: Any) -> None:
        self._decodes = len(plan.rows) == plan.total_tokens == self._running
        self._timed("record", call, plan)

    def _step(self, call: Callable[[], Any]) -> Any:
        self._now, self._decodes = {}, False
        start = time.perf_counter()
        value = call()
        whole = (time.perf_counter() - start) * 1e3
        if self._decodes and self._now.keys() == set(_CALLS):
            self.steps.append(self._now | {"step": whole, "host": whole - self._now["collect"]})
        return value
