"""Which replica takes a request: by predicted seconds, in turn, or the one with the fewest requests.

The other two are for comparison, and for fleets whose replicas share no prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.replicas.learned_times import mean_pace
from ridgeline.engine.replicas.replica_load import ReplicaLoad, Ticket
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt

CLOSE = 1.02                         # predictions that differ by less are equal: learned times are not exact
POLICIES = ("predicted", "round-robin", "least-pending")


class Choice:
    """`loads` are all replicas; a request may use some of them, given by their numbers."""

    def __init__(self, policy: str, loads: Sequence[ReplicaLoad]) -> None:
        self.policy = policy
        self.loads = loads
        self._turn = 0

    def choose(self, prompt: RoutedPrompt, now: float, usable: Sequence[int]) -> int:
        """The number of the best replica; equal ones take turns."""
        self._turn += 1
        count = len(self.loads)
        by_turn = sorted(usable, key=lambda number: (number - self._turn) % count)
        if self.policy == "round-robin":
            return by_turn[0]
        if self.policy == "least-pending":
            return min(by_turn, key=lambda number: self.loads[number].pending)
        otherwise = mean_pace(load.times for load in self.loads)
        coming = sum(len(self.loads[number].waiting) for number in by_turn) / len(by_turn)
        predicted = {number: self.loads[number].predict(prompt, now, otherwise, coming) for number in by_turn}
        best = min(each.total for each in predicted.values())
        close = [number for number in by_turn if predicted[number].total <= CLOSE * best]
        return max(close, key=lambda number: predicted[number].cached)

    def send(self, number: int, prompt: RoutedPrompt, now: float) -> Ticket:
        return self.loads[number].send(prompt, now, mean_pace(load.times for load in self.loads))

    def shortest_wait(self, now: float, usable: Sequence[int]) -> float:
        """Seconds until a replica has begun all requests that wait there; for Retry-After."""
        otherwise = mean_pace(load.times for load in self.loads)
        nothing = RoutedPrompt(b"", 0, [])
        return min((self.loads[number].predict(nothing, now, otherwise).wait for number in usable), default=1.0)
