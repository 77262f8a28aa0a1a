"""Choosing one token per row of logits: penalties, masks, filters, and the race that draws.

Everything here is a pure function of its arguments. No request, no row state and no generator: the sampler
(runner/sampler.py) keeps those and decides which stages a batch needs.

The order of the stages is vLLM's:

    mask · allowed ids · bad words · min_tokens · logit_bias · penalties      they change the logits, greedy sees them
    temperature · min_p · top_k · top_p · typical_p                           they only matter to random rows

Every filter looks at what the one before it left, renormalised. Equal values rank by id, lowest first, so top_k keeps
exactly k ids and top_p the smallest set whose mass reaches p.

The draw is an exponential race: token = argmax of p(id) / E(id), where E(id) is exponential noise that depends on the
seed, the output index and the id alone, never on other rows, on what was filtered out or on earlier draws:

    words = philox4x32-10(counter = (id // 4, output index, 0, 0), key = (seed % 2^32, seed // 2^32))
    E(id) = -log(1 - v(id)),  v(id) = (words[id % 4] + 1/2) / 2^32

The last two counter words are free for other uses of the same seed. Noise and weights are float64, so that it makes no
difference to the result which of several equivalent ways (all ids, or only those that survive) computed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

# How each row of a batch chooses. 0 turns temperature (greedy), top_k and min_p off, 1 turns top_p and typical_p off.
CHOICE = np.dtype([
    ("seed", np.uint64), ("index", np.int64),
    ("temperature", np.float64), ("min_p", np.float64),
    ("top_k", np.int64), ("top_p", np.float64), ("typical_p", np.float64),
])

BLOCK = 64                           # ids per block when looking for the largest: blocks are ruled out by their maximum
BOUND_SLACK = 1e-5                   # relative; an exponential and a division in float32 are off by less than 1e-6
CACHED_ELEMENTS = 1 << 17            # noise for this many ids stays in a core's cache while ten rounds go over it
SCRATCH_ELEMENTS = 1 << 21           # and filters never copy more logits than this at a time
LOW_WORD = 0xFFFFFFFF


# ---- noise ----------------------------------------------------------------------------------------------------------

def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, key0: Any, key1: Any) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox4x32 on numpy uint64 arrays, int64 tensors or ints below 2^32; shapes broadcast.

    A word's upper half may hold rubbish: it is cleared only where the word is about to be multiplied, and at the end.
    That also makes the sign-extending shift of int64 harmless.
    """
    for _ in range(10):
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product2 >> 32) ^ (c1 ^ key0)) & LOW_WORD, product2
        c2, c3 = ((product0 >> 32) ^ (c3 ^ key1)) & LOW_WORD, product0
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return c0, c1 & LOW_WORD, c2, c3 & LOW_WORD


def noise_words(how: np.ndarray, counter: Tensor) -> list[Tensor]:
    """The four words of every counter (int64 [n, C], or [1, C] for all rows alike), each int64 [n, C] below 2^32."""
    columns = [how["index"].astype(np.uint64), how["seed"] & np.uint64(LOW_WORD), how["seed"] >> np.uint64(32)]
    if counter.is_cpu:               # numpy's integer loops take half of torch's time
        index, key0, key1 = (column[:, None] for column in columns)
        words = philox4x32(counter.numpy().view(np.uint64), index, 0, 0, key0, key1)
        return [torch.from_numpy(word.view(np.int64)) for word in words]
    index, key0, key1 = (to_device(column.view(np.int64), counter.device)[:, None] for column in columns)
    return list(philox4x32(counter, index, 0, 0, key0, key1))


def exponential_noise(how: np.ndarray, ids: Tensor) -> Tensor:
    """E(id) for ids [n, K]: float64 [n, K], between 1e-10 and 23."""
    words = torch.stack(noise_words(how, ids >> 2), dim=-1)
    return _exponential(words.gather(2, (ids & 3)[:, :, None])[:, :, 0])


