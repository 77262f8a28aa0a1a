"""The effect of each technique, all candidate setups, and the best of them for an objective."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.draft_options import DRAFT_MODEL, MOST_DRAFTS
from ridgeline.models.checkpoints.quantisation_check import is_untimed, made_formats
from ridgeline.models.model_config import checkpoint_dtype
from ridgeline.ops.kernel_table import DeviceFacts
from ridgeline.plan.capacity import Capacity, kernel_facts
from ridgeline.plan.operation import Point, Slo, Traffic, batches, layouts, operate
from ridgeline.plan.precision import WEIGHT_FORMATS as PLANNED_FORMATS
from ridgeline.plan.precision import signal_to_noise
from ridgeline.plan.prediction import MOST_ROWS, Setup, step_parts
from ridgeline.plan.public_models import PlannedModel
from ridgeline.plan.workload_steps import count_rows, decode_rows, gather
from ridgeline.sizes.abilities import (
    KV_FORMATS,
    MOST_RANKS,
    QUALITY_MODEL,
    WEIGHT_FORMATS,
    WORTH_ITS_LOSS,
    distinct,
    faster_kv,
)

# ── what this engine has ─────────────────────────────────────────────────────────────────────────────────────────────

UTILIZATION = EngineConfig().cache.gpu_memory_utilization # unless another is asked for
RAY = "--distributed-executor-backend ray"               # for ranks on several machines: docs/cluster.md
YES, MEMORY, NOT_TIMED, NOT_YET = "yes", "memory only", "not timed", "not yet"
BY_DATA_SHEET = "speed by the data sheet: not timed on this kind of GPU"
# Of those the engine has, what has no speed to be said, and why.
UNKNOWN = {
    MEMORY: "there are no kernels of its own for it on this device; general ones may be slower than 16 bits",
    NOT_TIMED: "a library multiplies; it should be faster by the data sheet, but was not timed on this kind of GPU",
}


@functools.cache
def _made(model: PlannedModel, kind: str, dtype: str, ranks: int, facts: DeviceFacts) -> dict[str, bool]:
    return made_formats(model.config, kind, dtype, ranks, facts=facts) if kind in MOST_RANKS else {}


def weight_formats(setup: Setup) -> dict[str, bool]:
    """Formats that the engine makes of this model's 16-bit weights on this device. True: faster, not only smaller."""
    return _made(setup.model, setup.device.kind, setup.dtype, setup.ranks, kernel_facts(setup.device))


@functools.cache
def _untimed(model: PlannedModel, weights: str, kind: str, dtype: str, ranks: int, facts: DeviceFacts) -> bool:
    return is_untimed(model.config, weights, kind, dtype, ranks, facts)


def untimed(setup: Setup, weights: str) -> bool:
    """Whether a gain of such weights, made of 16-bit ones, is that of a data sheet, which was not timed on this kind of GPU."""
    made = bool(weight_formats(setup).get(weights))
    return made and _untimed(setup.model, weights, setup.device.kind, setup.dtype, setup.ranks, kernel_facts(setup.device))


def untimed_formats(setup: Setup) -> list[str]:
    return [name for name in weight_formats(setup) if untimed(setup, name)]


def recommended(setup: Setup) -> tuple[list[str], list[str]]:
    """Narrower formats of weights and of the KV cache to consider. A quantised checkpoint's weights stay as they are."""
    made, device = weight_formats(setup), setup.device
    plain = PLANNED_FORMATS[setup.weights].bits >= 16 and not _is_quantised(setup)
    weights = distinct(each for each in WEIGHT_FORMATS if plain and made.get(each.name))
    has_kv = () if setup.context_parallel else faster_kv(device.kind, "fp8" in device.flops)
    kv = distinct(each for each in KV_FORMATS if setup.kv == "auto" and each.name in has_kv)
    return [each.name for each in weights], [each.name for each in kv]


