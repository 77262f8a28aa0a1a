"""Who sends a request, apart from the request itself: its deadlines, its cache salt, its API key.

The server makes a Caller from each HTTP request's headers and hands it on to AsyncLLM.stream().
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_TTFT_MS = 3_600_000.0            # milliseconds; the longest deadline that can be asked for


@dataclass(frozen=True, slots=True)
class Caller:
    ttft_deadline: float | None = None   # seconds; a request that will wait longer for its first token is refused
    ends: float | None = None            # by time.monotonic(): a request that is unfinished then is aborted
    cache_salt: str = ""                 # callers with different salts never share cached blocks
    prefix_caching: bool = True          # False: this request reuses no cached blocks
    key: int = 0                         # the number of its API key, from 1; 0: the server has none

    def expecting_first_token(self, milliseconds: float | None) -> Caller:
        """With the deadline that a request's body sets; the shorter of two deadlines counts."""
        if milliseconds is None:
            return self
        seconds = milliseconds / 1000
        return replace(self, ttft_deadline=min(seconds, self.ttft_deadline or seconds))


LOCAL = Caller()                     # code in this process: no deadlines, no key
