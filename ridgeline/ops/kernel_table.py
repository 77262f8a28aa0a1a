"""Which kernel multiplies by a weight: one table, by the weight's format, the rows, the matrix and the device. No torch.

`choose` takes the first kernel of a format whose plan is not None; the last one has a plan for every call. Ops ask it with the
facts of their device (ops/launch.py) and call the kernel that it names; `ridgeline bench ops --table` prints it. What depends on
the memory of a single call (rows at multiples of 16 bytes) stays with the ops: there the library multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ridgeline.ops.linear.select import (
    MULTIPROCESSORS,
    GemmPlan,
    GemvPlan,
    OneRowPlan,
    RingGemmPlan,
    fp8_ring_gemm_plan,
    one_row_plan,
    plan,
    ring_gemm_plan,
    ring_plan,
)
from ridgeline.ops.linear.select_wide import WidePlan, fp8_wide_plan, wide_plan
from ridgeline.ops.packed.select_packed import PackedGemmPlan, PackedGemvPlan, byte_plan, packed_plan


class DeviceFacts(NamedTuple):
    """What a choice depends on. Without Gluon (another device, Triton's interpreter, an old Triton) simpler kernels run."""

    gluon: bool
    hopper: bool                     # TMA and wgmma
    shared: int                      # bytes of shared memory that a CTA may have
    multiprocessors: int
    block_scales: bool = True        # cuBLAS multiplies by scales of blocks: torch was built with CUDA 12.9 or later
    fp8: bool = True                 # tensor cores for e4m3: from compute capability 8.9 on


class Call(NamedTuple):
    rows: int
    outputs: int                     # with a gate, the pairs
    inputs: int
    gated: bool
    device: DeviceFacts


class Kernel(NamedTuple):
    name: str
    plan: Callable[[Call], Any]      # None: this kernel does not serve the call
    fuses_norm: bool = False


class Choice(NamedTuple):
    kernel: str
    plan: Any
    fuses_norm: bool


H200 = DeviceFacts(True, True, 232_448, MULTIPROCESSORS)
CPU = DeviceFacts(False, False, 0, 0)
MANY_ROWS = 1024                     # from here on no choice changes; the library adds the residual in its epilogue
# Bytes of shared memory that a CTA needs beside what its plan counts: mbarriers, reductions, layout conversions, the driver's.
RING_GEMV_RESERVED, RING_GEMM_RESERVED, PACKED_RESERVED = 2048, 1280, 12 * 1024
WIDE_SCRATCH, WIDE_PART_SCRATCH = 5 * 1024, 1024
GATED_ROWS, GATED_OUTPUTS, GATED_INPUTS = 640, 4096, 6144            # fewest rows and pairs, most inputs, of gemm_gated.py
GATED_SHARED = (128 + 2 * 128) * 64 * 2 * 4 + 128 * 128 * 2          # its blocks in flight, and the tile it writes
INTEGER_SHARED = (128 + 256) * 128 * 3 + 128 * 256 * 2 + 2048       # integer_product.py: blocks in flight, and the tile it writes
CODES_RUN = 256                      # inputs of a unit of codes_gemv.py
FEWEST_BLOCKED_ROWS = 4              # of a CPU's float32 linears that keep oneDNN's layout, too (quant/layout.py)
MOST_CODE_ROWS = 64                  # that ops/quantised multiplies by codes; for more rows it expands the weight
# Of whole groups, which are expanded fast (gate and up of an 8B model as Q4_K: 108 us, and cuBLAS takes 56), only
# this many rows and outputs gain: 64 rows take 104 us with 28,672 outputs, but 183 with 4,096, and 16 rows 228 and 127.
FEWEST_GROUP_ROWS, FEWEST_GROUP_OUTPUTS = 33, 16384

# ── plans: None where the kernel does not serve the call ─────────────────────────────────────────────────────────────


def _wide(call: Call, found: WidePlan | None) -> WidePlan | None:
    """With split-K all CTAs must run at once."""
    if found is None or not (call.device.gluon and call.device.hopper):
        return None
    if found.shared_bytes() + (WIDE_SCRATCH if found.splits == 1 else WIDE_PART_SCRATCH) > call.device.shared:
        return None
    at_once = -(-call.outputs // found.step) * found.splits <= call.device.multiprocessors
    return found if found.splits == 1 or at_once else None


def _wide_gemm(call: Call) -> WidePlan | None:
    return _wide(call, wide_plan(call.rows, call.outputs, call.inputs, call.gated))


def _gemv(call: Call) -> GemvPlan | None:
    found = plan(call.rows, call.outputs, call.inputs, call.gated)
    return found if isinstance(found, GemvPlan) else None


def _ring_gemv(call: Call) -> Any:
    found = ring_plan(call.outputs, call.inputs, call.gated) if call.device.gluon and _gemv(call) is not None else None
    if found is None:
        return None
    padded = 1 << (call.inputs - 1).bit_length()
    needed = found.shared_bytes(padded, call.gated) + found.programs * RING_GEMV_RESERVED
    return found if needed <= call.device.shared else None


def _small_gemm(call: Call) -> GemmPlan | None:
    found = plan(call.rows, call.outputs, call.inputs, call.gated)
    return found if isinstance(found, GemmPlan) and found.shared_bytes(call.gated) <= call.device.shared else None


def _ring(call: Call, found: RingGemmPlan | None, element_bytes: int) -> RingGemmPlan | None:
    if found is None or not (call.device.gluon and call.device.hopper):
        return None
    needed = found.programs * (found.shared_bytes(call.gated, element_bytes) + RING_GEMM_RESERVED)
    return found if needed <= call.device.shared else None


def _ring_gemm(call: Call) -> RingGemmPlan | None:
    if _small_gemm(call) is None:
        return None
    return _ring(call, ring_gemm_plan(call.rows, call.outputs, call.inputs, call.gated), 2)


def _gated_gemm(call: Call) -> bool | None:
    large = call.rows >= GATED_ROWS and call.outputs >= GATED_OUTPUTS and call.inputs <= GATED_INPUTS
    whole = call.inputs % 8 == 0 and call.outputs % 8 == 0               # rows at multiples of 16 bytes
    return True if call.gated and large and whole and call.device.hopper and call.device.shared >= GATED_SHARED else None


def _codes_gemv(call: Call) -> PackedGemvPlan | None:
    """Plans of the packed kernel of one row: the same bytes for each warp."""
    stored = call.outputs * (2 if call.gated else 1)
    if not (call.device.gluon and call.device.hopper) or call.rows != 1 or call.inputs % CODES_RUN or stored % 16:
        return None
    found = packed_plan(1, stored, call.inputs)
    if not isinstance(found, PackedGemvPlan):
        return None
    placed = -(-call.inputs // (CODES_RUN * found.warps)) * CODES_RUN * found.warps * 2
    return found if found.programs * (placed + PACKED_RESERVED) <= call.device.shared else None


def _ungated(call: Call) -> Call:
    """Most products of codes for several rows leave the gate to another kernel."""
    return call._replace(outputs=2 * call.outputs, gated=False) if call.gated else call


def _one_row_gemm(call: Call) -> OneRowPlan | None:
    if call.rows != 1 or not (call.device.gluon and call.device.hopper):
        return None
    return one_row_plan(call.outputs, call.inputs, call.gated, call.device.shared - RING_GEMM_RESERVED)


def _code_ring_gemm(call: Call) -> RingGemmPlan | None:
    whole = _ungated(call)
    return _ring(whole, fp8_ring_gemm_plan(whole.rows, whole.outputs, whole.inputs), 1)


def _code_wide_gemm(call: Call) -> WidePlan | None:
    whole = _ungated(call)
    return _wide(whole, fp8_wide_plan(whole.rows, whole.outputs, whole.inputs))


def _code_gated_gemm(call: Call) -> WidePlan | None:
    return _wide(call, fp8_wide_plan(call.rows, call.outputs, call.inputs, True)) if call.gated else None


def _scaled_mm_blocks(call: Call) -> bool | None:
    """cuBLAS with a scale for each 128 inputs of a row, too. It wants whole blocks, and four scales of a row side by side."""
    whole = _ungated(call).outputs % 128 == 0 and call.inputs % 512 == 0
    return True if call.device.hopper and call.device.block_scales and whole and call.rows > 1 else None


def _integer_gemm(call: Call) -> bool | None:
    return True if call.device.hopper and call.device.shared >= INTEGER_SHARED else None


PackedPlan = PackedGemvPlan | PackedGemmPlan | None


def _packed(call: Call, rule: Callable[[int, int, int], PackedPlan]) -> PackedPlan:
    if not (call.device.gluon and call.device.hopper):
        return None
    found = rule(call.rows, call.outputs * (2 if call.gated else 1), call.inputs)
    if found is None:
        return None
    placed = found.shared_bytes(call.inputs) if isinstance(found, PackedGemvPlan) else found.shared_bytes()
    return found if found.programs * (placed + PACKED_RESERVED) <= call.device.shared else None


def _high_plan(rows: int, outputs: int, inputs: int) -> PackedPlan:
    return packed_plan(rows, outputs, inputs, True)


def _gemv_of(rule: Callable[[int, int, int], PackedPlan]) -> Callable[[Call], PackedPlan]:
    def plan(call: Call) -> PackedPlan:
        found = _packed(call, rule)
        return found if isinstance(found, PackedGemvPlan) else None

    return plan


def _gemm_of(rule: Callable[[int, int, int], PackedPlan]) -> Callable[[Call], PackedPlan]:
    def plan(call: Call) -> PackedPlan:
        found = _packed(call, rule)
        return found if isinstance(found, PackedGemmPlan) else None

    return plan


def _few_rows(call: Call) -> bool | None:
    return True if 1 <= call.rows <= MOST_CODE_ROWS else None


def _few_group_rows(call: Call) -> bool | None:
    gains = FEWEST_GROUP_ROWS <= call.rows <= MOST_CODE_ROWS and call.outputs >= FEWEST_GROUP_OUTPUTS
    return True if gains else None


def _one_row(call: Call) -> bool | None:
    return True if call.rows == 1 else None


def _blocked(call: Call) -> bool | None:
    return True if call.rows >= FEWEST_BLOCKED_ROWS else None


def _always(call: Call) -> bool:
    return True


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────

# One row has two rows of codes: the ops ask for one row, and where nothing serves that, for two.
_ROWS = (
    Kernel("one_row_gemm", _one_row_gemm, True), Kernel("ring_gemm", _code_ring_gemm), Kernel("wide_gemm", _code_wide_gemm),
)
_CODES = Kernel("codes_gemv", _codes_gemv, True)         # 8-bit codes that are not packed; x stays in 16 bits
_GATED = Kernel("gated_wide_gemm", _code_gated_gemm)     # a tile with scales of blocks would have several of them
_PACKED_ROWS = (Kernel("packed_gemm", _gemm_of(packed_plan)), Kernel("expand", _always))
_ANY = (Kernel("few_rows", _few_rows), Kernel("expand", _always))
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "16-bit": (
        Kernel("wide_gemm", _wide_gemm), Kernel("ring_gemv", _ring_gemv, True), Kernel("gemv", _gemv, True),
        Kernel("ring_gemm", _ring_gemm), Kernel("small_gemm", _small_gemm), Kernel("gated_gemm", _gated_gemm),
        Kernel("library", _always),
    ),
    "fp8-row": (_GATED, *_ROWS, _CODES, Kernel("scaled_mm", _always)),
    "int8-row": (_GATED, *_ROWS, _CODES, Kernel("integer_gemm", _integer_gemm), Kernel("int_mm", _always)),
    "fp8-block": (*_ROWS, _CODES, Kernel("scaled_mm_blocks", _scaled_mm_blocks), Kernel("expand", _always)),
    "fp8-block-cut": (*_ROWS[:2], _CODES, Kernel("expand", _always)),            # blocks that a part of the linear cuts
    "codes": (_CODES, *_ANY),
    "4-bit": (Kernel("packed_gemv", _gemv_of(packed_plan), True), *_PACKED_ROWS),
    "6-bit": (Kernel("packed_gemv", _gemv_of(_high_plan), True), *_PACKED_ROWS),     # Q5, Q6_K: a plane of two more bits
    "8-bit": (                                                           # Q8_0, W8A16, LLM.int8(): x stays in 16 bits
        Kernel("byte_gemv", _gemv_of(byte_plan), True), Kernel("packed_gemm", _gemm_of(byte_plan)), Kernel("expand", _always),
    ),
    "groups": (Kernel("few_rows", _few_group_rows), Kernel("expand", _always)),      # as stored
    "other": _ANY,
    "cpu-float32": (Kernel("linear_row", _one_row), Kernel("blocked", _blocked), Kernel("library", _always)),
    "cpu-packed": (Kernel("packed_rows", _always),),
}
LIBRARY = Choice("library", True, False)


def choose(format: str, rows: int, outputs: int, inputs: int, gated: bool, device: DeviceFacts) -> Choice:
    """The first kernel with a plan. With a gate, `outputs` counts the pairs."""
    return _chosen(format, min(rows, MANY_ROWS), outputs, inputs, gated, device)


@functools.cache
def _chosen(format: str, rows: int, outputs: int, inputs: int, gated: bool, device: DeviceFacts) -> Choice:
    call = Call(rows, outputs, inputs, gated, device)
    found = ((kernel, kernel.plan(call)) for kernel in KERNELS[format])
    return next(Choice(kernel.name, made, kernel.fuses_norm) for kernel, made in found if made is not None)


@functools.cache
def bands(format: str, outputs: int, inputs: int, gated: bool, device: DeviceFacts) -> tuple[tuple[int, int, str], ...]:
    """(first rows, last rows, kernel), from one row to MANY_ROWS, which stands for more. Kept: all layers have the same few
    matrices, and a plan asks for a model hundreds of times."""
    found = []
    first, name = 1, choose(format, 1, outputs, inputs, gated, device).kernel
    for rows in range(2, MANY_ROWS + 1):
        following = choose(format, rows, outputs, inputs, gated, device).kernel
        if following != name:
            found.append((first, rows - 1, name))
            first, name = rows, following
    return *found, (first, MANY_ROWS, name)
