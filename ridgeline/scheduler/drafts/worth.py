"""Do drafts pay in all? What steps took in which they were looked for, against what their tokens would have taken without.

The controller weighs each step's drafts by the time of its shape. But to look for drafts takes the host's time in every step,
also in those that end up without any, and a small model's steps do not hide it. So what came of it is compared as a whole:
where it lost, no drafts are looked for, for a while that doubles each time.
"""

from __future__ import annotations

_FEW, _MUCH = 16, 1.08               # after so many steps a loss of so much is believed, …
_MANY, _LITTLE = 64, 1.01            # … and after so many a small one
_SHORTEST, _LONGEST = 16, 256        # steps without looking


class Worth:
    def __init__(self) -> None:
        self._steps, self._spent, self._without = 0, 0.0, 0.0
        self._pause, self._left = _SHORTEST, 0

    @property
    def will_rest(self) -> bool:
        """What rests() will say next."""
        return self._left > 1

    def rests(self) -> bool:
        """Are no drafts to be looked for in this step?"""
        resting, self._left = self.will_rest, max(0, self._left - 1)
        return resting

    def count(self, seconds: float, without: float) -> None:
        """A step in which they were looked for took so long; without, its tokens would have taken `without`."""
        self._steps, self._spent, self._without = self._steps + 1, self._spent + seconds, self._without + without
        ratio = self._spent / self._without
        if ratio > (_LITTLE if self._steps >= _MANY else _MUCH) and self._steps >= _FEW:
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST)
        elif self._steps >= _MANY:
            self._pause = _SHORTEST
        else:
            return
        self._steps, self._spent, self._without = 0, 0.0, 0.0
