"""How long a step takes, learned from the steps that were: what prompts may take of a step for whose end others wait.

A step's time is close to a line: what the decodes alone take, and so much more for each prompt token beside them. Both
numbers are medians of the last steps, so they follow the model, the machine and the load, and no single step that was
held up (a kernel compiled, a graph recorded) counts.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

_REMEMBERED = 15                     # steps of each kind
_SHARE = 0.25                        # of a step's time that prompts get at least, however long the decodes take
_FEWEST = 256                        # prompt tokens: fewer say little about the time of one, and are always allowed
_ROUND = 64                          # matrix products like whole tiles


class StepTimeModel(Protocol):
    def prompt_tokens(self, num_decodes: int, num_prompts: int, budget: int) -> int:
        """Most prompt tokens that a step with that many decodes may compute, while so many prompts are not through."""

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step that took so long."""


class NoTimeModel:
    """The off version: prompts may fill the token budget."""

    def prompt_tokens(self, num_decodes: int, num_prompts: int, budget: int) -> int:
        return budget

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """It learns nothing."""


class MeasuredStepTime:
    def __init__(self, target_seconds: float) -> None:
        self._target = target_seconds
        self._decode: deque[float] = deque(maxlen=_REMEMBERED)       # seconds of the last steps without prompts
        self._per_token: deque[float] = deque(maxlen=_REMEMBERED)    # seconds that each prompt token added

    def prompt_tokens(self, num_decodes: int, num_prompts: int, budget: int) -> int:
        """One prompt and nobody else, or nothing known yet: nobody waits, or it will be known after this step. Of several
        prompts those that are through wait for the end of the step as decodes do."""
        if (num_decodes == 0 and num_prompts <= 1) or not self._per_token:
            return budget
        rest = max(self._target - (_median(self._decode) if num_decodes else 0.0), _SHARE * self._target)
        fit = int(rest / _median(self._per_token))
        return max(_FEWEST, fit - fit % _ROUND)

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        if num_prompt_tokens == 0:
            self._decode.append(seconds)
        elif num_prompt_tokens >= _FEWEST:
            rest = seconds - (_median(self._decode) if num_decodes else 0.0)
            self._per_token.append(max(rest, _SHARE * seconds) / num_prompt_tokens)


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
