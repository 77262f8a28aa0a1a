"""Simulates the steps of a workload, and counts what each has to read and compute, as arrays.

A workload is (tokens in, tokens out) of each request, all there from the start. Steps are planned as our scheduler does: decodes
first, then prompts under the token budget; decode steps are padded to a CUDA graph's shape. `prediction.py` turns the counts
into seconds, for any device.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ridgeline.plan.public_models import PlannedModel
from ridgeline.roofline.decoder_shape import DecoderShape, StepCounts
from ridgeline.roofline.step_cost import LINEARS, cost_of
from ridgeline.sizes.batch_levelling import Level
from ridgeline.sizes.graph_shapes import decode_sizes
from ridgeline.sizes.latent_costs import FEW_QUERIES
from ridgeline.sizes.op_costs import Attended

Lengths = Sequence[tuple[int, int]]          # tokens in and out, of every request
PRODUCTS = (*LINEARS, "experts", "head")
_SMALL = ("embedding", "norms", "rotary_write", "activation", "sample")
# FLOPs that an SM's matrix units could do in the time of one of attention's exponentials (16 per cycle; 989 TFLOP/s are 4,270 per
# cycle and SM): with narrow heads softmax takes longer than the matrix products.
_EXPONENTIAL_FLOPS = 267


class Row(NamedTuple):                # thousands of them are keys of a cache: a tuple's hash is the cheapest
    new: int                         # tokens computed in this step
    kv: int                          # KV length, these included
    logits: int = 1                  # of the last of them


@dataclass(frozen=True, slots=True)
class Steps:
    """Arrays over steps; of the products also over PRODUCTS."""

    tokens: np.ndarray               # computed, padding included
    rows: np.ndarray                 # requests
    layers: int
    product_bytes: np.ndarray        # [n, products]: weights and what goes in and out
    product_flops: np.ndarray
    product_calls: np.ndarray
    attention_bytes: np.ndarray
    attention_flops: np.ndarray      # exponentials among them, at what they cost
    attention_calls: np.ndarray
    small_bytes: np.ndarray          # of norms, rotation, activation, embedding and sampling
    launches: np.ndarray             # kernels, without CUDA graphs
    admitted: np.ndarray             # requests that begin …
    admitted_tokens: np.ndarray      # … the tokens of their prompts …
    cached_tokens: np.ndarray        # … and those of them that the prefix cache has
    collectives: np.ndarray
    collective_bytes: np.ndarray
    ranks: int = 1

    def __len__(self) -> int:
        return len(self.tokens)


def count_rows(shape: DecoderShape, rows: Sequence[Row], shared: int = 0, padded_to: int = 0) -> StepCounts:
    """Like roofline.step_cost.step_counts, vectorised over rows. `padded_to`: tokens of the CUDA graph's shape."""
    return _count_rows(_Seen.by(shape), tuple(rows), shared, padded_to)


@dataclass(frozen=True, slots=True)
class _Seen:
    """All that a step's counts depend on, of a decoder: candidates in other formats have the same."""

    block_size: int
    window: int | None
    has_windows: bool
    last_windowed: bool

    @classmethod
    def by(cls, shape: DecoderShape) -> _Seen:
        return cls(shape.block_size, shape.window, bool(shape.window_layers), shape.last_windowed)


@functools.lru_cache(maxsize=1024)
def _count_rows(seen: _Seen, rows: tuple[Row, ...], shared: int, padded_to: int) -> StepCounts:
    new, kv, logits = np.array(rows, np.int64).reshape(-1, 3).T
    return _count(seen, new, kv, logits, shared, padded_to)


def _count(
    seen: _Seen, new: np.ndarray, kv: np.ndarray, logits: np.ndarray, shared: int, padded_to: int
) -> StepCounts:
    goes_on = logits > 0
    tokens, num_logits = int(new.sum()), int(logits.sum())
    padding = max(0, padded_to - tokens)
    return StepCounts(
        tokens + padding, num_logits + padding, num_logits + padding,
        _attended(new, kv, None, seen.block_size),
        _attended(new, kv, seen.window, seen.block_size) if seen.has_windows else Attended(),
        _attended(logits[goes_on], kv[goes_on], seen.window if seen.last_windowed else None, seen.block_size),
        shared, _attended(new[few := new <= FEW_QUERIES], kv[few], None, seen.block_size).pairs,
    )


