"""The Triton kernels compile for an H100 (sm_90) without a GPU: what the interpreter accepts, the compiler may not.

Every kernel is compiled on every commit, here in the variants that take the most of its branches, or by test_kernel_steps.py,
which compiles whatever serving an 8B model launches; the others are slow tests.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.ops import activation, rms_norm
from ridgeline.ops.attention import kernel_decode, kernel_one_row, kernel_prefill, qkv_write
from ridgeline.ops.attention.attention_launch import decode_tiles
from ridgeline.ops.attention.kernel_one_row import one_row_tiles
from ridgeline.ops.linear import gemm_gated, gemm_invariant, gemm_small, gemv
from ridgeline.ops.registry import TRITON_INTERPRETED
from ridgeline.ops.sampling import logprobs, sample_kernels

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(TRITON_INTERPRETED, reason="the interpreter replaces the compiler"),
]

slow = pytest.mark.slow


def compile_for_h100(module: Any, name: str, types: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    """PTX of a kernel with these argument types. The assembler only has to accept it, so it need not optimise."""
    return compiled_for_h100(module, name, types, constants, ptx_options="--opt-level 0", **options).asm["ptx"]


def compiled_for_h100(
    module: Any, name: str, types: dict[str, str], constants: dict[str, Any], *, aligned: Sequence[str] = (),
    **options: Any,
) -> Any:
    """`aligned` arguments are multiples of 16."""
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module.tl = triton.language          # not imported by the op files on a machine that cannot run kernels
    kernel = getattr(module, name)
    kernel = kernel if isinstance(kernel, triton.JITFunction) else triton.jit(kernel)
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    by_place = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, by_place, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0
    return compiled


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """What a thread keeps in memory because its registers do not suffice."""
    import triton

    (folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(folder / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    (found,) = re.findall(r"STACK:(\d+)", usage)
    return int(found)


@pytest.fixture(autouse=True)
def restored_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))        # compile, do not remember
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    attention = (kernel_decode, kernel_one_row, kernel_prefill)
    for module in (*attention, gemm_gated, gemv, gemm_invariant, rms_norm, sample_kernels, gemm_small):
        monkeypatch.setattr(module, "tl", module.tl)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that kernels call must be compiled ones too."""
    import triton
    import triton.language

    compiled = gemv.activated if isinstance(gemv.activated, triton.JITFunction) else triton.jit(gemv.activated)
    monkeypatch.setattr(gemv, "tl", triton.language)
    for module in (gemm_gated, gemv, gemm_small):
        monkeypatch.setattr(module, "activated", compiled)


@pytest.mark.parametrize(("dtype", "residual"), [("bf16", True), pytest.param("fp32", False, marks=slow)])
def test_rms_norm_compiles(dtype: str, residual: bool) -> None:
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "new_residual_ptr")
    types = dict.fromkeys(pointers, f"*{dtype}") | {"eps": "fp32", "weight_offset": "fp32"}
    types |= {"rows": "i32", "x_stride": "i32", "residual_stride": "i32"}
    constants = {"WIDTH": 576, "BLOCK": 1024, "BLOCK_ROWS": 1, "HAS_RESIDUAL": residual, "DEPENDENT": True}
    ptx = compile_for_h100(rms_norm, "_rms_norm_kernel", types, constants)
    assert "rsqrt" in ptx and "griddepcontrol.wait" in ptx


@pytest.mark.usefixtures("gates")
@pytest.mark.parametrize(("inputs", "gate"), [(4096, 0), (4096, 1), (14336, 0)])
def test_gemv_compiles(inputs: int, gate: int) -> None:
    pointers = ("x_ptr", "residual_ptr", "norm_ptr", "weight_ptr", "bias_ptr", "out_ptr", "new_residual_ptr")
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("inputs", "outputs", "weight_stride"), "i32")
    types |= {"eps": "fp32", "norm_offset": "fp32"}
    constants = {
        "BLOCK": 2, "BLOCK_INPUTS": 4096 if inputs == 4096 else 16384, "EVEN": inputs == 4096, "NORM": inputs == 4096,
        "RESIDUAL": inputs == 4096, "GATE": gate, "BIAS": False, "ONTO": inputs != 4096, "DEPENDENT": True,
    }
    aligned = (*pointers, "inputs", "weight_stride")
    ptx = compile_for_h100(gemv, "_gemv_kernel", types, constants, aligned=aligned, num_warps=16, launch_pdl=True)
    before, after = ptx.split("griddepcontrol.wait")
    assert ".v4.b32" in before and ".v4.b32" in after        # weights are on their way before the wait, 16 bytes a load


