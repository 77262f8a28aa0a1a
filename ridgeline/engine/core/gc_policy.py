"""When a process that is the engine's own looks for garbage.

Python's collector looks at the young often and at the old seldom, but then at all of them, and cached blocks are old: with
125,000, which two million tokens make, it took 74 ms in the middle of a run (docs/h200.md). Hardly any of that is garbage, for
what a request leaves behind goes when nobody refers to it any more. So the old are looked at while there is nothing to do, and
otherwise two hundred times more rarely than usual.
"""

from __future__ import annotations

import gc

_RARELY = 2000                       # looks at the middle-aged, before the old get one under load
_ENOUGH = 10                         # … and in a quiet moment; Python's own number


def spare_the_old() -> None:
    """What lives now lives for ever: it is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _RARELY)


def look_at_the_old() -> None:
    """For a quiet moment, after work."""
    if gc.get_count()[2] >= _ENOUGH:
        gc.collect()
