"""Samples one token per row of logits: penalties, masks, filters, and the exponential race.

Everything here is a pure function of its arguments. The sampler (runner/sampler.py) keeps requests and row state, and decides
which stages a batch needs.

The order of the stages is vLLM's:

    mask · allowed ids · bad words · min_tokens · logit_bias · penalties      they change the logits, greedy sees them
    temperature · min_p · top_k · top_p · typical_p                           they only matter to random rows

Every filter works on the ids that the one before it kept, renormalised. Equal values rank by id, lowest first, so top_k keeps
exactly k ids and top_p the smallest set whose mass reaches p.

A token is sampled by an exponential race: token = argmax of p(id) / E(id), with the noise E of noise.py. Noise and weights are
float64, so that the two equivalent ways to compute them (for all ids, or for the ids that survive) give the same token.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.ops.sampling import sample_kernels
from ridgeline.ops.sampling.greedy import argmax
from ridgeline.ops.sampling.noise import exponential, exponential_noise, exponential_noise_all, noise_words, to_device
from ridgeline.ops.sampling.sample_kernels import Choices
from ridgeline.sizes.sampling_costs import MASK_CASES, SAMPLE_CASES, mask_cost, sample_cost

# How each row of a batch chooses. 0 turns temperature (greedy), top_k and min_p off, 1 turns top_p and typical_p off.
CHOICE = np.dtype([
    ("seed", np.uint64), ("index", np.int64),
    ("temperature", np.float64), ("min_p", np.float64),
    ("top_k", np.int64), ("top_p", np.float64), ("typical_p", np.float64),
])

BLOCK = 64                           # ids per block when looking for the largest: blocks are ruled out by their maximum
BOUND_SLACK = 1e-5                   # relative; an exponential and a division in float32 are off by less than 1e-6
CACHED_ELEMENTS = 1 << 17            # ids at a time where many passes go over all of them: they stay in the CPU cache
SCRATCH_ELEMENTS = 1 << 21           # ids at a time where few passes do: bounds the scratch memory of a large batch
GPU_ELEMENTS = 1 << 24               # a GPU wants few launches, of any kind


# ── what changes the logits, in place ─────────────────────────────────────────────────────────────────────────────────

def apply_mask_reference(logits: Tensor, mask: Tensor | None, out: Tensor, broken: Tensor) -> None:
    """Logits [S, V] into `out`, without what the mask does not allow: bool [S, V], or int32 [S, ceil(V / 32)], id 32 w + b at
    bit b of word w. `broken` [S]: which rows have a NaN or an infinity, which a mask could hide."""
    out.copy_(logits)
    if mask is not None:
        if mask.dtype != torch.bool:
            bits = torch.arange(32, dtype=torch.int32, device=mask.device)
            mask = ((mask[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
        out.masked_fill_(~mask, -torch.inf)
    torch.logical_not(logits.amax(dim=1) < torch.inf, out=broken)        # amax propagates NaN, and NaN < inf is false


def keep_only(logits: Tensor, rows: Tensor, row: Tensor, ids: Tensor) -> None:
    """Forbid, in each of `rows`, all but the ids that are paired with it in (row, ids)."""
    kept = logits[row, ids]
    logits.index_fill_(0, rows, -torch.inf)
    logits[row, ids] = kept


def apply_penalties(
    logits: Tensor, row: Tensor, known: Tensor, count: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Penalise known ids [n, L] of rows [n]; `count` [n, L] says how often each is in the answer, the prompt left out.

    An id may stand in `known` many times: each occurrence computes and writes the same value. So the work grows with
    the text, not with the vocabulary. The three penalties are [n, 1].
    """
    row = row[:, None]
    value = logits[row, known]
    value = torch.where(value > 0, value / repetition, value * repetition)
    logits[row, known] = value - (frequency * count + presence * (count > 0))


# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

