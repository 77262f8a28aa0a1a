"""File descriptors kept in reserve, so that a child process can still be started when connections have taken all others.

A server with thousands of connections may use up its limit (`ulimit -n`). Then an engine that died could not be started again:
its sockets and pipes need descriptors, too. `keep()` opens a few; `lent()` closes them for as long as a child is being started.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COUNT = 15                           # an engine's sockets, its pipes and the descriptor of its process take 13

_lock = threading.RLock()
_kept: list[int] = []
_wanted = 0
_lent = 0                            # how many callers use them at the moment


def keep(count: int = COUNT) -> None:
    """Open the reserve; 0 gives it up."""
    global _wanted
    with _lock:
        _wanted = count
        _refill()


@contextmanager
def lent() -> Iterator[None]:
    """Inside, this many descriptors more are free. Afterwards the reserve is filled again, as far as there are any."""
    global _lent
    with _lock:
        _lent += 1
        while _kept:
            os.close(_kept.pop())
    try:
        yield
    finally:
        with _lock:
            _lent -= 1
            if not _lent:
                _refill()


def _refill() -> None:
    while len(_kept) > _wanted:
        os.close(_kept.pop())
    while len(_kept) < _wanted:
        try:
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return                                       # a later child fills it
