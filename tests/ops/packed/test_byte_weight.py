"""8-bit codes in the packed layout: no number changes, the PTX makes the right operands, and on a GPU kernels multiply by it."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import ptx_warp
import pytest
import torch
import torch.nn.functional as F
from folders import import_path
from test_block_asm import DTYPES, ERRORS, LANE, assert_near, random_x, words

from ridgeline.ops.hopper import HAS_GLUON, is_hopper
from ridgeline.ops.kernel_table import H200, PACKED_RESERVED, choose
from ridgeline.ops.packed import packed_linear as packed_file
from ridgeline.ops.packed.block_weight import packed_numbers
from ridgeline.ops.packed.byte_asm import byte_factors, byte_operands, byte_products, enlarged, tile_scales
from ridgeline.ops.packed.byte_weight import holds_bytes, pack_bytes, stored_bytes
from ridgeline.ops.packed.packed_asm import code_step, restored, sum_span, x_factor
from ridgeline.ops.packed.packed_expand import expand as expand_packed
from ridgeline.ops.packed.packed_linear import multiplied, normed_packed_linear_gpu, packed_linear
from ridgeline.ops.packed.packed_sizes import byte_bytes
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.packed.select_packed import MOST_ROWS, PackedGemmPlan, PackedGemvPlan, byte_plan
from ridgeline.ops.quantised.expand import QuantisedWeight, expand
from ridgeline.ops.rms_norm import rms_norm_reference

HOPPER = torch.cuda.is_available() and HAS_GLUON and is_hopper(torch.device("cuda", 0))
# Groups, and the dtype of scales: Q8_0, GPTQ and compressed-tensors with groups, a scale for each output.
FORMS = {
    "Q8_0": (32, torch.float16), "of 64": (64, torch.bfloat16), "of 128": (128, torch.bfloat16), "of 256": (256, torch.float16),
    "row": (0, torch.float32), "of 16": (16, torch.bfloat16),
}
MATRICES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (2048, 2048), (10240, 8192), (8192, 28672)]


def random_bytes(form: str, outputs: int, inputs: int, device: str = "cpu") -> QuantisedWeight:
    """All codes there are, -128 among them; one output without a scale."""
    (group, dtype), generator = FORMS[form], torch.Generator(device).manual_seed(outputs + inputs)
    codes = torch.randint(-128, 128, (outputs, inputs), device=device, generator=generator, dtype=torch.int8)
    shape = (outputs, inputs // group) if group else (outputs,)
    scale = ((torch.rand(shape, device=device, generator=generator) + 0.5) * inputs**-0.5 / 74).to(dtype)
    scale[3] = 0
    return QuantisedWeight("int8", inputs, codes, scale, (1, group))


# ── the layout ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_packing_keeps_every_number(form: str, gated: bool) -> None:
    """With padded outputs and inputs."""
    weight = random_bytes(form, 32 if gated else 24, 768)
    packed = pack_bytes(weight, gated)
    assert torch.equal(stored_bytes(packed).weight, weight.weight)
    assert torch.equal(packed_numbers(packed, torch.float64), expand(weight, torch.float64))
    assert packed.group == min(FORMS[form][0] or 128, 128) and (packed.outer is None) == (form != "row")
    assert packed.nbytes == byte_bytes(len(weight.weight), 768, packed.group, packed.outer is not None)
    x = torch.randn(3, 768, dtype=torch.float64)
    torch.testing.assert_close(packed_linear(x, packed), x @ expand(weight, torch.float64).T, rtol=1e-12, atol=1e-12)


def test_what_the_layout_does_not_hold() -> None:
    weight = random_bytes("Q8_0", 32, 512)
    assert holds_bytes(weight) and holds_bytes(weight, gated=True) and not holds_bytes(weight._replace(zero=weight.scale))
    assert not holds_bytes(weight._replace(grid="e4m3")) and not holds_bytes(random_bytes("Q8_0", 24, 512), gated=True)
    wide = weight._replace(scale=weight.scale.float())
    assert holds_bytes(wide) and not holds_bytes(wide._replace(scale=wide.scale + 2**-26))
    assert not holds_bytes(random_bytes("row", 16, 100)) and not holds_bytes(weight._replace(block=(16, 32)))


@pytest.mark.parametrize("inputs", [8, 96, 136, 520, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_for_each_output_needs_no_whole_groups(inputs: int, dtype: str) -> None:
    """The last group of a row is padded with codes that mean zero."""
    weight = random_bytes("row", 16, inputs)
    assert holds_bytes(weight)
    packed, numbers = pack_bytes(weight), expand(weight, torch.float64)
    assert torch.equal(packed_numbers(packed, torch.float64), numbers)
    assert packed.nbytes == byte_bytes(16, inputs, 128, True)
    if inputs < 512:
        x = torch.where(torch.arange(512) < inputs, random_x(dtype, 3.0), 0)     # as kernels place it
        assert_near(one_row(packed, x, dtype, "bf16"), numbers, x[:inputs], 1e-5)
        assert (left_operand(packed, inputs // 64, dtype, "bf16")[:, inputs % 64 :] == 0).all()


def check_expanding(device: str) -> None:
    for form, inputs in (*((form, 768) for form in FORMS), ("row", 520)):
        for gated in (False, True):
            packed = pack_bytes(random_bytes(form, 32 if gated else 40, inputs, device), gated)
            assert torch.equal(expand_packed(packed, torch.float32), packed_numbers(packed, torch.float32)), form


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_expanding_in_memory(run_interpreted: Any) -> None:
    if torch.cuda.is_available():
        check_expanding("cuda")
        return
    run = run_interpreted([sys.executable, __file__], PYTHONPATH=import_path())
    assert run.returncode == 0, run.stderr[-3000:]


# ── instructions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def one_row(weight: PackedWeight, x: torch.Tensor, dtype: str, scale_dtype: str) -> np.ndarray:
    """16 outputs, with operands as byte_gemv.py hands them over."""
    assert weight.high is not None
    planes, scale = (words(weight.codes[0]), words(weight.high[0])), words(weight.scale[0, 0])
    pairs = words((x * x_factor(dtype)).view(-1, 2).contiguous().view(torch.int32)[:, 0]).reshape(-1, 8)
    span, sums = sum_span("int8", weight.group), np.zeros(16)
    each = tile_scales(weight.group)
    for tile in range(8):
        operands, block = {number: np.zeros(32, np.uint32) for number in range(8)}, tile // 2
        for step in range(4):
            for half in (0, 1):
                operands[8 + 4 * half + step] = planes[half][tile, :, step]
                operands[16 + 2 * step + half] = pairs[4 * tile + step][LANE % 4 + 4 * half]
        first = tile % 2 * each if weight.group < 128 else 0
        operands |= {24 + 4 * number: scale[first + number] for number in range(each)}
        totals = x[128 * block : 128 * block + 128].double().view(-1, span).sum(1) * -code_step("int8", dtype)
        at = 24 + 4 * each
        operands |= {at + number: np.full(32, total, np.float32).view(np.uint32) for number, total in enumerate(totals)}
        found = ptx_warp.run(byte_products(weight.group, dtype, scale_dtype, tile), operands)
        for half in (0, 1):
            column = found[2 * half].view(np.float32).reshape(8, 4)
            assert (column == column[:, :1]).all()                               # x is in every column
            sums[8 * half : 8 * half + 8] += column[:, 0].astype(np.float64) * restored("int8", dtype, bool(half))
    return sums if weight.outer is None else sums * weight.outer.double().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_one_row(form: str, dtype: str) -> None:
    """Nothing is rounded to 16 bits, so also not with x far from zero."""
    weight = pack_bytes(random_bytes(form, 16, 512))
    for mean in (0.0, 3.0):
        x = random_x(dtype, mean)
        found = one_row(weight, x, dtype, "f16" if weight.scale_dtype == torch.float16 else "bf16")
        assert_near(found, packed_numbers(weight, torch.float64), x, 1e-5)


def left_operand(weight: PackedWeight, tile: int, dtype: str, scale_dtype: str) -> np.ndarray:
    """[16, 64] as packed_gemm.py makes it of one of the eight tiles of 512 inputs."""
    assert weight.high is not None
    out, block = np.zeros((16, 64)), np.full(32, tile // 2, np.uint32)
    for word in range(4):
        group = (tile % 2 * 64 + word * 16) // weight.group
        factors = ptx_warp.run(byte_factors(dtype, scale_dtype), {2: words(weight.scale[0, 0])[group], 3: block})
        codes = [words(plane[0])[tile, :, word] for plane in (weight.codes, weight.high)]
        found = ptx_warp.run(byte_operands(dtype), {8: codes[0], 9: codes[1], 10: factors[0], 11: factors[1]})
        for number in range(8):
            bits = found[number].astype(np.uint16)
            values = bits.view(np.float16) if dtype == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)
            pair, odd = divmod(number, 2)
            out[LANE // 4 + 8 * (pair % 2), 16 * word + 8 * (pair // 2) + 2 * (LANE % 4) + odd] = values
    return out * enlarged("int8", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_many_rows(form: str, dtype: str) -> None:
    """Weights are rounded once; those whose scale is that of a whole output not at all."""
    weight = pack_bytes(random_bytes(form, 16, 512))
    wanted = expand(stored_bytes(weight)._replace(outer=None), torch.float64).numpy()
    for tile in (0, 3, 6):
        part = wanted[:, 64 * tile : 64 * tile + 64]
        error = np.abs(left_operand(weight, tile, dtype, "f16" if weight.scale_dtype == torch.float16 else "bf16") - part)
        assert np.linalg.norm(error) <= (0 if weight.outer is not None else ERRORS[dtype]) * np.linalg.norm(part)


def test_large_and_small_scales_stay_within_bf16() -> None:
    """The largest scale that float16 has, and one far below what weights need."""
    for size in (65504.0, 2.0**-24):
        weight = random_bytes("Q8_0", 16, 512)
        packed = pack_bytes(weight._replace(scale=torch.full_like(weight.scale, size)))
        wanted = packed_numbers(packed, torch.float64).numpy()[:, :64]
        assert np.linalg.norm(left_operand(packed, 0, "bf16", "f16") - wanted) < ERRORS["bf16"] * np.linalg.norm(wanted)


# ── which kernel ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("outputs", "inputs"), MATRICES)
def test_plans_fit_an_sm(outputs: int, inputs: int) -> None:
    for rows in (1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, MOST_ROWS):
        plan = byte_plan(rows, outputs, inputs)
        if isinstance(plan, PackedGemvPlan):
            assert rows == 1 and plan.programs * (plan.shared_bytes(inputs) + PACKED_RESERVED) <= H200.shared
            continue
        assert isinstance(plan, PackedGemmPlan) and plan.programs * (plan.shared_bytes() + PACKED_RESERVED) <= H200.shared
        assert 2 <= plan.tiles <= 4 and 8 % plan.tiles == 0


def test_codes_are_multiplied_from_one_row_to_768(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {rows: choose("8-bit", rows, 14336, 4096, True, H200).kernel for rows in (1, 2, 128, 768, 769)}
    assert kernels == {1: "byte_gemv", 2: "packed_gemm", 128: "packed_gemm", 768: "packed_gemm", 769: "expand"}
    assert choose("8-bit", 128, 14336, 4096, True, H200._replace(hopper=False)).kernel == "expand"
    monkeypatch.setattr(packed_file, "device_facts", lambda device: H200)
    packed, x = pack_bytes(random_bytes("Q8_0", 64, 256)), torch.zeros(2, 256, dtype=torch.float16)
    assert {packed_file._chosen(each, packed, False).kernel for each in (x, x.bfloat16())} == {"packed_gemm"}


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize(("form", "rows"), [
    *((form, rows) for form in ("Q8_0", "row") for rows in (1, 2, 16, 30, 50, 128, 200, 800)),
    *((form, rows) for form in ("of 64", "of 128") for rows in (1, 16, 128)), ("of 16", 1), ("of 16", 16),
])
def test_kernels_match_float64(form: str, rows: int) -> None:
    torch.manual_seed(rows)
    for dtype, worst in ((torch.float16, 0.0015), (torch.bfloat16, 0.01)):
        odd = (1000, 1096) if form == "row" else (1000, 2048)            # inputs that are no whole groups
        for gate, (outputs, inputs) in ((None, odd), (None, (6144, 4096)), ("silu", (512, 1536))):
            packed = pack_bytes(random_bytes(form, outputs, inputs, "cuda"), gate is not None)
            numbers = packed_numbers(packed, torch.float64)
            assert torch.equal(expand_packed(packed, torch.float32), packed_numbers(packed, torch.float32))
            x, residual = (torch.randn(rows, inputs, device="cuda").to(dtype) for _ in range(2))
            norm, bias = torch.rand(inputs, device="cuda").to(dtype), torch.randn(outputs, device="cuda").to(dtype)
            for _ in range(2):                           # split sums leave counters behind
                found = (multiplied(x, packed, bias, gate), x.double())
                normed = normed_packed_linear_gpu(x, residual, norm, 1e-5, packed, bias, gate=gate)[0]
                for out, read in (found, (normed, rms_norm_reference((x + residual).double(), norm.double(), 1e-5))):
                    wanted = F.linear(read, numbers, bias.double())
                    if gate is not None:
                        left, right = wanted.chunk(2, 1)
                        wanted = F.silu(left) * right
                    assert float((out.double() - wanted).norm() / wanted.norm()) < worst


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_many_equal_terms_is_right(dtype: torch.dtype, rows: int) -> None:
    codes = torch.full((4096, 14336), 9, device="cuda", dtype=torch.int8)
    scale = torch.full((4096, 448), 0.125, device="cuda", dtype=dtype)
    weight = pack_bytes(QuantisedWeight("int8", 14336, codes, scale, (1, 32)))
    out = packed_linear(torch.ones(rows, 14336, device="cuda", dtype=dtype), weight)
    torch.testing.assert_close(out.float(), torch.full_like(out, 14336 * 1.125).float(), rtol=2**-8, atol=0)


if __name__ == "__main__":
    check_expanding("cpu")
