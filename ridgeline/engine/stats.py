"""The engine's side of metrics: watches each step, and writes down now and then what the counters say.

After each step it reads a few integers and adds to two histograms, some microseconds in all. Slow steps are logged with
their cause, once a second at most. Reads the core, never changes it.
"""

from __future__ import annotations

import dataclasses
import gc
import time

from ridgeline.engine.core import EngineCore
from ridgeline.log import get_logger
from ridgeline.metrics import HAPPENED, EngineStats, Step, StepWatch
from ridgeline.resolve import ResolvedConfig
from ridgeline.techniques import TECHNIQUES, turned_off

logger = get_logger("engine")

_STATS_SECONDS = 0.1                 # between two reports while there is work
_LOG_SECONDS = 1.0                   # between two lines about slow steps


def active_techniques(config: ResolvedConfig) -> list[str]:
    """Names of the techniques that this engine uses."""
    options = {name: value for part in dataclasses.asdict(config.pinned()).values() for name, value in part.items()}
    off = turned_off(options, config.device)
    return [technique.name for technique in TECHNIQUES if technique.is_on(options) and technique.name not in off]


class _CollectorClock:
    """Seconds this process has spent collecting garbage."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began

    def close(self) -> None:
        gc.callbacks.remove(self._note)


class StatsKeeper:
    """Told of every step by the engine's loop: `stepped` when one ran, `due` when there is something to report."""

    def __init__(self, core: EngineCore) -> None:
        self.watch = StepWatch()
        self._core = core
        self._clock = _CollectorClock()
        self._ended = 0.0                                # the last step; 0: there was no work since
        self._taken = self._tokens_taken()
        self._seen = self._marks()
        self._collected = 0.0
        self._reported = 0.0
        self._news = False
        self._waiting = 0                                # as last reported
        self._logged = 0.0
        self._unlogged = 0                               # slow steps since the last line

    def idle(self) -> None:
        """There is no work: the time until there is some again belongs to no step."""
        self._ended = 0.0

    def stepped(self, began: float, ended: float) -> None:
        """A step ran. With steps in flight the first of them brings nothing yet; its time counts with the next."""
        before = self._ended or began
        self._news = True
        taken = self._tokens_taken()
        tokens = taken - self._taken
        if not tokens:
            self._ended = before
            return
        self._taken, self._ended = taken, ended
        prompts, preemptions, compiled, recorded = marks = self._marks()
        seen, self._seen = self._seen, marks
        collected, self._collected = self._collected, self._clock.seconds
        step = Step(
            ended - before, began - before, self._collected - collected, tokens, prompts - seen[0],
            preemptions - seen[1], compiled - seen[2], recorded - seen[3],
        )  # fmt: skip
        cause = self.watch.observe(step)
        if cause:
            self._log(step, cause, ended)

    def due(self, now: float) -> bool:
        """Is there something to report, a step or a longer or shorter queue, and is it time?"""
        news = self._news or self._core.scheduler.num_waiting != self._waiting
        return news and (now - self._reported >= _STATS_SECONDS or not self._core.has_work)

    def report(self, now: float) -> EngineStats:
        self._reported, self._news = now, False
        scheduler, watch = self._core.scheduler, self.watch
        self._waiting = scheduler.num_waiting
        counters, cache = scheduler.counters, scheduler.manager.counters
        numbers = {
            "steps": counters.steps,
            "prompt_tokens": counters.prompt_tokens,
            "preemptions": counters.preemptions,
            "useful": counters.useful_tokens,
            "recomputation": counters.wasted_tokens,
            "padding": counters.padded_tokens,
            "rejected": counters.rejected_tokens,
            "late": counters.late_tokens,
            "held_slots": counters.held_slots,
            "used_slots": counters.used_slots,
            "prefix_queries": cache.asked_tokens,
            "prefix_hits": cache.hit_tokens,
            "evicted_blocks": cache.evicted,
            "graph_replays": self._replays(),
            "graph_recordings": HAPPENED["graph_recording"],
            "kernel_compiles": HAPPENED["kernel_compile"],
        }
        return EngineStats(
            scheduler.num_running, self._waiting, scheduler.manager.num_free, numbers, watch.slow,
            watch.seconds.counts, watch.seconds.sum, watch.tokens.counts, watch.tokens.sum,
        )  # fmt: skip

    def close(self) -> None:
        self._clock.close()

    def _tokens_taken(self) -> int:
        """Tokens of the steps whose results were taken in."""
        counters = self._core.scheduler.counters
        return counters.useful_tokens + counters.wasted_tokens

    def _marks(self) -> tuple[int, int, int, int]:
        counters = self._core.scheduler.counters
        return counters.prompt_tokens, counters.preemptions, HAPPENED["kernel_compile"], HAPPENED["graph_recording"]

    def _replays(self) -> int:
        """Only a forward pass with recorded graphs counts them."""
        runner = getattr(self._core.executor, "runner", None)
        return int(getattr(getattr(runner, "forward", None), "replays", 0))

    def _log(self, step: Step, cause: str, now: float) -> None:
        if now - self._logged < _LOG_SECONDS:
            self._unlogged += 1
            return
        logger.info(
            "slow step: cause=%s ms=%.1f median_ms=%.1f tokens=%d prompt_tokens=%d preemptions=%d compiled=%d "
            "recorded=%d gc_ms=%.1f between_ms=%.1f unlogged=%d",
            cause, step.seconds * 1e3, self.watch.median * 1e3, step.tokens, step.prompt_tokens, step.preemptions,
            step.compiled, step.recorded, step.collecting * 1e3, step.between * 1e3, self._unlogged,
        )  # fmt: skip
        self._logged, self._unlogged = now, 0
