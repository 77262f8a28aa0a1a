"""Which replica takes a request: by predicted seconds, in turn, or the one with the fewest requests.

The other two are for comparison, and for fleets whose replicas share no prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.replicas.learned_times import mean_pace
from ridgeline.engine.replicas.replica_load import ReplicaLoad, Ticket
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt

CLOSE = 1.02                         # predictions that differ by less are equal: learned times are not exact
PASSED_SECONDS = 60.0                # without a request, and …
PASSED_TURNS = 4                     # … times as many requests as there are replicas, after which what was learned is old
POLICIES = ("predicted", "round-robin", "least-pending")


class Choice:
    """`loads` are all replicas; a request may use some of them, given by their numbers."""

    def __init__(self, policy: str, loads: Sequence[ReplicaLoad]) -> None:
        self.policy = policy
        self.loads = loads
        self._turn = 0
        self._used = [(0, 0.0)] * len(loads)             # the turn of the last request that each got, and when

    def choose(self, prompt: RoutedPrompt, now: float, usable: Sequence[int]) -> int:
        """The number of the best replica; equal ones take turns."""
        self._turn += 1
        count = len(self.loads)
        by_turn = sorted(usable, key=lambda number: (number - self._turn) % count)
        if self.policy == "round-robin":
            return by_turn[0]
        if self.policy == "least-pending":
            return min(by_turn, key=lambda number: self.loads[number].pending)
        self._doubt_old_times(by_turn, now)
        otherwise = mean_pace(load.times for load in self.loads)
        coming = sum(len(self.loads[number].waiting) for number in by_turn) / len(by_turn)
        predicted = {number: self.loads[number].predict(prompt, now, otherwise, coming) for number in by_turn}
        best = min(each.total for each in predicted.values())
        close = [number for number in by_turn if predicted[number].total <= CLOSE * best]
        return max(close, key=lambda number: predicted[number].cached)

    def _doubt_old_times(self, numbers: Sequence[int], now: float) -> None:
        """One that stood still for some seconds has the times of a slow one. Nothing would show otherwise, because others are
        chosen as long as they have time."""
        for number in numbers:
            turn, when = self._used[number]
            if self._turn - turn > PASSED_TURNS * len(self.loads) and now - when > PASSED_SECONDS:
                self.loads[number].times.grow_old()

    def send(self, number: int, prompt: RoutedPrompt, now: float) -> Ticket:
        self._used[number] = self._turn, now
        return self.loads[number].send(prompt, now, mean_pace(load.times for load in self.loads))

    def shortest_wait(self, now: float, usable: Sequence[int]) -> float:
        """Seconds until a replica has begun all requests that wait there; for Retry-After."""
        otherwise = mean_pace(load.times for load in self.loads)
        nothing = RoutedPrompt(b"", 0, [])
        return min((self.loads[number].predict(nothing, now, otherwise).wait for number in usable), default=1.0)
