"""The kernels of a mixture of experts compile for an H100 (sm_90) without a GPU, and keep their numbers in registers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_triton_compile import compiled_for_h100, stack_bytes

from ridgeline.ops import registry
from ridgeline.ops.experts import (
    expert_gate,
    expert_products,
    expert_tiles,
    few_codes,
    few_tokens,
    mxfp4,
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
MODULES = (expert_gate, expert_products, expert_tiles, few_tokens, gemv, mxfp4, route, router)
CALLED = (
    "activated", "gated_sums", "_tile_at", "_weights_of", "visited_experts", "_down_block", "_write_tiles", "_logits_at",
    "_scored", "choose_experts", "placed_codes",
    "_scales_at", "_weights_at", "expanded_codes",
)
INTEGERS = ("arrived_ptr", "order_ptr", "tiles_ptr", "reads_ptr")
WIDE = {
    "_sum_experts_kernel": ("weight_ptr",), "_experts_few_down_kernel": ("share_ptr",),
    "_router_experts_kernel": ("logits_ptr", "bias_ptr", "weight_ptr"),
}
FLOATS = ("limit", "alpha", "scale")


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
    module: Any, name: str, constants: dict[str, Any], dtype: str = "bf16", codes: tuple[str, ...] = (), **options: Any
) -> Any:
    kernel = getattr(module, name)
    names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
    types = {}
    for each in names:
        if each in INTEGERS:
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
    tile: Tile, up: bool, clamped: bool = False, group: int = 0, hidden: int = HIDDEN, width: int = WIDTH,
) -> dict[str, Any]:
    found = {
        "INPUTS": hidden if up else width, "OUTPUTS": width if up else hidden, "GROUP": group,
        "BIAS": clamped, "ROWS": tile.rows,
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
        "DEPENDENT": True,
    }
    routed = compiled(route, "_route_experts_kernel", rule, num_warps=4)
    assert stack_bytes(routed.asm["cubin"], tmp_path) == 0
    routed = compiled(router, "_router_experts_kernel", rule | {"INPUTS": HIDDEN, "STEP": 2048, "OUTPUTS": 2}, num_warps=4)
    assert stack_bytes(routed.asm["cubin"], tmp_path) == 0
    sort = {"READS": True, "BLOCK": 128, "PAIRS": 32, "CHUNK": 256, "ROWS": 16, "TILES": 512, "DEPENDENT": True}
    assert stack_bytes(compiled(expert_tiles, "_sort_experts_kernel", sort, num_warps=8).asm["cubin"], tmp_path) == 0
    summed = {"WIDTH": HIDDEN, "USED": USED, "BLOCK": 1024, "DEPENDENT": True}
    assert stack_bytes(compiled(expert_products, "_sum_experts_kernel", summed, num_warps=4).asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize(("hidden", "width", "used", "clamped"), [
    (HIDDEN, WIDTH, USED, False), pytest.param(2880, 2880, 4, True, marks=slow), pytest.param(4096, 14336, 2, False, marks=slow),
])
def test_experts_of_few_tokens_read_sixteen_bytes_at_once(
    hidden: int, width: int, used: int, clamped: bool, tmp_path: Path
) -> None:
    up, down = few_tokens.few_up(width, hidden), few_tokens.few_down(width, hidden)
    shared = {"USED": used, "BIAS": clamped, "DEPENDENT": True}
    for name, constants, warps in (
        ("_experts_few_up_kernel", {
            "INPUTS": hidden, "OUTPUTS": width, "GATE": 1, "CLAMPED": clamped, "READS": True, "PAIRS": 8 * used,
            "BLOCK": up.outputs, "STEP": up.inputs,
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
    constants = product_constants(tile, up, True, 32, 2880, 2880)
    found = compiled(
        expert_products, name, constants, codes=("weight_ptr", "scale_ptr"), num_warps=tile.warps, num_stages=tile.stages,
    )
    assert "fma.rn.bf16x2" in found.asm["ptx"] and "mul.bf16x2" not in found.asm["ptx"] and "mma" in found.asm["ptx"]
    assert stack_bytes(found.asm["cubin"], tmp_path) == 0


def codes_compiled(folder: str) -> None:
    """In a process of its own, where the op files believe in a GPU. Prints bytes of stack for each kernel."""
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton, registry.tl = True, gluon, triton, triton.language
    for name in ("hopper", "linear.gemv", "experts.expert_gate", "experts.few_tokens", "experts.mxfp4", "experts.few_codes"):
        importlib.reload(importlib.import_module(f"ridgeline.ops.{name}"))
    types = {
        "x_ptr": "*i32", "code_ptr": "*u8", "scale_ptr": "*u8", "bias_ptr": "*bf16", "out_ptr": "*bf16", "chosen_ptr": "*i64",
        "reads_ptr": "*i32", "share_ptr": "*fp32", "pairs": "i32", "stride": "i32", "limit": "fp32", "alpha": "fp32",
    }
    shared = {"INPUTS": 2880, "OUTPUTS": 2880, "USED": 4, "BIAS": True, "BLOCK": 8, "WARPS": 4, "DEPENDENT": True}
    for kernel, more in (
        (few_codes._experts_codes_up_kernel, {"GATE": 1, "CLAMPED": True, "READS": True, "PAIRS": 32}),
        (few_codes._experts_codes_down_kernel, {}),
    ):
        constants, names = shared | more, kernel.arg_names
        source = GluonASTSource(
            kernel, {name: types.get(name, "constexpr") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr") or name == "stride"},
        )
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
        assert re.search(r"ld\.global\.L1::evict_first\S*\.v4\.b32", found.asm["ptx"])
        print(stack_bytes(found.asm["cubin"], Path(folder)))


@slow
def test_products_of_few_tokens_with_codes_compile(tmp_path: Path) -> None:
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", f"import test_experts_compile; test_experts_compile.codes_compiled({str(tmp_path)!r})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(here.parents[2]), str(here), str(here.parent))),
             "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["0", "0"]
