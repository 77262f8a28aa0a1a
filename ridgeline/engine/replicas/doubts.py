"""Replicas that fail at once: one with another model or key, or whose engine answers each request with an error.

Such a replica is idle, so it has the fewest predicted seconds: three of them took every try of every request. After several
failures in a row it is chosen last for a while, then tried with one request. A request that has failed once goes to replicas
without such failures first. By model, so that a client's spelling mistake says nothing of other requests.

Knows numbers only: no clock, no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

IN_A_ROW = 3                         # failures without an answer between them: one may be the request's own mistake
DOUBT_SECONDS = 30.0
MOST_MODELS = 64                     # names come from clients


@dataclass(slots=True)
class _Failures:
    count: int = 0
    until: float = 0.0


class Doubts:
    """Of one replica."""

    def __init__(self) -> None:
        self._failures: dict[bytes, _Failures] = {}      # by model; the newest last

    def sent(self, model: bytes, now: float) -> None:
        """It gets a request. Others do not follow one that tries it."""
        found = self._failures.get(model)
        if found is not None and found.count >= IN_A_ROW and now >= found.until:
            found.until = now + DOUBT_SECONDS

    def failed(self, model: bytes, now: float) -> None:
        """It had a request and gave it no answer, or refused it as perhaps no other does."""
        found = self._failures.pop(model, None) or _Failures()
        found.count += 1
        if found.count >= IN_A_ROW:
            found.until = now + DOUBT_SECONDS
        self._failures[model] = found
        if len(self._failures) > MOST_MODELS:
            del self._failures[next(iter(self._failures))]

    def answered(self, model: bytes) -> None:
        self._failures.pop(model, None)

    def is_last(self, model: bytes, now: float, again: bool) -> bool:
        """Whether others are chosen first. `again`: the request has failed elsewhere."""
        found = self._failures.get(model)
        return found is not None and (again or now < found.until)
