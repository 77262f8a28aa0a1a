"""The rule that chooses a kernel: what was measured comes out, and no shape leaves multiprocessors without work."""

from __future__ import annotations

import pytest

from ridgeline.ops.kernel_table import RING_GEMM_RESERVED
from ridgeline.ops.linear.gemm_small import MOST_TILES
from ridgeline.ops.linear.select import (
    MULTIPROCESSORS,
    SPLIT_UNIT,
    GemmPlan,
    GemvPlan,
    RingPlan,
    even_splits,
    invariant_plan,
    plan,
    ring_gemm_plan,
    ring_plan,
    split_inputs,
)

# outputs (pairs, with a gate), inputs, gate
LLAMA_8B = [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False)]
LLAMA_1B = [(3072, 2048, False), (2048, 2048, False), (8192, 2048, True), (2048, 8192, False), (128256, 2048, False)]
QWEN3_8B = [(6144, 4096, False), (12288, 4096, True), (4096, 12288, False), (151936, 4096, False)]
LLAMA_70B = [(10240, 8192, False), (8192, 8192, False), (28672, 8192, True), (8192, 28672, False)]
QUARTER_70B = [(2560, 8192, False), (8192, 2048, False), (7168, 8192, True), (8192, 7168, False)]
SMALL = [(960, 576, False), (576, 576, False), (1536, 576, True), (576, 1536, False), (49152, 576, False)]
LLAMA_3B = [(5120, 3072, False), (3072, 3072, False), (8192, 3072, True), (3072, 8192, False), (128256, 3072, False)]
QWEN25_7B = [(4608, 3584, False), (3584, 3584, False), (18944, 3584, True), (3584, 18944, False), (152064, 3584, False)]
SHAPES = [*LLAMA_8B, *LLAMA_1B, *LLAMA_3B, *QWEN3_8B, *QWEN25_7B, *LLAMA_70B, *QUARTER_70B, *SMALL]
ROWS = [1, 2, 7, 16, 17, 32, 40, 64, 65, 100, 128, 129, 512]