@pytest.mark.usefixtures("gates")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "splits", "step", "gate"),
    [(16, 64, 256, 2, 64, 0), pytest.param(64, 64, 64, 1, 56, 1, marks=slow), (128, 128, 64, 1, 112, 1)],
)
def test_small_gemm_compiles(rows: int, outputs: int, inputs: int, splits: int, step: int, gate: int) -> None:
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr", "part_ptr", "arrived_ptr")
    counts = ("rows", "inputs", "outputs", "x_stride", "weight_stride", "part_inputs")
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(counts, "i32")
    types |= {"part_ptr": "*fp32", "arrived_ptr": "*i32"}
    constants = {
        "BLOCK_ROWS": rows, "BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": inputs, "SPLITS": splits, "STEP": step,
        "EVEN": step == outputs, "EVEN_INPUTS": True, "GATE": gate, "BIAS": False, "AHEAD": 256, "DEPENDENT": True,
        "UPCAST": False,
    }
    aligned = ("x_ptr", "weight_ptr", "out_ptr", "part_ptr", "inputs", "x_stride", "weight_stride", "part_inputs")
    options = {"num_warps": 8 if rows == 128 else 4, "num_stages": 4, "launch_pdl": True}
    ptx = compile_for_h100(gemm_small, "_small_gemm_kernel", types, constants, aligned=aligned, **options)
    assert "wgmma" in ptx and "cp.async.cg" in ptx and "prefetch.global.L2" in ptx


@pytest.mark.usefixtures("gates")
@pytest.mark.parametrize("gate", [1, pytest.param(2, marks=slow)])
def test_gated_gemm_compiles(gate: int) -> None:
    types = dict.fromkeys(("rows", "outputs", "inputs"), "i32") | {
        "x": "tensordesc<bf16[128, 64]>", "weight": "tensordesc<bf16[2, 128, 64]>", "out": "tensordesc<bf16[128, 128]>",
    }
    constants = {
        "BLOCK_ROWS": 128, "BLOCK_OUTPUTS": 128, "BLOCK_INPUTS": 64, "NEIGHBOURS": 8, "PROGRAMS": 132, "GATE": gate,
        "UPCAST": False,
    }
    options = {"num_warps": 8, "num_stages": gemm_gated.STAGES}
    ptx = compile_for_h100(gemm_gated, "_gated_gemm_kernel", types, constants, aligned=("outputs", "inputs"), **options)
    assert "wgmma" in ptx and "cp.async.bulk.tensor.3d.shared" in ptx        # gate and up come as one
    assert "ld.global" not in ptx and "st.global" not in ptx


@pytest.mark.parametrize(("outputs", "splits"), [pytest.param(256, 1, marks=slow), (128, 4)])
def test_invariant_gemm_compiles(outputs: int, splits: int) -> None:
    types = dict.fromkeys(("rows", "inputs", "outputs", "part_inputs"), "i32") | {
        "x_tiles": "tensordesc<bf16[128, 64]>", "weight_tiles": f"tensordesc<bf16[{outputs}, 64]>",
        "bias_ptr": "*bf16", "out_ptr": "*bf16",
    }
    constants = {
        "BLOCK_ROWS": 128, "BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": 64, "SPLITS": splits, "GROUP": 8, "BIAS": False,
        "DEPENDENT": True, "UPCAST": False,
    }
    ptx = compile_for_h100(
        gemm_invariant, "_invariant_gemm_kernel", types, constants, num_warps=8, num_stages=4, launch_pdl=True
    )
    assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx


ATTENTION_HELPERS = (
    "from_sinks", "oldest_key",
    "share_of", "load_query", "load_tile", "in_compute_type", "fold_tile", "attend_keys", "first_blocks", "fetch_tile",
    "merge_shares", "from_sinks", "queries_of", "member_offset", "fold_prefix", "prepared", "in_runs", "partner_of", "angles",
    "norm_weights", "load_heads", "turned", "scales_of", "store_scaled", "store_newest", "slot_of", "load_pairs",
)


