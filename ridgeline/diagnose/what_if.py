"""Predicts the gain of a change: the engine's own scheduler plans the same requests with the option changed, and the cost model
prices every step at the speeds that were just measured.

    step = Σ over parts of (calls · their least time + floor · how far from its roof it was) + what is beside the ops
    gain = price of all steps as they are / price of all steps as they would be

A part's distance from its roof is measured separately for memory-bound and for compute-bound steps: a decode of one row says
little about prefill. If only one kind was seen, small and large steps separate the time that grows with the work from the
time that does not. No model runs here, and only the change `kernels=auto` assumes better kernels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.bench.workload.plan_only import PlanOnly
from ridgeline.config import EngineConfig
from ridgeline.diagnose.driven_run import Load, StepLog, drive
from ridgeline.engine.core.core import EngineCore
from ridgeline.errors import RidgelineError
from ridgeline.plan.prediction import fitted
from ridgeline.resolve import DeviceFacts, ResolvedConfig, resolve
from ridgeline.roofline.decoder_shape import kv_element_bytes
from ridgeline.roofline.parts import PARTS, floors
from ridgeline.roofline.patterns import REACHED
from ridgeline.roofline.remedies import Planned
from ridgeline.roofline.vectorised import ManyCosts, StepCosts
from ridgeline.runner.worker import device_facts
from ridgeline.sizes.abilities import BY_FLAG

_CLEAR = 0.8                         # of a part's floor: what binds the step's part is clear
_TIMES = (2, 4, 8)                   # rows to try


# ── planning without computing ───────────────────────────────────────────────────────────────────────────────────────


def planned_log(config: ResolvedConfig, load: Load) -> StepLog:
    """The steps that the scheduler would make of this load."""
    core = EngineCore(replace(config, depth=0), PlanOnly())
    with StepLog(core, None) as log:
        drive(core, load.asked(config.model.vocab_size), load.at_once)
    core.close()
    return log


# ── pricing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speeds of this machine's kernels, and a step's time outside of them."""

    read_bytes_s: float
    flops_s: float | np.ndarray      # or by op
    least: Mapping[str, float]       # by part: fixed seconds per step …
    reading: Mapping[str, float]     # … and the time beyond, as a multiple of the floor, where memory-bound …
    computing: Mapping[str, float]   # … and where compute-bound
    beside: float                    # device seconds of a step outside all parts: launching, small ops
    host: float                      # seconds of a step in which the device is idle
    overlap: bool = False            # is the host hidden behind the device?
    recorded: float = 0.0            # what would be left of `beside` in a CUDA graph

    def price(self, costs: ManyCosts) -> float:
        """Seconds of all these steps."""
        device = np.full(len(costs.tokens), self.beside)
        for part, (reads, computes) in self.floors(costs).items():
            device += self.least.get(part, 0.0) * (reads + computes > 0)
            device += reads * self.reading.get(part, 1.0) + computes * self.computing.get(part, 1.0)
        steps = np.maximum(device, self.host) if self.overlap else device + self.host
        return float(steps.sum())

    def floors(self, costs: ManyCosts) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return floors(costs, self.read_bytes_s, self.flops_s)


def measured_speeds(
    costs: ManyCosts, own: Mapping[str, np.ndarray], device: Sequence[float], host: Sequence[float],
    read_bytes_s: float, flops_s: float | np.ndarray, overlap: bool, recorded: float = 0.0,
) -> Speeds:
    """`own`: by part, seconds in each step without the profiler. Medians, because other programs may use the machine."""
    least, reading, computing = dict[str, float](), dict[str, float](), dict[str, float]()
    for part, (reads, computes) in floors(costs, read_bytes_s, flops_s).items():
        seconds = own.get(part)
        floor = reads + computes
        seen = floor > 0
        if seconds is None or not seen.any() or not seconds[seen].any():
            continue
        seconds, floor, mostly = seconds[seen], floor[seen], computes[seen] / floor[seen]
        reads_alone, computes_alone = mostly <= 1 - _CLEAR, mostly >= _CLEAR
        if reads_alone.any() and computes_alone.any():
            least[part] = 0.0
            reading[part], computing[part] = (
                float(np.median(seconds[which] / floor[which])) for which in (reads_alone, computes_alone)
            )
        else:
            least[part], grows = _line(seconds, floor)
            reading[part] = computing[part] = grows
    beside = np.asarray(device) - np.sum([seconds for part, seconds in own.items() if part in PARTS], axis=0)
    return Speeds(
        read_bytes_s, flops_s, least, reading, computing, beside=max(0.0, float(np.median(beside))),
        host=max(0.0, statistics.median(host)), overlap=overlap, recorded=recorded,
    )