def test_the_measured_shapes_get_what_won() -> None:
    assert [plan(1, *shape) for shape in LLAMA_8B] == [
        GemvPlan(2, 8, 4), GemvPlan(2, 8, 4), GemvPlan(1, 4, 16), GemvPlan(2, 16, 2), GemvPlan(2, 8, 4),
    ]
    assert [plan(16, *shape) for shape in LLAMA_8B[:4]] == [
        GemmPlan(16, 64, 256, 4, 5, 1, 48), GemmPlan(16, 64, 256, 4, 5, 2, 64), GemmPlan(16, 64, 128, 4, 3, 1, 56),
        GemmPlan(16, 64, 256, 4, 5, 2, 64),
    ]
    assert plan(128, 14336, 4096, True) == GemmPlan(128, 128, 64, 8, 4, 1, 112)
    assert plan(128, 4096, 4096) is None and plan(129, 14336, 4096, True) is None
    assert plan(128, 8192, 2048, True) is None and plan(128, 7168, 8192, True) is None       # narrow tiles lost
    assert plan(64, 8192, 2048, True) is not None


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), SHAPES)
def test_every_plan_is_sound(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    chosen = plan(rows, outputs, inputs, gated)
    if isinstance(chosen, GemvPlan):
        assert rows == 1
        padded = 1 << (inputs - 1).bit_length()
        in_registers = chosen.block * padded * (2 if gated else 1) / (32 * chosen.warps)
        assert in_registers <= 64                        # more would spill
        assert chosen.warps * chosen.programs <= 64      # what a multiprocessor holds
    elif chosen is not None:
        assert rows <= chosen.block_rows
        assert chosen.step <= chosen.block_outputs
        step = chosen.step or chosen.block_outputs
        width = chosen.block_rows + chosen.block_outputs * (2 if gated else 1)
        assert width * chosen.block_inputs * 2 * chosen.stages <= 232448         # shared memory
        tiles = -(-outputs // step)
        assert chosen.splits == 1 or tiles <= MOST_TILES
        if outputs * inputs > 4e6:                       # worth more than one launch
            programs = tiles * chosen.splits
            assert programs / (-(-programs // MULTIPROCESSORS) * MULTIPROCESSORS) > 0.7


def test_rings_fill_the_shared_memory() -> None:
    """Deep enough to keep the memory busy while a kernel waits, and threads whose registers hold what they multiply."""
    assert ring_plan(6144, 4096) == RingPlan(2, 8, 3, 4) and ring_plan(4096, 14336) == RingPlan(1, 16, 2, 3)
    assert ring_plan(2048, 4096) == ring_plan(4096, 4096)            # O of Qwen3-30B-A3B, and nothing else of so few outputs
    assert ring_plan(2048, 8192) is ring_plan(2048, 4096, True) is ring_plan(1536, 4096) is ring_plan(2048, 3072) is None
    for outputs, inputs, gated in SHAPES:
        if not isinstance(plan(1, outputs, inputs, gated), GemvPlan):
            continue
        ring, padded = ring_plan(outputs, inputs, gated), 1 << (inputs - 1).bit_length()
        if (outputs, inputs, gated) in (*LLAMA_1B, *SMALL) or inputs == 2048:
            assert ring is None                          # measured: slower
            continue
        assert ring is not None and ring.shared_bytes(padded, gated) == 192 * 1024
        assert ring.stages >= 3 and ring.programs * ring.warps <= 32
        assert ring.block * padded % (8 * 32 * ring.warps) == 0      # whole copies of 16 bytes for every thread
        assert ring.block * padded // (32 * ring.warps) <= 64


@pytest.mark.parametrize("rows", ROWS)
def test_rings_of_a_few_rows_are_sound(rows: int) -> None:
    for outputs, inputs, gated in SHAPES:
        ring = ring_gemm_plan(rows, outputs, inputs, gated)
        if ring is None or not isinstance(plan(rows, outputs, inputs, gated), GemmPlan):
            continue
        assert rows <= ring.block_rows
        part = split_inputs(inputs, ring.splits)
        assert inputs % ring.block_inputs == 0 and part % ring.block_inputs == 0     # no block is cut off
        assert ring.stages >= 3 and ring.x_stages >= 3
        assert ring.programs * (ring.shared_bytes(gated) + RING_GEMM_RESERVED) <= 232448
        weights = (ring.stages - 1) * ring.block_outputs * ring.block_inputs * (4 if gated else 2)
        assert ring.programs * weights >= 96 * 1024      # on their way before the wait
        tiles = -(-outputs // ring.step)
        assert 8 <= ring.step <= ring.block_outputs and ring.step % 8 == 0 and tiles <= MOST_TILES
        if outputs * inputs > 4e6:
            programs = tiles * ring.splits
            assert programs / (-(-programs // MULTIPROCESSORS) * MULTIPROCESSORS) > 0.7


def test_where_rings_of_a_few_rows_are() -> None:
    """As measured on an H200. A single row too long for registers is one of a few."""
    assert ring_gemm_plan(2, 6144, 2560) is not None and ring_gemm_plan(2, 3072, 2048) is None
    assert ring_gemm_plan(32, 4096, 4096) is not None and ring_gemm_plan(40, 4096, 4096) is None
    assert ring_gemm_plan(48, 4096, 4096) is not None and ring_gemm_plan(65, 4096, 4096) is None
    assert ring_gemm_plan(64, 14336, 4096, True) is None
    assert isinstance(plan(1, 3584, 18944), GemmPlan) and ring_gemm_plan(1, 3584, 18944) is not None


@pytest.mark.parametrize(("outputs", "inputs", "narrow"), [
    (14336, 4096, False), (12288, 4096, False), (28672, 8192, False), (8192, 3072, True), (9728, 2560, True),
    (18944, 3584, True),
])
def test_gated_tiles_that_would_be_half_empty_are_narrow(outputs: int, inputs: int, narrow: bool) -> None:
    for rows in (4, 16, 32):
        ring = ring_gemm_plan(rows, outputs, inputs, True)
        assert ring is not None
        assert (ring.block_outputs, ring.programs) == ((64, 1) if narrow else (128, 1) if rows == 32 else (64, 2))


def test_what_the_kernels_cannot_do_is_the_librarys() -> None:
    assert plan(1, 4096, 4100) is None                   # loads of 16 bytes
    assert plan(1, 32, 4096) is None and plan(4, 4096, 128) is None
    assert plan(0, 4096, 4096) is None
    assert isinstance(plan(1, 8192, 28672), GemmPlan)    # too long a row for registers


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 14336), (2048, 11008), (70, 1040), (6144, 4096)])
def test_parts_are_a_matter_of_the_matrix(outputs: int, inputs: int) -> None:
    splits = even_splits(outputs, inputs)
    assert {invariant_plan(rows, outputs, inputs).splits for rows in ROWS} == {splits}
    part = split_inputs(inputs, splits)
    assert part % SPLIT_UNIT == 0 and part * splits >= inputs
    assert all(SPLIT_UNIT % invariant_plan(rows, outputs, inputs).block_inputs == 0 for rows in ROWS)
