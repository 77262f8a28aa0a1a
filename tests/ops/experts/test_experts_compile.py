"""The kernels of a mixture of experts compile for an H100 (sm_90) without a GPU, and keep their numbers in registers."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
from test_triton_compile import compiled_for_h100, stack_bytes

from ridgeline.ops.experts import expert_products, expert_tiles, route
from ridgeline.ops.experts.expert_products import Tile, tile_for
from ridgeline.ops.registry import TRITON_INTERPRETED

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(TRITON_INTERPRETED, reason="the interpreter replaces the compiler"),
]
slow = pytest.mark.slow
HIDDEN, WIDTH, EXPERTS, USED = 2048, 768, 128, 8         # Qwen3-30B-A3B
INTEGERS = ("order_ptr", "tiles_ptr", "reads_ptr")
FLOATS = ("limit", "alpha", "scale")


@pytest.fixture(autouse=True)
def restored_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import triton
    import triton.language

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))        # compile, do not remember
    activated = expert_products.activated
    compiled = activated if isinstance(activated, triton.JITFunction) else triton.jit(activated)
    for module in (expert_products, expert_tiles, route):
        monkeypatch.setattr(module, "tl", triton.language)
    monkeypatch.setattr(expert_products, "activated", compiled)
    monkeypatch.setitem(compiled.fn.__globals__, "tl", triton.language)


def compiled(module: Any, name: str, constants: dict[str, Any], dtype: str = "bf16", **options: Any) -> Any:
    kernel = getattr(module, name)
    names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
    types = {}
    for each in names:
        if each in INTEGERS:
            types[each] = "*i32"
        elif each in ("chosen_ptr",):
            types[each] = "*i64"
        elif each.endswith("_ptr"):
            types[each] = "*fp32" if module is route or (name == "_sum_experts_kernel" and each == "weight_ptr") else f"*{dtype}"
        elif not each.isupper():
            types[each] = "fp32" if each in FLOATS else "i32"
    assert set(constants) == {each for each in names if each.isupper()}
    aligned = [each for each in names if each.endswith("_ptr") or each == "stride"]
    return compiled_for_h100(module, name, types, constants, aligned=aligned, launch_pdl=True, **options)


def product_constants(tile: Tile, up: bool, clamped: bool = False) -> dict[str, Any]:
    found = {
        "INPUTS": HIDDEN if up else WIDTH, "OUTPUTS": WIDTH if up else HIDDEN, "BIAS": clamped, "ROWS": tile.rows,
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
    assert ("wgmma" if tile.rows >= 64 else "mma.sync") in found.asm["ptx"]
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
    routed = compiled(route, "_route_experts_kernel", {
        "EXPERTS": 128, "BLOCK": 128, "USED": 8, "SLOTS": 8, "SIGMOID": False, "NORMALISE": True, "BIAS": False,
        "DEPENDENT": True,
    }, num_warps=1)
    assert stack_bytes(routed.asm["cubin"], tmp_path) == 0
    sort = {"READS": True, "BLOCK": 128, "CHUNK": 32, "ROWS": 16, "TILES": 256, "DEPENDENT": True}
    assert stack_bytes(compiled(expert_tiles, "_sort_experts_kernel", sort, num_warps=8).asm["cubin"], tmp_path) == 0
    summed = {"WIDTH": HIDDEN, "USED": USED, "BLOCK": 1024, "DEPENDENT": True}
    assert stack_bytes(compiled(expert_products, "_sum_experts_kernel", summed, num_warps=4).asm["cubin"], tmp_path) == 0
