"""Sampling on a GPU without a sort and without host synchronisation: what ops/sampling/sample.py defines, as four kernels.

    best     splits the vocabulary over CTAs: the largest logit of every row, whether the row is broken, and, for
             the filters, the largest logit of every group of ids and the weight of every tile
    select   one CTA per filtered row: the maxima of the groups give a lower bound for the logits of survivors; the few
             ids above it are collected, cut exactly as defined, and race in registers
    race     splits the vocabulary again, for rows without filters and for those with too many candidates
    finish   for rows with too many candidates: the winner of the race counts if its rank and the weight before it say that
             it survives; if not, everything from it on is ruled out and the rest races again

A row that a kernel does not handle costs it one load. Nothing depends on values on the host, so a CUDA graph can capture all of
it. Scores are float64. They are computed only for ids whose bound weight / v (see `_race_bounded` in ops/sampling/sample.py),
in float32 logarithms, reaches the best score known.

The one difference to the definition: the weight of all ids, of which top_p takes a share, is a float32 sum. Its relative
error is below 1e-6, and so is the probability that it changes a sampled token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.registry import tl, triton_kernel
from ridgeline.sizes.sampling_costs import SAMPLE_CANDIDATES, SAMPLE_GROUP, SAMPLE_RACE_TILE, SAMPLE_TILE

BEST_TILE, BEST_WARPS = SAMPLE_TILE, 4
RACE_TILE, RACE_WARPS = SAMPLE_RACE_TILE, 2
RACE_SPAN, RACE_ALONE = 8, 8         # tiles per CTA; one tile, up to this many rows, which do not fill the GPU
GROUP = SAMPLE_GROUP
CANDIDATES = SAMPLE_CANDIDATES
FEW = 128                            # candidates: most rows have no more than this
PAIRS = 4096                         # pairs of ids that are compared at once: what registers hold
GROUPS_AT_ONCE = 16                  # groups whose ids are scanned at once
FINISH_TILE, FINISH_WARPS = 4096, 16
SCAN_TILE = 16384                    # ids at a time where one CTA scans a whole row
SELECT_WARPS = 4
LOWEST = float(np.finfo(np.float32).min)
EMPTY_KEY = -0x7FFFFFFFFFFFFFFF      # below the key of every logit


# ── on the device ────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def _larger(first, second):  # type: ignore[no-untyped-def]
    """Of two numbers; a NaN counts as the largest."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton_kernel()
def ordered_key(value):  # type: ignore[no-untyped-def]
    """An int32 that is ordered as the float32 values are: zeros are equal, a NaN is the largest."""
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value == 0, 0, key)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton_kernel()
def ordered_value(key):  # type: ignore[no-untyped-def]
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton_kernel()
def _noise(seed, index, ids):  # type: ignore[no-untyped-def]
    """E(id), as ops/sampling/noise.py defines it; 1 - v is exact in float64."""
    counter = (ids >> 2).to(tl.uint32)
    zero = counter * 0
    words0, words1, words2, words3 = tl.philox(seed, counter, zero + index.to(tl.uint32), zero, zero)
    lane = ids & 3
    word = tl.where(lane < 2, tl.where(lane == 0, words0, words1), tl.where(lane == 2, words2, words3))
    return -tl.log((4294967295.5 - word.to(tl.float64)) * 2.3283064365386963e-10)


