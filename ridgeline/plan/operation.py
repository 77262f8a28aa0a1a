"""Predicts a deployment under steady load: requests of one size, a fixed batch, prompts computed in the decodes' steps.

    step  = a decode of the batch at its mean context + per finished request the extra time of one prompt in such a step
    TPOT  = such a step with the others' prompts alone / tokens per request and step (1, or with drafts (1 − αᵏ⁺¹)/(1 − α)):
            it counts the tokens after the first, and a request's own prompt is done by then
    TTFT  = half of that + the steps that compute the prompt, together with running decodes and the step's other prompts
    tok/s = batch · tokens per request and step / step

From it: the table over batch sizes, the limits of the batch, the best number of ranks, and the devices that a rate needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.errors import ConfigError
from ridgeline.plan.capacity import Capacity, kernel_facts, possible_ranks
from ridgeline.plan.division import possible_stages
from ridgeline.plan.precision import StoredWeights
from ridgeline.plan.prediction import (
    MOST_ROWS,
    STEP_TOKENS,
    Setup,
    decode_seconds,
    hop_seconds,
    seconds_each,
    stage_bubble,
)
from ridgeline.plan.public_models import gpu_weights
from ridgeline.plan.workload_steps import Row, decode_rows
from ridgeline.roofline.step_cost import expected_tokens
from ridgeline.sizes.abilities import MOST_RANKS


@dataclass(frozen=True, slots=True)
class Traffic:
    """The lengths and the cache hit rate of requests."""

    tokens_in: int
    tokens_out: int
    hit_rate: float = 0.0            # share of the prompts' tokens that the prefix cache has

    def __post_init__(self) -> None:
        if self.tokens_in < 1 or self.tokens_out < 1 or not 0 <= self.hit_rate < 1:
            raise ConfigError(f"requests need at least one token in and out, and a hit rate from 0 to below 1; got "
                              f"{self.tokens_in} in, {self.tokens_out} out, {self.hit_rate:g}")

    @property
    def context(self) -> int:
        """Tokens of a request at its longest."""
        return self.tokens_in + self.tokens_out

    @property
    def mean_context(self) -> int:
        return self.tokens_in + self.tokens_out // 2


@dataclass(frozen=True, slots=True)
class Slo:
    ttft: float = math.inf           # seconds
    tpot: float = math.inf


@dataclass(frozen=True, slots=True)
class Point:
    """A setup at one batch size."""

    setup: Setup
    batch: int
    ttft: float
    tpot: float
    prefill: float                   # seconds of one prompt, alone …
    prompt: float                    # … and what it adds to the steps that it shares with decodes
    tok_s: float                     # output tokens per second, of all devices together
    requests_s: float

    @property
    def tok_s_device(self) -> float:
        return self.tok_s / self.setup.devices

    def dollars_per_million(self, price: float) -> float:
        """Of output tokens, at a price per device and hour."""
        return price * self.setup.devices / 3600 / self.tok_s * 1e6

    def meets(self, slo: Slo) -> bool:
        return self.ttft <= slo.ttft and self.tpot <= slo.tpot


def operate(setup: Setup, batch: int, traffic: Traffic, budget: int = STEP_TOKENS) -> Point:
    if setup.stages > 1:
        return _pipelined(setup, batch, traffic, budget)
    decode = decode_seconds(setup, batch, traffic.mean_context)
    cached = int(traffic.tokens_in * traffic.hit_rate)
    room = max(1, budget - batch)
    chunks = [(done, min(traffic.tokens_in, done + room)) for done in range(cached, traffic.tokens_in, room)]
    decodes = decode_rows(batch, traffic.mean_context, setup.drafts)
    rows = [Row(end - done, end, int(end == traffic.tokens_in)) for done, end in chunks]
    steps = [decodes, *([*decodes, row] for row in rows), *([row] for row in rows)]
    plain, *prefills = seconds_each(setup, steps)
    with_prompt, alone = prefills[: len(rows)], sum(prefills[len(rows) :])
    extra = sum(each - plain for each in with_prompt)    # what a prompt adds to the steps it is in
    tokens = expected_tokens(setup.acceptance, setup.drafts)
    prompts = batch * tokens / traffic.tokens_out        # that begin per step, on average
    step, others = decode + prompts * extra, decode + prompts * extra * (batch - 1) / batch
    ttft = others / 2 + len(rows) * plain + max(1.0, prompts) * extra    # others' prompts are in the same steps
    return Point(
        setup, batch, ttft=ttft, tpot=others / tokens, prefill=alone, prompt=extra, tok_s=batch * tokens / step,
        requests_s=batch * tokens / step / traffic.tokens_out,
    )


def _pipelined(setup: Setup, batch: int, traffic: Traffic, budget: int) -> Point:
    """As many steps at once as there are stages, each with its part of the rows. A step takes as long as if one device had all
    layers, and the way between the stages; where every stage has work, it waits for the slowest of them."""
    part = math.ceil(batch / setup.stages)
    one = operate(replace(setup, stages=1, nodes=1), part, traffic, budget)
    wait = stage_bubble(setup, part, traffic.mean_context) if batch >= setup.stages else 1.0
    hop, tokens = hop_seconds(setup, part), expected_tokens(setup.acceptance, setup.drafts)
    chunks = math.ceil(traffic.tokens_in * (1 - traffic.hit_rate) / max(1, budget - part)) or 1
    prompt = hop_seconds(setup, min(budget, traffic.tokens_in)) * chunks
    rate = batch * tokens / max(part * tokens / one.tok_s + hop, wait * part * tokens / one.tok_s)
    return Point(
        setup, batch, ttft=one.ttft + prompt, tpot=max(one.tpot + hop / tokens, wait * one.tpot), prefill=one.prefill + prompt,
        prompt=one.prompt, tok_s=rate, requests_s=rate / traffic.tokens_out,
    )


def batches(largest: int) -> list[int]:
    """Powers of two, and the largest that fits."""
    found = [1 << power for power in range(largest.bit_length()) if 1 << power <= largest]
    return found if not found or found[-1] == largest else [*found, largest]


def table(setup: Setup, traffic: Traffic, largest: int) -> list[Point]:
    return [operate(setup, batch, traffic) for batch in batches(min(largest, MOST_ROWS))]


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────

SATURATED = 0.9                      # of the throughput at the largest batch


def compute_limited_batch(setup: Setup) -> int:
    """Rows from which the linears are compute-bound: ridge · bytes per weight / 2. An expert gets only its share of the
    rows."""
    device, shape = setup.device, setup.shape
    rate = device.rate(setup.computed) * (2 if setup.sparse and device.sparse else 1)
    each = shape.weight_bytes if shape.expert_bytes is None else shape.expert_bytes
    rows = rate / device.bandwidth * each / 2
    experts = setup.model.experts
    part = experts.used / experts.count if experts is not None else 1.0
    return math.ceil(rows / part / (1 + setup.drafts))


def saturation_batch(points: Sequence[Point]) -> int:
    """The smallest batch with nearly the throughput of the largest: beyond it mostly latency grows."""
    enough = SATURATED * max(point.tok_s for point in points)
    return next(point.batch for point in points if point.tok_s >= enough)


MOST_LOAD = 0.8                      # of the replicas' capacity: random arrivals need room, or requests queue


# ── how many ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Answer:
    """How many devices a rate needs."""

    point: Point                     # of one replica, at the most it may be given
    replicas: int
    rate: float                      # requests/s asked for

    @property
    def load(self) -> float:
        """Of what the replicas can within the SLO."""
        return self.rate / (self.replicas * self.point.requests_s)

    @property
    def devices(self) -> int:
        return self.replicas * self.point.setup.devices


def best_point(setup: Setup, traffic: Traffic, slo: Slo, utilization: float = 0.9) -> Point | None:
    """The largest batch that the memory holds and that meets the SLO: the most requests per second that do."""
    capacity = Capacity.of(setup, traffic.context, utilization)
    low, high = 0, min(capacity.largest_batch(MOST_ROWS), MOST_ROWS)
    if not high or not operate(setup, 1, traffic).meets(slo):
        return None
    low = 1
    while low < high:                                    # latency only grows with the batch
        middle = (low + high + 1) // 2
        low, high = (middle, high) if operate(setup, middle, traffic).meets(slo) else (low, middle - 1)
    return operate(setup, low, traffic)


def devices_for(
    setup: Setup, traffic: Traffic, slo: Slo, rate: float, most_ranks: int = 8, utilization: float = 0.9,
    any_engine: bool = True,
) -> list[Answer]:
    """For every number of ranks that can, fewest devices first; none is loaded beyond MOST_LOAD. Without `any_engine` only ranks
    that this engine has."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate must be above 0, got {rate}")
    answers = []
    for divided in layouts(setup, most_ranks, any_engine):
        point = best_point(divided, traffic, slo, utilization)
        if point is not None:
            answers.append(Answer(point, math.ceil(rate / (MOST_LOAD * point.requests_s)), rate))
    return sorted(answers, key=lambda answer: (answer.devices, answer.point.tpot))


