"""Which float32 linears keep a second layout on a CPU: the rules, without torch, so that memory is known before loading.

oneDNN's blocked layout is faster from a few rows on, more so for wide linears, and slower at one row, where the GEMV only
streams the weight. On x86-64 narrow linears gain nothing; on aarch64 (one shape tried) all gain.

So x86-64 keeps it for linears with many outputs, other machines for all. Steps with few rows always use the plain layout,
which streams at memory speed.
"""

from __future__ import annotations

import platform

FEWEST_ROWS = 4                      # from this many input rows on, a linear uses the blocked layout
STORED_KINDS = frozenset({"Q4_1", "Q8_0"})       # GGUF packings that are also kept and multiplied as stored


def fewest_outputs(machine: str = "") -> int:
    """Outputs from which on a linear keeps the blocked layout beside the plain one."""
    return 2048 if (machine or platform.machine()) in ("x86_64", "AMD64") else 1
