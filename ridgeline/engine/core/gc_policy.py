"""When the engine's process runs Python's garbage collector.

A full (generation 2) collection scans every cached block, tens of milliseconds with a full GPU's. Hardly any of that is garbage:
reference counts free what a request leaves behind. So it runs while the engine is idle, and 200 times more rarely under load.
"""

from __future__ import annotations

import gc

_RARELY = 2000                       # generation 1 collections before a full one, under load …
_ENOUGH = 10                         # … and while idle; Python's own number


def spare_the_old() -> None:
    """Never scan the objects that exist now: they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _RARELY)


def look_at_the_old() -> None:
    """A full collection, if one is due: for idle moments."""
    if gc.get_count()[2] >= _ENOUGH:
        gc.collect()