def layouts(setup: Setup, most: int, any_engine: bool = True) -> list[Setup]:
    """The model divided among more or fewer devices, at most so many. Without `any_engine` as this engine can on such a device,
    and as was asked for."""
    limit = MOST_RANKS.get(setup.device.kind, 1)
    return [
        _with_ranks(setup, ranks) for ranks in possible_ranks(setup.model, most, setup.stages)
        if any_engine or ranks * setup.stages <= limit or ranks == setup.ranks
    ]


def _with_ranks(setup: Setup, ranks: int) -> Setup:
    several = ranks > 1
    whole, positions = setup.expert_parallel and several, setup.context_parallel and several
    return replace(
        setup, ranks=ranks, expert_parallel=whole, context_parallel=positions, stored=_stored_by(setup, ranks))


def _stored_by(setup: Setup, ranks: int) -> StoredWeights | None:
    """A file's own weights on each of that many ranks: shards may cut blocks, and are padded."""
    if setup.stored is None or setup.device.kind != "cuda" or ranks == setup.ranks:
        return setup.stored
    found = gpu_weights(setup.model, setup.dtype, ranks, kernel_facts(setup.device))
    return setup.stored if found is None else replace(found, format=setup.stored.format)


def _all_layouts(setup: Setup, most: int) -> list[Setup]:
    """Also in other numbers of stages, and with whole experts on each rank."""
    found = []
    for stages in possible_stages(setup.model.config.num_layers, setup.nodes, setup.stages, most):
        for each in layouts(replace(setup, stages=stages), most):
            found.append(each)
            if each.ranks > 1 and each.model.experts is not None and not each.expert_parallel:
                found.append(replace(each, expert_parallel=True))
    return found


def by_ranks(setup: Setup, traffic: Traffic, most: int, utilization: float = 0.9) -> list[tuple[Point, Point]]:
    """For every division with which it fits: with one request, and with as many as the memory holds."""
    found = []
    for sharded in _all_layouts(setup, most):
        largest = min(Capacity.of(sharded, traffic.context, utilization).largest_batch(MOST_ROWS), MOST_ROWS)
        if largest:
            found.append((operate(sharded, 1, traffic), operate(sharded, largest, traffic)))
    return found
