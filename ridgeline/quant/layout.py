"""How linears lie in memory on a CPU: the rules, without torch, so that memory is known before loading.

Weights that a GGUF file packs stay packed, in tiles (ops/cpu/src/products/tiles.h). float32 linears may keep a second layout:

oneDNN's blocked layout is faster from a few rows on, more so for wide linears, and slower at one row, where the GEMV only
streams the weight. On x86-64 narrow linears gain nothing; on aarch64 (one shape tried) all gain.

So x86-64 keeps it for linears with many outputs, other machines for all. Steps with few rows always use the plain layout,
which streams at memory speed.
"""

from __future__ import annotations

import platform

# Of GGUF packings that a CPU multiplies as they are stored: bits of a code, bytes of a tile's scales and of the scales above
# them for one output, and the tiles of 32 inputs that share those above.
_TILES = {
    "Q4_0": (4, 0, 2, 1), "Q4_1": (4, 0, 4, 1), "Q5_0": (5, 0, 2, 1), "Q5_1": (5, 0, 4, 1), "Q8_0": (8, 0, 2, 1),
    "Q4_K": (4, 2, 4, 8), "Q5_K": (5, 2, 4, 8), "Q6_K": (6, 2, 2, 8), "F32": (32, 0, 0, 1),
}
STORED_KINDS = frozenset(_TILES) - {"F32"}


def matrix_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Of a packed matrix in tiles; F32: a part of one whose other parts are packed."""
    bits, inner, outer, span = _TILES[kind]
    tiles = -(-inputs // 32)
    group = 16 * (tiles * (4 * bits + inner) + -(-tiles // span) * outer)
    return -(-outputs // 16) * -(-group // 64) * 64


def fewest_outputs(machine: str = "") -> int:
    """Outputs from which on a linear keeps the blocked layout beside the plain one."""
    return 2048 if (machine or platform.machine()) in ("x86_64", "AMD64") else 1
