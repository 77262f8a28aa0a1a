"""What is known of whoever asks, beside the request itself: set around a request, read where it enters the engine.

Every endpoint's requests pass both places, so no endpoint has to hand these on.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    ttft_deadline: float | None = None   # seconds; a request that will wait longer for its first token is refused
    ends: float | None = None            # by time.monotonic(): what is not answered by then is given up
    cache_salt: str = ""                 # callers with different ones never share cached blocks
    prefix_caching: bool = True          # False: what was computed for others is computed again


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 (it cannot change)
