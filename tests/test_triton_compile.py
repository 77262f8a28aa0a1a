"""The Triton kernels compile for an H100 (sm_90) without a GPU: what the interpreter accepts, the compiler may not."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ridgeline.ops import paged_attention, rms_norm
from ridgeline.ops.registry import TRITON_INTERPRETED

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(TRITON_INTERPRETED, reason="the interpreter replaces the compiler"),
]

ATTENTION_STRIDES = (
    "q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride", "k_block_stride", "k_slot_stride",
    "k_head_stride", "v_block_stride", "v_slot_stride", "v_head_stride",
)  # fmt: skip


def compile_for_h100(module: Any, name: str, types: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX of a kernel with these argument types."""
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module.tl = triton.language          # not imported by the op files on a machine that cannot run kernels
    kernel = getattr(module, name)
    kernel = kernel if isinstance(kernel, triton.JITFunction) else triton.jit(kernel)
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    by_place = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, by_place), target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0
    return compiled.asm["ptx"]


@pytest.fixture(autouse=True)
def restored_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))        # compile, do not remember
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    for module in (paged_attention, rms_norm):
        monkeypatch.setattr(module, "tl", module.tl)


@pytest.mark.parametrize(("dtype", "residual"), [("bf16", True), ("fp32", False)])
def test_rms_norm_compiles(dtype: str, residual: bool) -> None:
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "new_residual_ptr")
    types = dict.fromkeys(pointers, f"*{dtype}") | {"eps": "fp32", "weight_offset": "fp32"}
    types |= {"x_stride": "i32", "residual_stride": "i32"}
    constants = {"WIDTH": 576, "BLOCK": 1024, "HAS_RESIDUAL": residual}
    assert "rsqrt" in compile_for_h100(rms_norm, "_rms_norm_kernel", types, constants)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tile_queries", "window", "softcap"),
    [("bf16", 128, 16, 0, False), ("bf16", 128, 64, 4096, True), ("fp32", 80, 16, 0, False)],
)
def test_paged_attention_compiles(dtype: str, head_dim: int, tile_queries: int, window: int, softcap: bool) -> None:
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("table_ptr", "query_start_ptr", "kv_len_ptr"), "*i32")
    types |= {"scale": "fp32", "softcap": "fp32", "table_stride": "i32"} | dict.fromkeys(ATTENTION_STRIDES, "i32")
    constants = {
        "GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "WINDOW": window, "SOFTCAP": softcap,
        "TILE_QUERIES": tile_queries, "TILE_KEYS": 32 if dtype == "fp32" else 64, "TILE_DIM": 128, "UPCAST": False,
    }  # fmt: skip
    ptx = compile_for_h100(paged_attention, "_paged_attention_kernel", types, constants)
    assert ("mma" in ptx) == (dtype == "bf16")           # float32 must stay IEEE, never tf32 tensor cores
