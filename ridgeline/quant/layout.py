"""Which float32 linears keep a second form on a CPU: the rules, without torch, so that memory is known before loading.

oneDNN's blocked layout wins from a few rows on, more on wide linears than on narrow ones, and loses at one row, which
is nothing but reading the weight. On x86-64 narrow linears gain nothing; on aarch64 (one shape tried) all gain.

So x86-64 keeps it for linears with many outputs, other machines for all; and few rows always take the plain one, which
streams at memory speed.
"""

from __future__ import annotations

import platform

FEWEST_ROWS = 4                      # of the input, that go through the blocked layout
STORED_KINDS = frozenset({"Q4_1", "Q8_0"})       # of GGUF's packings, that are also kept and multiplied as they are stored


def fewest_outputs(machine: str = "") -> int:
    """How many outputs a linear must have to keep the blocked layout beside the plain one."""
    return 2048 if (machine or platform.machine()) in ("x86_64", "AMD64") else 1
