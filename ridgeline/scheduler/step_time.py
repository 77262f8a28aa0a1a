"""How long a step takes, learned from the steps that were: what prompts may take of a step in which others decode.

A step's time is close to a line: what the decodes alone take, and so much more for each prompt token beside them. Both
numbers are running averages of measured steps, so they follow the model, the machine and the load.
"""

from __future__ import annotations

from typing import Protocol

_WEIGHT = 0.2                        # of the newest measurement in a running average
_FEWEST = 256                        # prompt tokens: fewer say little about the time of one, and are always allowed
_ROUND = 64                          # matrix products like whole tiles


class StepTimeModel(Protocol):
    def prompt_tokens(self, num_decodes: int, budget: int) -> int:
        """Most prompt tokens that a step with that many decodes may compute."""

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step that took so long."""


class NoTimeModel:
    """The off version: prompts may fill the token budget."""

    def prompt_tokens(self, num_decodes: int, budget: int) -> int:
        return budget

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """It learns nothing."""


class MeasuredStepTime:
    def __init__(self, target_seconds: float) -> None:
        self._target = target_seconds
        self._decode = 0.0           # seconds of a step without prompts
        self._per_token = 0.0        # seconds that a prompt token adds

    def prompt_tokens(self, num_decodes: int, budget: int) -> int:
        """Nobody decodes, or nothing is known yet: nobody waits, or it will be known after this step."""
        if num_decodes == 0 or self._per_token == 0.0:
            return budget
        fit = int((self._target - self._decode) / self._per_token)
        return max(_FEWEST, fit - fit % _ROUND)

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        if num_prompt_tokens == 0:
            self._decode = _averaged(self._decode, seconds)
        elif num_prompt_tokens >= _FEWEST:
            rest = seconds - (self._decode if num_decodes else 0.0)
            self._per_token = _averaged(self._per_token, max(rest, 0.1 * seconds) / num_prompt_tokens)


def _averaged(average: float, value: float) -> float:
    return value if average == 0.0 else average + _WEIGHT * (value - average)
