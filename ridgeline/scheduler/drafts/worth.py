"""Do drafts pay in all? What steps took in which they were looked for, against what their tokens would have taken without.

The controller weighs each step's drafts by the time of its shape. But to look for drafts takes the host's time in every step,
also in those that end up without any, and a small model's steps do not hide it. So what came of it is counted as a whole, as a
debt: steps lost, less steps gained. Every step pays off a small share of itself. Beyond a limit no drafts are looked for until
enough is paid off. So what is lost is that share of the time and the limit, however short a server runs; a step that takes far
longer than others counts for little, because few do so for their drafts.

Few rows and many are counted apart: what one row gains does not excuse what four lose.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.01                        # of the time: what looking for drafts may lose
_LIMIT = 2.0                         # steps that may be lost at once, …
_AGAIN = 1.0                         # … and how many must be paid off before drafts are looked for again
_CREDIT = 2.0                        # steps gained that count against later losses
_SOON = 8                            # steps before a rest ends: from then on what steps take is measured again
_OUTLIER = 2.0                       # a step loses no more: most that take longer would have taken as long without drafts


@dataclass(slots=True)
class _Account:
    """Of steps with about as many rows."""

    debt: float = 0.0                # in steps without drafts
    rests: bool = False

    def add(self, steps: float) -> None:
        self.debt = max(-_CREDIT, self.debt + steps)
        if self.debt > _LIMIT:
            self.rests = True
        elif self.debt <= _LIMIT - _AGAIN:
            self.rests = False


class Worth:
    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._now = self._of(1)

    @property
    def rests(self) -> bool:
        """Are no drafts to be looked for in the next step?"""
        return self._now.rests

    def slept(self, rows: int) -> bool:
        """A step has come back. True: as the one before, it is in the middle of a rest. It is counted, and its time does not
        matter."""
        account = self._accounts.get(rows.bit_length())
        if account is not self._now or not account.rests or account.debt <= _LIMIT - _AGAIN + _SOON * _SHARE:
            return False
        account.debt -= _SHARE
        return True

    def passed(self, rows: int) -> None:
        """A step has come back. The next one is believed to have as many rows."""
        self._now = self._of(rows)
        self._now.add(-_SHARE)

    def count(self, rows: int, seconds: float, alone: float, tokens_each: float) -> None:
        """A step in which drafts were looked for took so long, and brought a row so many tokens. Without it would have taken
        `alone`, for one token."""
        self._of(rows).add(min(_OUTLIER, seconds / alone - tokens_each))

    def _of(self, rows: int) -> _Account:
        return self._accounts.setdefault(rows.bit_length(), _Account())
