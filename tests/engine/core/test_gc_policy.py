"""When old garbage is looked for: in a process of its own, whose collector it is."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from ridgeline.engine.core import gc_policy

class Thing:
    pass

def cycle():
    thing = Thing()
    thing.itself = thing
    return weakref.ref(thing), thing

gc_policy.spare_the_old()
assert gc.get_freeze_count() > 1000 and gc.get_threshold()[2] == 2000
found, thing = cycle()
gc.collect(1)                        # it is old now
gc.collect(1)
del thing
gc_policy.look_at_the_old()
assert found() is not None, "not after so little work"
for _ in range(10):
    gc.collect(1)
assert found() is not None, "the young are not all"
gc_policy.look_at_the_old()
assert found() is None
print("right")
"""


def test_the_old_are_looked_at_in_quiet_moments() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "right\n", ran.stderr
