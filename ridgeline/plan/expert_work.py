"""What the products of a mixture do on a GPU beside their FLOPs and weights (ops/experts).

Weights of 16 or 8 bits (expert_products.py):

    padding     an expert's last tile is half empty: the products compute rows that do not exist
    pairs       each pair of a token and an expert leaves an activated row and a result in memory, which the next kernel reads
    rate        tiles whose rows are gathered keep a part of the rate of dense GEMMs

Few tokens do none of this: every pair is a GEMV, and a token's experts are added where they are multiplied (few_tokens.py).

Packed 4-bit codes (packed_products.py, packed_few.py): what limits few tokens is unpacking, not memory. Every tile of rows
unpacks its expert's weights in registers. Many tokens compute longer than that, with rows that fill up an expert's last tile.

    unpacking   tiles · weights of an expert / (lanes of instructions per second / INSTRUCTIONS)
    computing   FLOPs · rows with padding / rows, at the rate of 4-bit linears
    tiles       of few tokens one for each pair; else pairs / rows of a tile, and half a tile for each expert

8-bit codes are multiplied as they are, by coarse and fine codes of each row: twice the products, at twice the rate. The GEMVs of
few tokens make numbers of them (few_bytes.py), in as much time as reading them takes.

The constants are facts of the kernels and of the chip. benchmarks/studies/experts has the op's times for 1 to 8,192 tokens. The
constants of 8 bits and of int4 are from one mixture, Qwen3-30B-A3B in blocks of fp8 and in AWQ's int4 (its records in
benchmarks/h200).
"""

from __future__ import annotations

import numpy as np

from ridgeline.models.expert_config import Experts

# Of the rate of dense GEMMs. The op alone takes 4.74 ms for 32,768 tokens of Qwen3-30B-A3B (benchmarks/studies/experts), which is
# 0.86. Prompts of 128 requests took 0.76 (Mixtral-8x7B), 0.67 (Qwen3-30B-A3B) and 0.64 (DeepSeek-V2-Lite).
TILED_COMPUTE = 0.75
# An SM issues 128 lanes of instructions in a cycle, in which its matrix units could do 4,096 FLOPs of 16 bits.
FLOPS_PER_LANE = 32
INSTRUCTIONS = 8.0                   # for each weight that is unpacked, between 7 and 10 in the kernels' code for e2m1 …
INT4_INSTRUCTIONS, INT4_FEW_INSTRUCTIONS = 7.0, 3.5      # … of int4, with scales before the product or behind it
CONVERTING = 7.5                     # instructions of few tokens for each 8-bit code
EIGHT_BIT_TILES = 0.76               # of TILED_COMPUTE, making the rows' codes included
FEW_CALLS = 3 / 5                    # launches of few tokens, for each of many: nothing is sorted, and nothing is left to add
MOST_FEW = 8                         # tokens of which every pair of a token and an expert is a GEMV of its own
RUN = 512                            # inputs of a matrix are padded to it


def _visited(experts: Experts, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(experts.count * (1 - (1 - experts.used / experts.count) ** tokens))


def packed_rows(pairs: np.ndarray, experts: int) -> np.ndarray:
    """As packed_tile_for chooses them."""
    mean = pairs / np.minimum(np.maximum(pairs, 1), experts)
    return np.select([mean <= 3, mean <= 20, mean <= 96], [16, 32, 64], 128)


def unpacked_weights(hidden: int, width: int) -> int:
    """Of one expert, padding included."""
    return 2 * width * -(-hidden // RUN) * RUN + hidden * -(-width // RUN) * RUN


def tiles(experts: Experts, tokens: np.ndarray) -> np.ndarray:
    """Of a layer, if routing is even."""
    pairs = tokens * experts.used
    many = np.maximum(_visited(experts, tokens), pairs / packed_rows(pairs, experts.count) + experts.count / 2)
    return np.where(tokens <= MOST_FEW, pairs, many)


def work(experts: Experts, hidden: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weights that a layer unpacks, rows that it computes for each row that there is)"""
    count, pairs = tiles(experts, tokens), np.maximum(tokens * experts.used, 1)
    padded = np.where(tokens <= MOST_FEW, 1.0, np.maximum(1.0, count * packed_rows(pairs, experts.count) / pairs))
    return count * unpacked_weights(hidden, experts.width), padded


def unpacks_per_second(matrix_rate: float, format: str, tokens: np.ndarray) -> np.ndarray:
    """Weights of 4 bits, from the chip's rate of dense 16-bit products."""
    few = INT4_FEW_INSTRUCTIONS if format == "int4" else INSTRUCTIONS
    many = INT4_INSTRUCTIONS if format == "int4" else INSTRUCTIONS
    return matrix_rate / FLOPS_PER_LANE / np.where(tokens <= MOST_FEW, few, many)


def conversions(experts: Experts, hidden: int, tokens: np.ndarray, bits: float) -> np.ndarray:
    """Instructions of a layer in which codes of 8 bits become numbers: those of every pair of few tokens."""
    weights = 3 * hidden * experts.width if bits == 8 else 0
    return np.where(tokens <= MOST_FEW, tokens * experts.used * CONVERTING * weights, 0.0)


def tiled_compute(bits: float) -> float:
    return TILED_COMPUTE * (EIGHT_BIT_TILES if bits == 8 else 1.0)


def tile_rows(pairs: np.ndarray, experts: int, bits: float = 16) -> np.ndarray:
    """As expert_products chooses them."""
    mean = pairs / np.minimum(np.maximum(pairs, 1), experts)
    return np.select([mean <= 9, mean <= 20, mean <= 96], [16, 32, 64], 64 if bits == 8 else 128)


def padded_rows(experts: Experts, tokens: np.ndarray, bits: float = 16) -> np.ndarray:
    """Rows that a layer computes for each that there is, if routing is even."""
    pairs = np.maximum(tokens * experts.used, 1)
    rows = tile_rows(pairs, experts.count, bits)
    tiles = np.maximum(_visited(experts, tokens), pairs / rows + experts.count / 2)
    return np.where(tokens <= MOST_FEW, 1.0, np.maximum(1.0, tiles * rows / pairs))


def pair_bytes(experts: Experts, hidden: int, tokens: np.ndarray, element_bytes: float) -> np.ndarray:
    """Written and read again in a layer: the activated row of every pair, and its result."""
    each = 2 * (experts.width + hidden) * element_bytes
    return np.where(tokens <= MOST_FEW, 0.0, tokens * experts.used * each)
