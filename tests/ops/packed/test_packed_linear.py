"""Linears with packed 4-bit weights: which kernel, what it costs, and on a GPU that it is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.ops import kernel_table
from ridgeline.ops.hopper import HAS_GLUON, is_hopper
from ridgeline.ops.kernel_table import PACKED_RESERVED
from ridgeline.ops.packed import packed_linear as packed_file
from ridgeline.ops.packed.packed_expand import expand
from ridgeline.ops.packed.packed_linear import multiplied, normed_packed_linear_gpu, packed_linear
from ridgeline.ops.packed.packed_weight import PackedWeight, expanded, pack, quantised, scale_numbers
from ridgeline.ops.packed.select_packed import MOST_ROWS, PackedGemmPlan, PackedGemvPlan, packed_plan
from ridgeline.ops.rms_norm import rms_norm_reference
from ridgeline.sizes.packed_costs import packed_bytes

H200 = 232_448                       # bytes of shared memory of an SM that CTAs may have
MATRICES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 2048), (10240, 8192), (8192, 28672), (576, 1536)]
HOPPER = torch.cuda.is_available() and HAS_GLUON and is_hopper(torch.device("cuda", 0))


# ── which kernel ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("outputs", "inputs"), MATRICES)
def test_plans_fit_an_sm_and_cover_the_matrix(outputs: int, inputs: int) -> None:
    for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, MOST_ROWS):
        plan = packed_plan(rows, outputs, inputs)
        if isinstance(plan, PackedGemvPlan):
            assert rows == 1 and plan.programs * (plan.shared_bytes(inputs) + PACKED_RESERVED) <= H200
            continue
        assert isinstance(plan, PackedGemmPlan)
        assert plan.programs * (plan.shared_bytes() + PACKED_RESERVED) <= H200
        assert 1 <= plan.step <= plan.parts * plan.warps * plan.halves
        assert plan.block_rows >= min(rows, 64 if plan.together else 128) and 2 <= plan.tiles <= 8 and 8 % plan.tiles == 0
        # Sums that are split are counted as they arrive: one counter each.
        tiles, row_blocks = -(-outputs // (16 * plan.step)), -(-rows // plan.block_rows)
        assert plan.splits == 1 or tiles * row_blocks * plan.parts * plan.halves <= 4096


def test_one_row_is_a_gemv_and_many_rows_are_cublas() -> None:
    assert isinstance(packed_plan(1, 4096, 14336), PackedGemvPlan)
    assert isinstance(packed_plan(2, 4096, 4096), PackedGemmPlan)
    assert packed_plan(MOST_ROWS + 1, 4096, 4096) is None and packed_plan(0, 4096, 4096) is None


def test_parts_share_outputs_where_one_round_of_tiles_fills_the_sms() -> None:
    """(block_rows, splits) of the study's fastest plans; None: parts with outputs of their own were faster."""
    fastest = {
        (6144, 4096): {16: None, 17: (32, 1), 32: (32, 1), 64: (64, 1), 128: (128, 1), 256: None},
        (4096, 4096): {16: None, 17: (32, 2), 32: (32, 2), 64: (64, 2), 128: (64, 1), 256: (128, 1), 257: None},
        (4096, 14336): {32: (32, 2), 64: (64, 2), 128: (64, 1), 256: (128, 1)},
        (28672, 4096): dict.fromkeys((32, 64, 128, 256)),
        (128256, 4096): dict.fromkeys((32, 64, 128, 256)),
        (4096, 2048): dict.fromkeys((32, 128)),          # not measured
    }
    for matrix, by_rows in fastest.items():
        for rows, wanted in by_rows.items():
            plan = packed_plan(rows, *matrix)
            assert isinstance(plan, PackedGemmPlan)
            assert ((plan.block_rows, plan.splits) if plan.together else None) == wanted, (matrix, rows)


