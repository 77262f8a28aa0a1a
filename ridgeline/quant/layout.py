"""How linears are laid out in memory on a CPU: the rules, without torch, so that memory is known before loading.

Codes and 16-bit numbers lie in tiles (ops/cpu/src/products/tiles.h). float32 linears may keep a second layout:

oneDNN's blocked layout is faster from a few rows on, more so for wide linears, and slower at one row, where the GEMV only
streams the weight. On x86-64 narrow linears gain nothing; on aarch64 (one shape tried) all gain.

So x86-64 keeps it for linears with many outputs, other machines for all. Steps with few rows always use the plain layout,
which streams at memory speed.
"""

from __future__ import annotations

import platform

from ridgeline.quant.format import WeightFormat

# By kind: bits of a code, bytes of a tile's scales and of the scales above them for one output, and the tiles of 32 inputs that
# share those above; 0: the matrix says how many.
_TILES = {
    "Q4_0": (4, 0, 2, 1), "Q4_1": (4, 0, 4, 1), "Q5_0": (5, 0, 2, 1), "Q5_1": (5, 0, 4, 1), "Q8_0": (8, 0, 2, 1),
    "Q4_K": (4, 2, 4, 8), "Q5_K": (5, 2, 4, 8), "Q6_K": (6, 2, 2, 8), "INT4": (4, 0, 8, 0), "INT8": (8, 0, 4, 0),
    "E4M3": (8, 0, 4, 0), "E2M1": (4, 0, 4, 0), "NF4": (4, 0, 4, 0),
    "F16": (16, 0, 0, 1), "BF16": (16, 0, 0, 1), "F32": (32, 0, 0, 1),
}
NUMBER_KINDS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
CODE_KINDS = {"int8": "INT8", "uint4": "INT4", "ternary": "INT4", "e4m3": "E4M3", "e2m1": "E2M1", "nf4": "NF4"}     # by grid
STORED_KINDS = frozenset(_TILES) - {*CODE_KINDS.values(), *NUMBER_KINDS.values()}        # blocks of GGUF files


def fewest_outputs(machine: str = "") -> int:
    """Outputs from which on a float32 linear keeps the blocked layout beside the plain one."""
    return 2048 if (machine or platform.machine()) in ("x86_64", "AMD64") else 1


def plain_bytes(outputs: int, inputs: int, is_linear: bool = True) -> int:
    """Of a matrix whose numbers are all float32."""
    return 4 * outputs * inputs * (2 if is_linear and outputs >= fewest_outputs() else 1)


def stored_kind(type: str) -> str:
    """In which a tensor of a GGUF file is kept."""
    return type if type in STORED_KINDS or type in NUMBER_KINDS.values() else "F32"


def tile_kind(grid: str, block: tuple[int, int], inputs: int) -> tuple[str, int] | None:
    """(kind, tiles that share a scale) in which codes with scales for such blocks of (outputs, inputs) are kept; None: they are
    expanded."""
    kind = CODE_KINDS.get(grid)
    if kind is None or block[1] % 32 or (kind == "INT4" and block[0] != 1):
        return None
    return kind, block[1] // 32 or -(-inputs // 32)


def format_kind(format: WeightFormat, inputs: int) -> tuple[str, int] | None:
    """The same of a weight format."""
    scales = format.scales
    if scales is None or (CODE_KINDS.get(format.grid) != "INT4" and scales.zero is not None):
        return None
    if scales.outer is not None and scales.outer.block[0] != 1:
        return None
    return tile_kind(format.grid, scales.block, inputs)


def matrix_bytes(kind: str, outputs: int, inputs: int, span: int = 1) -> int:
    """Of a matrix in tiles, or of a part of it; `span`: of codes that are not blocks."""
    bits, inner, outer, shared = _TILES[kind]
    tiles = -(-inputs // 32)
    group = 16 * (tiles * (4 * bits + inner) + -(-tiles // (shared or span)) * outer)
    return -(-outputs // 16) * -(-group // 64) * 64
