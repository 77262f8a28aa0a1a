"""How the matrix of a quantised linear lies in the memory of a GPU: the one place that loader, ledger and `plan` ask. No torch.

    stored      the tensors of its format (format.py)
    four bits   codes in the order in which a Hopper GPU's tensor cores take them (ops/packed/packed_weight.py); scales that are
                bytes stay bytes, others have 16 bits
    blocks      the same of GGUF's 4 to 6 bits, with the scales of its types (ops/packed/block_weight.py)
    eight bits  the same of int8 beside x of 16 bits (ops/packed/byte_weight.py): Q8_0, W8A16, LLM.int8()

The layout depends on the GPU's kind: its facts are those of the kernel table. layout.py is the same for a CPU.
"""

from __future__ import annotations

from ridgeline.ops.kernel_table import DeviceFacts
from ridgeline.ops.packed.packed_sizes import (
    BITS_ABOVE,
    BLOCK,
    BYTES,
    GROUPS,
    block_bytes,
    byte_bytes,
    four_bit_bytes,
    keeps_bytes,
    packs,
    packs_rows,
)
from ridgeline.quant.format import ORDER, TensorSpec, WeightFormat, is_fp8_rows, quantises_rows

STORED, FOUR_BITS, BLOCKS, EIGHT_BITS = "stored", "four bits", "blocks", BYTES
# What multiplies: kernels made and timed for the format; cuBLAS with fp8 units; or what serves every format on every GPU
# (ops/quantised, cuBLAS with integers), which saves memory and may be slower than 16 bits.
OWN, LIBRARY, GENERAL = "own", "library", "general"
FOUR_BIT_GRIDS = ("uint4", "e2m1")
_EXACT = ("bfloat16", "float16", "e8m0", "float8_e4m3fn")        # dtypes of scales whose numbers 16 bits hold


def has_kernels(device: DeviceFacts) -> bool:
    """Those of ops/packed are written in Gluon, which older versions of Triton lack. Without them packed weights would be
    expanded for every step, and as stored few rows can be multiplied by codes."""
    return device.hopper and device.gluon


def gpu_layout(format: WeightFormat, outputs: int, inputs: int, gated: bool, device: DeviceFacts) -> str:
    """Of a matrix on one rank. `gated`: it holds gates and their partners, which share strips.

    Where the numbers of a checkpoint decide (`may_pack`), a matrix counts as stored.
    """
    if not has_kernels(device):
        return STORED
    pairs = gated and not format.reordered
    form = block_form_of(format)
    if form:
        whole = inputs % (BLOCK if form.startswith("byte") else 32) == 0 and (not pairs or outputs % 16 == 0)
        return BLOCKS if whole else STORED
    if not _is_exact(format) or not _packs(format, outputs, inputs, pairs):
        return STORED
    return EIGHT_BITS if format.grid == "int8" else FOUR_BITS


def may_pack(format: WeightFormat) -> bool:
    """Whether the numbers that a checkpoint has in this format decide how it lies: float32 scales that 16 bits hold, offsets that
    are a code times their scale."""
    return (_has_four_bits(format) or _has_bytes(format)) and not _is_exact(format) and not block_form_of(format)


def may_stay(format: WeightFormat, dtype: str) -> bool:
    """Whether the numbers decide that a matrix with a layout of its own stays as it is stored (packed.in_range): float16 lacks
    the range of bfloat16 scales, and an output with small weights alone is enough. Only the scales themselves tell, so memory is
    counted for both. In bfloat16, 8-bit codes with scales of 2^18 and more stay, too; such weights are not counted on."""
    scales = format.scales
    if scales is None or dtype != "float16" or scales.dtype != "bfloat16":
        return False
    return format.grid != "int8" or bool(scales.block[1])            # a scale of a whole output multiplies sums in float32