def _attended(new: np.ndarray, kv: np.ndarray, window: int | None, block_size: int) -> Attended:
    first = kv - new                                     # keys before the first query
    pairs = new * first + new * (new + 1) // 2
    keys = kv
    if window is not None:
        cut = np.maximum(kv - window, 0)                 # queries that do not see everything before them, at most `new`
        over = np.minimum(cut, new)
        lost = over * cut - over * (over - 1) // 2
        pairs = pairs - lost
        keys = np.minimum(kv, window + new - 1)
    blocks = (kv - 1) // block_size - (kv - keys) // block_size + 1
    return Attended(len(kv), int(new.sum()), int(pairs.sum()), int(keys.sum()), int(blocks.sum()))


def gather(shape: DecoderShape, counts: Iterable[StepCounts], model: PlannedModel | None = None) -> Steps:
    """The costs of many steps, side by side; `model`: where it has what the dense decoder of `shape` has not."""
    listed = list(counts)
    costs = [cost_of(shape, each) for each in listed]
    # An exponential for each pair and head, whatever else attention computes there.
    exponentials = np.array([cost.ops["attention"].flops for cost in costs], float)
    exponentials *= _EXPONENTIAL_FLOPS / (4 * shape.head_dim + 5)
    if shape.latent is not None:
        pairs = [(shape.layers - 1) * each.full.pairs + each.last.pairs for each in listed]
        exponentials = np.array(pairs, float) * shape.heads * _EXPONENTIAL_FLOPS

    def each(name: str, field: str) -> list[float]:
        return [getattr(cost.ops[name], field) for cost in costs]

    def products(field: str) -> np.ndarray:
        return np.array([each(name, field) for name in PRODUCTS], float).T.reshape(len(costs), len(PRODUCTS))

    def counted(name: str) -> np.ndarray:
        return np.array([getattr(count, name) for count in listed], float)

    return Steps(
        tokens=counted("tokens"), rows=counted("rows"), layers=shape.layers,
        product_bytes=products("bytes"), product_flops=products("flops"), product_calls=products("calls"),
        attention_bytes=np.array(each("attention", "bytes"), float),
        attention_flops=np.array(each("attention", "flops"), float) + exponentials,
        attention_calls=np.array(each("attention", "calls"), float),
        small_bytes=np.array([sum(cost.ops[name].bytes for name in _SMALL) for cost in costs], float),
        launches=np.array([sum(op.calls for op in cost.ops.values()) + cost.collectives for cost in costs], float),
        admitted=counted("admitted"), admitted_tokens=counted("admitted_tokens"), cached_tokens=counted("cached_tokens"),
        collectives=np.array([cost.collectives for cost in costs], float),
        collective_bytes=np.array([cost.collective_bytes for cost in costs], float),
        ranks=shape.ranks,
    )


def decode_rows(batch: int, context: int, drafts: int = 0) -> list[Row]:
    """A decode step of `batch` requests with this context; with drafts to verify, every token has logits."""
    return [Row(1 + drafts, context + 1 + drafts, 1 + drafts)] * batch


def workload_counts(
    shape: DecoderShape, asked: Lengths, budget: int, max_rows: int, shared: int = 0, graphs: bool = True,
    level: int | None = None,
) -> list[StepCounts]:
    """Every step of a workload whose prompts begin with `shared` tokens in common, computed by the first request alone. `level`:
    rows that run at once, see sizes/batch_levelling.py."""
    return workload_spans(shape, asked, budget, max_rows, shared, graphs, level)[0]


def workload_spans(
    shape: DecoderShape, asked: Lengths, budget: int, max_rows: int, shared: int = 0, graphs: bool = True,
    level: int | None = None,
) -> tuple[list[StepCounts], list[tuple[int, int]]]:
    """The same, and of every request the steps of its first token and of its last."""
    counts, spans = _planned(shape, tuple(asked), budget, max_rows, shared, graphs, level)
    return list(counts), list(spans)