def test_codes_of_more_bits_have_a_gemv_plan_of_their_own() -> None:
    assert packed_plan(1, 6144, 4096) == PackedGemvPlan(2, 4, 2) and packed_plan(1, 6144, 4096, True) == PackedGemvPlan(1, 4, 3)
    for outputs, inputs in [(4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]:
        assert packed_plan(1, outputs, inputs) == packed_plan(1, outputs, inputs, True)
    six, four = (kernel_table.choose(format, 1, 6144, 4096, False, kernel_table.H200) for format in ("6-bit", "4-bit"))
    assert six.plan == PackedGemvPlan(1, 4, 3) and four.plan == PackedGemvPlan(2, 4, 2) and six.fuses_norm


def random_weight(outputs: int, inputs: int, group: int, gated: bool = False, **more: Any) -> PackedWeight:
    kind = more.pop("kind", "uint4")
    codes, scale = quantised(torch.randn(outputs, inputs) * inputs**-0.5, group, kind)
    return pack(codes, scale, kind=kind, gated=gated, **more)


def test_what_kernels_do_not_know_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "device_facts", lambda device: kernel_table.H200)
    weight = random_weight(64, 256, 64)
    x = torch.zeros(1, 264, dtype=torch.bfloat16)

    def chosen(x: torch.Tensor, weight: PackedWeight, gated: bool = False) -> bool:
        return packed_file._chosen(x, weight, gated).kernel != "expand"

    assert chosen(x[:, :256], weight) and chosen(x[:, :256].half(), weight)
    assert not chosen(x[:, 1:257], weight)                                       # 16-byte loads
    assert not chosen(x[:, :256].float(), weight)
    assert not chosen(x[:, :256], weight, gated=True)                            # gates and partners do not alternate
    assert not chosen(x[:, :256], random_weight(64, 256, 64, gated=True))
    assert not chosen(x[:, :256].half(), random_weight(64, 256, 32, kind="e2m1"))
    codes, scale = quantised(torch.randn(64, 256), 64)
    assert chosen(x[:, :256], pack(codes, scale, torch.full_like(scale, 7.0)))
    assert not chosen(x[:, :256], pack(codes, scale, torch.full_like(scale, 7.5)))


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_definition_multiplies_by_the_expanded_weight() -> None:
    weight, x = random_weight(32, 256, 64, gated=True), torch.randn(3, 256, dtype=torch.float64)
    wanted = x @ expanded(weight, torch.float64).T
    torch.testing.assert_close(packed_linear(x, weight), wanted, rtol=1e-12, atol=1e-12)


def test_costs_count_the_bytes_that_are_stored() -> None:
    codes, scale = quantised(torch.randn(64, 1024), 128)
    assert pack(codes, scale).nbytes == packed_bytes(64, 1024, 128)
    outer = torch.ones(64)
    bytes_ = torch.full((64, 32), 120, dtype=torch.uint8)
    assert pack(codes, bytes_, kind="e2m1", outer=outer).nbytes == packed_bytes(64, 1024, 32, False, True, scale_bytes=1)
    assert pack(codes, scale, torch.full_like(scale, 8.0), outer=outer).nbytes == packed_bytes(64, 1024, 128, True, True)


