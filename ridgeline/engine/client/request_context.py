"""What is known of whoever asks, beside the request itself: set around a request, read where it enters the engine.

Every endpoint's requests pass both places, so no endpoint has to hand these on.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace

MAX_TTFT_MS = 3_600_000.0            # milliseconds; the longest deadline that can be asked for


@dataclass(frozen=True, slots=True)
class Caller:
    ttft_deadline: float | None = None   # seconds; a request that will wait longer for its first token is refused
    ends: float | None = None            # by time.monotonic(): what is not answered by then is given up
    cache_salt: str = ""                 # callers with different ones never share cached blocks
    prefix_caching: bool = True          # False: what was computed for others is computed again
    key: int = 0                         # which of the API keys it came with; 0: there are none


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 (it cannot change)


def expect_first_token(milliseconds: float | None) -> None:
    """A deadline that the request's body brings, for the task that answers it; of several the shortest counts."""
    if milliseconds is not None:
        known = CALLER.get()
        seconds = milliseconds / 1000
        CALLER.set(replace(known, ttft_deadline=min(seconds, known.ttft_deadline or seconds)))
