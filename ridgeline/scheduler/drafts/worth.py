"""Do drafts pay in all? What steps took in which they were looked for, against what their tokens would have taken without.

The controller weighs each step's drafts by the time of its shape. But to look for drafts takes the host's time in every step,
also in those that end up without any, and a small model's steps do not hide it. So what came of it is compared as a whole:
where it lost, no drafts are looked for, for a while that doubles each time.

Few rows and many are compared apart: what one row gains does not excuse what four lose.
"""

from __future__ import annotations

from dataclasses import dataclass

_AGAIN = 6, 1.25                     # after so many steps a loss of so much is believed where the search lost before, …
_FEW = 16, 1.08                      # … after so many anywhere, …
_MANY = 64, 1.01                     # … and after so many a small one
_SHORTEST, _LONGEST = 16, 256        # steps without looking, …
_SHARE = 0.01                        # … and beyond that as many as make what was lost this share of the time


@dataclass(slots=True)
class _Account:
    """Of steps with about as many rows."""

    steps: int = 0
    spent: float = 0.0
    without: float = 0.0             # what the same tokens would have taken
    pause: int = _SHORTEST
    left: int = 0

    def count(self, seconds: float, without: float) -> None:
        self.steps, self.spent, self.without = self.steps + 1, self.spent + seconds, self.without + without
        ratio = self.spent / self.without
        believed = (_FEW, _MANY) if self.pause == _SHORTEST else (_AGAIN, _FEW, _MANY)
        if any(self.steps >= steps and ratio > loss for steps, loss in believed):
            self.left = self.pause
            self.pause = min(2 * self.pause, max(_LONGEST, int(self.steps * (ratio - 1) / _SHARE)))
        elif self.steps >= _MANY[0]:
            self.pause = _SHORTEST
        else:
            return
        self.steps, self.spent, self.without = 0, 0.0, 0.0


class Worth:
    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._now = self._of(1)

    @property
    def will_rest(self) -> bool:
        """What rests() will say next."""
        return self._now.left > 1

    def rests(self) -> bool:
        """Are no drafts to be looked for in this step?"""
        resting, self._now.left = self.will_rest, max(0, self._now.left - 1)
        return resting

    def passed(self, rows: int) -> None:
        """A step has come back. The next one is believed to have as many rows."""
        self._now = self._of(rows)

    def count(self, rows: int, seconds: float, without: float) -> None:
        """A step in which they were looked for took so long; without, its tokens would have taken `without`."""
        self._of(rows).count(seconds, without)

    def _of(self, rows: int) -> _Account:
        return self._accounts.setdefault(rows.bit_length(), _Account())
