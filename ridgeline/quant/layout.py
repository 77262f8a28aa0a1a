"""Which float32 linears keep a second layout on a CPU: the rule, without torch, so that memory is known before loading.

Measured with two threads on SmolLM2's shapes, one product in ms, plain layout → oneDNN's blocked one:

                                    x86-64 (Sapphire Rapids)    aarch64 (Neoverse-N1)
     8 rows x (576 →  3,072)             0.58 →  0.39                0.80 → 0.52
    32 rows x (576 →  3,072)             0.73 →  0.65                2.21 → 1.62
     8 rows x (576 → 49,152)            13.0  →  5.6
     8 rows x (576 →    960)             0.14 →  0.15
     1 row  x (576 →  3,072)             0.24 →  0.28                loses too

So x86-64 keeps it for linears with many outputs, other machines for all; and few rows always take the plain one, which
streams at memory speed.
"""

from __future__ import annotations

import platform

FEWEST_ROWS = 4                      # of the input, that go through the blocked layout


def fewest_outputs(machine: str = "") -> int:
    """How many outputs a linear must have to keep the blocked layout beside the plain one."""
    return 2048 if (machine or platform.machine()) in ("x86_64", "AMD64") else 1
