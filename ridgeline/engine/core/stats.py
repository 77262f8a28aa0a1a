"""The engine's side of metrics: watches each step, and reports the counters now and then.

After each step it reads a few integers and adds to two histograms, some microseconds in all. Slow steps are logged with
their cause, once a second at most, and not at all if prompts explain them; what the steps come to against the machine's
roofline, once a minute under load. The machine's peaks are measured in moments without work, unless they were measured
before. A thread samples a GPU's power and clocks. Reads the core, never changes it.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time

import numpy as np
import torch

from ridgeline.cache.block_pool import CACHED, HELD
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.what_helps import factors, linear_share, untimed
from ridgeline.gpus.gpu_log import GpuSums
from ridgeline.metrics import HAPPENED, EngineStats, RooflineStats, Step, StepWatch
from ridgeline.process.log import get_logger
from ridgeline.process.thread_clock import ThreadClock
from ridgeline.resolve import ResolvedConfig
from ridgeline.roofline.live import LiveRoofline, Rates
from ridgeline.roofline.peaks import MachinePeaks, from_data_sheet
from ridgeline.roofline.steps import PHASES
from ridgeline.roofline.verdict import IDLE, Setting
from ridgeline.runner.start.gpu_names import gpu_names
from ridgeline.runner.start.measure_peaks import PeakMeter
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.sizes.abilities import SHEET_NAMES, Factors
from ridgeline.sizes.hardware import data_sheet
from ridgeline.techniques import TECHNIQUES, turned_off

logger = get_logger("engine")

_STATS_SECONDS = 0.1                 # between two reports while there is work
_LOG_SECONDS = 1.0                   # between two lines about slow steps …
_SAME_SECONDS = 60.0                 # … of the same cause: on a shared machine there are several a second
_LINE_SECONDS = 60.0                 # between two lines about the roofline
_EXPECTED = ("prompt_tokens", "first_of_its_kind")       # causes of slow steps that are no news: they are counted, not logged
_MAP_SECONDS = 2.0                   # between two pictures of the KV cache
_MAP_CELLS = 480                     # at most
_ROOFLINE_SECONDS = 0.5              # between two counts of what was recorded: many steps at once cost little
_POINTS = 128                        # steps in one report
_QUIET_SECONDS = 1.0                 # without work, before the machine is measured


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


class _StepFacts:
    """What happened to this process in a step: the differences of numbers that only grow."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._clock = _CollectorClock()
        self._thread = ThreadClock()
        self._kinds: set[tuple[int, int]] = set()        # of steps so far: their sizes, as powers of two
        self._allocations = 0                            # of the GPU's driver, as last asked
        self._seen, self._times, self._collected = self._marks(), self._thread.read(), 0.0

    def idle(self) -> None:
        self._times = self._thread.read()

    def take(self, seconds: float, between: float, tokens: int, is_slow: bool) -> Step:
        """Since the step before."""
        marks, times, collected = self._marks(), self._thread.read(), self._clock.seconds
        prompts, preemptions, compiled, recorded, added = (now - then for now, then in zip(marks, self._seen, strict=True))
        used, collecting = times.since(self._times), collected - self._collected
        self._seen, self._times, self._collected = marks, times, collected
        kind = (tokens.bit_length(), prompts.bit_length())
        is_first = kind not in self._kinds
        self._kinds.add(kind)
        return Step(
            seconds, between, collecting, tokens, prompts, preemptions, compiled, recorded,
            device=self._core.recorder.last_device, computing=used.computing, waiting=used.waiting, faults=used.faults,
            read_faults=used.read_faults, allocated=self._allocated() if is_slow else 0, added=added, is_first=is_first,
        )

    def close(self) -> None:
        self._clock.close()

    def _marks(self) -> tuple[int, ...]:
        scheduler = self._core.scheduler
        counters, happened = scheduler.counters, (HAPPENED["kernel_compile"], HAPPENED["graph_recording"])
        return counters.prompt_tokens, counters.preemptions, *happened, scheduler.num_arrived

    def _allocated(self) -> int:
        """Pieces of memory that came from the GPU's driver since this was last asked: asking takes too long for every step."""
        if self._core.config.device != "cuda":
            return 0
        before, self._allocations = self._allocations, torch.cuda.memory_stats().get("num_device_alloc", 0)
        return self._allocations - before