def exponential_noise_all(how: np.ndarray, width: int, device: torch.device) -> Tensor:
    """E(id) for the ids 0 … width - 1, width a multiple of 4; a quarter of the work per id."""
    words = noise_words(how, torch.arange(width // 4, device=device)[None])
    return _exponential(torch.stack(words, dim=-1).view(len(how), width))


def _exponential(words: Tensor) -> Tensor:
    return words.double().add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()


# ---- what changes the logits, in place ------------------------------------------------------------------------------

def apply_mask(logits: Tensor, mask: Tensor) -> None:
    """Forbid what the mask does not allow: bool [S, V], or int32 [S, ceil(V / 32)] with id 32 w + b at bit b of word w."""
    if mask.dtype != torch.bool:
        bits = torch.arange(32, dtype=torch.int32, device=mask.device)
        mask = ((mask[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.masked_fill_(~mask, -torch.inf)


def keep_only(logits: Tensor, rows: Tensor, row: Tensor, ids: Tensor) -> None:
    """Forbid, in each of `rows`, all but the ids that are paired with it in (row, ids)."""
    kept = logits[row, ids]
    logits[rows] = -torch.inf
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


# ---- choosing -------------------------------------------------------------------------------------------------------

def sample_reference(logits: Tensor, how: np.ndarray) -> tuple[Tensor, Tensor]:
    """Tokens int64 [S], and which rows failed: those with a NaN, an infinity, or nothing left to choose from.

    A failed row's token is 0. Nothing about it reaches another row.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    tokens = argmax(logits)
    best = logits.gather(1, tokens[:, None])
    failed = ~best.isfinite()[:, 0]
    random = how["temperature"] > 0
    if random.any():
        random &= ~failed.cpu().numpy()
        filtered = (how["top_k"] > 0) | (how["top_p"] < 1) | (how["min_p"] > 0) | (how["typical_p"] < 1)
        for members, choose, elements in (
            (random & ~filtered, _race, CACHED_ELEMENTS),
            (random & filtered, _race_filtered, SCRATCH_ELEMENTS),
        ):
            for rows in _slices(np.flatnonzero(members), max(1, elements // logits.shape[1])):
                place = to_device(rows, logits.device)
                scaled = _scale(logits[place], best[place], how["temperature"][rows])
                tokens[place] = choose(scaled, how[rows])
    return tokens.masked_fill_(failed, 0), failed


def argmax(x: Tensor) -> Tensor:
    """The first of the largest along the last dimension; a NaN counts as the largest."""
    if x.is_cpu:                     # the same answer as torch's, which does not vectorise: 4 µs a row instead of 90
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.argmax(dim=-1)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _slices(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _scale(logits: Tensor, best: Tensor, temperature: np.ndarray) -> Tensor:
    """(logits - best) / temperature, so that the largest is 0 and its weight exp(0) = 1; padded to whole blocks."""
    rows, vocab = logits.shape
    scaled = logits.new_full((rows, -(-vocab // BLOCK) * BLOCK), -torch.inf)
    torch.sub(logits, best, out=scaled[:, :vocab])
    return scaled.div_(to_device(temperature, logits.device).to(logits.dtype)[:, None])


def _race(scaled: Tensor, how: np.ndarray) -> Tensor:
    """Every id takes part."""
    if scaled.is_cpu:
        return _race_bounded(scaled, how)
    return argmax(scaled.double().exp_().div_(exponential_noise_all(how, scaled.shape[1], scaled.device)))


def _race_bounded(scaled: Tensor, how: np.ndarray) -> Tensor:
    """The same winners with hardly a logarithm: E >= v, so an id with weight / v below a known score cannot win.

    The bound is in the logits' precision, off by less than BOUND_SLACK; the few ids it leaves are scored as defined.
    """
    rows, width = scaled.shape
    words = noise_words(how, torch.arange(width // 4)[None])
    bound = scaled.new_empty((rows, width // 4, 4))
    for lane, word in enumerate(words):
        bound[:, :, lane] = word
    bound = scaled.exp().div_(bound.view(rows, width).add_(0.5)).numpy()           # weight / v, over 2^32

    def score(row: np.ndarray, ids: np.ndarray) -> np.ndarray:
        word = np.choose(ids & 3, [word.numpy()[row, ids >> 2] for word in words])
        return np.exp(scaled.numpy()[row, ids].astype(np.float64)) / _exponential(torch.from_numpy(word)).numpy()

    known = score(np.arange(rows), bound.argmax(-1)) * (2.0**-32 * (1 - BOUND_SLACK))
    row, ids = np.divmod(np.flatnonzero(bound >= known[:, None].astype(bound.dtype)), width)
    order = np.lexsort((-ids, score(row, ids), row))                               # a row's winner comes last
    last = np.searchsorted(row, np.arange(rows), side="right") - 1
    return torch.from_numpy(ids[order[last]])


def _race_filtered(scaled: Tensor, how: np.ndarray) -> Tensor:
    """Only the ids that survive min_p, top_k, top_p and typical_p take part.

    In the order of (value, id) the survivors of the first three are a prefix, so it is enough to sort the ids at or
    above a floor that does not lie above the last of them.
    """
    block_best = scaled.view(len(how), -1, BLOCK).amax(-1)
    with np.errstate(divide="ignore"):
        floor = np.log(how["min_p"])
    total, entropy = np.full((2, len(how)), np.nan)          # of all ids, where the survivors alone do not tell
    open_ended = (how["top_k"] == 0) & (how["min_p"] == 0)

    rows = np.flatnonzero(how["top_k"] > 0)
    if len(rows):
        floor[rows] = np.maximum(floor[rows], _top_k_floor(scaled, block_best, rows, how["top_k"][rows]))
    rows = np.flatnonzero(open_ended & (how["top_p"] < 1))
    if len(rows):
        floor[rows], total[rows] = _top_p_floor(scaled[to_device(rows, scaled.device)], how["top_p"][rows])
    rows = np.flatnonzero(open_ended & (how["top_p"] == 1))
    if len(rows):
        floor[rows], total[rows], entropy[rows] = _typical_floor(
            scaled[to_device(rows, scaled.device)], how["typical_p"][rows]
        )
    floor = np.maximum(floor, torch.finfo(scaled.dtype).min)           # above -inf: what is masked never takes part
    return _race_above(scaled, block_best, floor, total, entropy, how)


def _top_k_floor(scaled: Tensor, block_best: Tensor, rows: np.ndarray, top_k: np.ndarray) -> np.ndarray:
    """The k-th largest block maximum: at least k ids are as large."""
    largest = int(top_k.max())
    values = block_best if largest <= block_best.shape[1] else scaled
    values = values[to_device(rows, scaled.device)].topk(min(largest, scaled.shape[1])).values
    return values.gather(1, to_device(top_k - 1, scaled.device)[:, None])[:, 0].double().cpu().numpy()


def _top_p_floor(scaled: Tensor, top_p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest value in the nucleus, and the weight of all ids."""
    if scaled.is_cpu:                # sorting values without their ids: 0.2 ms a row instead of 5
        values = torch.from_numpy(np.sort(scaled.numpy(), axis=-1)).flip(-1)
    else:
        values = torch.sort(scaled, dim=-1, descending=True).values
    sums = values.double().exp_().cumsum(-1)
    goal = sums[:, -1:] * to_device(top_p, scaled.device)[:, None]
    floor = values.gather(1, torch.searchsorted(sums, goal))[:, 0]
    return floor.double().cpu().numpy(), sums[:, -1].cpu().numpy()


def _typical_floor(scaled: Tensor, typical_p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A value that no typical id is below, and the weight and the entropy of all ids.

    Ids with a share below (1 - p) / V have less than 1 - p of mass between them (the half below is for rounding). They
    are the last to be taken if they are also farther from the entropy than the most likely id can be, that is, if
    their surprise is above twice the entropy.
    """
    weight = scaled.double().exp_()
    total = weight.sum(-1).cpu().numpy()
    entropy = np.log(total) - torch.special.xlogy(weight, weight).sum(-1).cpu().numpy() / total
    share = np.minimum(np.log((1 - typical_p) / (2 * scaled.shape[1])), -2 * entropy)
    return np.log(total) + share, total, entropy


def _race_above(
    scaled: Tensor, block_best: Tensor, floor: np.ndarray, total: np.ndarray, entropy: np.ndarray, how: np.ndarray
) -> Tensor:
    """Filter and race the ids at or above the floor."""
    device = scaled.device
    all_weight, all_entropy, top_p = (to_device(column, device) for column in (total, entropy, how["top_p"]))
    limit = to_device(np.where(how["top_k"] > 0, how["top_k"], scaled.shape[1]), device)

    values, ids = _sorted_above(scaled, block_best, to_device(floor, device).to(scaled.dtype))
    weight = values.double().exp_()
    weight.masked_fill_(torch.arange(values.shape[1], device=device) >= limit[:, None], 0)           # min_p, top_k
    sums = weight.cumsum(-1)
    goal = top_p * torch.where(all_weight.isnan(), sums[:, -1], all_weight)
    goal.masked_fill_(top_p == 1, torch.inf)
    weight.masked_fill_(_before(sums) >= goal[:, None], 0)                                           # top_p
    typical = np.flatnonzero(how["typical_p"] < 1)
    if len(typical):
        place = to_device(typical, device)
        kept = _typical(weight[place], ids[place], all_weight[place], all_entropy[place], how["typical_p"][typical])
        weight[place] = weight[place].masked_fill_(~kept, 0)

    survivors = int((weight > 0).any(0).nonzero()[-1]) + 1
    weight, ids = weight[:, :survivors], ids[:, :survivors]
    if 4 * survivors < scaled.shape[1]:
        noise = exponential_noise(how, ids)
    else:
        noise = exponential_noise_all(how, scaled.shape[1], device).gather(1, ids)
    score = weight / noise
    winners = score == score.amax(-1, keepdim=True)
    return torch.where(winners, ids, scaled.shape[1]).amin(-1)


def _sorted_above(scaled: Tensor, block_best: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Values and ids at or above each row's floor, largest first, equal ones by id; padded with -inf and id 0."""
    rows = len(floor)
    row, block = (block_best >= floor[:, None]).nonzero(as_tuple=True)
    inside = scaled.view(rows, -1, BLOCK)[row, block]
    which, lane = (inside >= floor[row, None]).nonzero(as_tuple=True)
    row, found, found_ids = row[which], inside[which, lane], block[which] * BLOCK + lane
    count = torch.bincount(row, minlength=rows)
    column = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    values = scaled.new_full((rows, int(count.max())), -torch.inf)
    ids = row.new_zeros(values.shape)
    values[row, column], ids[row, column] = found, found_ids
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _typical(weight: Tensor, ids: Tensor, total: Tensor, entropy: Tensor, typical_p: np.ndarray) -> Tensor:
    """Which columns are kept: those whose surprise is nearest to the entropy, until their mass reaches typical_p.

    `total` and `entropy` are of the whole distribution where something is left to know about it, NaN elsewhere.
    """
    probability = weight / torch.where(entropy.isnan(), weight.sum(-1), total)[:, None]
    own_entropy = -torch.special.xlogy(probability, probability).sum(-1)
    deviation = (probability.log() + torch.where(entropy.isnan(), own_entropy, entropy)[:, None]).abs_()
    by_id = ids.argsort(dim=-1)
    order = by_id.gather(1, deviation.gather(1, by_id).sort(dim=-1, stable=True).indices)
    mass_before = _before(probability.gather(1, order).cumsum(-1))
    kept = mass_before < to_device(typical_p, weight.device)[:, None]
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _before(sums: Tensor) -> Tensor:
    """Running sums without the element itself."""
    return torch.nn.functional.pad(sums, (1, 0))[:, :-1]


sample = sample_reference
