"""Sizes of weights in the packed layout (packed_weight.py, block_weight.py), without torch: memory is known before loading.

Inputs are padded to a multiple of RUN and outputs to a multiple of STRIP, whatever the codes are.
"""

from __future__ import annotations

STRIP, TILE, RUN = 16, 64, 512       # outputs of a strip; inputs of a lane's 16 bytes, and of the lanes' scales
GROUPS = (16, 32, 64, 128)           # inputs with one scale that kernels know; larger multiples of 128 become 128
BLOCK = 256                          # inputs with one multiplier of scales: K types
BITS_ABOVE = {"uint4": 0, "q5": 1, "q6": 2}              # of a code, in a plane of their own
BYTES = "eight bits"                 # the form of 8-bit codes: byte_weight.py
# Numbers of a weight that are expanded at a time, 512 MiB of them: gate and up of a 70B model in two parts, the other matrices of
# its layers, and all of an 8B model's layers, whole. Parts are wide: with few tiles of outputs the last wave of cuBLAS's CTAs
# is empty for the most part. They end where its tiles of 256 outputs do, which are WIDE_TILE strips.
MOST_EXPANDED, WIDE_TILE = 2**28, 16
SCALE_BYTES = ("e8m0", "float8_e4m3fn")                  # dtypes of scales that may stay bytes: MXFP4 and NVFP4


def packs(outputs: int, inputs: int, group: int, gated: bool = False) -> bool:
    """Whether a matrix of that shape has a packed form. A whole row of inputs is one group where it is a multiple of 128."""
    known = group in GROUPS or (group % 128 == 0 and group > 0)
    return known and inputs % group == 0 and inputs % 2 == 0 and (not gated or outputs % STRIP == 0)


def packs_rows(outputs: int, inputs: int, gated: bool = False) -> bool:
    """Of 8-bit codes with one scale for each output, which multiplies sums: the last group of a row may be padded. Kernels read x
    at multiples of 16 bytes."""
    return inputs % 8 == 0 and (not gated or outputs % STRIP == 0)


def keeps_bytes(kind: str, dtype: str, group: int) -> bool:
    """Whether scales of that dtype stay bytes; others take 16 bits. A word has those of two groups, so 128 inputs must have two.
    Only e2m1 codes have such scales in checkpoints."""
    return kind == "e2m1" and dtype in SCALE_BYTES and group < 128


def padded_weights(outputs: int, inputs: int) -> int:
    return -(-outputs // STRIP) * STRIP * (-(-inputs // RUN) * RUN)


def strips_at_once(outputs: int, inputs: int) -> int:
    """Strips of a weight that are expanded at a time: all of most weights, or of parts that are alike in size."""
    strips, parts = -(-outputs // STRIP), -(-outputs * inputs // MOST_EXPANDED)
    return strips if parts <= 1 else -(-strips // (parts * WIDE_TILE)) * WIDE_TILE


def expanded_elements(outputs: int, inputs: int) -> int:
    """Numbers of a weight that lie in memory at once where it is expanded (expand_room.py)."""
    return min(outputs, strips_at_once(outputs, inputs) * STRIP) * inputs


def four_bit_bytes(
    outputs: int, inputs: int, group: int, zeros: bool = False, outer: bool = False, scale_bytes: int = 2
) -> int:
    """Of the tensors that packed_weight.pack makes: codes, scales, 16-bit zeros, a float32 factor for each output."""
    weights = padded_weights(outputs, inputs)
    each = scale_bytes + (2 if zeros else 0)
    return weights // 2 + weights // min(group, GROUPS[-1]) * each + (4 * outputs if outer else 0)


def byte_bytes(outputs: int, inputs: int, group: int, outer: bool = False) -> int:
    """Of the tensors that byte_weight.pack_bytes makes."""
    weights = padded_weights(outputs, inputs)
    return weights + weights // min(group, GROUPS[-1]) * 2 + (4 * outputs if outer else 0)


def block_bytes(grid: str, form: str, group: int, outputs: int, inputs: int) -> int:
    """Of the tensors that block_weight.pack_blocks makes. `form`: of their scales, as there."""
    weights, offset = padded_weights(outputs, inputs), form.endswith("+offset")
    codes = weights // 2 + (weights // 4 if BITS_ABOVE[grid] else 0)     # the plane has two bits for q5, too
    if form.startswith("pair"):
        return codes + weights // group * (4 if offset else 2)
    # A word for 32 inputs of two outputs, another one where the first has no room for offsets; two float16 numbers for 256.
    words = 2 if offset and group == 16 else 1
    return codes + words * weights // 16 + weights // BLOCK * 4
