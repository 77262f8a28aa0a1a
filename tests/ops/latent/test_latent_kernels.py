"""The Triton kernels of latent attention compile for sm_90 at DeepSeek's true sizes, without spilling their sums to memory."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton_compile import compiled_for_h100, stack_bytes

from ridgeline.ops.attention import kernel_decode
from ridgeline.ops.latent import kernel_latent, latent_products, latent_write
from ridgeline.ops.latent.latent_launch import decode_tiles, older_tiles, prompt_tiles
from ridgeline.ops.registry import TRITON_INTERPRETED

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(TRITON_INTERPRETED, reason="the interpreter replaces the compiler"),
]

HELPERS = {
    kernel_decode: ("oldest_key", "fetch_tile", "first_blocks", "fold_tile", "in_compute_type", "load_tile", "member_offset",
                    "merge_shares", "slot_of",
                    "scales_of", "store_scaled"),
    kernel_latent: ("absorbed_query", "block_of", "attend_latents", "attend_keys_first", "tile_of_row", "load_heads_tile",
                    "attend_widened"),
    latent_write: ("write_entry",),
}
SIZES = {"RANK": 512, "ROPE": 64, "TILE_RANK": 512, "TILE_ROPE": 64, "BLOCK_SIZE": 16}
WRITES = {
    "HEADS": 16, "NOPE": 128, "HALF": 32, "RANK": 512, "BLOCK_SIZE": 16, "HEADS_ROUND": 16, "HALF_ROUND": 32,
    "RANK_ROUND": 512, "INTERLEAVED": True, "LIMIT": 448.0, "DEPENDENT": True,
}
FLOATS = {"score_scale": "fp32", "eps": "fp32", "weight_ptr": "*fp32", "accumulated_ptr": "*fp32", "statistics_ptr": "*fp32",
          "scale_ptr": "*fp32", "cos_sin_ptr": "*fp32"}
INTEGERS = ("table_ptr", "table_rows_ptr", "kv_len_ptr", "item_row_ptr", "first_item_ptr", "size_ptr", "arrived_ptr",
            "query_start_ptr")


@pytest.fixture(autouse=True)
def compiled_helpers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Functions that kernels call must be compiled ones too."""
    import triton
    import triton.language

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))        # compile, do not remember
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    users = (kernel_decode, kernel_latent, latent_products, latent_write)
    for module in users:
        monkeypatch.setattr(module, "tl", triton.language)
    for owner, names in HELPERS.items():
        for name in names:
            helper = getattr(owner, name)
            compiled = helper if isinstance(helper, triton.JITFunction) else triton.jit(helper)
            for module in users:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, compiled)


def compiled(module: Any, name: str, constants: dict[str, Any], cache: str = "bf16", **options: Any) -> Any:
    kernel = getattr(module, name)
    names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
    types = {}
    for each in names:
        if each in constants:
            continue
        if each in INTEGERS:
            types[each] = "*i32"
        elif each in FLOATS:
            types[each] = FLOATS[each]
        elif each in ("positions_ptr", "slots_ptr"):
            types[each] = "*i64"
        elif each.endswith("_ptr"):
            types[each] = f"*{cache}" if each == "cache_ptr" else "*bf16"
        else:
            types[each] = "i32"
    aligned = [each for each in types if each.endswith(("_ptr", "_stride")) and each != "table_stride"]
    return compiled_for_h100(module, name, types, constants, aligned=aligned, **options)


