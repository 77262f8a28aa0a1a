"""KL divergence of a model from a reference, token by token, over the whole vocabulary.

    KL = Σ over the vocabulary of p(id) · (log p(id) − log q(id))        p: the reference, q: the model, in nats

Perplexity hides damage that cancels out; divergence does not. Both models read the same tokens (teacher forcing), so one
difference does not change all later positions. Beside the mean it reports the tail, the share of positions at which both have the
same top token, the figures by position, and the worst tenth of the passages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.evaluate.perplexity import TokenScores, exponential
from ridgeline.evaluate.scoring import Scores, Tick, log_probabilities
from ridgeline.evaluate.texts import Passage
from ridgeline.text.tokenizer import Tokenizer

KEPT_BYTES = 512 * 2**20             # of the reference's logits, kept until the model's are computed
_EXCERPT = 60                        # characters


class Divergence:
    """Both models' scores of the sequences, and their divergence at every position that has a token after it."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.reference, self.model = TokenScores(sequences), TokenScores(sequences)
        self.kl = [np.full(len(each) - 1, np.nan) for each in sequences]

    def agree(self, place: int) -> np.ndarray:
        """bool: both have the same top token."""
        return self.reference.best[place] == self.model.best[place]

    def keep(self, place: int, start: int, reference: Tensor, model: Tensor) -> None:
        p, q = log_probabilities(reference), log_probabilities(model)
        self.reference.keep(place, start, p)
        self.model.keep(place, start, q)
        self.kl[place][start : start + len(p)] = kl_divergence(p, q).cpu().numpy()


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Of log-probabilities [n, vocabulary]. Ids with reference probability 0 add nothing. Below 0 only by rounding."""
    terms = torch.where(torch.isneginf(p), 0.0, p.exp() * (p - q))
    return terms.sum(-1, dtype=torch.float64)


def compare(reference: Scores, model: Scores, sequences: Sequence[Sequence[int]], tick: Tick | None = None) -> Divergence:
    """In groups: the reference's logits of a group are kept until the model has computed its own."""
    if reference.vocab_size != model.vocab_size:
        raise ConfigError(
            f"the reference has a vocabulary of {reference.vocab_size} ids, the model one of {model.vocab_size}: "
            "only models with the same vocabulary can be compared"
        )
    found = Divergence(sequences)
    most = max(1, KEPT_BYTES // (4 * model.vocab_size))  # positions
    begin = 0
    while begin < len(sequences):
        end, positions = begin + 1, len(sequences[begin])
        while end < len(sequences) and positions + len(sequences[end]) <= most:
            positions += len(sequences[end])
            end += 1
        _compare_group(reference, model, sequences, range(begin, end), found)
        begin = end
        if tick is not None:
            tick(end, len(sequences))
    return found


def _compare_group(
    reference: Scores, model: Scores, sequences: Sequence[Sequence[int]], group: range, found: Divergence
) -> None:
    kept: dict[int, list[tuple[int, Tensor]]] = {place: [] for place in group}

    def keep(place: int, start: int, logits: Tensor) -> None:
        kept[group[place]].append((start, logits if logits.dtype == torch.float64 else logits.float()))

    def take(place: int, start: int, logits: Tensor) -> None:
        for first, theirs in kept[group[place]]:         # the two may have been split at different positions
            low, high = max(first, start), min(first + len(theirs), start + len(logits))
            if low < high:
                mine = logits[low - start : high - start]
                found.keep(group[place], low, theirs[low - first : high - first].to(mine.device), mine)

    tokens = [sequences[place] for place in group]
    reference.score(tokens, keep)
    model.score(tokens, take)


def summary(passages: Sequence[Passage], found: Divergence, places: Sequence[int]) -> dict[str, Any]:
    """Figures of the passages at these places, together."""
    kl = np.concatenate([found.kl[place][passages[place].first - 1 :] for place in places])
    agree = np.concatenate([found.agree(place)[passages[place].first - 1 :] for place in places])
    reference, model = (
        np.concatenate([-scores.logprobs[place][passages[place].first - 1 :] for place in places])
        for scores in (found.reference, found.model)
    )
    ratio = exponential(float(model.mean() - reference.mean()))
    # Both score the same tokens: the error is that of the mean difference, much smaller than that of either perplexity.
    with np.errstate(invalid="ignore"):                  # a broken format gives tokens no probability
        error = ratio * float((model - reference).std(ddof=1)) / math.sqrt(len(kl)) if len(kl) > 1 else math.nan
    return {
        "tokens": len(kl), "kl": float(kl.mean()), "kl_median": float(np.median(kl)),
        "kl_p90": float(np.quantile(kl, 0.9)), "kl_p99": float(np.quantile(kl, 0.99)), "kl_max": float(kl.max()),
        "top1": float(agree.mean()), "reference_perplexity": exponential(float(reference.mean())),
        "perplexity_ratio": ratio, "perplexity_ratio_error": error if math.isfinite(error) else None,
    }


def by_position(passages: Sequence[Passage], found: Divergence) -> list[dict[str, Any]]:
    """Means over all passages, by how many tokens came before: 1, 2–3, 4–7 and so on."""
    rows: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for place, passage in enumerate(passages):
        before = np.arange(1, len(passage.tokens))
        counts = before >= passage.first
        octaves = np.frexp(before)[1] - 1                # the exponent: exact, where a logarithm might round
        for octave in np.unique(octaves[counts]):
            chosen = counts & (octaves == octave)
            rows.setdefault(int(octave), []).append((found.kl[place][chosen], found.agree(place)[chosen]))
    return [
        {
            "from": 2**octave, "to": 2 ** (octave + 1) - 1, "tokens": sum(len(kl) for kl, _ in parts),
            "kl": float(np.concatenate([kl for kl, _ in parts]).mean()),
            "top1": float(np.concatenate([agree for _, agree in parts]).mean()),
        }
        for octave, parts in sorted(rows.items())
    ]


def worst_decile(passages: Sequence[Passage], found: Divergence, tokenizer: Tokenizer) -> dict[str, Any]:
    """The tenth of the passages (one at least) with the highest mean divergence."""
    means = [float(found.kl[place][passage.first - 1 :].mean()) for place, passage in enumerate(passages)]
    order = sorted(range(len(passages)), key=lambda place: (-means[place], place))[: -(-len(passages) // 10)]
    return {
        "kl": float(np.mean([means[place] for place in order])),
        "passages": [
            {
                "slice": passages[place].slice, "number": passages[place].number, "kl": means[place],
                "top1": float(found.agree(place)[passages[place].first - 1 :].mean()),
                "begins": " ".join(tokenizer.decode(passages[place].tokens[:32], True).split())[:_EXCERPT],
            }
            for place in order
        ],
    }