# ── techniques ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Effect:
    """A technique by itself, against the setup without it."""

    technique: str
    here: str                        # has this engine got it? YES, one of UNKNOWN, or NOT_YET
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
    narrower = () if _is_quantised(setup) else ("fp8", "int8", "int4")
    changed: list[tuple[str, bool, Setup, Traffic]] = [
        *((f"{name} weights", False, replace(setup, weights=name), traffic) for name in narrower),
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
        here = _here(setup, new)
        if before is None:                               # only with it does the model fit
            found.append(Effect(name, here, exact, math.inf, math.inf, math.inf, many.batch, new, requests))
            continue
        found.append(Effect(
            name, here, exact, before[0].tpot / one.tpot, many.tok_s / before[1].tok_s,
            before[0].ttft / one.ttft, many.batch, new, requests,
        ))
    return found


def _here(setup: Setup, new: Setup) -> str:
    """Whether this engine has what is new."""
    if not missing(new) <= missing(setup) or setup.device.kind not in MOST_RANKS:
        return NOT_YET
    other_weights = new.weights != setup.weights
    slow_weights = other_weights and not weight_formats(setup).get(new.weights)
    if slow_weights or (new.kv != setup.kv and setup.device.kind == "cpu"):
        return MEMORY
    return NOT_TIMED if other_weights and untimed(setup, new.weights) else YES


def _is_quantised(setup: Setup) -> bool:
    """A checkpoint of codes: others would be made by rounding them a second time."""
    return setup.kept is not None or bool(setup.model.expert_format)


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
    score: Callable[[Point], tuple[float, ...]]          # less is better
    what: str


def _fewest_dollars(point: Point) -> tuple[float, ...]:
    return (-point.tok_s_device,)


def _one_user(point: Point) -> tuple[float, ...]:
    """The fastest answer on as few devices as can."""
    return point.setup.devices, point.tpot


OBJECTIVES = {
    each.name: each
    for each in (
        Objective("one-user", Traffic(1024, 256), Slo(), True, _one_user,
                  "the least time per token of one request, on as few devices as hold the model with formats that are fast here"),
        Objective("chat", Traffic(1024, 256), Slo(0.5, 0.05), True, _fewest_dollars,
                  "the most tokens per device with a first token in 500 ms and the next every 50"),
        Objective("speech", Traffic(256, 128), Slo(0.2, 0.03), True, _fewest_dollars,
                  "the most tokens per device with a first token in 200 ms and the next every 30"),
        Objective("batch", Traffic(1024, 512), Slo(), True, _fewest_dollars,
                  "the most tokens per device, whatever the latency"),
        Objective("quality-first", Traffic(1024, 256), Slo(1.0, 0.1), False, lambda point: (point.tpot,),
                  "the least time per token of one request without any lossy technique, on as many devices as help"),
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
    # A file's own codes are read as it stores them.
    narrow = PLANNED_FORMATS[setup.weights].bits < 16
    if setup.kept is None and narrow and setup.weights not in weight_formats(setup):
        found.add(f"{setup.weights} weights")
    kv = {each.rpartition("=")[2] for each in setup.kv.split(",")} - {"auto"}                # of K and V together or apart
    if not kv <= set(faster_kv(device.kind, "fp8" in device.flops)) and device.kind != "cpu":    # there it saves memory
        found.add(f"{setup.kv} KV")
    if kv and setup.context_parallel:
        found.add("quantised KV with divided contexts")
    if setup.sparse:
        found.add("2:4 sparsity")
    if setup.drafts and setup.draft_model is not None and setup.stages > 1:
        found.add("a draft model in a pipeline")
    if setup.drafts > MOST_DRAFTS:
        found.add(f"more than {MOST_DRAFTS} drafts")
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
        weights, kvs = (["fp8", "int4"], ["fp8"]) if any_engine else recommended(setup)
        formats += [(each, kv) for each in (setup.weights, *weights) for kv in (setup.kv, *kvs)]
    found = []
    for divided in layouts(setup, most_ranks):
        for each, kv in dict.fromkeys(formats):
            made = replace(divided, weights=each, kv=kv)
            if not any_engine and not missing(made) <= missing(setup):
                continue
            largest = min(Capacity.of(made, traffic.context, utilization).largest_batch(MOST_ROWS), MOST_ROWS)
            found += [operate(made, batch, traffic) for batch in batches(largest)]
    return found


def best(points: Sequence[Point], objective: Objective) -> Point | None:
    """Of those that are nearly as good as the best, the one that loses least."""
    meeting = [point for point in points if point.meets(objective.slo) and (objective.lossy or not point.setup.lossy)]
    if not meeting:
        return None
    *first, least = min(objective.score(point) for point in meeting)
    near = [point for point in meeting if [*objective.score(point)[:-1]] == first
            and objective.score(point)[-1] <= least + (WORTH_ITS_LOSS - 1) * abs(least)]
    return min(near, key=lambda point: (-quality(point.setup), len(point.setup.lossy), objective.score(point)))


# ── single parts of a step ───────────────────────────────────────────────────────────────────────────────────────────

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


def weight_factors(setup: Setup, weights: str) -> list[tuple[float, float]]:
    """(rows, time of the layers' products with such weights over that with the setup's own), kernels' own times included."""
    found = []
    for each in (setup, replace(setup, weights=weights)):
        shape = each.shape
        steps = gather(shape, [count_rows(shape, decode_rows(rows, 512)) for rows in _ROWS], each.model)
        found.append(step_parts(each, steps)["linears"])
    return [(rows, float(narrow / wide)) for rows, wide, narrow in zip(_ROWS, *found, strict=True)]


def kv_factor(setup: Setup, kv: str) -> float:
    """Time of attention that reads such a KV cache, over that of the setup's own."""
    shape, narrow = setup.shape, replace(setup, kv=kv)
    return narrow.shape.kv_bytes / shape.kv_bytes / setup.used.narrow_kv_read


# ── advice ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def options(setup: Setup, batch: int, own_format: bool, utilization: float = UTILIZATION) -> str:
    """What `ridgeline serve` is to be told, beside what it would choose itself; empty where it cannot run this at all.
    `own_format`: the weights' format is the checkpoint's."""
    if missing(setup):
        return ""
    words = format_options(setup, own_format)
    chosen = "float32" if setup.device.kind == "cpu" else checkpoint_dtype(setup.model.config)       # as resolve does
    words += [f"--dtype {setup.dtype}"] * (setup.dtype != chosen)
    words += [f"--tensor-parallel-size {setup.ranks}"] * (setup.ranks > 1)
    words += [f"--pipeline-parallel-size {setup.stages}"] * (setup.stages > 1)
    words += [RAY] * (setup.nodes > 1)
    words += ["--enable-expert-parallel"] * setup.expert_parallel
    words += [f"--decode-context-parallel-size {setup.ranks}"] * setup.context_parallel
    words += [f"--speculative-config '{json.dumps(_proposer(setup))}'"] * bool(setup.drafts)
    words += [f"--gpu-memory-utilization {utilization:g}"] * (setup.device.kind != "cpu" and utilization != UTILIZATION)
    return " ".join(words + [f"--max-num-seqs {batch}"] * (batch > 1))


def format_options(setup: Setup, own_format: bool) -> list[str]:
    words = [f"--quantization {setup.weights}"] * (PLANNED_FORMATS[setup.weights].bits < 16 and not own_format)
    return words + [f"--kv-cache-dtype {setup.kv}"] * (setup.kv != "auto")


def _proposer(setup: Setup) -> dict[str, Any]:
    method = {"method": "ngram"} if setup.draft_model is None else {"method": DRAFT_MODEL, "model": "DRAFT_MODEL"}
    return method | {"num_speculative_tokens": setup.drafts}


def losses(setup: Setup, own_format: bool) -> dict[str, float]:
    """By format: nats per token, measured with abilities.QUALITY_MODEL. A checkpoint's own loss is on its card."""
    found = {f"{each.name} weights": each.kl for each in WEIGHT_FORMATS if setup.weights == each.name and not own_format}
    return found | {f"{each.name} KV": each.kl for each in KV_FORMATS if setup.kv == each.name}


def gain(points: Sequence[Point], objective: Objective, chosen: Point, asked: Setup) -> float | None:
    """Of what the objective looks for, over the best with the formats that were asked for; None: these are chosen, or none of
    them meets it on as many devices."""
    plain = best([
        each for each in points
        if (each.setup.weights, each.setup.kv, each.setup.devices) == (asked.weights, asked.kv, chosen.setup.devices)
    ], objective)
    if plain is None or (chosen.setup.weights, chosen.setup.kv) == (asked.weights, asked.kv):
        return None
    ours, theirs = objective.score(chosen)[-1], objective.score(plain)[-1]
    return ours / theirs if ours < 0 else theirs / ours


def helps(points: Sequence[Point], traffic: Traffic, own_format: bool) -> list[dict[str, Any]]:
    """At each of these points: the option of a narrower format that gains most tokens per second, if one is worth its loss."""
    found: list[dict[str, Any]] = []
    for point in points:
        weights, kvs = recommended(point.setup)
        changed = [replace(point.setup, weights=each) for each in weights] + [replace(point.setup, kv=each) for each in kvs]
        most = max((operate(each, point.batch, traffic) for each in changed), key=lambda each: each.tok_s, default=None)
        if most is not None and not missing(most.setup) and most.tok_s >= WORTH_ITS_LOSS * point.tok_s:
            same_weights = most.setup.weights == point.setup.weights
            found.append({
                "batch": point.batch, "options": " ".join(format_options(most.setup, own_format or same_weights)),
                "gain": most.tok_s / point.tok_s, "untimed": not same_weights and untimed(point.setup, most.setup.weights),
                "losses": losses(most.setup, own_format or same_weights),
            })
    return found


def lost_said(losses: Mapping[str, float]) -> str:
    """What formats cost, where it was measured."""
    found = ", ".join(f"{name} KL {kl:.2g}" for name, kl in losses.items())
    return f"loss with {QUALITY_MODEL}: {found}; measure your model with `ridgeline eval`"


def advised(found: Mapping[str, Any]) -> list[str]:
    """Below an objective's best setup: how to have it, what it gains and what it costs."""
    words = found.get("options") or ""
    lines = [f"  ridgeline serve MODEL {words}" + "   # with Ray on all machines: docs/cluster.md" * (RAY in words)] * bool(words)
    said = [f"{found['gain']:.2f} × what it is with the formats as given"] if found.get("gain") else []
    said += [BY_DATA_SHEET] * bool(found.get("untimed"))
    said += [lost_said(found["losses"])] if found.get("losses") else []
    return lines + [f"  {'; '.join(said)}"] * bool(said)


def pareto(points: Sequence[Point], cost: Callable[[Point], float]) -> list[Point]:
    """Points that none other beats in both throughput per device and cost; cheapest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (cost(each), -each.tok_s_device)):
        if not front or point.tok_s_device > front[-1].tok_s_device:
            front.append(point)
    return front