@pytest.fixture
def attention_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that kernels call must be compiled ones too."""
    import triton
    import triton.language

    for name in ATTENTION_HELPERS:
        helper = getattr(kernel_decode, name)
        compiled = helper if isinstance(helper, triton.JITFunction) else triton.jit(helper)
        for module in (kernel_decode, kernel_one_row, kernel_prefill):
            monkeypatch.setattr(module, "tl", triton.language)
            if hasattr(module, name):
                monkeypatch.setattr(module, name, compiled)
    for name in ("load_turned", "merge_in_order"):
        helper = getattr(kernel_one_row, name)
        monkeypatch.setattr(kernel_one_row, name, helper if isinstance(helper, triton.JITFunction) else triton.jit(helper))


def attention_types(names: list[str], dtype: str, kv_dtype: str) -> dict[str, str]:
    types = {}
    for name in names:
        if name in ("q_ptr", "qkv_ptr", "out_ptr", "q_norm_ptr", "k_norm_ptr"):
            types[name] = f"*{dtype}"
        elif name in ("k_ptr", "v_ptr"):
            types[name] = f"*{kv_dtype}"
        elif name in ("k_scale_ptr", "v_scale_ptr", "accumulated_ptr", "statistics_ptr", "cos_sin_ptr", "sinks_ptr"):
            types[name] = "*fp32"
        elif name in ("positions_ptr", "slots_ptr"):
            types[name] = "*i64"
        elif name.endswith("_ptr"):
            types[name] = "*i32"
        elif not name.isupper():
            types[name] = "fp32" if name in ("score_scale", "softcap", "eps", "norm_offset") else "i32"
    return types


@pytest.mark.usefixtures("attention_helpers")
@pytest.mark.parametrize(
    ("kernel", "dtype", "kv_dtype", "changes"),
    [
        pytest.param("decode_kernel", "bf16", "bf16", {}, marks=slow),
        pytest.param("decode_kernel", "bf16", "fp8e4nv", {"SOFTCAP": True, "WINDOW": 4096}, marks=slow),
        # Heads are narrow on every commit: half the instructions, and the same branches.
        ("decode_kernel", "fp32", "fp32", {"HEAD_DIM": 24, "TILE_DIM": 32, "TILE_KEYS": 16, "HAS_PREFIX": False}),
        pytest.param("decode_kernel", "bf16", "bf16", {"FRESH": True, "NORM": True}, marks=slow),
        # Scales of its own, and i8: test_decode_attention_keeps_its_numbers_in_registers.
        ("decode_kernel", "bf16", "fp8e4nv",
         {"FRESH": True, "HEAD_DIM": 64, "TILE_DIM": 64, "HALF": 24, "SINKS": True, "CALIBRATED": True}),
        pytest.param("decode_kernel", "bf16", "i8", {"FRESH": True, "CALIBRATED": True}, marks=slow),
        pytest.param("prefill_kernel", "bf16", "i8", {}, marks=slow),
        pytest.param(
            "decode_kernel", "bf16", "bf16",
            {"QUERIES": 8, "WINDOW": 4096, "SOFTCAP": True, "HAS_PREFIX": False, "TILE_QUERIES": 32, "TILE_GROUP": 32,
             "TILE_SLOTS": 1}, marks=slow,
        ),
        pytest.param("prefill_kernel", "bf16", "bf16", {}, marks=slow),
        ("prefill_kernel", "bf16", "fp8e4nv",
         {"HEAD_DIM": 64, "TILE_DIM": 64, "TILE_KEYS": 32, "SOFTCAP": True, "WINDOW": 4096, "SINKS": True}),
        pytest.param("prefill_kernel", "bf16", "fp8e4nv", {"SOFTCAP": True, "WINDOW": 4096, "SINKS": True}, marks=slow),
        pytest.param("prefill_kernel", "bf16", "bf16", {"WINDOW": -8192}, marks=slow),
        pytest.param("decode_kernel", "bf16", "bf16", {"WINDOW": -8192}, marks=slow),
        pytest.param("prefix_kernel", "bf16", "bf16", {}, marks=slow),
        pytest.param("prefix_kernel", "bf16", "fp8e4nv", {}, marks=slow),
    ],
)
def test_attention_compiles(kernel: str, dtype: str, kv_dtype: str, changes: dict[str, Any]) -> None:
    module = next(module for module in (kernel_decode, kernel_prefill) if hasattr(module, kernel))
    many = kernel in ("prefill_kernel", "prefix_kernel")
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "QUERIES": 1, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "WINDOW": 0, "SOFTCAP": False,
        "HAS_TABLE_ROWS": True, "HAS_PREFIX": True, "MINIMUM_PREFIX": 256, "TILE_PREFIX": 64,
        "TILE_QUERIES": 128 if many else 16, "TILE_TOKENS": 32, "TILE_ROWS": 256, "TILE_KEYS": 64, "TILE_DIM": 128,
        "TILE_GROUP": 4, "TILE_SLOTS": 16, "FRESH": False, "HALF": 64, "NORM": False, "K_LIMIT": 448.0,
        "V_LIMIT": 448.0, "CALIBRATED": False, "DEPENDENT": True, "UPCAST": False, "SINKS": False,
        **dict.fromkeys(("K_SCALED", "V_SCALED", "NARROW", "V_NARROW", "PAIRED"), kv_dtype in ("fp8e4nv", "i8")), **changes,
    }
    names = list(inspect.signature(getattr(getattr(module, kernel), "fn", getattr(module, kernel))).parameters)
    constants = {name: value for name, value in constants.items() if name in names}
    assert set(constants) == {name for name in names if name.isupper()}
    ptx = compile_for_h100(module, kernel, attention_types(names, dtype, kv_dtype), constants, num_warps=8 if many else 4)
    assert ("mma" in ptx) == (dtype == "bf16")           # float32 must stay IEEE, never tf32 tensor cores


@pytest.mark.usefixtures("attention_helpers")
@pytest.mark.parametrize(("head_dim", "narrow", "pairs", "queries"), [
    (128, "fp8e4nv", 1024, 1), (128, "", 8, 16),
    *(pytest.param(*case, marks=slow) for case in (
        (128, "", 8192, 1), (128, "i8", 1024, 1),
        (64, "", 8, 1), (64, "", 1024, 1), (64, "", 8192, 1), (128, "", 8, 1), (128, "", 1024, 1),
        (256, "", 8, 1), (256, "", 1024, 1), (256, "", 8192, 1), (128, "fp8e4nv", 8, 1), (128, "fp8e4nv", 8192, 1),
        (64, "", 8, 16), (128, "", 1024, 4), (128, "", 256, 8), (128, "fp8e4nv", 8, 16), (256, "", 8, 8),
    )),
])
def test_decode_attention_keeps_its_numbers_in_registers(
    head_dim: int, narrow: str, pairs: int, queries: int, tmp_path: Path
) -> None:
    """No register spills for any number of rows, also where the launch limits registers. Eight-bit numbers are converted two at a
    time, and no byte is loaded by itself."""
    names = list(inspect.signature(getattr(kernel_decode.decode_kernel, "fn", kernel_decode.decode_kernel)).parameters)
    types = attention_types(names, "bf16", narrow or "bf16")
    aligned = [name for name in names if name.endswith(("_ptr", "_stride"))]
    members = 4 * queries
    keys, values, launch = decode_tiles(torch.bfloat16, head_dim, bool(narrow), pairs, 132, members if queries > 1 else 0)
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "QUERIES": queries, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "WINDOW": 0, "SOFTCAP": False,
        **dict.fromkeys(("K_SCALED", "V_SCALED", "NARROW", "V_NARROW", "PAIRED"), bool(narrow)),
        "HAS_TABLE_ROWS": True, "HAS_PREFIX": False,
        "MINIMUM_PREFIX": 256, "TILE_PREFIX": 64, "TILE_QUERIES": max(16, members), "TILE_KEYS": keys, "TILE_DIM": head_dim,
        "TILE_GROUP": members, "TILE_SLOTS": max(1, values // (members * head_dim)), "FRESH": queries == 1,
        "HALF": head_dim // 2, "NORM": False, "K_LIMIT": 448.0, "V_LIMIT": 448.0, "CALIBRATED": False, "DEPENDENT": True,
        "UPCAST": False, "SINKS": False,
    }
    compiled = compiled_for_h100(
        kernel_decode, "decode_kernel", types, constants, aligned=aligned, launch_pdl=True, **launch
    )
    assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0, f"{pairs} pairs"
    if narrow:
        convert = "sub.rn.f16x2" if narrow == "i8" else "cvt.rn.f16x2.e4m3x2"
        assert convert in compiled.asm["ptx"] and "ld.shared.b8" not in compiled.asm["ptx"]


@pytest.mark.usefixtures("attention_helpers")
@pytest.mark.parametrize(("group", "head_dim", "changes"), [
    (8, 128, {"NORM": True}), pytest.param(4, 128, {}, marks=slow),
    pytest.param(8, 64, {"SINKS": True, "WINDOW": 128}, marks=slow),
    pytest.param(2, 256, {"SOFTCAP": True, "WINDOW": 4096, "NORM": True}, marks=slow),
])
def test_attention_of_one_row_has_its_keys_before_the_projection(
    group: int, head_dim: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Keys and values of the first tile are requested before the wait, 16 bytes a load, and nothing is spilled."""
    names = list(inspect.signature(getattr(kernel_one_row.one_row_kernel, "fn", kernel_one_row.one_row_kernel)).parameters)
    plan = one_row_tiles(torch.bfloat16, head_dim)
    constants = {
        "KV_HEADS": 4, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "WINDOW": 0, "SOFTCAP": False, "SINKS": False,
        "HAS_TABLE_ROWS": True, "HALF": head_dim // 2, "NORM": False, "MOST_PARTS": 17, "TILE_QUERIES": 16,
        "TILE_KEYS": plan.keys, "TILE_DIM": head_dim, "TILE_GROUP": group, "DEPENDENT": True, "UPCAST": False, **changes,
    }
    aligned = [name for name in names if name.endswith(("_ptr", "_stride")) and name != "table_stride"]
    found = compiled_for_h100(
        kernel_one_row, "one_row_kernel", attention_types(names, "bf16", "bf16"), constants, aligned=aligned, launch_pdl=True,
        num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
    )
    assert stack_bytes(found.asm["cubin"], tmp_path) == 0
    # The waits are those of CTAs without work, of the newest key and of shares: the last is behind the tile's loads.
    before = found.asm["ptx"].rsplit("griddepcontrol.wait", 1)[0].rsplit("griddepcontrol.wait", 1)[1]
    assert before.count(".v4.b32") >= 2 * plan.keys * head_dim // (8 * 32 * plan.warps)