@pytest.mark.parametrize(("heads", "tile", "cache", "apart"), [
    (16, 16, "bf16", True), pytest.param(16, 16, "bf16", False, marks=pytest.mark.slow),
    pytest.param(20, 32, "bf16", False, marks=pytest.mark.slow),
    pytest.param(20, 32, "bf16", True, marks=pytest.mark.slow), pytest.param(16, 16, "fp8e4nv", True, marks=pytest.mark.slow),
    pytest.param(16, 16, "fp8e4nv", False, marks=pytest.mark.slow),
])
def test_decode_compiles(heads: int, tile: int, cache: str, apart: bool, tmp_path: Path) -> None:
    narrow = cache != "bf16"
    tile_keys, keys_first, options = decode_tiles(torch.bfloat16, tile, narrow, apart)
    made = compiled(kernel_latent, "latent_decode_kernel", SIZES | {
        "HEADS": heads, "COLUMNS": -(-heads // tile), "QUERIES": 1, "SCALED": narrow, "NARROW": narrow, "HAS_TABLE_ROWS": True,
        "TILE_HEADS": tile, "TILE_KEYS": tile_keys, "TILE_SLOTS": 1, "KEYS_FIRST": keys_first, "APART": apart,
        "DEPENDENT": True, "UPCAST": False,
    }, cache, launch_pdl=True, **options)
    assert "cp.async" in made.asm["ptx"] and ("wgmma" in made.asm["ptx"]) == keys_first
    # Of many rows, as many CTAs fit on an SM as split_kv.py counts with.
    assert made.metadata.shared <= 227 * 1024 // (2 if tile == 16 and not apart else 1)
    assert stack_bytes(made.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("cache", ["bf16", pytest.param("fp8e4nv", marks=pytest.mark.slow)])
def test_older_compiles(cache: str) -> None:
    narrow = cache != "bf16"
    tile_keys, options = older_tiles(torch.bfloat16)
    made = compiled(kernel_latent, "latent_older_kernel", SIZES | {
        "HEADS": 16, "SCALED": narrow, "NARROW": narrow, "HAS_TABLE_ROWS": True, "TILE_ROWS": 256, "TILE_TOKENS": 4,
        "TILE_HEADS": 16, "TILE_QUERIES": 64, "TILE_KEYS": tile_keys, "UPCAST": False,
    }, cache, **options)
    assert made.metadata.shared <= 227 * 1024 and "wgmma" in made.asm["ptx"]


def test_prompt_compiles(tmp_path: Path) -> None:
    tile_queries, tile_keys, options = prompt_tiles(torch.bfloat16)
    made = compiled(kernel_latent, "latent_prompt_kernel", {
        "NOPE": 128, "ROPE": 64, "VALUE": 128, "RANK": 512, "HAS_OLDER": True, "TILE_ROWS": 256, "TILE_QUERIES": tile_queries,
        "TILE_KEYS": tile_keys, "TILE_NOPE": 128, "TILE_ROPE": 64, "TILE_VALUE": 128, "UPCAST": False,
    }, **options)
    assert made.metadata.shared <= 227 * 1024 and "wgmma" in made.asm["ptx"]
    assert stack_bytes(made.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("cache", ["bf16", "fp8e4nv"])
def test_write_compiles(cache: str, tmp_path: Path) -> None:
    made = compiled(
        latent_write, "_latent_write_kernel", WRITES | {"SCALED": cache != "bf16"}, cache, launch_pdl=True, num_warps=4
    )
    assert stack_bytes(made.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("tokens", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_products_compile(tokens: int, tmp_path: Path) -> None:
    """Weights are on their way before the wait, 16 bytes a load."""
    absorb = compiled(latent_products, "latent_absorb_kernel", WRITES | {
        "SCALED": False, "FRESH": True, "TILE_TOKENS": tokens, "TILE_NOPE": 128, "TILE_OUT": latent_products.TILE_ABSORBED,
        "UPCAST": False,
    }, launch_pdl=True, num_warps=4)
    widen = compiled(latent_products, "latent_widen_kernel", {
        "HEADS": 16, "NOPE": 128, "VALUE": 128, "RANK": 512, "TILE_TOKENS": tokens, "TILE_RANK": 512,
        "TILE_OUT": latent_products.TILE_WIDENED, "DEPENDENT": True, "UPCAST": False,
    }, launch_pdl=True, num_warps=4)
    for made in (absorb, widen):
        assert ".v4.b32" in made.asm["ptx"].split("griddepcontrol.wait")[-2]
        assert stack_bytes(made.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("queries", [1, 4])
def test_merge_compiles(queries: int, tmp_path: Path) -> None:
    made = compiled(latent_products, "latent_merge_kernel", {
        "HEADS": 16, "COLUMNS": queries, "QUERIES": queries, "NOPE": 128, "VALUE": 128, "RANK": 512, "TILE_HEADS": 16,
        "TILE_RANK": 512, "TILE_OUT": latent_products.TILE_MERGED, "TILE_SLOTS": latent_products.MERGED_SLOTS, "DEPENDENT": True,
    }, launch_pdl=True, num_warps=8)
    assert ".v4.b32" in made.asm["ptx"].split("griddepcontrol.wait")[0]
    assert stack_bytes(made.asm["cubin"], tmp_path) == 0
