"""How large steps may be after one of them did not fit into memory.

All memory of an engine is planned before its first request, so this is for the unforeseeable: another process takes memory of
the same device, or memory is fragmented. The next step has half the tokens, then half of those, until it fits; after steps
that fit, the size grows again. Knows numbers of tokens; which requests are in a step is the scheduler's business.
"""

from __future__ import annotations

CALM_STEPS = 16                      # that went well, before twice the tokens are tried
MOST_FAILURES = 32                   # without CALM_STEPS between them: work is lost before it is of use


class StepLimit:
    """`tokens` is what a step may have now, `most` what it may have when there is no need to save."""

    def __init__(self, most: int) -> None:
        self.most = self.tokens = most
        self._calm = 0                                   # steps that went well since the size was last changed
        self._again = False                              # the step before did not fit, and could not be made smaller
        self._failures = 0                               # since there was calm

    def ran_out(self, tokens: int, least: int = 1) -> bool:
        """A step of `tokens` tokens did not fit. True: give up; the smallest step failed twice, or there were too many failures.

        `least`: tokens of it that cannot be computed in parts.
        """
        self._calm = 0
        self._failures += 1
        if self._failures > MOST_FAILURES:
            return True
        smaller = max(least, tokens // 2)
        if smaller < tokens:
            self.tokens, self._again = smaller, False
            return False
        hopeless, self._again = self._again, not self._again
        return hopeless

    def went_well(self) -> bool:
        """A step fitted. True: all is as it was before memory ran out."""
        self._again = False
        self._calm += 1
        if self._calm >= CALM_STEPS:
            self._calm = self._failures = 0
            self.tokens = min(self.most, 2 * self.tokens)
        return self.tokens == self.most

    def forget(self) -> None:
        """No step of this size can be made of what there is to do."""
        self.tokens = self.most