# ── sampling and the small ops of a layer ────────────────────────────────────────────────────────────────────────────

SAMPLING_TYPES = {
    "stride": "i32", "vocab": "i32", "params_stride": "i32", "top_k": "i32", "keys_ptr": "*i64", "arrivals_ptr": "*i32",
    "tokens_ptr": "*i64", "failed_ptr": "*u8", "rows_ptr": "*i64", "last_token_ptr": "*i64", "integers_ptr": "*i64",
    "numbers_ptr": "*fp64", "best_ptr": "*fp32", "best_id_ptr": "*i32", "state_ptr": "*i32", "group_best_ptr": "*fp32",
    "tile_best_ptr": "*fp32", "tile_weight_ptr": "*fp32", "leaders_ptr": "*i32", "scores_ptr": "*fp64",
    "listed_ptr": "*i32", "values_ptr": "*fp32", "ids_ptr": "*i32", "logprobs_ptr": "*fp32", "ranks_ptr": "*i64",
    "top_ids_ptr": "*i64", "top_logprobs_ptr": "*fp32", "tile_sum_ptr": "*fp32", "tile_before_ptr": "*i32",
    "mask_ptr": "*i32", "mask_stride": "i32",
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("masked", [True, False])
def test_masks_compile(dtype: str, masked: bool) -> None:
    """A thread moves sixteen bytes at a time."""
    types = {
        "logits_ptr": f"*{dtype}", "mask_ptr": "*i32", "out_ptr": "*fp32", "broken_ptr": "*u8", "vocab": "i32", "stride": "i64",
        "mask_stride": "i64", "out_stride": "i64",
    }
    aligned = ("logits_ptr", "out_ptr", "vocab", "stride", "out_stride")
    constants = {"MASKED": masked, "WORDS": 64}
    ptx = compile_for_h100(sample_kernels, "_mask_kernel", types, constants, aligned=aligned, num_warps=4)
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


def compile_with_helpers(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, types: dict[str, str], constants: dict[str, Any],
    helpers: Sequence[str], **options: Any,
) -> str:
    import triton
    import triton.language

    monkeypatch.setattr(module, "tl", triton.language)
    for helper in helpers:
        function = getattr(module, helper)
        monkeypatch.setattr(module, helper, function if isinstance(function, triton.JITFunction) else triton.jit(function))
        monkeypatch.setitem(function.__globals__, "tl", triton.language)     # of the module that defines it
    arguments = inspect.signature(getattr(module, name)).parameters
    assert {name for name in arguments if name.isupper()} == set(constants)
    types = {name: kind for name, kind in types.items() if name in arguments}
    aligned = [name for name in types if name in ("logits_ptr", "stride", "vocab")]
    return compile_for_h100(module, name, types, constants, aligned=aligned, **options)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=slow)])
