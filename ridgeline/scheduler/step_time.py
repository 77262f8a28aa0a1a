"""Learns step times, and limits prompt tokens per step so that decoding requests are not held up.

A step's time is close to a line: the time of the decodes alone, plus a constant for each prompt token beside them. Both
numbers are medians of the last steps, so they follow the model, the machine and the load, and a single slow step
(a kernel compiled, a CUDA graph captured) does not count. Two slow steps do: where another program takes the cores, chunks
shrink at once, and grow again when most of the remembered steps were fast.

A prompt token costs its GEMMs, which are always the same, and its attention, which grows with the keys before it: a token in
the middle of a long prompt costs several at the beginning of a short one. So tokens are counted by weight: `alike` keys
weigh as much as one more token. A token with prompt log-probabilities ("scored") also costs the head and passes over the
vocabulary, which may be a hundred times its GEMMs in a small model: the time of such tokens is learned apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

_REMEMBERED = 15                     # steps of each kind
_LATEST = 3                          # the last of them, whose median counts if it is larger
_SHARE = 0.25                        # of the target time that prompts get at least, even if decodes take longer
# Prompt tokens that are always allowed, by kind of device. Fewer cost more each: kernels for few rows read all weights for them.
# On a CPU other programs may take the cores at any time, and a step that is too long by then cannot be cut shorter than this.
FEWEST = {"cuda": 256, "cpu": 32}
_UNKNOWN = 2                         # times as many are computed before a step was measured
_ROUND = 64                          # GEMMs are fastest with whole tiles; at most the fewest, so that small steps grow again
# Scored tokens that are always allowed, also before any was measured: as many as others on a CPU, where most of their time are
# GEMMs, too, unless a model is tiny. Fewer cost more each: a step reads all weights for them.
_FEWEST_SCORED = 32
_SCORED_SECONDS = 0.1                # most that more of them take of a step: where the vocabulary takes long, they gain nothing


# FLOP rate of attention relative to that of the model's GEMMs (measured on a GPU, prompts of 2k to 16k).
_ATTENTION_RATE = 0.67


class StepTimeModel(Protocol):
    def prompt_tokens(self, num_decodes: int, position: int, budget: int) -> int:
        """Most prompt tokens of a step with that many decodes, where prompts go on at `position`."""

    def scored_tokens(self, num_decodes: int, budget: int) -> int:
        """Most of these prompt tokens that may be scored in a step with that many decodes and no other prompt tokens."""

    def observe(
        self, num_decodes: int, num_prompt_tokens: int, num_pairs: int, seconds: float, num_scored: int = 0
    ) -> None:
        """The time of a step. `num_pairs`: (query, key) pairs of its prompt tokens; `num_scored` of the tokens were scored."""


class NoTimeModel:
    """The off version: prompts may fill the token budget."""

    def prompt_tokens(self, num_decodes: int, position: int, budget: int) -> int:
        return budget

    def scored_tokens(self, num_decodes: int, budget: int) -> int:
        return budget

    def observe(
        self, num_decodes: int, num_prompt_tokens: int, num_pairs: int, seconds: float, num_scored: int = 0
    ) -> None:
        """It learns nothing."""


class MeasuredStepTime:
    def __init__(self, target_seconds: float, alike: float = math.inf, fewest: int = FEWEST["cuda"]) -> None:
        self._target = target_seconds
        self._fewest = fewest
        self._round = min(_ROUND, fewest)
        self._alike = alike                                          # keys whose attention costs as much as a token's GEMMs
        self._decode: deque[float] = deque(maxlen=_REMEMBERED)       # seconds of the last steps without prompts
        self._per_weight: deque[float] = deque(maxlen=_REMEMBERED)   # seconds that a prompt token without keys adds
        self._per_scored: deque[float] = deque(maxlen=_REMEMBERED)   # seconds that a scored token adds, its GEMMs among them
        self._beside = 0                                             # steps with prompts since the last without

    def prompt_tokens(self, num_decodes: int, position: int, budget: int) -> int:
        """Also for a prompt alone: a request that arrives next waits for the step that runs, and for one that is planned.
        Before anything is known, a small step shows what a token takes."""
        if not self._per_weight:
            return min(budget, _UNKNOWN * self._fewest)
        per_weight = _typical(self._per_weight)
        if not per_weight:                               # steps are only planned, and take no time
            return budget
        fit = self._tokens(self._for_prompts(num_decodes) / per_weight, position)
        return max(self._fewest, fit - fit % self._round)

    def scored_tokens(self, num_decodes: int, budget: int) -> int:
        if not self._per_scored:
            return min(budget, _FEWEST_SCORED)
        per_scored = _typical(self._per_scored)
        fit = min(self._for_prompts(num_decodes), _SCORED_SECONDS) / per_scored if per_scored else budget
        return int(min(budget, max(_FEWEST_SCORED, fit)))

    def _for_prompts(self, num_decodes: int) -> float:
        """Seconds of a step that prompts may take. While prompts come, no step shows what decodes take alone: two slow ones are
        believed for a few steps, and then what came with the prompts says whether steps are slow."""
        decode = _typical(self._decode) if self._beside < _LATEST else _median(self._decode)
        return max(self._target - (decode if num_decodes else 0.0), _SHARE * self._target)

    def _tokens(self, weight: float, position: int) -> int:
        """The number n of tokens from a position on with this weight: n + (n position + n²/2) / alike."""
        if self._alike == math.inf:
            return int(weight)
        first = self._alike + position
        return int(math.sqrt(first * first + 2 * self._alike * weight) - first)

    def observe(
        self, num_decodes: int, num_prompt_tokens: int, num_pairs: int, seconds: float, num_scored: int = 0
    ) -> None:
        if num_prompt_tokens == 0:
            self._decode.append(seconds)
            self._beside = 0
            return
        self._beside += 1
        rest = max(seconds - (_median(self._decode) if num_decodes else 0.0), _SHARE * seconds)
        if num_scored:
            if num_scored >= _FEWEST_SCORED // 2:        # shares of a step are rounded
                others = _median(self._per_weight) * (num_prompt_tokens - num_scored)
                self._per_scored.append(max(rest - others, _SHARE * rest) / num_scored)
        elif num_prompt_tokens >= self._fewest:
            self._per_weight.append(rest / (num_prompt_tokens + num_pairs / self._alike))


def keys_like_a_token(matrices: list[tuple[int, int, int]], num_layers: int, num_heads: int, head_dim: int) -> float:
    """Keys whose attention takes as long as one token's GEMMs. `matrices`: (how many, outputs, inputs), the last the head's,
    which few tokens need; layers with a window attend to a bounded number of keys and are not among `num_layers`."""
    products = sum(count * 2 * outputs * inputs for count, outputs, inputs in matrices[:-1])
    pairs = 4 * num_layers * num_heads * head_dim
    return _ATTENTION_RATE * products / pairs if pairs else math.inf


def _typical(values: deque[float]) -> float:
    """What the next step has to reckon with."""
    return max(_median(values), _median(list(values)[-_LATEST:]))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
