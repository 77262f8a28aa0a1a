"""Seconds of a mixture's products whose weights are packed 4-bit codes, on a GPU (ops/experts/packed_products.py, packed_few.py).

What limits few tokens is unpacking, not memory: every tile of rows unpacks its expert's weights in registers. Many tokens compute
longer than that, with rows that fill up the last tile of each expert.

    unpacking   tiles · weights of an expert / (lanes of instructions per second / INSTRUCTIONS)
    computing   FLOPs · rows with padding / rows, at the rate of 4-bit linears
    tiles       of few tokens one for each pair; else pairs / rows of a tile, and half a tile for each expert

The constants are facts of the kernels and of the chip. benchmarks/studies/experts has the op's times for 1 to 8,192 tokens.
"""

from __future__ import annotations

import numpy as np

from ridgeline.models.expert_config import Experts

# An SM issues 128 lanes of instructions in a cycle, in which its matrix units could do 4,096 FLOPs of 16 bits.
FLOPS_PER_LANE = 32
INSTRUCTIONS = 8.0                   # for each weight that is unpacked, between 7 and 10 in the kernels' code
MOST_FEW = 8                         # tokens of which every pair of a token and an expert is a GEMV of its own
RUN = 512                            # inputs of a matrix are padded to it


def tile_rows(pairs: np.ndarray, experts: int) -> np.ndarray:
    """As packed_tile_for chooses them."""
    mean = pairs / np.minimum(np.maximum(pairs, 1), experts)
    return np.select([mean <= 3, mean <= 20, mean <= 96], [16, 32, 64], 128)


def unpacked_weights(hidden: int, width: int) -> int:
    """Of one expert, padding included."""
    return 2 * width * -(-hidden // RUN) * RUN + hidden * -(-width // RUN) * RUN


def tiles(experts: Experts, tokens: np.ndarray) -> np.ndarray:
    """Of a layer, if routing is even."""
    pairs = tokens * experts.used
    visited = experts.count * (1 - (1 - experts.used / experts.count) ** tokens)
    many = np.maximum(visited, pairs / tile_rows(pairs, experts.count) + experts.count / 2)
    return np.where(tokens <= MOST_FEW, pairs, many)


def work(experts: Experts, hidden: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weights that a layer unpacks, rows that it computes for each row that there is)"""
    count, pairs = tiles(experts, tokens), np.maximum(tokens * experts.used, 1)
    padded = np.where(tokens <= MOST_FEW, 1.0, np.maximum(1.0, count * tile_rows(pairs, experts.count) / pairs))
    return count * unpacked_weights(hidden, experts.width), padded


def unpacks_per_second(matrix_rate: float) -> float:
    """Weights, from the chip's rate of dense 16-bit products."""
    return matrix_rate / FLOPS_PER_LANE / INSTRUCTIONS
