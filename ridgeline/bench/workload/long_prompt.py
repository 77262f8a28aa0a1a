"""The effect of a long prompt on decoding requests: gaps between their tokens before, during and after its prefill.

The same requests run twice: with prompt chunks limited by the step-time model (scheduler/step_time.py), as in a server, and with
chunks of the whole token budget. The prompt also runs alone, to show what the limit costs it.

A gap counts as "during" if it overlaps the time from when the prompt is added until its first token is on the host.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.bench.lab.machine_log import Watch
from ridgeline.bench.options.studies_options import DECODES, PROMPT
from ridgeline.bench.workload.bench_engine import Engine
from ridgeline.runner.start.gpu_names import gpu_names
from ridgeline.scheduler.step_time import FEWEST

SERVED, WHOLE = "step_time_model", "whole_budget"
PHASES = ("before", "during", "after")
SMALLEST_CHUNK = min(FEWEST.values())    # tokens that a step computes of a prompt at least: how long decodes may have to go on


@dataclass(frozen=True, slots=True)
class Sizes:
    decodes: int = DECODES
    tokens_in: int = 512             # of each of them
    prompt: int = PROMPT
    before: int = 100                # steps with all decodes and nothing else …
    after: int = 50                  # … and behind the prompt's first token

    @property
    def tokens_out(self) -> int:
        """More tokens than a request reaches: requests left at the end are aborted."""
        return self.before + self.after + -(-self.prompt // SMALLEST_CHUNK) + 2 * self.decodes + 16


SIZES = Sizes()


@dataclass(slots=True)
class Timed:
    """One run: when each decode's tokens came, and between which times the prompt was there."""

    arrivals: list[list[float]]
    full: float                      # all of them decode from here on
    handed_in: float
    first_token: float
    steps: int                       # while the prompt was there

    def gaps(self) -> dict[str, list[float]]:
        """Seconds between consecutive tokens of a request, by phase."""
        found: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for times in self.arrivals:
            for begin, end in itertools.pairwise(times):
                if end > self.handed_in and begin < self.first_token:
                    found["during"].append(end - begin)
                elif begin >= self.full:
                    found["before" if end <= self.handed_in else "after"].append(end - begin)
        return found


def long_prompt(
    model: str, sizes: Sizes = SIZES, repeats: int = 2, step_time_ms: float | None = None, **options: Any
) -> dict[str, Any]:
    """`step_time_ms`: of the first of the two; None: what a server takes on this device."""
    defaults = {
        "max_num_seqs": sizes.decodes + 1,
        "max_model_len": -(-max(sizes.prompt + 2, sizes.tokens_in + sizes.tokens_out) // 16) * 16,
    }
    found: dict[str, Any] = {}
    for name, milliseconds in ((SERVED, step_time_ms), (WHOLE, 0.0)):
        engine = Engine(model, **defaults | options | {"step_time_ms": milliseconds})
        with Watch(gpu_names()) as watch:
            run(engine, sizes, seed=0)                   # compiles and records; the model of step times has seen some
            engine.settle()
            began = time.time()
            runs = [run(engine, sizes, seed) for seed in range(1, repeats + 1)]
            alone = [engine.serve([(_prompt(sizes.prompt, engine, -seed), 1)]).seconds for seed in range(1, repeats + 1)]
            log = watch.between(began, time.time()).get("gpu", {})
        found[name] = summary(runs) | {
            "first_token_alone_s": min(alone), "step_time_ms": engine.config.step_seconds * 1e3,
            "max_num_batched_tokens": engine.config.max_num_batched_tokens, "device_log": log,
        }
        engine.close()
        _show(name, found[name])
    longest = {name: found[name]["gap_ms"]["during"]["max"] for name in (SERVED, WHOLE)}
    return found | {"sizes": dataclasses.asdict(sizes), "longest_gap_whole_over_served": longest[WHOLE] / longest[SERVED]}


def run(engine: Engine, sizes: Sizes, seed: int) -> Timed:
    core = engine.core
    arrivals: dict[str, list[float]] = {}

    def step() -> set[str]:
        """Who has got a token."""
        deltas = core.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.error:
                raise AssertionError(f"a request of the benchmark failed: {delta.error}")
            arrivals.setdefault(delta.request_id, []).append(now)
        return {delta.request_id for delta in deltas}

    decodes = [
        engine.submit(_prompt(sizes.tokens_in, engine, seed * sizes.decodes + number), sizes.tokens_out)
        for number in range(sizes.decodes)
    ]
    waiting = set(decodes)
    while waiting:
        waiting -= step()
    full = max(times[-1] for times in arrivals.values())
    for _ in range(sizes.before):
        step()
    prompt = _prompt(sizes.prompt, engine, -seed - 1000)
    handed_in = time.perf_counter()
    long_one = engine.submit(prompt, 1)
    steps = 0
    while long_one not in arrivals:
        step()
        steps += 1
    first_token = arrivals[long_one][0]
    for _ in range(sizes.after):
        step()
    for request_id in decodes:
        core.abort(request_id)
    while core.has_work:
        core.step()
    return Timed([arrivals[request_id] for request_id in decodes], full, handed_in, first_token, steps)


def summary(runs: Sequence[Timed]) -> dict[str, Any]:
    """Gaps of all runs together, by phase; and what the prompt itself had of it."""
    gaps = {phase: sorted(gap for each in runs for gap in each.gaps()[phase]) for phase in PHASES}
    return {
        "gap_ms": {
            phase: {"p50": _at(values, 0.5), "p99": _at(values, 0.99), "max": _at(values, 1.0), "tokens": len(values)}
            for phase, values in gaps.items()
        },
        "first_token_s": [each.first_token - each.handed_in for each in runs],
        "steps_of_the_prompt": [each.steps for each in runs],
        "longest_gap_ms": [max(each.gaps()["during"]) * 1e3 for each in runs],
    }


def _at(ordered: Sequence[float], share: float) -> float:
    """Milliseconds: a gap that there was."""
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] * 1e3


def _prompt(tokens: int, engine: Engine, seed: int) -> list[int]:
    rng = random.Random(f"long-prompt-{seed}")
    return [rng.randrange(engine.config.model.vocab_size) for _ in range(tokens)]


def _show(name: str, found: dict[str, Any]) -> None:
    gaps = found["gap_ms"]
    parts = [f"{phase} {gaps[phase]['p50']:.1f}/{gaps[phase]['p99']:.1f}/{gaps[phase]['max']:.1f}" for phase in PHASES]
    first = ", ".join(f"{seconds * 1e3:.0f}" for seconds in found["first_token_s"])
    print(f"{name:16s} gap P50/P99/max ms: {'  '.join(parts)}  the prompt's first token after {first} ms "
          f"in {found['steps_of_the_prompt']} steps, alone {found['first_token_alone_s'] * 1e3:.0f} ms", flush=True)
