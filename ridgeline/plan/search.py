"""The effect of each technique, all candidate setups, and the best of them for an objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.plan.capacity import Capacity
from ridgeline.plan.operation import Point, Slo, Traffic, batches, layouts, operate
from ridgeline.plan.precision import signal_to_noise
from ridgeline.plan.prediction import MOST_ROWS, Setup
from ridgeline.plan.public_models import PlannedModel
from ridgeline.sizes import abilities
from ridgeline.sizes.abilities import MOST_RANKS, available

# ── techniques ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Effect:
    """A technique by itself, against the setup without it."""

    technique: str
    here: bool                       # has this engine got it?
    exact: bool
    tpot: float                      # of one request …
    tok_s: float                     # … and throughput at the largest batch: factors, 2 is twice as good
    ttft: float
    batch: int                       # the largest, with it
    setup: Setup
    traffic: Traffic


def effects(
    setup: Setup, traffic: Traffic, *, hit_rate: float = 0.5, drafts: int = 4, acceptance: float = 0.7,
    draft_model: PlannedModel | None = None, utilization: float = 0.9,
) -> list[Effect]:
    """Every technique that is not on already."""
    hits = replace(traffic, hit_rate=hit_rate)
    speculative = replace(setup, drafts=drafts, acceptance=acceptance, draft_model=draft_model)
    changed: list[tuple[str, bool, Setup, Traffic]] = [
        ("fp8 weights", False, replace(setup, weights="fp8"), traffic),
        ("int8 weights", False, replace(setup, weights="int8"), traffic),
        ("int4 weights", False, replace(setup, weights="int4"), traffic),
        ("2:4 sparsity", False, replace(setup, sparse=True), traffic),
        ("fp8 KV", False, replace(setup, kv="fp8"), traffic),
        ("int8 KV", False, replace(setup, kv="int8"), traffic),
        (f"prefix hits {hit_rate:.0%}", True, setup, hits),
        (f"{drafts} drafts, α = {acceptance:g}", True, speculative, traffic),
    ]
    before = _ends(setup, traffic, utilization)
    found = []
    for name, exact, new, requests in changed:
        if new == setup and requests == traffic:
            continue
        after = _ends(new, requests, utilization)
        if after is None:
            continue
        one, many = after
        here = missing(new) <= missing(setup)
        if before is None:                               # only with it does the model fit
            found.append(Effect(name, here, exact, math.inf, math.inf, math.inf, many.batch, new, requests))
            continue
        found.append(Effect(
            name, here, exact, before[0].tpot / one.tpot, many.tok_s / before[1].tok_s,
            before[0].ttft / one.ttft, many.batch, new, requests,
        ))
    return found


def _ends(setup: Setup, traffic: Traffic, utilization: float) -> tuple[Point, Point] | None:
    largest = min(Capacity.of(setup, traffic.context, utilization).largest_batch(MOST_ROWS), MOST_ROWS)
    return (operate(setup, 1, traffic), operate(setup, largest, traffic)) if largest else None


# ── objectives ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Objective:
    name: str
    traffic: Traffic
    slo: Slo
    lossy: bool                      # may formats be narrowed?
    score: Callable[[Point], float]  # less is better
    what: str


OBJECTIVES = {
    each.name: each
    for each in (
        Objective("chat", Traffic(1024, 256), Slo(0.5, 0.05), True, lambda point: -point.tok_s_device,
                  "the most tokens per device with a first token in 500 ms and the next every 50"),
        Objective("speech", Traffic(256, 128), Slo(0.2, 0.03), True, lambda point: -point.tok_s_device,
                  "the most tokens per device with a first token in 200 ms and the next every 30"),
        Objective("batch", Traffic(1024, 512), Slo(), True, lambda point: -point.tok_s_device,
                  "the most tokens per device, whatever the latency"),
        Objective("quality-first", Traffic(1024, 256), Slo(1.0, 0.1), False, lambda point: point.tpot,
                  "the least time per token without any lossy technique"),
    )
}


def quality(setup: Setup) -> float:
    """Decibels: the worst format of weights and KV, see precision.py. Sparsity leaves out half of the weights: the smaller
    half, in groups of four."""
    worst = min(signal_to_noise(setup.weights), signal_to_noise(setup.dtype if setup.kv == "auto" else setup.kv))
    return min(worst, _SPARSE_NOISE) if setup.sparse else worst


# Of four normal numbers the two smaller have 13.2 % of the energy: 10 log₁₀(1 / 0.132) decibels.
_SPARSE_NOISE = 8.8


def measured_loss(setup: Setup, kl: Mapping[str, float]) -> float | None:
    """Nats that `ridgeline eval` has measured for the lossy formats in use, summed; None where one was not measured."""
    formats = [setup.weights] if setup.weights != setup.dtype else []
    formats += [f"kv-{setup.kv}"] if setup.kv != "auto" else []
    formats += ["2:4"] if setup.sparse else []
    found = [kl.get(name) for name in formats]
    return None if None in found else sum(value for value in found if value is not None)


def missing(setup: Setup) -> set[str]:
    """What this engine cannot do of a setup, on its device, today."""
    device, found = setup.device, set()
    if device.kind not in MOST_RANKS:
        found.add(f"{device.name} as a device")
    weights, kv = (
        {each.name for each in available(formats, device.kind, device.flops, setup.dtype)}
        for formats in (abilities.WEIGHT_FORMATS, abilities.KV_FORMATS)
    )
    # A file's own codes are read as it stores them. On a CPU no other format is.
    if setup.kept is None and setup.weights not in (setup.dtype, *weights) and device.kind != "cpu":
        found.add(f"{setup.weights} weights")
    if not kv >= {each.rpartition("=")[2] for each in setup.kv.split(",")} - {"auto"}:       # of K and V together or apart
        found.add(f"{setup.kv} KV")
    if setup.sparse:
        found.add("2:4 sparsity")
    if setup.drafts and setup.draft_model is not None and setup.stages > 1:
        found.add("a draft model in a pipeline")
    if setup.devices > MOST_RANKS.get(device.kind, 1):
        found.add("several devices")
    return found


def candidates(
    setup: Setup, traffic: Traffic, most_ranks: int, lossy: bool = True, utilization: float = 0.9, any_engine: bool = True,
) -> list[Point]:
    """Every combination of ranks, formats and batch that fits. Without `any_engine` those that this engine can run, beside what
    was asked for."""
    formats = [(setup.weights, setup.kv)]
    if lossy:
        formats += [(weights, kv) for weights in (setup.weights, "fp8", "int4") for kv in (setup.kv, "fp8")]
    found = []
    for divided in layouts(setup, most_ranks):
        for weights, kv in dict.fromkeys(formats):
            made = replace(divided, weights=weights, kv=kv)
            if not any_engine and not missing(made) <= missing(setup):
                continue
            largest = min(Capacity.of(made, traffic.context, utilization).largest_batch(MOST_ROWS), MOST_ROWS)
            found += [operate(made, batch, traffic) for batch in batches(largest)]
    return found


def best(points: Sequence[Point], objective: Objective) -> Point | None:
    meeting = [point for point in points if point.meets(objective.slo) and (objective.lossy or not point.setup.lossy)]
    return min(meeting, key=objective.score) if meeting else None


def pareto(points: Sequence[Point], cost: Callable[[Point], float]) -> list[Point]:
    """Points that none other beats in both throughput per device and cost; cheapest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (cost(each), -each.tok_s_device)):
        if not front or point.tok_s_device > front[-1].tok_s_device:
            front.append(point)
    return front
