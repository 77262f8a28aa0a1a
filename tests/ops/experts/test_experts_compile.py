"""The kernels of a mixture of experts compile for an H100 (sm_90) without a GPU, and keep their numbers in registers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_triton_compile import compiled_for_h100, stack_bytes

from ridgeline.ops import registry
from ridgeline.ops.experts import (
    expert_codes,
    expert_gate,
    expert_products,
    expert_tiles,
    few_bytes,
    few_tokens,
    packed_few,
    packed_products,
    route,
    router,
)
from ridgeline.ops.experts.expert_products import Tile, tile_for
from ridgeline.ops.linear import gemv
from ridgeline.ops.registry import TRITON_INTERPRETED

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(TRITON_INTERPRETED, reason="the interpreter replaces the compiler"),
]
slow = pytest.mark.slow
HIDDEN, WIDTH, EXPERTS, USED = 2048, 768, 128, 8         # Qwen3-30B-A3B
MODULES = (expert_codes, expert_gate, expert_products, expert_tiles, few_tokens, gemv, route, router)
CALLED = (
    "activated", "gated_sums", "tile_at", "_weights_of", "visited_experts", "_down_row", "_down_block", "_down_input",
    "_write_tiles", "_logits_at", "_scored", "choose_experts", "placed_codes", "_allowed_groups", "_in_groups", "_stream_at",
    "_scales_at", "_weights_at", "expanded_codes", "integer_codes", "byte_codes", "_product",
)
INTEGERS = ("arrived_ptr", "order_ptr", "tiles_ptr", "reads_ptr")
WIDE = {
    "_sum_experts_kernel": ("weight_ptr",), "_experts_few_down_kernel": ("share_ptr",),
    "_router_experts_kernel": ("logits_ptr", "bias_ptr", "weight_ptr"),
}
FLOATS = ("limit", "alpha", "scale", "eps", "norm_offset")


@pytest.fixture(autouse=True)
def restored_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import triton
    import triton.language

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))        # compile, do not remember
    for module in MODULES:
        monkeypatch.setattr(module, "tl", triton.language)
    for name in CALLED:                                  # functions that kernels call must be compiled ones too
        places = [module for module in MODULES if hasattr(module, name)]
        function = getattr(places[0], name)
        compiled = function if isinstance(function, triton.JITFunction) else triton.jit(function)
        for module in places:
            monkeypatch.setattr(module, name, compiled)


def compiled(
    module: Any, name: str, constants: dict[str, Any], dtype: str = "bf16", codes: tuple[str, ...] = (),
    types: dict[str, str] | None = None, **options: Any,
) -> Any:
    kernel = getattr(module, name)
    names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
    given, types = types or {}, {}
    for each in names:
        if each in given:
            types[each] = given[each]
        elif each in INTEGERS:
            types[each] = "*i32"
        elif each in codes:
            types[each] = "*u8"
        elif each in ("chosen_ptr",):
            types[each] = "*i64"
        elif each.endswith("_ptr"):
            wide = each in WIDE.get(name, ()) or (module is route and each != "offset_ptr")
            types[each] = "*fp32" if wide else f"*{dtype}"
        elif not each.isupper():
            types[each] = "fp32" if each in FLOATS else "i32"
    assert set(constants) == {each for each in names if each.isupper()}
    aligned = [each for each in names if each.endswith("_ptr") or each == "stride"]
    return compiled_for_h100(module, name, types, constants, aligned=aligned, launch_pdl=True, **options)


def product_constants(
    tile: Tile, up: bool, clamped: bool = False, grid: str = "", hidden: int = HIDDEN, width: int = WIDTH,
) -> dict[str, Any]:
    found = {
        "INPUTS": hidden if up else width, "OUTPUTS": width if up else hidden, "GRID": grid,
        "GROUP": {"": 0, "e2m1": 32}.get(grid, 128), "SCALE_ROWS": 128 if grid == "e4m3" else 1, "ZEROS": grid == "uint4",
        "BIAS": clamped, "PARTS": 0, "ROWS": tile.rows,
        "BLOCK": tile.outputs, "STEP": tile.inputs, "NEIGHBOURS": tile.neighbours, "UPCAST": False,
        "DEPENDENT": True,
    }
    return found | ({"USED": USED, "GATE": 1, "CLAMPED": clamped} if up else {})


@pytest.mark.parametrize(("pairs", "up"), [
    (USED, True), (32 * 1024 * USED, True), *(pytest.param(pairs, up, marks=slow) for pairs, up in (
        (USED, False), (24 * EXPERTS, True), (24 * EXPERTS, False), (64 * EXPERTS, True), (64 * EXPERTS, False),
        (32 * 1024 * USED, False),
    )),
])
def test_grouped_products_use_tensor_cores_and_spill_nothing(pairs: int, up: bool, tmp_path: Path) -> None:
    tile = tile_for(pairs, EXPERTS, up)
    name = "_experts_up_kernel" if up else "_experts_down_kernel"
    found = compiled(expert_products, name, product_constants(tile, up), num_warps=tile.warps, num_stages=tile.stages)
    assert ("wgmma" if tile.outputs >= 64 else "mma.sync") in found.asm["ptx"]
    assert "cp.async" in found.asm["ptx"]                # weights are on their way while others are multiplied
    assert stack_bytes(found.asm["cubin"], tmp_path) == 0
    assert found.metadata.shared <= 227 * 1024


@slow
def test_clamped_experts_with_biases_compile(tmp_path: Path) -> None:
    tile = tile_for(USED, EXPERTS, True)
    constants = product_constants(tile, True, clamped=True)
    found = compiled(expert_products, "_experts_up_kernel", constants, num_warps=tile.warps, num_stages=tile.stages)
    assert stack_bytes(found.asm["cubin"], tmp_path) == 0


def test_routing_sorting_and_the_sum_compile(tmp_path: Path) -> None:
    rule = {
        "EXPERTS": 128, "BLOCK": 128, "USED": 8, "SIGMOID": False, "NORMALISE": True, "OFFSET": False, "BIAS": False,
        "GROUPS": 1, "TOP_GROUPS": 1, "BEST_TWO": False, "LINES": 1, "SIZE": 128, "DEPENDENT": True,
    }
    grouped = {                                          # DeepSeek-V3
        "EXPERTS": 256, "BLOCK": 256, "SIGMOID": True, "BIAS": True, "GROUPS": 8, "TOP_GROUPS": 4, "BEST_TWO": True, "LINES": 8,
        "SIZE": 32,
    }
    for each in (rule, rule | grouped):
        routed = compiled(route, "_route_experts_kernel", each, num_warps=4)
        assert stack_bytes(routed.asm["cubin"], tmp_path) == 0
    multiplied = {"INPUTS": HIDDEN, "STEP": 2048, "OUTPUTS": 2, "NORM": True, "RESIDUAL": True}
    routed = compiled(router, "_router_experts_kernel", rule | multiplied, num_warps=4)
    assert stack_bytes(routed.asm["cubin"], tmp_path) == 0
    sort = {"READS": True, "BLOCK": 128, "PAIRS": 32, "CHUNK": 256, "ROWS": 16, "TILES": 512, "DEPENDENT": True}
    assert stack_bytes(compiled(expert_tiles, "_sort_experts_kernel", sort, num_warps=8).asm["cubin"], tmp_path) == 0
    summed = {"WIDTH": HIDDEN, "USED": USED, "BLOCK": 1024, "DEPENDENT": True}
    assert stack_bytes(compiled(expert_products, "_sum_experts_kernel", summed, num_warps=4).asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize(("hidden", "width", "used", "clamped"), [
    (HIDDEN, WIDTH, USED, False), *(pytest.param(*case, marks=slow) for case in (
        (2880, 2880, 4, True), (4096, 14336, 2, False), (HIDDEN, 1408, 6, False),
    )),
])
def test_experts_of_few_tokens_read_sixteen_bytes_at_once(
    hidden: int, width: int, used: int, clamped: bool, tmp_path: Path
) -> None:
    up, down = few_tokens.few_up(width, hidden), few_tokens.few_down(width, hidden)
    shared = {"USED": used, "SHARED": 0 if clamped else 2, "BIAS": clamped, "DEPENDENT": True}
    for name, constants, warps in (
        ("_experts_few_up_kernel", {
            "INPUTS": hidden, "OUTPUTS": width, "GATE": 1, "CLAMPED": clamped, "READS": True,
            "PAIRS": 1 << (8 * used - 1).bit_length(), "BLOCK": up.outputs, "STEP": up.inputs,
        }, up.warps),
        ("_experts_few_down_kernel", {
            "INPUTS": width, "OUTPUTS": hidden, "BLOCK": down.outputs, "STEP": down.inputs,
        }, down.warps),
    ):
        found = compiled(few_tokens, name, shared | constants, num_warps=warps)
        assert re.search(r"ld\.global\.L1::evict_first\S*\.v4\.b32", found.asm["ptx"])
        assert stack_bytes(found.asm["cubin"], tmp_path) == 0            # no block of weights


@pytest.mark.parametrize(("pairs", "up"), [
    (4, True), *(pytest.param(pairs, up, marks=slow) for pairs, up in ((4, False), (512, True), (512, False), (10**5, True))),
])
def test_products_with_mxfp4_codes_expand_them_in_registers(pairs: int, up: bool, tmp_path: Path) -> None:
    tile = expert_products.code_tile_for(pairs, 32, up)
    name = "_experts_up_kernel" if up else "_experts_down_kernel"
    constants = product_constants(tile, up, True, "e2m1", 2880, 2880)
    found = compiled(
        expert_products, name, constants, codes=("weight_ptr", "scale_ptr"), num_warps=tile.warps, num_stages=tile.stages,
    )
    assert "fma.rn.bf16x2" in found.asm["ptx"] and "mul.bf16x2" not in found.asm["ptx"] and "mma" in found.asm["ptx"]
    assert stack_bytes(found.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize(("pairs", "up"), [(64 * 8, True), *(pytest.param(pairs, up, marks=slow) for pairs, up in (
    (64 * 8, False), (128 * 8, True), (256 * 8, True), (512 * 8, True), (4096 * 8, True), (4096 * 8, False),
))])
def test_products_of_codes_with_rows_of_codes_convert_nothing(pairs: int, up: bool, tmp_path: Path) -> None:
    tile = expert_products.row_code_tile_for(pairs, EXPERTS, up)
    name = "_experts_up_kernel" if up else "_experts_down_kernel"
    constants = product_constants(tile, up, grid="e4m3") | {"PARTS": 2}
    found = compiled(
        expert_products, name, constants, types={"x_scale_ptr": "*fp32", "scale_ptr": "*fp32", "x_ptr": "*fp8e4nv",
                                                 "weight_ptr": "*fp8e4nv"},
        num_warps=tile.warps, num_stages=tile.stages,
    )
    ptx = found.asm["ptx"]
    assert re.search(r"wgmma\S*\.e4m3\.e4m3", ptx) and "cvt.rn.f16x2.e4m3x2" not in ptx
    assert stack_bytes(found.asm["cubin"], tmp_path) == 0
    assert found.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("up", [True, pytest.param(False, marks=slow)])
def test_products_of_codes_with_rows_of_numbers_place_bits(up: bool, tmp_path: Path) -> None:
    """On GPUs without tensor cores for such codes."""
    tile = expert_products.byte_tile_for(64 * 8, EXPERTS, up)
    name = "_experts_up_kernel" if up else "_experts_down_kernel"
    constants = product_constants(tile, up, grid="e4m3")
    found = compiled(
        expert_products, name, constants, types={"x_scale_ptr": "*bf16", "scale_ptr": "*fp32", "weight_ptr": "*u8"},
        num_warps=tile.warps, num_stages=tile.stages,
    )
    assert "fma.rn.bf16x2" in found.asm["ptx"] and "e4m3x2" not in found.asm["ptx"]
    assert stack_bytes(found.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("up", [True, pytest.param(False, marks=slow)])
def test_products_with_four_bit_codes_and_zeros_compile(up: bool, tmp_path: Path) -> None:
    tile = expert_products.code_tile_for(10, 8, up)
    name = "_experts_up_kernel" if up else "_experts_down_kernel"
    constants = product_constants(tile, up, False, "uint4")
    found = compiled(
        expert_products, name, constants, codes=("weight_ptr",), num_warps=tile.warps, num_stages=tile.stages,
    )
    assert "mma" in found.asm["ptx"]
    assert stack_bytes(found.asm["cubin"], tmp_path) == 0


FORMS = {
    "mxfp4": {"KIND": "e2m1", "GROUP": 32, "ZEROS": False, "DTYPE": "bf16", "SCALE_DTYPE": "e8m0"},
    "zeros": {"KIND": "uint4", "GROUP": 128, "ZEROS": True, "DTYPE": "bf16", "SCALE_DTYPE": "f16"},
}


def packed_sources(pairs: int) -> Iterator[tuple[Any, dict[str, Any], dict[str, str], dict[str, int]]]:
    """(kernel, constants, types of arguments that others do not have, options); pairs 0: the kernels of few tokens."""
    if not pairs:
        for form in FORMS.values():
            shared = form | {"RUNS": 6, "USED": 4, "BIAS": True, "DEPENDENT": True}
            yield packed_few.packed_few_up_kernel, shared | {
                "GATE": 1, "CLAMPED": True, "READS": True, "PAIRS": 32, "GROUPS": 4, "WARPS": 2,
            }, {}, {"num_warps": 8}
            yield packed_few.packed_few_down_kernel, shared | {"WARPS": 8}, {}, {"num_warps": 8}
        types = dict.fromkeys(("x_ptr",), "*i64") | {"word_ptr": "*i32", "scale_ptr": "*fp32"}
        shared = {
            "USED": USED, "BIAS": False, "GROUP": 128, "SCALE_ROWS": 128, "DTYPE": "bf16", "DEPENDENT": True,
        }
        for kernel, tile, own in (
            (few_bytes.few_bytes_up_kernel, few_bytes.UP, {
                "INPUTS": HIDDEN, "OUTPUTS": WIDTH, "GATE": 1, "CLAMPED": False, "READS": True, "PAIRS": 64,
            }),
            (few_bytes.few_bytes_down_kernel, few_bytes.down_tile(WIDTH, 1), {"INPUTS": WIDTH, "OUTPUTS": HIDDEN}),
        ):
            constants = shared | own | {"LINES": tile.lines, "GROUPS": tile.groups, "WARPS": tile.warps}
            yield kernel, constants, types, {"num_warps": tile.warps}
        return
    plan = packed_products.packed_tile_for(pairs, 32)
    constants = FORMS["mxfp4"] | {
        "RUNS": 6, "BLOCK_ROWS": plan.block_rows, "TILES": plan.tiles, "PARTS": plan.parts, "HALVES": plan.halves,
        "STAGES": plan.stages, "GATE": 1, "CLAMPED": True, "BIAS": True, "NEIGHBOURS": 1, "WARPS": plan.warps, "DEPENDENT": True,
    }
    layout = packed_products.gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    described = f"tensordesc<bf16[{plan.block_rows}, {plan.tiles * 64}],{layout!r}>"
    options = {"num_warps": plan.warps, "maxnreg": plan.registers()}
    yield packed_products.packed_experts_kernel, constants, {"x": described}, options


def packed_compiled(pairs: int, folder: str) -> None:
    """In a process of its own, where the op files believe in a GPU. Prints bytes of stack for each kernel."""
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton, registry.tl = True, gluon, triton, triton.language
    for name in (
        "hopper", "linear.gemv", "experts.expert_gate", "experts.expert_tiles", "experts.few_tokens", "packed.packed_asm",
        "packed.block_asm", "packed.block_operand", "packed.packed_gemv", "packed.packed_gemm",
        "experts.packed_products", "experts.packed_few", "experts.few_bytes",
    ):
        importlib.reload(importlib.import_module(f"ridgeline.ops.{name}"))
    types = dict.fromkeys(("code_ptr", "scale_ptr", "zero_ptr", "order_ptr", "tiles_ptr", "reads_ptr"), "*i32")
    types |= {"chosen_ptr": "*i64", "share_ptr": "*fp32", "limit": "fp32", "alpha": "fp32"}
    types |= dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "*bf16")
    for kernel, constants, more, options in packed_sources(pairs):
        names = kernel.arg_names
        known = types | more | dict.fromkeys(constants, "constexpr")
        source = GluonASTSource(
            kernel, {name: known.get(name, "i32") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr") or name == "stride"},
        )
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True, **options})
        wanted = "wgmma" if pairs else "fma.rn.f32" if "word_ptr" in names else "mma.sync"
        assert wanted in found.asm["ptx"] and ".e4m3" not in found.asm["ptx"]
        print(stack_bytes(found.asm["cubin"], Path(folder)))


@slow
@pytest.mark.parametrize(("pairs", "kernels"), [(0, 6), (512, 1), (10**5, 1)])
def test_products_of_packed_experts_compile(pairs: int, kernels: int, tmp_path: Path) -> None:
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", f"import test_experts_compile; test_experts_compile.packed_compiled({pairs}, {str(tmp_path)!r})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(here.parents[2]), str(here), str(here.parent))),
             "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["0"] * kernels