def _line(seconds: np.ndarray, floor: np.ndarray) -> tuple[float, float]:
    """(fixed time, time per floor), a line through small and large steps. With steps of one size only, the time beyond twice
    the floor counts as fixed."""
    small, large = floor <= 2 * floor.min(), floor >= 4 * floor.min()
    low, low_floor = float(np.median(seconds[small])), float(np.median(floor[small]))
    if large.any():
        high, high_floor = float(np.median(seconds[large])), float(np.median(floor[large]))
        grows = max(0.0, (high - low) / (high_floor - low_floor))
    else:
        grows = min(2.0, low / low_floor)
    if grows * low_floor > low:                          # the fixed time would be negative: all of the time grows
        return 0.0, _weighted_median(seconds / floor, floor)
    return low - grows * low_floor, grows


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Half of the weight lies on either side, so a few large steps count as much as many small ones."""
    order = np.argsort(values)
    place = np.searchsorted(np.cumsum(weights[order]), 0.5 * weights.sum())
    return float(values[order][min(place, len(values) - 1)])


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Case:
    """A change to price: in the engine's options, in the load, or in the cost of steps."""

    key: str
    what: str
    trade_off: str
    options: Mapping[str, Any]
    load: Load | None = None
    speeds: Callable[[Speeds], Speeds] = lambda speeds: speeds
    kv_dtype: str = ""