CASES: list[dict[str, Any]] = [
    {"shape": (6144, 4096)}, {"shape": (4096, 14336)}, {"shape": (4096, 4096), "group": 32, "kind": "e2m1"},
    {"shape": (28672, 4096), "gate": "silu"}, {"shape": (1000, 1088), "group": 64, "zero": True},
    {"shape": (512, 2560), "group": 16, "kind": "e2m1", "outer": True}, {"shape": (512, 2560), "group": 16, "zero": True},
    {"shape": (2048, 2048), "dtype": torch.float16, "zero": True},
    {"shape": (2048, 1536), "group": 32, "zero": True, "gate": "gelu_tanh", "outer": True},
]


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 30, 50, 128, 200, 800])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_match_float64(case: dict[str, Any], rows: int) -> None:
    """With a planted output of zeros: a scale of 0. Twice, since split sums leave counters behind."""
    torch.manual_seed(rows)
    (outputs, inputs), group, gate = case["shape"], case.get("group", 128), case.get("gate")
    dtype = case.get("dtype", torch.bfloat16)
    codes = torch.randint(256, (outputs, inputs // 2), device="cuda", dtype=torch.uint8)
    scale = ((torch.rand(outputs, inputs // group, device="cuda") + 0.5) * inputs**-0.5 / 4).to(dtype)
    scale[3] = 0
    zero = torch.randint(16, scale.shape, device="cuda").to(dtype) if case.get("zero") else None
    outer = torch.rand(outputs, device="cuda") + 0.5 if case.get("outer") else None
    weight = pack(codes, scale, zero, kind=case.get("kind", "uint4"), gated=gate is not None, outer=outer)
    assert torch.equal(expand(weight, torch.float32), expanded(weight, torch.float32))
    x, bias = torch.randn(rows, inputs, device="cuda").to(dtype), torch.randn(outputs, device="cuda").to(dtype)
    residual, norm = torch.randn(rows, inputs, device="cuda").to(dtype), torch.rand(inputs, device="cuda").to(dtype)

    def exact(x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, expanded(weight, torch.float64), bias.double())
        if gate is None:
            return out
        left, right = out.chunk(2, 1)
        return (F.silu(left) if gate == "silu" else F.gelu(left, approximate="tanh")) * right

    for _ in range(2):
        out = multiplied(x, weight, bias, gate)
        wanted = exact(x.double())
        assert float((out.double() - wanted).norm() / wanted.norm()) < 0.005
        out, stream = normed_packed_linear_gpu(x, residual, norm, 1e-5, weight, bias, gate=gate)
        assert torch.equal(stream, x + residual)
        wanted = exact(rms_norm_reference((x + residual).double(), norm.double(), 1e-5))
        assert float((out.double() - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("rows", [1, 5, 30, 128, 800])
@pytest.mark.parametrize(("group", "dtype"), [(16, torch.float8_e4m3fn), (32, torch.float8_e4m3fn), (32, torch.uint8)])
def test_scales_as_bytes_give_the_same_bits(group: int, dtype: torch.dtype, rows: int) -> None:
    """As the same scales in 16 bits, with the smallest ones of the format among them."""
    torch.manual_seed(rows)
    for outputs, inputs, gate in ((4096, 4096, None), (1000, 1088, None), (28672, 4096, "silu")):
        codes = torch.randint(256, (outputs, inputs // 2), device="cuda", dtype=torch.uint8)
        first = 112 if dtype == torch.uint8 else 20      # around 2^-12, and around 2^-4
        stored = torch.randint(first, first + 12, (outputs, inputs // group), device="cuda", dtype=torch.uint8)
        stored[5, :8] = torch.arange(8, device="cuda")
        outer = torch.rand(outputs, device="cuda") + 0.5 if dtype != torch.uint8 else None
        scale = stored.view(dtype)
        narrow, wide = (
            pack(codes, each, kind="e2m1", gated=gate is not None, outer=outer) for each in (scale, scale_numbers(scale))
        )
        assert narrow.scale_dtype == dtype and narrow.scale.nbytes * 2 == wide.scale.nbytes
        for number in (torch.float32, torch.bfloat16):
            assert torch.equal(expand(narrow, number), expand(wide, number))
        x, residual = (torch.randn(rows, inputs, device="cuda").bfloat16() for _ in range(2))
        norm = torch.rand(inputs, device="cuda").bfloat16()
        found = multiplied(x, narrow, None, gate)
        assert torch.equal(found, multiplied(x, wide, None, gate))
        assert bool(found.isfinite().all()) and float(found.abs().max()) > 0
        normed = [normed_packed_linear_gpu(x, residual, norm, 1e-5, each, gate=gate)[0] for each in (narrow, wide)]
        assert torch.equal(*normed)


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_a_sum_of_many_equal_terms_is_right(rows: int) -> None:
    codes = torch.full((4096, 14336 // 2), 0x99, device="cuda", dtype=torch.uint8)
    weight = pack(codes, torch.full((4096, 112), 1.125, device="cuda", dtype=torch.bfloat16))
    out = packed_linear(torch.ones(rows, 14336, device="cuda", dtype=torch.bfloat16), weight)
    torch.testing.assert_close(out.float(), torch.full_like(out, 14336 * 1.125).float(), rtol=2**-8, atol=0)


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
def test_a_float16_row_times_its_norm_may_exceed_float16() -> None:
    """tests/ops/packed/test_place_x.py is the same without a GPU."""
    torch.manual_seed(1)
    codes, scale = quantised(torch.randn(4096, 4096) * 4096**-0.5, 128)
    weight = pack(codes.cuda(), scale.half().cuda())
    x, residual = (torch.randn(1, 4096, device="cuda").half() for _ in range(2))
    norm = torch.rand(4096, device="cuda").half()
    x[0, 7], norm[7] = 30000.0, 12.0
    out, _ = normed_packed_linear_gpu(x, residual, norm, 1e-5, weight)
    normed = rms_norm_reference((x + residual).double(), norm.double(), 1e-5)
    assert isinstance(normed, torch.Tensor)
    wanted = F.linear(normed, expanded(weight, torch.float64))
    assert float((out.double() - wanted).norm() / wanted.norm()) < 0.01