def gpu_bytes(
    format: WeightFormat, outputs: int, inputs: int, gated: bool, device: DeviceFacts, dtype: str = "bfloat16"
) -> int:
    """Of a matrix on one rank with everything that belongs to it, as it lies after loading. Where its numbers decide, the larger
    of both layouts. `dtype`: of the model's activations."""
    scales, found = format.scales, gpu_layout(format, outputs, inputs, gated, device)
    stored = format.nbytes(outputs, inputs)
    if scales is None or (found == STORED and not (has_kernels(device) and may_pack(format))):
        return stored
    order = TensorSpec(ORDER, "int32").nbytes(outputs, inputs) if format.reordered else 0
    decide = found == STORED or may_stay(format, dtype)
    if found == BLOCKS:
        packed = order + block_bytes(format.grid, block_form_of(format), scales.block[1], outputs, inputs)
        return max(stored, packed) if decide else packed
    group = _group(format, inputs)
    if not _packs(format, outputs, inputs, gated and not format.reordered):
        return stored
    if format.grid == "int8":
        packed = order + byte_bytes(outputs, inputs, group, not scales.block[1])
    else:
        each = 1 if keeps_bytes(format.grid, scales.dtype, group) else 2
        packed = order + four_bit_bytes(outputs, inputs, group, scales.zero is not None, scales.outer is not None, each)
    return max(stored, packed) if decide else packed


def served(format: WeightFormat, device: DeviceFacts) -> str:
    """By what a GPU multiplies by weights of this format: resolve, the verdict, `diagnose` and `plan` ask here. Only a Hopper GPU
    has kernels of ours for narrow weights (TMA, wgmma), and only there has any of it been timed."""
    if has_kernels(device) and (quantises_rows(format) or bool(block_form_of(format)) or _is_exact(format)):
        return OWN
    return LIBRARY if is_fp8_rows(format) and device.fp8 else GENERAL


def block_form_of(format: WeightFormat) -> str:
    """As block_weight.block_form says of the tensors: how scales of GGUF's 4 to 6 bits are stored; empty: another format."""
    scales = format.scales
    if scales is None or format.grid not in BITS_ABOVE or scales.zero == "code" or format.reordered:
        return ""
    added = "" if scales.zero is None else "+offset"
    if scales.outer is None:
        known = scales.block == (1, 32) and scales.dtype in ("bfloat16", "float16")
        return "pair" + added if known and (format.grid != "uint4" or added) else ""
    two_levels = scales.outer.block == (1, BLOCK) and scales.outer.dtype == "float16" and scales.dtype in ("uint8", "int8")
    return "byte" + added if two_levels and (scales.block == (1, 16) or (scales.block == (1, 32) and added)) else ""


def _has_four_bits(format: WeightFormat) -> bool:
    """4-bit codes with scales for each output and group, and at most one more for each output. Whether the kernels know the
    groups is a matter of the shape, too."""
    scales = format.scales
    if scales is None or format.grid not in FOUR_BIT_GRIDS or scales.block[0] != 1:
        return False
    return (scales.zero is None or format.grid == "uint4") and (scales.outer is None or scales.outer.block == (1, 0))


def _has_bytes(format: WeightFormat) -> bool:
    """int8 with scales for each output, or for each of its groups; x is not quantised."""
    scales = format.scales
    if scales is None or format.grid != "int8" or quantises_rows(format) or scales.block[0] != 1:
        return False
    return scales.zero is None and scales.outer is None and scales.dtype in ("bfloat16", "float16", "float32")


def _is_exact(format: WeightFormat) -> bool:
    """Whether the layout of four or of eight bits holds every number of this format."""
    scales = format.scales
    if _has_bytes(format) and scales is not None:
        group = scales.block[1]                          # a scale for each output stays as it is
        return not group or (scales.dtype in _EXACT and (group in (16, 32, 64) or group % 128 == 0))
    return _has_four_bits(format) and scales is not None and scales.dtype in _EXACT and scales.zero != "offset" and (
        scales.block[1] in (16, 32, 64) or scales.block[1] % 128 == 0
    )


def _packs(format: WeightFormat, outputs: int, inputs: int, gated: bool) -> bool:
    assert format.scales is not None
    if format.grid == "int8" and not format.scales.block[1]:
        return packs_rows(outputs, inputs, gated)
    return packs(outputs, inputs, _group(format, inputs), gated)


def _group(format: WeightFormat, inputs: int) -> int:
    assert format.scales is not None
    return format.scales.block[1] or (GROUPS[-1] if format.grid == "int8" else inputs)