@functools.lru_cache(maxsize=64)         # records and candidates repeat workloads
def _planned(
    shape: DecoderShape, asked: tuple[tuple[int, int], ...], budget: int, max_rows: int, shared: int, graphs: bool,
    level: int | None,
) -> tuple[tuple[StepCounts, ...], tuple[tuple[int, int], ...]]:
    steps, spans = _schedule(asked, budget, max_rows, shared, level)
    sizes = decode_sizes(max_rows)
    found: list[StepCounts] = []
    for step in steps:
        rows = len(step.new)
        padded = next((size for size in sizes if size >= rows), 0) if graphs and step.decoding else 0
        counts = _count(_Seen.by(shape), step.new, step.kv, step.logits, max(0, rows - 1) * shared, padded)
        if step.admitted:
            counts = replace(
                counts, admitted=step.admitted, admitted_tokens=step.admitted_tokens, cached_tokens=step.cached_tokens
            )
        found.append(counts)
    return tuple(found), spans


@dataclass(frozen=True, slots=True)
class _Step:
    """What is computed, whatever the model: arrays over rows."""

    new: np.ndarray
    kv: np.ndarray
    logits: np.ndarray
    decoding: bool                   # all rows decode
    admitted: int
    admitted_tokens: int
    cached_tokens: int


@functools.lru_cache(maxsize=16)         # records of many models and formats have few workloads
def _schedule(
    asked: tuple[tuple[int, int], ...], budget: int, max_rows: int, shared: int, level: int | None
) -> tuple[tuple[_Step, ...], tuple[tuple[int, int], ...]]:
    """The steps, and of every request those of its first token and of its last."""
    prompt, answer = np.array(asked, np.int64).reshape(-1, 2).T.copy()
    kv = np.zeros_like(prompt)                           # tokens in the cache
    kv[1:] = shared
    first, last = np.full_like(prompt, -1), np.full_like(prompt, -1)
    waiting = deque(range(len(asked)))
    running = np.empty(0, np.int64)                      # requests, by number
    levelled = Level(level) if level else None
    found: list[_Step] = []
    while waiting or len(running):
        behind = np.maximum(prompt[running] - kv[running], 0)
        room = budget - int(np.count_nonzero(behind == 0))
        admitted = _admit(waiting, asked, kv, room - int(behind.sum()), len(running), max_rows, levelled)
        running = np.concatenate((running, np.array(admitted, np.int64)))
        cached = int(kv[admitted].sum())
        new, decoding = _tokens_of(prompt[running] - kv[running], room)
        computed = running[new > 0]
        kv[running] += new
        done = kv[computed] >= prompt[computed]
        says = computed[done]
        answer[says] -= 1
        first[says] = np.where(first[says] < 0, len(found), first[says])
        last[says] = len(found)
        found.append(_Step(
            new[new > 0], kv[computed], done.astype(np.int64), decoding,
            len(admitted), sum(asked[request][0] for request in admitted), cached,
        ))
        running = running[answer[running] > 0]
    return tuple(found), tuple(zip(first.tolist(), last.tolist(), strict=True))


def _admit(
    waiting: deque[int], asked: tuple[tuple[int, int], ...], kv: np.ndarray, room: int, num_running: int, max_rows: int,
    levelled: Level | None,
) -> list[int]:
    """Takes requests while there are rows, and room for prompts behind those that run."""
    places = max_rows - num_running if levelled is None else levelled.places(num_running, len(waiting))
    admitted: list[int] = []
    while waiting and len(admitted) < places and room > 0:
        admitted.append(waiting.popleft())
        room -= asked[admitted[-1]][0] - int(kv[admitted[-1]])
    if admitted and levelled is not None:
        levelled.begun(num_running + len(admitted), full=False)
    return admitted


def _tokens_of(missing: np.ndarray, room: int) -> tuple[np.ndarray, bool]:
    """New tokens of each request (`missing`: tokens of its prompt that are not computed): one of those that decode, and prompts
    in turn, as far as there is room. And whether all that get any decode."""
    decodes = missing <= 0
    wanted = np.where(decodes, 0, missing)
    given = np.clip(room - (np.cumsum(wanted) - wanted), 0, wanted)
    return np.where(decodes, 1, given), not given.any()