class StatsKeeper:
    """Told of every step by the engine's loop: `stepped` when one ran, `due` when there is something to report."""

    def __init__(self, core: EngineCore) -> None:
        self.watch = StepWatch()
        self._core = core
        self._facts = _StepFacts(core)
        self._ended = 0.0                                # the last step; 0: there was no work since
        self._taken = self._tokens_taken()
        self._reported = 0.0
        self._news = True                                # facts about the machine can be reported before the first step
        self._waiting = 0                                # as last reported
        self._logged: dict[str, float] = {}              # when there was the last line about each cause
        self._unlogged = 0                               # slow steps since the last line
        self.roofline = RooflineReporter(core)

    def idle(self) -> None:
        """There is no work: the time until there is some again belongs to no step."""
        self._ended = 0.0
        self._facts.idle()

    def prepare(self, now: float) -> bool:
        """Use a moment without work to measure what the machine can do. False: that is known."""
        measured = self.roofline.measure(now)
        self._news |= measured
        return measured

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
        step = self._facts.take(ended - before, began - before, tokens, self.watch.is_slow(ended - before))
        cause = self.watch.observe(step)
        if cause and cause not in _EXPECTED:
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
            "left_out": counters.left_out,
            "slow_masks": self._core.slow.filled,
            "out_of_memory": counters.out_of_memory,
            "held_slots": counters.held_slots,
            "used_slots": counters.used_slots,
            "prefix_queries": cache.asked_tokens,
            "prefix_hits": cache.hit_tokens,
            "evicted_blocks": cache.evicted,
            **self._drafts(),
            "graph_replays": self._replays(),
            "graph_captures": HAPPENED["graph_recording"],
            "kernel_compiles": HAPPENED["kernel_compile"],
        }
        return EngineStats(
            scheduler.num_running, self._waiting, scheduler.manager.num_free, numbers, watch.slow,
            watch.seconds.counts, watch.seconds.sum, watch.tokens.counts, watch.tokens.sum, self.roofline.report(now),
        )

    def close(self) -> None:
        self._facts.close()
        self.roofline.close()

    def _tokens_taken(self) -> int:
        """Tokens of the steps whose results were taken in."""
        counters = self._core.scheduler.counters
        return counters.useful_tokens + counters.wasted_tokens

    def _replays(self) -> int:
        """Steps that were a CUDA graph, if there are any."""
        runner = getattr(self._core.executor, "runner", None)
        return int(getattr(getattr(runner, "forward", None), "replays", 0))

    def _drafts(self) -> dict[str, int]:
        """Counts of speculation; nothing where it is off."""
        drafter = self._core.scheduler.drafter
        if not isinstance(drafter, Controller):
            return {}
        counted = drafter.counters
        positions = {f"accepted_at_{place}": int(each) for place, each in enumerate(counted.accepted_per_position)}
        return positions | {
            "drafts": counted.drafts, "draft_tokens": counted.draft_tokens, "accepted_tokens": counted.accepted_tokens,
            "draft_probes": counted.probes,
        }

    def _log(self, step: Step, cause: str, now: float) -> None:
        last = max(self._logged.values(), default=-math.inf)
        if now - last < _LOG_SECONDS or now - self._logged.get(cause, -math.inf) < _SAME_SECONDS:
            self._unlogged += 1
            return
        logger.info(
            "slow step: cause=%s ms=%.1f median_ms=%.1f tokens=%d prompt_tokens=%d preemptions=%d compiled=%d "
            "captured=%d gc_ms=%.1f between_ms=%.1f device_ms=%.1f cpu_ms=%.1f run_queue_ms=%.1f page_faults=%d unlogged=%d",
            cause, step.seconds * 1e3, self.watch.median * 1e3, step.tokens, step.prompt_tokens, step.preemptions,
            step.compiled, step.recorded, step.collecting * 1e3, step.between * 1e3, step.device * 1e3, step.computing * 1e3,
            step.waiting * 1e3, step.faults, self._unlogged,
        )
        self._logged[cause], self._unlogged = now, 0