def cases(config: ResolvedConfig, load: Load, preemptions: int) -> Iterator[Case]:
    """Changes that this engine's settings do not include yet."""
    options = config.options
    demand, rows = load.at_once, config.max_num_seqs
    later = "time per output token of each request"
    for times in _TIMES:
        more = min(times * rows, demand)
        if more > rows:
            yield Case("rows", f"max_num_seqs {rows} → {more}", later, {"max_num_seqs": more})
    for times in _TIMES:
        more = min(times * demand, load.prompts, rows)
        if more > demand:
            yield Case("rows", f"{demand} → {more} requests at once", later, {}, replace(load, concurrency=more))
    if not config.prefix_caching and not config.contiguous:
        yield Case("prefix", "enable_prefix_caching: compute a common prefix once", "none",
                   {"enable_prefix_caching": True})
    if options.scheduler.batching == "static":
        yield Case("continuous", "batching static → continuous: a row is reused as soon as its answer ends", "none",
                   {"batching": "continuous"})
    if config.contiguous:
        yield Case("paged", "kv_layout contiguous → paged: rows hold only the blocks they need", "none", {"kv_layout": "paged"})
    if preemptions:
        held = max(1, (config.num_blocks - 1) * options.cache.block_size // (load.tokens_in + load.tokens_out))
        if held < rows:
            yield Case("admission", f"max_num_seqs {rows} → {held}: as many full requests as the KV cache holds",
                       "time in the queue", {"max_num_seqs": held})
        if options.cache.num_gpu_blocks_override:
            yield Case("blocks", "use all memory for KV blocks (leave num_gpu_blocks_override out)",
                       "other users of the memory", {"num_gpu_blocks_override": None})
    if options.model.kernels == "reference":
        yield Case("kernels", f"kernels=auto: every op at {REACHED:.0%} of its roof, if the kernels are good",
                   "none; verify with `bench ops`", {"kernels": "auto"}, speeds=_good_kernels)
    if config.device == "cuda":
        yield from _gpu_cases(config)


def _gpu_cases(config: ResolvedConfig) -> Iterator[Case]:
    if config.depth == 0:
        yield Case("overlap", "async_scheduling: plan a step while the one before it runs",
                   "a stop is noticed one step late", {"async_scheduling": True},
                   speeds=lambda speeds: replace(speeds, overlap=True))
    if config.options.execution.enforce_eager:
        yield Case("graphs", "CUDA graphs (leave enforce_eager off)", "memory of the graphs", {"enforce_eager": False},
                   speeds=lambda speeds: replace(speeds, beside=min(speeds.beside, speeds.recorded)))
    for narrow in (BY_FLAG[flag] for flag in config.narrower):
        if narrow.option == "kv_cache_dtype":
            yield Case(narrow.flag, f"{narrow.flag}: fewer bytes of the cache", narrow.trade_off,
                       {narrow.option: narrow.name}, speeds=_narrow_pages, kv_dtype=narrow.name)


def _narrow_pages(speeds: Speeds) -> Speeds:
    """Attention over fp8 KV is slower per byte and per FLOP, because it converts; by the factors of plan/fit.py."""
    known = fitted()
    return replace(
        speeds, reading={**speeds.reading, "attention": speeds.reading.get("attention", 1.0) / known.narrow_kv_read},
        computing={**speeds.computing, "attention": speeds.computing.get("attention", 1.0) / known.narrow_kv_compute},
    )


def _good_kernels(speeds: Speeds) -> Speeds:
    return replace(speeds, reading={part: min(1 / REACHED, value) for part, value in speeds.reading.items()},
                   computing={part: min(1 / REACHED, value) for part, value in speeds.computing.items()})


def emptied(device: DeviceFacts, config: ResolvedConfig) -> DeviceFacts:
    """The device without this engine: the changed engine would replace it."""
    own = sum(config.memory.values())
    if device.kind == "cpu":
        return replace(device, memory=device.memory + own)
    return replace(device, free=min(device.memory, device.free + own))


@dataclass(slots=True)
class WhatIf:
    """The price of the unchanged settings, against which changes are priced."""

    config: ResolvedConfig
    load: Load
    speeds: Speeds
    reads: Callable[[int], tuple[int, int]] | None       # of the weights, from the runner
    seconds: float = 0.0             # predicted, unchanged

    def __post_init__(self) -> None:
        self.seconds = self._price(self.config, self.load, self.speeds, "")

    def _price(self, config: ResolvedConfig, load: Load, speeds: Speeds, kv_dtype: str) -> float:
        log = planned_log(config, load)
        shape = log.shape
        if kv_dtype:
            shape = replace(shape, kv_bytes=kv_element_bytes(kv_dtype, shape.head_dim), window_kv_bytes=None)
        return speeds.price(log.rows.costs(StepCosts(shape, self.reads)))

    def gain(self, case: Case) -> float:
        """Speed-up factor; for a changed load, in tokens per second."""
        options = self.config.options.flat() | {name: value for name, value in case.options.items() if value is not None}
        for name, value in case.options.items():
            if value is None:
                options.pop(name, None)
        changed = EngineConfig.of(**options)
        config = resolve(changed, emptied(device_facts(changed), self.config)) if case.options else self.config
        return self.seconds / self._price(config, case.load or self.load, case.speeds(self.speeds), case.kv_dtype)

    def changes(self, preemptions: int) -> list[Planned]:
        """Each kind of change once: its smallest variant that brings nearly all of the gain."""
        found: dict[str, list[Planned]] = {}
        for case in cases(self.config, self.load, preemptions):
            try:
                gain = self.gain(case)
            except RidgelineError:                       # it does not fit, or does not work here
                continue
            found.setdefault(case.key, []).append(Planned(case.key, case.what, gain, case.trade_off, case.options))
        chosen = []
        for tried in found.values():
            best = max(each.gain for each in tried)
            chosen.append(next(each for each in tried if each.gain >= 0.95 * best))
        return chosen