@triton_kernel()
def _masked(logits_ptr, mask_ptr, first_word, vocab, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits [WORDS, 32] of some words of a row's mask, without those that it does not allow; and which of all are a NaN or
    an infinity, which a mask could hide."""
    word = first_word + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    ids = word[:, None] * 32 + bit[None, :]
    logits = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    words = tl.load(mask_ptr + word, mask=word * 32 < vocab, other=0)
    kept = tl.where(((words[:, None] >> bit[None, :]) & 1) == 0, float("-inf"), logits)
    return kept, (logits != logits) | (logits == float("inf"))


@triton_kernel(do_not_specialize=["params_stride"])
def _best_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, vocab, keys_ptr, arrivals_ptr, tokens_ptr, failed_ptr, rows_ptr, last_token_ptr,
    integers_ptr, numbers_ptr, best_ptr, best_id_ptr, state_ptr, group_best_ptr, tile_best_ptr, tile_weight_ptr,
    params_stride, mask_ptr, mask_stride,
    TILE: tl.constexpr, GROUP: tl.constexpr, EMPTY_KEY: tl.constexpr, LOWEST: tl.constexpr,
    RANDOM: tl.constexpr, FILTERED: tl.constexpr, MASKED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One CTA: one tile of one row. The CTA of a row that arrives last knows its best logit, and finds the first
    id that has it in the tile it came from. A mask does not go with filters (see `draw`)."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits_ptr += row * stride
    if FILTERED:
        groups: tl.constexpr = TILE // GROUP
        group = tile * groups + tl.arange(0, groups)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        group_best = tl.max(x, axis=1)
        tl.store(group_best_ptr + row * (tl.num_programs(0) * groups) + group, group_best)
        highest = tl.max(group_best, axis=0)
        origin = tl.where(highest == float("-inf"), 0.0, highest)
        per_unit = 1.4426950408889634 / tl.load(numbers_ptr + row).to(tl.float32)        # of a logit, in log2 of weight
        weight = tl.sum(tl.sum(tl.exp2((x - origin) * per_unit), axis=1), axis=0)
        tl.store(tile_best_ptr + row * tl.num_programs(0) + tile, highest)
        tl.store(tile_weight_ptr + row * tl.num_programs(0) + tile, weight)
        value = tl.reduce(tl.reduce(x, 1, _larger), 0, _larger)
    elif MASKED:
        # By words of the mask: a thread has several ids of one word, and loads it once.
        x, wrong = _masked(logits_ptr, mask_ptr + row * mask_stride, tile * (TILE // 32), vocab, TILE // 32)
        value = tl.max(tl.max(x, axis=1), axis=0)
        value = tl.where(tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0) > 0, float("nan"), value)
    else:
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        value = tl.reduce(x, 0, _larger)
    key = (ordered_key(value).to(tl.int64) << 32) | (0x7FFFFFFF - tile).to(tl.int64)
    tl.atomic_max(keys_ptr + row, key)
    if tl.atomic_add(arrivals_ptr + row, 1) == tl.num_programs(0) - 1:
        key = tl.atomic_xchg(keys_ptr + row, EMPTY_KEY)
        tl.store(arrivals_ptr + row, 0)
        value = ordered_value((key >> 32).to(tl.int32))
        best_tile = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
        if MASKED:
            again, _ = _masked(logits_ptr, mask_ptr + row * mask_stride, best_tile * (TILE // 32), vocab, TILE // 32)
            word = best_tile * (TILE // 32) + tl.arange(0, TILE // 32)
            place = word[:, None] * 32 + tl.arange(0, 32)[None, :]
            first = tl.min(tl.min(tl.where(again == value, place, 0x7FFFFFFF), axis=1), axis=0)
        else:
            place = best_tile * TILE + tl.arange(0, TILE)
            again = tl.load(logits_ptr + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
            first = tl.min(tl.where(again == value, place, 0x7FFFFFFF), axis=0)
        failed = (value != value) | (tl.abs(value) == float("inf"))
        token = tl.where(failed, 0, first).to(tl.int64)
        tl.store(tokens_ptr + row, token)
        tl.store(failed_ptr + row, failed.to(tl.uint8))
        tl.store(last_token_ptr + tl.load(rows_ptr + row), token)
        if RANDOM:
            random = (tl.load(numbers_ptr + row) > 0) & (failed == 0)
            filtered = tl.load(integers_ptr + 2 * params_stride + row) > 0
            filtered = filtered | (tl.load(numbers_ptr + params_stride + row) > LOWEST)
            filtered = filtered | (tl.load(numbers_ptr + 2 * params_stride + row) < 1)
            tl.store(best_ptr + row, value)
            tl.store(best_id_ptr + row, first)
            tl.store(state_ptr + row, tl.where(random, tl.where(filtered, 2, 1), 0))


@triton_kernel()
def _race_tile(  # type: ignore[no-untyped-def]
    logits_ptr, mask_ptr, vocab, start, best, temperature, floor, cut, cut_id, seed, index, leader, leader_score,
    TILE: tl.constexpr, HAS_CUT: tl.constexpr, MASKED: tl.constexpr,
):
    """The winner and its score among a leader so far and the ids of a tile that are allowed, not below the floor and rank
    before the cut."""
    quads: tl.constexpr = TILE // 4
    counter = (start // 4 + tl.arange(0, quads)).to(tl.uint32)
    zero = counter * 0
    words0, words1, words2, words3 = tl.philox(seed, counter, zero + index.to(tl.uint32), zero, zero)
    words = tl.reshape(tl.join(tl.join(words0, words2), tl.join(words1, words3)), [TILE])
    ids = start + tl.arange(0, TILE)
    x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    # log2 of weight and of weight / v, less 32: within 1e-4 where it matters, so an id is compared with that slack, and
    # exactly before it leads.
    weight = (x - best) * (1.4426950408889634 / temperature)
    bound = weight - tl.log2(words.to(tl.float32) + 0.5)
    bound = tl.where(weight >= floor * 1.442696 - 1e-4, bound, float("-inf"))
    if MASKED:
        allowed = (tl.load(mask_ptr + (ids >> 5), mask=ids < vocab, other=0) >> (ids & 31)) & 1
        bound = tl.where(allowed == 0, float("-inf"), bound)
    if HAS_CUT:
        bound = tl.where(weight >= cut * 1.442696 - 1e-4, bound, float("-inf"))
    known = tl.log2(leader_score.to(tl.float32)) - 32.0 - 1e-4
    top = tl.max(bound, axis=0)
    while (top > float("-inf")) & (top >= known):
        token = tl.min(tl.where(bound == top, ids, 0x7FFFFFFF), axis=0)
        value = tl.div_rn(tl.load(logits_ptr + token).to(tl.float32) - best, temperature)
        score = tl.exp(value.to(tl.float64)) / _noise(seed, index, token)
        better = (score > leader_score) | ((score == leader_score) & (token < leader))
        better = better & (value >= floor)
        if HAS_CUT:
            better = better & ((value > cut) | ((value == cut) & (token < cut_id)))
        leader = tl.where(better, token, leader)
        leader_score = tl.where(better, score, leader_score)
        known = tl.log2(leader_score.to(tl.float32)) - 32.0 - 1e-4
        bound = tl.where(ids == token, float("-inf"), bound)
        top = tl.max(bound, axis=0)
    return leader, leader_score


@triton_kernel(do_not_specialize=["params_stride"])
def _race_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, vocab, arrivals_ptr, tokens_ptr, integers_ptr, numbers_ptr, best_ptr, best_id_ptr,
    state_ptr, leaders_ptr, scores_ptr, rows_ptr, last_token_ptr, params_stride, mask_ptr, mask_stride,
    TILE: tl.constexpr, SPAN: tl.constexpr, PROGRAMS: tl.constexpr, MASKED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One CTA: SPAN tiles of one row; the one that arrives last compares the winners. A row has at most PROGRAMS CTAs, a power
    of two."""
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(state_ptr + row) % 2 == 1:                    # 1 or 3, see Workspace
        logits_ptr += row * stride
        temperature = tl.load(numbers_ptr + row).to(tl.float32)
        floor = tl.load(numbers_ptr + params_stride + row).to(tl.float32)
        seed = tl.load(integers_ptr + row)
        index = tl.load(integers_ptr + params_stride + row).to(tl.int32)
        # Every CTA starts from the score of the best id: most tiles have no id whose bound reaches it.
        leader = tl.load(best_id_ptr + row)
        score = 1.0 / _noise(seed, index, leader)
        best = tl.load(best_ptr + row)
        first = program * (SPAN * TILE)
        mask_ptr += row * mask_stride
        for start in range(first, tl.minimum(first + SPAN * TILE, vocab), TILE):
            if MASKED:                                       # a grammar rules out most tiles: their noise is skipped
                word = start // 32 + tl.arange(0, TILE // 32)
                some = tl.max((tl.load(mask_ptr + word, mask=word * 32 < vocab, other=0) != 0).to(tl.int32), axis=0)
                if some != 0:
                    leader, score = _race_tile(
                        logits_ptr, mask_ptr, vocab, start, best, temperature, floor, float("-inf"), 0, seed, index, leader,
                        score, TILE, False, True,
                    )
            else:
                leader, score = _race_tile(
                    logits_ptr, mask_ptr, vocab, start, best, temperature, floor, float("-inf"), 0, seed, index, leader,
                    score, TILE, False, False,
                )
        tl.store(leaders_ptr + row * PROGRAMS + program, leader)
        tl.store(scores_ptr + row * PROGRAMS + program, score)
        if tl.atomic_add(arrivals_ptr + row, 1) == tl.num_programs(0) - 1:
            tl.store(arrivals_ptr + row, 0)
            place = tl.arange(0, PROGRAMS)
            there = place < tl.num_programs(0)
            # From L2, not L1: other CTAs have written them.
            scores = tl.load(scores_ptr + row * PROGRAMS + place, mask=there, other=0.0, cache_modifier=".cg")
            leaders = tl.load(leaders_ptr + row * PROGRAMS + place, mask=there, other=0, cache_modifier=".cg")
            token = tl.min(tl.where(there & (scores == tl.max(scores, axis=0)), leaders, 0x7FFFFFFF), axis=0)
            tl.store(tokens_ptr + row, token.to(tl.int64))
            tl.store(last_token_ptr + tl.load(rows_ptr + row), token.to(tl.int64))


@triton_kernel()
def _lower_bound(value, amount, goal, low, high):  # type: ignore[no-untyped-def]
    """A number as large as 16 halvings find it so that the amounts of all values from it on reach the goal; `low` if
    there is none."""
    for _ in range(16):
        middle = (low + high) * 0.5
        enough = tl.sum(tl.where(value >= middle, amount, 0), axis=0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton_kernel()
def _race_few(  # type: ignore[no-untyped-def]
    values_ptr, ids_ptr, count, best, temperature, floor, top_k, top_p, total, seed, index,
    MOST: tl.constexpr, AT_ONCE: tl.constexpr, LOWEST: tl.constexpr,
):
    """The winner of `count` listed ids, at most MOST. Each is compared with all: how many rank before it, and what do
    they weigh? `total` is what top_p takes a share of where no other filter comes before it."""
    place = tl.arange(0, MOST)
    there = place < count
    ids = tl.load(ids_ptr + place, mask=there, other=0)
    scaled = tl.div_rn(tl.load(values_ptr + place, mask=there, other=float("-inf")) - best, temperature)
    kept = there & (scaled >= floor)
    weight = tl.where(kept, tl.exp(scaled.to(tl.float64)), 0.0)
    rank = tl.zeros([MOST], tl.int32)
    before = tl.zeros([MOST], tl.float64)
    for begin in range(0, count, AT_ONCE):
        at = begin + tl.arange(0, AT_ONCE)
        other_id = tl.load(ids_ptr + at, mask=at < count, other=0)
        other = tl.div_rn(tl.load(values_ptr + at, mask=at < count, other=float("-inf")) - best, temperature)
        other_weight = tl.exp(other.to(tl.float64))
        first = other[None, :] == scaled[:, None]
        first = (other[None, :] > scaled[:, None]) | (first & (other_id[None, :] < ids[:, None]))
        first = first & (other >= floor)[None, :]
        rank += tl.sum(first.to(tl.int32), axis=1)
        before += tl.sum(tl.where(first, other_weight[None, :], 0.0), axis=1)
    if top_k > 0:
        kept = kept & (rank < top_k)
    if top_p < 1:
        if (top_k > 0) | (floor > LOWEST):
            total = tl.sum(tl.where(kept, weight, 0.0), axis=0)
        kept = kept & (before < top_p * total)
    score = tl.where(kept, weight / _noise(seed, index, ids), -1.0)
    return tl.min(tl.where(score == tl.max(score, axis=0), ids, 0x7FFFFFFF), axis=0)


@triton_kernel()
def _highest_key(key, amount, goal, low):  # type: ignore[no-untyped-def]
    """The largest key, from `low` to that of 0, so that the amounts of all keys from it on reach the goal."""
    high = low * 0
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        enough = tl.sum(tl.where(key >= middle, amount, 0), axis=0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton_kernel()
def _race_many(  # type: ignore[no-untyped-def]
    values_ptr, ids_ptr, count, best, temperature, floor, top_k, top_p, total, seed, index,
    MOST: tl.constexpr, LOWEST: tl.constexpr,
):
    """As `_race_few`, for a list too long to compare each with all: the value where a filter ends is searched for, and
    of the ids that have it the first few are kept. The list is ordered by id."""
    place = tl.arange(0, MOST)
    there = place < count
    ids = tl.load(ids_ptr + place, mask=there, other=0)
    scaled = tl.div_rn(tl.load(values_ptr + place, mask=there, other=float("-inf")) - best, temperature)
    kept = there & (scaled >= floor)
    key = ordered_key(scaled)
    low = tl.min(tl.where(kept, key, 0), axis=0)
    if (top_k > 0) & (tl.sum(kept.to(tl.int32), axis=0) > top_k):
        end = _highest_key(key, kept.to(tl.int32), top_k, low)
        equal = kept & (key == end)
        room = top_k - tl.sum((kept & (key > end)).to(tl.int32), axis=0)
        kept = kept & ((key > end) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room)))
    weight = tl.where(kept, tl.exp(scaled.to(tl.float64)), 0.0)
    if top_p < 1:
        if (top_k > 0) | (floor > LOWEST):
            total = tl.sum(weight, axis=0)
        goal = top_p * total
        end = _highest_key(key, weight, goal, low)
        equal = kept & (key == end)
        each = tl.max(tl.where(equal, weight, 0.0), axis=0)
        above = tl.sum(tl.where(key > end, weight, 0.0), axis=0)
        rank = tl.cumsum(equal.to(tl.int32), axis=0)
        kept = kept & ((key > end) | (equal & (above + (rank - 1).to(tl.float64) * each < goal)))
    score = tl.where(kept, weight / _noise(seed, index, ids), -1.0)
    return tl.min(tl.where(score == tl.max(score, axis=0), ids, 0x7FFFFFFF), axis=0)


@triton_kernel(do_not_specialize=["params_stride"])
def _select_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, vocab, tokens_ptr, integers_ptr, numbers_ptr, best_ptr, best_id_ptr, state_ptr,
    group_best_ptr, tile_best_ptr, tile_weight_ptr, listed_ptr, values_ptr, ids_ptr, params_stride,
    TILES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr, FEW: tl.constexpr,
    PAIRS: tl.constexpr, AT_ONCE: tl.constexpr, LOWEST: tl.constexpr, TILES_ROUND: tl.constexpr, GROUPS_ROUND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One CTA per row. Every list it writes is ordered by id."""
    row = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(state_ptr + row) == 2:
        logits_ptr += row * stride
        listed_ptr += row * CANDIDATES
        values_ptr += row * CANDIDATES
        ids_ptr += row * CANDIDATES
        best = tl.load(best_ptr + row)
        temperature = tl.load(numbers_ptr + row).to(tl.float32)
        floor = tl.load(numbers_ptr + params_stride + row).to(tl.float32)
        top_p = tl.load(numbers_ptr + 2 * params_stride + row)
        top_k = tl.load(integers_ptr + 2 * params_stride + row)
        per_unit = 1.4426950408889634 / temperature

        tile = tl.arange(0, TILES_ROUND)
        tile_best = tl.load(tile_best_ptr + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
        tile_weight = tl.load(tile_weight_ptr + row * TILES + tile, mask=tile < TILES, other=0.0)
        total = tl.sum((tile_weight * tl.exp2((tile_best - best) * per_unit)).to(tl.float64), axis=0)

        # A logit that no survivor lies below. At least k ids are as large as the k-th largest maximum; and the ids from
        # a maximum on weigh as much as the maxima from it on, or more. A share is taken of what the filter before has
        # left, so where there are two, only the first of them may rule anything out here.
        group = tl.arange(0, GROUPS_ROUND)
        group_best = tl.load(group_best_ptr + row * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
        bottom = tl.full([], LOWEST, tl.float32)
        if top_k > 0:
            lowest = tl.min(tl.where(group_best >= LOWEST, group_best, best), axis=0)
            if tl.sum((group_best >= lowest).to(tl.int32), axis=0) >= top_k:
                bottom = _lower_bound(group_best, tl.full([GROUPS_ROUND], 1, tl.int32), top_k, lowest, best)
        elif floor <= LOWEST:
            goal = (top_p * total * 1.0001).to(tl.float32)
            weight = tl.exp2((group_best - best) * per_unit)
            lowest = best - 30.0 * temperature               # what lies below weighs nothing
            if tl.sum(tl.where(group_best >= lowest, weight, 0.0), axis=0) >= goal:
                bottom = _lower_bound(group_best, weight, goal, lowest, best)
        bottom = tl.maximum(bottom, best + floor * temperature * 1.00001)
        # Different logits may be equal once they are divided: a little lower.
        bottom -= (best - bottom) * 1e-6 + tl.abs(best) * 1e-6
        bottom = tl.maximum(bottom, LOWEST)

        listed = group_best >= bottom
        num_listed = tl.sum(listed.to(tl.int32), axis=0)
        count = num_listed
        if num_listed <= CANDIDATES:
            tl.store(listed_ptr + tl.cumsum(listed.to(tl.int32), axis=0) - 1, group, mask=listed)
            tl.debug_barrier()
            count = num_listed * 0
            for begin in range(0, num_listed, AT_ONCE):
                at = begin + tl.arange(0, AT_ONCE)
                members = tl.load(listed_ptr + at, mask=at < num_listed, other=0)[:, None] * GROUP
                members += tl.arange(0, GROUP)[None, :]
                inside = (at < num_listed)[:, None] & (members < vocab)
                logits = tl.load(logits_ptr + members, mask=inside, other=float("-inf")).to(tl.float32)
                logits = tl.reshape(logits, [AT_ONCE * GROUP])
                members = tl.reshape(members, [AT_ONCE * GROUP])
                taken = logits >= bottom
                to = count + tl.cumsum(taken.to(tl.int32), axis=0) - 1
                tl.store(values_ptr + to, logits, mask=taken & (to < CANDIDATES))
                tl.store(ids_ptr + to, members, mask=taken & (to < CANDIDATES))
                count += tl.sum(taken.to(tl.int32), axis=0)
            tl.debug_barrier()

        if count > CANDIDATES:
            tl.store(state_ptr + row, 3)
        else:
            seed = tl.load(integers_ptr + row)
            index = tl.load(integers_ptr + params_stride + row).to(tl.int32)
            if count <= FEW:
                token = _race_few(
                    values_ptr, ids_ptr, count, best, temperature, floor, top_k, top_p, total, seed, index,
                    FEW, PAIRS // FEW, LOWEST,
                )
            else:
                token = _race_many(
                    values_ptr, ids_ptr, count, best, temperature, floor, top_k, top_p, total, seed, index,
                    CANDIDATES, LOWEST,
                )
            tl.store(tokens_ptr + row, token.to(tl.int64))
            tl.store(state_ptr + row, 0)


@triton_kernel(do_not_specialize=["params_stride"])
def _finish_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, vocab, tokens_ptr, integers_ptr, numbers_ptr, best_ptr, best_id_ptr, state_ptr, params_stride,
    TILE: tl.constexpr, SCAN: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One CTA per row that select left open; `tokens` has the winner of all ids that min_p leaves."""
    row = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(state_ptr + row) == 3:
        logits_ptr += row * stride
        best = tl.load(best_ptr + row)
        temperature = tl.load(numbers_ptr + row).to(tl.float32)
        floor = tl.load(numbers_ptr + params_stride + row).to(tl.float32)
        top_p = tl.load(numbers_ptr + 2 * params_stride + row)
        top_k = tl.load(integers_ptr + 2 * params_stride + row)
        seed = tl.load(integers_ptr + row)
        index = tl.load(integers_ptr + params_stride + row).to(tl.int32)

        token = tl.load(tokens_ptr + row).to(tl.int32)
        value = tl.div_rn(tl.load(logits_ptr + token).to(tl.float32) - best, temperature)
        count, weight, all_count, total = _before(logits_ptr, vocab, best, temperature, floor, value, token, SCAN)
        if (top_k > 0) & (all_count > top_k):
            low = ordered_key(floor)
            high = low * 0                                   # the key of the best id's value
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                start = ordered_value(middle)
                _, _, all_count, _ = _before(logits_ptr, vocab, best, temperature, start, value, token, SCAN)
                low = tl.where(all_count >= top_k, middle, low)
                high = tl.where(all_count >= top_k, high, middle - 1)
            floor = ordered_value(low)
            above, total, _, _ = _before(logits_ptr, vocab, best, temperature, floor, floor, token * 0, SCAN)
            total += (top_k - above).to(tl.float64) * tl.exp(floor.to(tl.float64))
        most = tl.where(top_k > 0, top_k, 0x7FFFFFFF)
        goal = tl.where(top_p < 1, top_p * total, float("inf"))

        while (count >= most) | (weight >= goal):
            winner = tl.load(best_id_ptr + row)
            score = 1.0 / _noise(seed, index, winner)
            for start in range(0, vocab, TILE):
                winner, score = _race_tile(
                    logits_ptr, logits_ptr, vocab, start, best, temperature, floor, value, token, seed, index, winner, score,
                    TILE, True, False,
                )
            token = winner
            value = tl.div_rn(tl.load(logits_ptr + token).to(tl.float32) - best, temperature)
            count, weight, _, _ = _before(logits_ptr, vocab, best, temperature, floor, value, token, SCAN)
        tl.store(tokens_ptr + row, token.to(tl.int64))


@triton_kernel()
def _before(logits_ptr, vocab, best, temperature, floor, cut, cut_id, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the ids that are not below the floor: how many rank before the cut, and their weight; and all of them."""
    count = tl.full([], 0, tl.int64)
    weight = tl.full([], 0.0, tl.float64)
    all_count = tl.full([], 0, tl.int64)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(x - best, temperature)
        inside = scaled >= floor
        before = inside & ((scaled > cut) | ((scaled == cut) & (ids < cut_id)))
        each = tl.exp2(scaled * 1.4426950408889634)
        count += tl.sum(before.to(tl.int32), axis=0)
        weight += tl.sum(tl.where(before, each, 0.0), axis=0).to(tl.float64)
        all_count += tl.sum(inside.to(tl.int32), axis=0)
        total += tl.sum(tl.where(inside, each, 0.0), axis=0).to(tl.float64)
    return count, weight, all_count, total


@triton_kernel()
def _mask_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, mask_ptr, out_ptr, broken_ptr, vocab, stride, mask_stride, out_stride,
    MASKED: tl.constexpr, WORDS: tl.constexpr,
):
    """One CTA: the ids of some words of one row's mask."""
    row = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    ids = word[:, None] * 32 + bit[None, :]
    inside = ids < vocab
    logits = tl.load(logits_ptr + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    kept = logits
    if MASKED:
        words = tl.load(mask_ptr + row * mask_stride + word, mask=word * 32 < vocab, other=0)
        kept = tl.where(((words[:, None] >> bit[None, :]) & 1) == 0, float("-inf"), logits)
    tl.store(out_ptr + row * out_stride + ids, kept, mask=inside)
    wrong = tl.max(tl.max(((logits != logits) | (logits == float("inf"))).to(tl.int32), axis=1), axis=0)
    tl.store(broken_ptr + row, 1, mask=wrong > 0)        # every CTA that finds one writes the same


# ── on the host ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Workspace:
    """What the kernels hand to each other. Every call leaves `keys` and `arrivals` as it found them."""

    own: Tensor                      # int64 [R]: 0, 1, 2, … in the place of rows, where there are none
    keys: Tensor                     # int64 [R]: best logit and its tile
    arrivals: Tensor                 # int32 [2, R]: CTAs of a row that are done
    best: Tensor                     # float32 [R], and its id, int32
    best_id: Tensor
    state: Tensor                    # int32 [R]: what is left to do: 0 nothing, 1 race, 2 select, 3 race and finish
    group_best: Tensor               # float32 [R, groups]
    tile_best: Tensor                # float32 [R, tiles]
    tile_weight: Tensor
    listed: Tensor                   # int32 [R, CANDIDATES]: groups to look through
    values: Tensor                   # float32 [R, CANDIDATES], and their ids
    ids: Tensor
    leaders: Tensor                  # int32 [R, race tiles, a power of two], and their scores
    scores: Tensor                   # float64 [R, race tiles]


_workspaces: dict[tuple[torch.device, int], Workspace] = {}
_outgrown: list[Workspace] = []      # kept: captured CUDA graphs may hold their addresses


def workspace(device: torch.device, rows: int, vocab: int) -> Workspace:
    """The device's workspace for this vocabulary. It is allocated again for more rows than before, so an
    engine that captures CUDA graphs reserves the most at start."""
    found = _workspaces.get((device, vocab))
    if found is None or found.keys.shape[0] < rows:
        if found is not None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                # Its memory would be of the graphs' pool, where graphs that were captured before write.
                raise AssertionError(f"a workspace for {rows} rows while a CUDA graph is captured: reserve it before")
            _outgrown.append(found)
        tiles = cdiv(vocab, BEST_TILE)
        groups = tiles * (BEST_TILE // GROUP)
        race_tiles = power_of_two(cdiv(vocab, RACE_TILE))

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        found = _workspaces[device, vocab] = Workspace(
            own=torch.arange(rows, device=device),
            keys=torch.full((rows,), EMPTY_KEY, dtype=torch.int64, device=device),
            arrivals=torch.zeros((2, rows), dtype=torch.int32, device=device),
            best=empty(torch.float32, rows),
            best_id=empty(torch.int32, rows),
            state=empty(torch.int32, rows),
            group_best=empty(torch.float32, rows, groups),
            tile_best=empty(torch.float32, rows, tiles),
            tile_weight=empty(torch.float32, rows, tiles),
            listed=empty(torch.int32, rows, CANDIDATES),
            values=empty(torch.float32, rows, CANDIDATES),
            ids=empty(torch.int32, rows, CANDIDATES),
            leaders=empty(torch.int32, rows, race_tiles),
            scores=empty(torch.float64, rows, race_tiles),
        )
    return found


@dataclass(slots=True)
class Choices:
    """How each row of a batch chooses, on the device, and which stages that takes."""

    integers: Tensor                 # int64 [3, R]: seed, output index, top_k
    numbers: Tensor                  # float64 [3, R]: temperature, log(min_p), top_p
    random: bool                     # is there a row with a temperature …
    filtered: bool                   # … and with a filter?
    unfiltered: bool

    @classmethod
    def of(cls, how: np.ndarray, device: torch.device) -> Choices:
        # Whole cache lines per column: a pointer that is aligned or not by the number of rows would be two kernels.
        width = -(-len(how) // 16) * 16
        sent = torch.empty((6, width), dtype=torch.int64, pin_memory=device.type == "cuda")
        integers, numbers = (part[:, : len(how)] for part in (sent[:3].numpy(), sent[3:].view(torch.float64).numpy()))
        with np.errstate(divide="ignore"):
            floor = np.maximum(np.log(how["min_p"]).astype(np.float32), np.float32(LOWEST))
        integers[:] = how["seed"].view(np.int64), how["index"], how["top_k"]
        numbers[:] = how["temperature"], floor, how["top_p"]
        random = how["temperature"] > 0
        filtered = random & ((how["top_k"] > 0) | (how["top_p"] < 1) | (how["min_p"] > 0))
        there = sent.to(device, non_blocking=True)
        return cls(
            there[:3], there[3:].view(torch.float64), bool(random.any()), bool(filtered.any()),
            bool((random & ~filtered).any()),
        )


def draw(
    logits: Tensor, choices: Choices | None, tokens: Tensor, failed: Tensor, rows: Tensor | None = None,
    last_token: Tensor | None = None, mask: Tensor | None = None,
) -> None:
    """Sample a token for each row of logits [S, V] into tokens [S], int64; failed [S], bool. Without choices the best one
    (greedy). With `rows` [S] the tokens also go into last_token[rows]. A mask, int32 [S, ceil(V / 32)], says which ids are
    allowed, for rows without filters."""
    count, vocab = logits.shape
    if count == 0:
        return
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    space = workspace(logits.device, count, vocab)
    random = choices is not None and choices.random
    filtered = choices is not None and choices.filtered
    if filtered and mask is not None:
        raise AssertionError("filters look at logits alone: mask_logits first")
    where = (space.own, tokens) if rows is None or last_token is None else (rows, last_token)
    integers, numbers = (choices.integers, choices.numbers) if choices is not None else (space.keys, space.scores)
    _best_kernel[(cdiv(vocab, BEST_TILE), count)](
        logits, logits.stride(0), vocab, space.keys, space.arrivals, tokens, failed.view(torch.uint8), *where, integers, numbers,
        space.best, space.best_id, space.state, space.group_best, space.tile_best, space.tile_weight, integers.stride(0),
        *_mask_and_stride(logits, mask),
        TILE=BEST_TILE, GROUP=GROUP, EMPTY_KEY=EMPTY_KEY, LOWEST=LOWEST, RANDOM=random, FILTERED=filtered,
        MASKED=mask is not None, num_warps=BEST_WARPS, **dependent_launch(logits.device),
    )
    if choices is not None and random:
        _draw_random(logits, choices, tokens, space, where, mask)


def _mask_and_stride(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, int]:
    """Where there is no mask, any tensor: it is not read."""
    return (logits, 0) if mask is None else (mask, mask.stride(0))


def _draw_random(
    logits: Tensor, choices: Choices, tokens: Tensor, space: Workspace, where: tuple[Tensor, Tensor], mask: Tensor | None
) -> None:
    """The kernels behind the first, which found the best ids. `where`: rows and last_token."""
    count, vocab = logits.shape
    launch = dependent_launch(logits.device)
    integers, common = choices.integers, (logits, logits.stride(0), vocab)
    row = (tokens, integers, choices.numbers, space.best, space.best_id, space.state)
    if choices.filtered:
        tiles = cdiv(vocab, BEST_TILE)
        groups = tiles * (BEST_TILE // GROUP)
        _select_kernel[(count,)](
            *common, *row, space.group_best, space.tile_best, space.tile_weight, space.listed, space.values, space.ids,
            integers.stride(0),
            TILES=tiles, GROUPS=groups, GROUP=GROUP, CANDIDATES=CANDIDATES, FEW=FEW, PAIRS=PAIRS,
            AT_ONCE=GROUPS_AT_ONCE, LOWEST=LOWEST, TILES_ROUND=power_of_two(tiles),
            GROUPS_ROUND=power_of_two(groups), num_warps=SELECT_WARPS, **launch,
        )
    span = 1 if count <= RACE_ALONE else RACE_SPAN
    _race_kernel[(cdiv(vocab, span * RACE_TILE), count)](
        *common, space.arrivals[1], *row, space.leaders, space.scores, *where, integers.stride(0),
        *_mask_and_stride(logits, mask),
        TILE=RACE_TILE, SPAN=span, PROGRAMS=space.scores.shape[1], MASKED=mask is not None,
        num_warps=4 if span == 1 else RACE_WARPS, **launch,
    )
    if choices.filtered:
        _finish_kernel[(count,)](
            *common, *row, integers.stride(0), TILE=FINISH_TILE, SCAN=SCAN_TILE, num_warps=FINISH_WARPS, **launch
        )
        if where[1] is not tokens:                       # filtered rows have theirs from several kernels
            where[1].index_copy_(0, where[0], tokens)


def mask_logits(logits: Tensor, mask: Tensor | None, out: Tensor, broken: Tensor) -> None:
    """apply_mask of ops/sampling/sample.py for packed masks."""
    rows, vocab = logits.shape
    broken.zero_()
    if rows:
        words = 64
        _mask_kernel[(cdiv(vocab, 32 * words), rows)](
            logits, logits if mask is None else mask, out, broken.view(torch.uint8), vocab, logits.stride(0),
            0 if mask is None else mask.stride(0), out.stride(0), MASKED=mask is not None, WORDS=words, num_warps=4,
        )