@pytest.mark.parametrize("kernel", [
    "best", "best-filtered", "race-masked",
    *(pytest.param(name, marks=slow) for name in ("race", "best-masked", "select", "finish")),
])
def test_sampling_compiles(kernel: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filtered, masked = kernel == "best-filtered", kernel.endswith("-masked")
    constants = {
        "best": {
            "TILE": 8192, "GROUP": 64, "EMPTY_KEY": sample_kernels.EMPTY_KEY,
            "RANDOM": filtered or masked, "FILTERED": filtered, "MASKED": masked, "LOWEST": sample_kernels.LOWEST,
        },
        "select": {
            "TILES": 16, "GROUPS": 2048, "GROUP": 64, "CANDIDATES": 1024, "FEW": 128, "PAIRS": 4096, "AT_ONCE": 16,
            "TILES_ROUND": 16, "GROUPS_ROUND": 2048, "LOWEST": sample_kernels.LOWEST,
        },
        "race": {"TILE": 1024, "SPAN": 8, "PROGRAMS": 128, "MASKED": masked},
        "finish": {"TILE": 4096, "SCAN": 16384},
    }[kernel.split("-")[0]]
    types = SAMPLING_TYPES | {"logits_ptr": f"*{dtype}"}
    helpers = (
        "_larger", "_masked", "ordered_key", "ordered_value", "_noise", "_race_tile", "_lower_bound", "_race_few", "_race_many",
        "_highest_key", "_before",
    )
    name = f"_{kernel.split('-')[0]}_kernel"
    constants["DEPENDENT"] = True
    warps = 16 if kernel == "finish" else 4
    ptx = compile_with_helpers(monkeypatch, sample_kernels, name, types, constants, helpers, num_warps=warps)
    assert "griddepcontrol.wait" in ptx
    if kernel == "race":
        assert "div.rn.f32" in ptx                       # or different logits would be equal at other places


def test_logprobs_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SAMPLING_TYPES | {"logits_ptr": "*bf16", "group_best_ptr": "*i32"}
    common = {"GROUP": 64, "NOTHING": logprobs.NOTHING}
    rounded = {"TILES": 16, "GROUPS": 2048, "TILES_ROUND": 16, "GROUPS_ROUND": 2048}
    for name, constants in (("_scan_kernel", {"TILE": 8192}), ("_logprobs_kernel", rounded)):
        compile_with_helpers(
            monkeypatch, logprobs, name, types, common | constants, ("ordered_key", "ordered_value"), num_warps=8
        )


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_gated_activation_compiles(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"x_ptr": "*bf16", "out_ptr": "*bf16", "stride": "i32", "out_stride": "i32"}
    constants = {"WIDTH": 14336, "KIND": kind, "BLOCK": 2048, "DEPENDENT": True}
    compile_with_helpers(monkeypatch, activation, "_gated_activation_kernel", types, constants, ())


@pytest.mark.parametrize(("cache", "half", "norm", "scaled", "calibrated"), [
    ("bf16", 64, False, False, False), ("fp8e4nv", 24, True, True, True),
    pytest.param("i8", 64, False, True, False, marks=slow),
])
def test_rotary_write_compiles(
    cache: str, half: int, norm: bool, scaled: bool, calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = inspect.signature(qkv_write._rotary_write_kernel).parameters
    types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in arguments if not name.isupper()}
    types |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_sin_ptr": "*fp32", "eps": "fp32", "norm_offset": "fp32"}
    types |= {"k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
    constants = {
        "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "HALF": half, "BLOCK_SIZE": 16, "HEADS_ROUND": 32,
        "KV_HEADS_ROUND": 8, "HALF_ROUND": 64, "REST_ROUND": 128, "DIM_ROUND": 128, "NORM": norm,
        "K_LIMIT": 448.0, "V_LIMIT": 448.0, "K_SCALED": scaled, "V_SCALED": scaled, "CALIBRATED": calibrated, "DEPENDENT": True,
    }
    compile_with_helpers(
        monkeypatch, qkv_write, "_rotary_write_kernel", types, constants, ("_turn", "scales_of", "store_scaled")
    )
