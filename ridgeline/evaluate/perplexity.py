"""Perplexity of passages, and bits per byte.

    perplexity = exp(mean of −log p(token | those before it))        bits per byte = −Σ log₂ p / bytes of the text

Perplexities compare models with the same tokenizer on the same passages; bits per byte compare any two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.evaluate.scoring import Scores, Tick, log_probabilities
from ridgeline.evaluate.texts import Passage
from ridgeline.text.tokenizer import Tokenizer


class TokenScores:
    """For every sequence: the log-probability of each token but the first, and the model's top token at its position."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = sequences
        self.logprobs = [np.full(len(each) - 1, np.nan) for each in sequences]
        self.best = [np.full(len(each) - 1, -1, np.int64) for each in sequences]

    def take(self, place: int, start: int, logits: Tensor) -> None:
        self.keep(place, start, log_probabilities(logits))

    def keep(self, place: int, start: int, logprobs: Tensor) -> None:
        end = start + len(logprobs)
        targets = torch.tensor(self._sequences[place][start + 1 : end + 1], device=logprobs.device)
        found = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)
        self.logprobs[place][start:end] = found.double().cpu().numpy()
        self.best[place][start:end] = logprobs.argmax(1).cpu().numpy()


def score_passages(scores: Scores, passages: Sequence[Passage], tick: Tick | None = None) -> TokenScores:
    found = TokenScores([passage.tokens for passage in passages])
    scores.score([passage.tokens for passage in passages], found.take, tick)
    return found


def exponential(loss: float) -> float:
    """exp; infinite where a float overflows, so that a broken model gets a figure as well, and fails its gate."""
    return math.exp(loss) if loss < 709 else math.inf if loss == loss else math.nan


def summary(passages: Sequence[Passage], logprobs: Sequence[np.ndarray], tokenizer: Tokenizer) -> dict[str, Any]:
    """Figures of some passages together; every token has the same weight."""
    counted = [-each[passage.first - 1 :] for passage, each in zip(passages, logprobs, strict=True)]
    losses = np.concatenate(counted)
    means = np.array([each.mean() for each in counted])
    weights = np.array([len(each) for each in counted]) / len(losses)
    loss = float(losses.mean())
    # Tokens of one passage depend on each other, so the error is that of the passages' means; n − 1 of them are free.
    count = len(means)
    error = float(np.sqrt(np.sum((weights * (means - loss)) ** 2) * count / (count - 1))) if count > 1 else math.nan
    size = sum(len(tokenizer.token_bytes(token)) for passage in passages for token in passage.tokens[passage.first :])
    return {
        "tokens": len(losses), "loss": loss, "perplexity": exponential(loss),
        "perplexity_error": None if math.isnan(error) else exponential(loss) * error,
        "bits_per_byte": float(losses.sum()) / math.log(2) / size if size else None,
    }