class RooflineReporter:
    """What the core's recorder has counted, for the front end and for the log."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._recorder = core.recorder
        self._live = LiveRoofline()
        self._meter = PeakMeter.remembering(core.config.device)
        self._gpus = GpuSums(gpu_names(core.config.options.parallel) if core.config.device == "cuda" else [])
        self._worked = time.monotonic()                  # when something was last reported
        self._reported = 0.0
        self._sent = 0                                   # points
        self._pictured = 0.0
        self._lined = 0.0
        self._faster: Factors = {}
        self._untimed: list[str] = []
        self._linear_share = linear_share(self._recorder.shape)
        known = self._meter.peaks or _sheet_peaks(core.config.device, self._meter.device)
        if known is not None:
            self._use(known)

    def _use(self, peaks: MachinePeaks) -> None:
        self._recorder.use(peaks)
        if self._core.config.narrower:
            self._faster, self._untimed = factors(self._core.config, peaks), untimed(self._core.config, peaks)

    def measure(self, now: float) -> bool:
        if now - self._worked < _QUIET_SECONDS:
            return False
        if not self._meter.prepare():
            return False
        if self._meter.peaks is not None:
            self._use(self._meter.peaks)
        return True

    def report(self, now: float) -> RooflineStats | None:
        """Now and then, and when the work is done; None in between."""
        if now - self._reported < _ROOFLINE_SECONDS and self._core.has_work:
            return None
        self._reported = now
        recorder = self._recorder
        recorder.fold()
        if recorder.beaten:
            recorder.beaten = False
            self._meter.beaten()
        sums = {phase: recorder.sums[phase].values() for phase in PHASES}
        gpu = self._gpus.values()
        self._live.take(now, sums, gpu)
        self._write_line(now)
        new = min(recorder.num_points - self._sent, len(recorder.points), _POINTS)
        self._sent = recorder.num_points
        self._worked = now if new else self._worked
        stats = RooflineStats(sums, list(recorder.points)[len(recorder.points) - new :], dtype=self._dtype, gpu=gpu)
        stats.device, stats.kv_bytes = self._meter.device, recorder.shape.kv_bytes
        stats.weight_bytes, stats.linear_share = recorder.weight_bytes, self._linear_share
        stats.faster, stats.untimed = {flag: list(points) for flag, points in self._faster.items()}, self._untimed
        if recorder.peaks is not None:
            peaks = recorder.peaks
            stats.read_bytes_s, stats.flops_s, stats.measured = peaks.read_bytes_s, peaks.flops_s, peaks.measured
            stats.launch_s, stats.host_launch_s = peaks.launch_s, peaks.host_launch_s
        if now - self._pictured >= _MAP_SECONDS or not self._core.has_work:
            self._pictured = now
            stats.held, stats.cached = _picture(self._core.scheduler.manager.pool.states())
        return stats

    def close(self) -> None:
        self._gpus.close()

    @property
    def _dtype(self) -> str:
        """Of the rate that the roof is drawn with: that of the linears, if it is known."""
        recorder, peaks = self._recorder, self._recorder.peaks
        return recorder.linear_dtype if peaks is not None and recorder.linear_dtype in peaks.flops_s else recorder.dtype

    def _write_line(self, now: float) -> None:
        """Now and then under load; an engine that mostly waits for requests has nothing to say."""
        if now - self._lined < _LINE_SECONDS:
            return
        begins = not self._lined
        peaks = self._recorder.peaks
        if begins or peaks is None:
            self._lined = self._lined or now
            return
        found = self._live.look(now, Rates(peaks.read_bytes_s, peaks.rate(self._dtype)), self._setting())
        if found.total.steps and found.verdict.term != IDLE:
            self._lined = now
            logger.info("%s", found.line())

    def _setting(self) -> Setting:
        config, scheduler = self._core.config, self._core.scheduler
        return Setting(
            device=config.device, max_rows=config.max_num_seqs,
            kv_usage=1 - scheduler.manager.num_free / max(1, config.num_blocks - 1),
            graphs=config.graphs, overlap=config.depth > 0, prefix_caching=config.prefix_caching,
            speculation=scheduler.drafter.active, ranks=config.options.parallel.num_ranks, faster=self._faster,
            untimed=self._untimed, linear_share=self._linear_share,
        )


def _sheet_peaks(kind: str, name: str) -> MachinePeaks | None:
    """Until there was a moment to measure: what the maker promises."""
    sheet = data_sheet(name) if kind == "cuda" else None
    if sheet is None:
        return None
    rates = {dtype: sheet.flops[each] for dtype, each in SHEET_NAMES.items() if each in sheet.flops}
    return from_data_sheet(name, sheet.bandwidth, {"float32": sheet.rate("float32"), **sheet.flops, **rates})


def _picture(states: np.ndarray) -> tuple[list[int], list[int]]:
    """Percent of each cell's blocks that sequences hold, and that only the prefix cache keeps."""
    edges = np.linspace(0, len(states), min(len(states), _MAP_CELLS) + 1).astype(np.int64)

    def percent(which: np.ndarray) -> list[int]:
        return [int(each) for each in 100 * np.add.reduceat(which, edges[:-1], dtype=np.int64) // np.diff(edges)]

    return percent(states >= HELD), percent(states == CACHED)