def sample_reference(
    logits: Tensor, how: np.ndarray, mask: Tensor | None = None, choices: Choices | None = None, late: Tensor | None = None,
    draw: Callable[[Tensor, Tensor, np.ndarray, np.ndarray], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [S], and which rows failed: those with a NaN, an infinity, or nothing left to choose from.

    A failed row's token is 0. Nothing about it reaches another row. `mask`: see apply_mask. `choices` is what `send_choices`
    made of `how`, and changes nothing. `late` [S]: a row's output index is that much smaller than `how` says; the host does not
    know it yet. Rows with typical_p have none. `draw` is another way to choose the tokens of random rows.
    """
    draw = draw or _draw
    if late is not None:
        how = how.copy()
        how["index"] -= late.cpu().numpy()
    if mask is not None:
        kept = torch.empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        broken = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
        apply_mask_reference(logits, mask, kept, broken)
        tokens, failed = sample_reference(kept, how, draw=draw)
        failed |= broken
        return tokens.masked_fill_(failed, 0), failed
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    tokens = argmax(logits)
    best = logits.gather(1, tokens[:, None])
    failed = ~best.isfinite()[:, 0]
    random = how["temperature"] > 0
    if random.any():
        rows = np.flatnonzero(random & ~failed.cpu().numpy())
        tokens[to_device(rows, logits.device)] = draw(logits, tokens, how, rows)
    return tokens.masked_fill_(failed, 0), failed


def _draw(logits: Tensor, best: Tensor, how: np.ndarray, rows: np.ndarray) -> Tensor:
    """The tokens of the (random) rows; `best` is the best id of every row."""
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    own = how[rows]
    filtered = (own["top_k"] > 0) | (own["top_p"] < 1) | (own["min_p"] > 0) | (own["typical_p"] < 1)
    for members, choose, elements in ((~filtered, _race, CACHED_ELEMENTS), (filtered, _race_filtered, SCRATCH_ELEMENTS)):
        for which in _slices(np.flatnonzero(members), logits, elements):
            place = to_device(rows[which], logits.device)
            mine = logits.index_select(0, place)
            scaled = _scale(mine, mine.gather(1, best[place][:, None]), own["temperature"][which])
            tokens[to_device(which, logits.device)] = choose(scaled, own[which])
    return tokens


def _slices(rows: np.ndarray, x: Tensor, elements: int) -> Iterator[np.ndarray]:
    """The rows of x in parts of about `elements` elements."""
    size = max(1, (elements if x.is_cpu else GPU_ELEMENTS) // x.shape[1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _scale(logits: Tensor, best: Tensor, temperature: np.ndarray) -> Tensor:
    """(logits - best) / temperature, so that the largest is 0 and its weight exp(0) = 1; padded to whole blocks.

    Works in place where it can: the logits are its own.
    """
    logits -= best
    logits /= to_device(temperature, logits.device).to(logits.dtype)[:, None]
    return torch.nn.functional.pad(logits, (0, -logits.shape[1] % BLOCK), value=-torch.inf)


def _race(scaled: Tensor, how: np.ndarray) -> Tensor:
    """Every id takes part."""
    if scaled.is_cpu:
        return _race_bounded(scaled, how)
    return argmax(scaled.double().exp().div_(exponential_noise_all(how, scaled.shape[1], scaled.device)))


def _race_bounded(scaled: Tensor, how: np.ndarray) -> Tensor:
    """The same winners with hardly a logarithm: E >= v, so an id with weight / v below a known score cannot win.

    The bound is in the logits' precision, off by less than BOUND_SLACK; the few ids it leaves are scored as defined.
    """
    rows, width = scaled.shape
    words = noise_words(how, torch.arange(width // 4)[None])
    bound = scaled.new_empty((rows, width // 4, 4))
    for lane, word in enumerate(words):
        bound[:, :, lane] = word
    bound = scaled.exp().div_(bound.view(rows, width).add_(0.5))                   # weight / v, over 2^32

    def score(row: Tensor, ids: Tensor) -> Tensor:
        lanes = torch.stack([word[row, ids >> 2] for word in words])
        noise = exponential(lanes.gather(0, (ids & 3)[None])[0])
        return scaled[row, ids].double().exp_().div_(noise)

    known = score(torch.arange(rows), argmax(bound)) * (2.0**-32 * (1 - BOUND_SLACK))
    row, ids = _find(bound, operator.ge, known.to(bound.dtype))
    return _winners(row, ids, score(row, ids), rows)


def _winners(row: Tensor, ids: Tensor, score: Tensor, rows: int) -> Tensor:
    """Of (row, id, score > 0) triples the best id in each row, the lowest of equals."""
    best = score.new_zeros(rows).scatter_reduce_(0, row, score, "amax")
    last = torch.iinfo(ids.dtype).max
    ids = torch.where(score == best[row], ids, last)
    return ids.new_full((rows,), last).scatter_reduce_(0, row, ids, "amin")


# ── filters ───────────────────────────────────────────────────────────────────────────────────────────────────────────

def _race_filtered(scaled: Tensor, how: np.ndarray) -> Tensor:
    """Only the ids that survive min_p, top_k, top_p and typical_p take part."""
    row, ids = survivors(scaled, how)
    value = scaled[row, ids]
    if 8 * len(ids) > scaled.numel():                        # noise for single ids costs four times as much each
        scaled.fill_(-torch.inf)[row, ids] = value
        return _race(scaled, how)
    noise = exponential_noise(how[row.cpu().numpy()], ids[:, None])[:, 0]
    return _winners(row, ids, value.double().exp_().div_(noise), len(how))


def survivors(scaled: Tensor, how: np.ndarray) -> tuple[Tensor, Tensor]:
    """Row and id of all that the filters leave, in that order.

    The survivors of min_p, top_k and top_p are all ids above some value and, of those equal to it, the first few. To
    find that value takes the sorted values, but not their ids, and of rows with a top_k or min_p only the largest.
    """
    rows = len(how)
    lowest = scaled.new_empty(rows)
    ties = torch.empty(rows, dtype=torch.int64, device=scaled.device)
    total, entropy = torch.empty((2, rows), dtype=torch.float64, device=scaled.device)
    open_ended = (how["top_k"] == 0) & (how["min_p"] == 0)
    for members, sorted_values, elements in (
        (open_ended, _all_values, CACHED_ELEMENTS),
        (~open_ended, _largest_values, SCRATCH_ELEMENTS),
    ):
        for which in _slices(np.flatnonzero(members), scaled, elements):
            place = to_device(which, scaled.device)
            own = scaled if len(which) == rows else scaled.index_select(0, place)
            lowest[place], ties[place], total[place], entropy[place] = _cut(sorted_values(own, how[which]), how[which])

    row, ids = _find(scaled, operator.ge, lowest)
    value = scaled[row, ids]
    kept = torch.ones_like(row, dtype=torch.bool)
    equal = (value == lowest[row]).nonzero()[:, 0]
    kept[equal] = _count_in_row(row[equal]) <= ties[row[equal]]
    if not kept.all():
        row, ids, value = row[kept], ids[kept], value[kept]
    if (how["typical_p"] < 1).any():
        kept = _typical(row, value, total, entropy, to_device(how["typical_p"], scaled.device))
        row, ids = row[kept], ids[kept]
    return row, ids


def _find(x: Tensor, compare: Callable[[Any, Any], Any], value: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column, in order, of every element of which the comparison with its row's value holds."""
    if x.is_cpu:                     # a tenth of the time of torch's comparison and nonzero
        flat = torch.from_numpy(np.flatnonzero(compare(x.numpy(), value.numpy()[:, None])))
        row = torch.div(flat, x.shape[1], rounding_mode="floor")
        return row, flat - row * x.shape[1]
    row, column = compare(x, value[:, None]).nonzero(as_tuple=True)
    return row, column


def descending(values: Tensor) -> Tensor:
    if values.is_cpu:                # numpy sorts values alone by vector instructions: 0.2 ms a row instead of 5
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return torch.sort(values, dim=-1, descending=True).values


def _all_values(scaled: Tensor, how: np.ndarray) -> Tensor:
    return descending(scaled)


def _largest_values(scaled: Tensor, how: np.ndarray) -> Tensor:
    """Sorted values that top_k and min_p do not rule out, and perhaps a few more; padded with -inf."""
    rows = len(how)
    block_best = scaled.view(rows, -1, BLOCK).amax(-1)
    floor = _min_p_floor(how, scaled)
    if (how["top_k"] > 0).any():
        # At least k ids are as large as the k-th largest block maximum.
        rank = np.clip(how["top_k"], 1, scaled.shape[1])
        source = block_best if rank.max() <= block_best.shape[1] else scaled
        largest = source.topk(int(rank.max())).values
        kth = largest.gather(1, to_device(rank - 1, scaled.device)[:, None])[:, 0]
        kth.masked_fill_(to_device(how["top_k"] == 0, scaled.device), -torch.inf)
        floor = torch.maximum(floor, kth)
    row, block = _find(block_best, operator.ge, floor)
    inside = scaled.view(rows, -1, BLOCK)[row, block]
    which, lane = _find(inside, operator.ge, floor[row])
    row = row[which]
    column = _count_in_row(row) - 1
    values = scaled.new_full((rows, int(column.max()) + 1), -torch.inf)
    values[row, column] = inside[which, lane]
    return descending(values)


def _min_p_floor(how: np.ndarray, scaled: Tensor) -> Tensor:
    """A share of at least min_p of the best id's; at any rate above -inf, so that what is masked never takes part."""
    with np.errstate(divide="ignore"):
        floor = to_device(np.log(how["min_p"]), scaled.device).to(scaled.dtype)
    return floor.clamp_(min=torch.finfo(scaled.dtype).min)


def _cut(values: Tensor, how: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where min_p, top_k and top_p end in sorted values [n, K]: the lowest value that survives and how many ids with
    just that value do; also, for typical_p, the survivors' weight and entropy (else 0).
    """
    rows, width = values.shape
    device = values.device
    limit = to_device(np.where(how["top_k"] > 0, np.minimum(how["top_k"], width), width), device)
    column = torch.arange(width, device=device)
    weight = values.double().exp()
    if (how["top_k"] > 0).any():
        weight.masked_fill_(column >= limit[:, None], 0)
    sums = weight.cumsum(-1)
    top_p = to_device(how["top_p"], device)
    nucleus = torch.searchsorted(sums, (top_p * sums[:, -1])[:, None])[:, 0] + 1
    kept = torch.where(top_p < 1, nucleus, limit)
    lowest = torch.maximum(values.gather(1, kept[:, None] - 1)[:, 0], _min_p_floor(how, values))
    ties = kept - torch.searchsorted(values.neg(), lowest.neg()[:, None])[:, 0]

    total, entropy = torch.zeros((2, rows), dtype=torch.float64, device=device)
    typical = np.flatnonzero(how["typical_p"] < 1)
    if len(typical):
        place = to_device(typical, device)
        weight = weight[place].masked_fill_(column >= kept[place, None], 0)
        total[place] = weight.sum(-1)
        entropy[place] = total[place].log() - torch.special.xlogy(weight, weight).sum(-1) / total[place]
        # Ids with a share below (1 - p) / K have less than 1 - p of mass between them. If they are also farther from
        # the entropy than the most likely id can be, with a surprise above twice the entropy, they are the last to be
        # taken and never needed. The half is for rounding.
        outside = to_device(np.log((1 - how["typical_p"][typical]) / (2 * width)), device)
        never = total[place].log() + torch.minimum(outside, -2 * entropy[place])
        raised = never.to(values.dtype) > lowest[place]
        ties[place] = torch.where(raised, width, ties[place])
        lowest[place] = torch.where(raised, never.to(values.dtype), lowest[place])
    return lowest, ties, total, entropy


def _typical(row: Tensor, value: Tensor, total: Tensor, entropy: Tensor, typical_p: Tensor) -> Tensor:
    """Which of the survivors (row, value), listed in order of id, typical_p keeps: those whose surprise is nearest to
    the entropy, until their mass reaches typical_p.
    """
    which = (typical_p < 1)[row].nonzero()[:, 0]
    kept = torch.ones_like(row, dtype=torch.bool)
    row = row[which]
    column = _count_in_row(row) - 1
    log_share = value[which].double() - total.log()[row]
    distance = log_share.new_full((len(typical_p), int(column.max()) + 1), torch.inf)
    share = torch.zeros_like(distance)
    distance[row, column] = (log_share + entropy[row]).abs_()
    share[row, column] = log_share.exp_()
    order = torch.sort(distance, dim=-1, stable=True).indices
    share = share.gather(1, order)
    taken = share.cumsum(-1) - share < typical_p[:, None]
    kept[which] = torch.zeros_like(taken).scatter_(1, order, taken)[row, column]
    return kept


def _count_in_row(row: Tensor) -> Tensor:
    """1, 2, 3 … within each row of a list ordered by row."""
    return torch.arange(1, len(row) + 1, device=row.device) - torch.searchsorted(row, row)


# ── native ────────────────────────────────────────────────────────────────────────────────────────────────────────────

def sample_native(
    logits: Tensor, how: np.ndarray, mask: Tensor | None = None, choices: Choices | None = None, late: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As defined. A row costs a few passes over its ids, whatever its filters are."""
    return sample_reference(logits, how, mask, choices, late, draw=_draw_native)


def _draw_native(logits: Tensor, best: Tensor, how: np.ndarray, rows: np.ndarray) -> Tensor:
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return _draw(logits, best, how, rows)
    own, tokens = how[rows], np.empty(len(rows), np.int64)
    arguments = [
        rows, best.numpy()[rows], own["temperature"].astype(np.float32), _min_p_floor(own, logits).numpy(), own["top_k"],
        own["top_p"], own["typical_p"], own["seed"], own["index"], tokens,
    ]
    kept = [np.ascontiguousarray(each) for each in arguments]            # until the kernel has returned
    pointers = [each.ctypes.data for each in kept]
    native.library().draw(logits.data_ptr(), *pointers, len(rows), logits.shape[1], logits.stride(0))
    if (tokens < 0).any():
        raise MemoryError("no memory is left to sample tokens in")
    return torch.from_numpy(tokens)


def apply_mask_native(logits: Tensor, mask: Tensor | None, out: Tensor, broken: Tensor) -> None:
    rows, width = logits.shape
    packed = mask is not None and mask.dtype == torch.int32 and mask.is_contiguous() and mask.shape == (rows, -(-width // 32))
    if not packed or out.shape != logits.shape or out.dtype != logits.dtype or logits.stride(1) != 1 or not out.is_contiguous():
        return apply_mask_reference(logits, mask, out, broken)
    assert mask is not None
    pointers = (logits.data_ptr(), mask.data_ptr(), out.data_ptr(), broken.data_ptr())
    native.library().apply_mask(*pointers, *logits.shape, logits.stride(0), mask.shape[1])


# ── Triton ────────────────────────────────────────────────────────────────────────────────────────────────────────────

def has_kernels(device: torch.device, dtype: torch.dtype, vocab: int) -> bool:
    """Whether sample_kernels.py chooses from such logits."""
    return sample.choose(Site(device.type, dtype, vocab)).name == "triton"


def takes_masks(logits: Tensor, how: np.ndarray, mask: Tensor) -> bool:
    """Whether `sample` chooses under this mask where the logits are, without a copy of them."""
    filtered = (how["top_k"] > 0) | (how["top_p"] < 1) | (how["min_p"] > 0) | (how["typical_p"] < 1)
    plain = mask.dtype == torch.int32 and mask.stride(1) == 1 and has_kernels(logits.device, logits.dtype, logits.shape[1])
    return plain and not (filtered & (how["temperature"] > 0)).any()


def send_choices(how: np.ndarray, device: torch.device, dtype: torch.dtype, vocab: int) -> Choices | None:
    """`how` on its way to the device, for `sample` of logits of this type: the host can do that while it waits for a mask.
    None: there is nothing to send."""
    random = how["temperature"] > 0
    sent = random.any() and not (random & (how["typical_p"] < 1)).any() and has_kernels(device, dtype, vocab)
    return Choices.of(how, device) if sent else None


def sample_on_gpu(
    logits: Tensor, how: np.ndarray, mask: Tensor | None = None, choices: Choices | None = None, late: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As defined, without waiting for the device; only typical_p, which needs a sort, runs the reference. A mask is allowed
    only for rows without filters (`takes_masks`)."""
    tokens = torch.empty(len(how), dtype=torch.int64, device=logits.device)
    failed = torch.empty(len(how), dtype=torch.bool, device=logits.device)
    typical = (how["temperature"] > 0) & (how["typical_p"] < 1)
    some_typical = typical.any()
    if some_typical:
        others = how.copy()
        others["temperature"][typical] = 0
    if choices is None and (how["temperature"] > 0).any():               # the best ones need nothing from the host
        choices = Choices.of(others if some_typical else how, logits.device)
    if choices is not None and late is not None:
        choices.integers[1, : len(how)].sub_(late)
    sample_kernels.draw(logits, choices, tokens, failed, mask=mask)
    if some_typical:
        place = to_device(np.flatnonzero(typical), logits.device)
        tokens[place] = sample_reference(logits[place], how[typical])[0]
    return tokens, failed


def apply_mask_on_gpu(logits: Tensor, mask: Tensor | None, out: Tensor, broken: Tensor) -> None:
    packed = mask is None or (mask.dtype == torch.int32 and mask.stride(1) == 1)
    if packed and logits.stride(1) == out.stride(1) == 1:
        sample_kernels.mask_logits(logits, mask, out, broken)
    else:
        apply_mask_reference(logits, mask, out, broken)


def reserve(device: torch.device, dtype: torch.dtype, rows: int, vocab: int) -> None:
    """Allocate the workspace of the kernels for `rows` rows at start: CUDA graphs hold its address, and the ledger counts it."""
    if has_kernels(device, dtype, vocab):
        sample_kernels.workspace(device, rows, vocab)


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────

def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, rows: int, vocab: int, kind: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    logits = torch.randn(rows, vocab, generator=generator).mul_(3).to(device, dtype)
    how = np.zeros(rows, CHOICE)
    row = np.arange(rows)
    how["seed"], how["index"], how["top_p"], how["typical_p"] = row * 2**40 + 7, row, 1, 1
    if kind != "greedy":
        how["temperature"] = 0.9
    if kind == "filtered":
        how["top_k"], how["top_p"] = 50, 0.95
    if kind == "mixed":              # one row each: greedy, random, and the four filters
        for place, name, value in ((0, "temperature", 0), (2, "top_k", 5), (3, "top_p", 0.8), (4, "min_p", 0.1),
                                   (5, "typical_p", 0.8)):
            how[name][place::6] = value
    return (logits, how), {}


def _mask_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, rows: int, vocab: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The second and third row are broken; the second's mask hides it."""
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator)
    logits = torch.randn(rows, vocab, generator=generator)
    logits[1:2, vocab // 2], logits[2:3, vocab - 1] = torch.inf, torch.inf
    words[1:2, vocab // 2 // 32], words[2:3, (vocab - 1) // 32] = 0, -1
    broken = torch.zeros(rows, dtype=torch.bool, device=device)
    logits = logits.to(device, dtype)
    return (logits, words.to(device, torch.int32), torch.empty_like(logits), broken), {}


apply_mask = Op(
    "apply_mask",
    apply_mask_reference,
    kernels=[
        Implementation("triton", apply_mask_on_gpu, _triton_supports),
        Implementation("native", apply_mask_native, native.supports),
    ],
    cases=MASK_CASES,
    cost=mask_cost,
    inputs=_mask_inputs,
    tolerance={dtype: Tolerance(0, 0) for dtype in ("float32", "bfloat16", "float16")},
)

sample = Op(
    "sample",
    sample_reference,
    kernels=[
        Implementation("triton", sample_on_gpu, _triton_supports),
        Implementation("native", sample_native, native.supports),
    ],
    cases=SAMPLE_CASES,
    cost=sample_cost,
    inputs=_inputs,
    tolerance={"float32": Tolerance(0, 0), "bfloat16": Tolerance(0, 0)},     # tokens: the same ones
)
