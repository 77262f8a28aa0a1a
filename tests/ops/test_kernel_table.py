"""The kernel table: every call is served, on an H200 and on other devices, and its text says by which kernel."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from ridgeline.bench.lab.kernel_bands import MATRICES, kernel_rows
from ridgeline.ops import kernel_table
from ridgeline.ops.hopper import has_block_scales
from ridgeline.ops.kernel_table import CPU, H200, KERNELS, MANY_ROWS, DeviceFacts, bands, choose

A100 = DeviceFacts(True, False, 166_912, 108)
INTERPRETED = DeviceFacts(False, True, 232_448, 132)
GLUON = {"ring_gemv", "ring_gemm", "wide_gemm", "codes_gemv", "byte_gemv", "packed_gemv", "packed_gemm"}


@pytest.mark.parametrize("format", KERNELS)
@pytest.mark.parametrize("device", [H200, A100, INTERPRETED, CPU], ids=["h200", "a100", "interpreter", "cpu"])
def test_every_call_has_a_kernel(format: str, device: DeviceFacts) -> None:
    for outputs, inputs, gated in [*MATRICES.values(), (48, 100, False), (7, 37, False)]:
        served = bands(format, outputs, inputs, gated, device)
        assert served[0][0] == 1 and served[-1][1] == MANY_ROWS
        assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(served))
        if not device.gluon:
            assert not {kernel for _, _, kernel in served} & GLUON


def test_only_kernels_of_one_row_fuse_the_norm() -> None:
    for format in KERNELS:
        assert not any(choose(format, rows, 4096, 4096, False, H200).fuses_norm for rows in (2, 16, 128, 4096))
    assert choose("16-bit", 1, 4096, 4096, False, H200).fuses_norm and choose("4-bit", 1, 4096, 4096, False, H200).fuses_norm


def test_rows_beyond_the_table_take_the_last_kernel_and_grow_no_cache() -> None:
    assert choose("16-bit", 5000, 14336, 4096, True, H200) is choose("16-bit", 8192, 14336, 4096, True, H200)


def test_a_matrix_is_looked_up_once_for_all_layers_and_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    served = bands("int8-row", 4096, 4096, False, H200)
    monkeypatch.setattr(kernel_table, "choose", None)
    assert bands("int8-row", 4096, 4096, False, H200) is served


def test_blocks_that_a_part_cuts_have_no_tiles_of_128_outputs() -> None:
    assert choose("fp8-block", 128, 4096, 4096, False, H200).kernel == "wide_gemm"
    assert choose("fp8-block-cut", 128, 4096, 4096, False, H200).kernel == "expand"
    assert choose("fp8-block", 512, 4096, 4096, False, H200).kernel == "scaled_mm_blocks"
    assert choose("fp8-block", 512, 4096, 4224, False, H200).kernel == "expand"          # 33 scales a row


def test_scales_of_blocks_need_a_torch_for_cuda_12_9() -> None:
    assert choose("fp8-block", 512, 4096, 4096, False, H200._replace(block_scales=False)).kernel == "expand"
    built = {None: False, "11.8": False, "12.6": False, "12.8": False, "12.9": True, "13.0": True}
    assert {version: has_block_scales(version) for version in built} == built


def test_the_table_as_text_names_each_format_and_matrix() -> None:
    rows = kernel_rows(H200)
    assert {(row["format"], row["matrix"]) for row in rows} == {(format, matrix) for format in KERNELS for matrix in MATRICES}
    gated = next(row for row in rows if row["format"] == "16-bit" and row["matrix"] == "gate and up")
    text = gated["rows and kernel"]
    assert text.startswith("1 ring_gemv, 2–32 ring_gemm") and text.endswith("640+ gated_gemm")


def test_the_table_needs_no_torch() -> None:
    code = "import sys, ridgeline.ops.kernel_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
