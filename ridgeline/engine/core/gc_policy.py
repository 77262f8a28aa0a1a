"""When Python's garbage collector runs: in the engine's own process, and in a caller's process while `LLM` answers.

A full (generation 2) collection scans every cached block, tens of milliseconds with a full GPU's. Hardly any of that is garbage:
reference counts free what a request leaves behind. So it runs while the engine is idle, and 200 times more rarely under load.

The heap of a caller's process is the caller's: `LLM` freezes nothing there. It holds 200,000 objects of imported modules, which
take 0.1 to 0.2 s to scan. So a full collection that is due waits until a call has returned.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 2000                       # generation 1 collections before a full one, under load …
_ENOUGH = 10                         # … and while idle; Python's own number

_lock = threading.Lock()
_found: list[tuple[int, int, int]] = []      # the caller's thresholds, once for each call of `LLM` that runs, in any thread


def freeze_loaded() -> None:
    """Never scan the objects that exist now: they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _RARELY)


def collect_old() -> None:
    """A full collection, if one is due: for idle moments."""
    if gc.get_count()[2] >= _ENOUGH:
        gc.collect()


@contextmanager
def only_the_young() -> Iterator[None]:
    """Full collections are as rare as in a busy engine. One that is due runs behind the `with`, as soon as Python looks again."""
    with _lock:
        thresholds = _found[0] if _found else gc.get_threshold()
        _found.append(thresholds)
        gc.set_threshold(*thresholds[:2], max(thresholds[2], _RARELY))
    try:
        yield
    finally:
        with _lock:
            _found.pop()
            if not _found:
                gc.set_threshold(*thresholds)
