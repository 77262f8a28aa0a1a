"""Prefill attention for Hopper (TMA, warp-specialised): the list of tiles and the assembly here, its results on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.messages import RowAdded, StepPlan, Want
from ridgeline.ops import hopper, registry
from ridgeline.ops.attention import kernel_prefill_hopper, prefill_tiles
from ridgeline.ops.attention.attention_arguments import AttentionWork
from ridgeline.ops.attention.attention_launch import paged_attention_triton
from ridgeline.ops.attention.attention_reference import paged_attention_reference
from ridgeline.ops.attention.paged_attention import paged_attention
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import Shape
from ridgeline.sizes.kv_spec import KVGroupSpec
from ridgeline.sizes.op_costs import E4M3

# ── the list of tiles ────────────────────────────────────────────────────────────────────────────────────────────────


def tiles_of(rows: list[tuple[int, int]], group: int, size: int | None = None) -> np.ndarray:
    """Of (queries, positions) per row; the tables are at ten times the rows' numbers."""
    borders = np.array(list(itertools.accumulate((queries for queries, _ in rows), initial=7)))
    lengths = np.array([length for _, length in rows])
    return prefill_tiles.cut_queries(borders, lengths, 10 * np.arange(len(rows)), group, size)


@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 400)), min_size=1, max_size=9),
    group=st.integers(1, 20), spare=st.integers(0, 3),
)
def test_every_query_is_in_one_tile(rows: list[tuple[int, int]], group: int, spare: int) -> None:
    rows = [(queries, queries + before) for queries, before in rows]
    step = prefill_tiles.tile_tokens(group)
    assert step * group <= prefill_tiles.TILE_PAIRS
    most = prefill_tiles.most_tiles(sum(queries for queries, _ in rows), len(rows), group) + spare
    tiles = tiles_of(rows, group, most)
    assert tiles.shape == (most, 4) and tiles.dtype == np.int32
    used = tiles[tiles[:, 1] > 0]
    assert not tiles[len(used) :].any()                  # unused tiles come last
    assert np.array_equal(used, tiles_of(rows, group))
    found = {}
    for token, live, position, table_row in used.tolist():
        for offset in range(min(live, step)):
            assert token + offset not in found
            found[token + offset] = (position + offset, table_row)
    expected = {}
    token = 7
    for row, (queries, length) in enumerate(rows):
        for query in range(queries):
            expected[token] = (length - queries + query, 10 * row)
            token += 1
    assert found == expected


def test_the_longest_come_first_and_neighbours_stay_together() -> None:
    tiles = tiles_of([(64, 2064), (300, 300), (64, 2064), (10, 900)], 4)
    walked = -(-(tiles[:, 2] + np.minimum(tiles[:, 1], 32)) // prefill_tiles.TILE_KEYS)
    assert walked.tolist() == [17, 16, 17, 16, 8, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1]
    assert tiles[:5, 3].tolist() == [0, 0, 20, 20, 30]
    assert (np.diff(tiles[tiles[:, 3] == 10, 2]) < 0).all()


def test_a_step_of_a_shape_has_as_many_tiles_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_prefill_hopper, "wants_tiles", lambda *model: True)
    group = KVGroupSpec(layers=(0,), window=None, block_size=16, num_kv_heads=2, head_dim=64)
    rows = DeviceRows([group], 8, 512, 256, 0, torch.device("cpu"), heads=8)

    def packed(counts: list[int], shape: Shape | None) -> Any:
        numbers = np.arange(len(counts), dtype=np.int32)
        added = [
            RowAdded(row, np.zeros(count + 20, np.int32), count + 20, 20, [np.arange(1, 20, dtype=np.int32)], params, 0)
            for row, count in enumerate(counts)
        ]
        want = np.full(len(counts), Want.TOKEN, np.int8)
        empty = np.zeros(0, np.int32)
        plan = StepPlan(0, empty, added, empty.reshape(0, 4), numbers, np.array(counts, np.int32), want)
        rows.apply(plan)
        return rows.pack(plan, shape)

    params = SamplingParams()
    batch = packed([1, 1, 70, 5], None)
    assert batch.query_tiles.tolist() == [[66, 6, 84, 2], [34, 38, 52, 2], [2, 70, 20, 2], [72, 5, 20, 3]]
    assert batch.sampled.query_tiles is None             # one query each: decodes
    assert packed([1, 1], None).query_tiles is None
    shape = Shape(decodes=4, prompts=2, prompt_tokens=128)
    for counts in ([1, 70, 5], [1, 1, 1, 128], [2]):
        tiles = packed(counts, shape).query_tiles
        assert tiles.shape == (prefill_tiles.most_tiles(128, 2, 4), 4)
        assert tiles[tiles[:, 1] > 0, 0].min() == 4      # after the decodes, padding included
    fixed = DeviceRows([group], 8, 512, 256, 0, torch.device("cpu"), heads=8, deterministic=True)
    assert fixed.schedule._tile_group is None


# ── the kernel, compiled ─────────────────────────────────────────────────────────────────────────────────────────────


def compiled(head_dim: int, group: int, narrow: bool) -> dict[str, Any]:
    """What the compiler makes of the kernel for sm_90. In a process of its own, where the op files are imported as on a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton = True, gluon, triton
    importlib.reload(hopper)
    module = importlib.reload(kernel_prefill_hopper)
    kernel = module.prompt_kernel
    rounded = 1 << (group - 1).bit_length()
    cube = module.gl.NVMMASharedLayout(128, 16, rank=3)
    constants = {
        "KV_HEADS": 8, "GROUP": group, "ROUND": rounded, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16,
        "TILE_KEYS": prefill_tiles.TILE_KEYS, "QUERY_STAGES": module.QUERY_STAGES,
        "KEY_STAGES": module.NARROW_KEY_STAGES if narrow else module.KEY_STAGES,
        "VALUE_STAGES": module.NARROW_VALUE_STAGES if narrow else module.VALUE_STAGES, "BYTE_STAGES": module.BYTE_STAGES,
        "CONVERTED_KEYS": module.CONVERTED_KEYS, "NARROW": narrow,
    }

    def pages(width: int) -> str:
        bits, dtype = (8, "fp8e4nv") if narrow else (16, "bf16")
        layout = module.gl.NVMMASharedLayout(width * bits // 8, bits, rank=2)
        return f"tensordesc<{dtype}[16, {width}],{layout!r}>"

    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr") | {
        "queries": f"tensordesc<bf16[{64 // rounded}, {rounded}, 64],{cube!r}>", "score_scale": "fp32",
        "keys": pages(head_dim if narrow else 64), "values": pages(64), "table_ptr": "*i32",
        "tiles_ptr": "*i32", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32", "out_ptr": "*bf16",
    }
    by_place = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("out_ptr", "out_token_stride")}
    source = GluonASTSource(kernel, types, by_place, aligned)
    options = {"num_warps": 4, "maxnreg": module.NARROW_REGISTERS if narrow else module.REGISTERS}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile() as binary:
        binary.write(result.asm["cubin"])
        binary.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        code = subprocess.run([tool, "-c", binary.name], capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"[HQ]GMMA|WARPGROUP\.DEPBAR|MUFU\.EX2|UTMALDG", code)
    parts = re.split(r"\n +(?:default|partition\d+)\b", result.asm["ttgir"])[1:]
    carried = [re.search(r"scf\.for .*?iter_args\((.*?)\) ->", part) for part in parts]
    return {
        "shared": result.metadata.shared, "ptx": result.asm["ptx"], "instructions": instructions,
        "carried": [found.group(1).count("=") if found else 0 for found in carried],
    }


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or registry.TRITON_INTERPRETED, reason="no compiler")
@pytest.mark.parametrize(
    ("head_dim", "group", "narrow"),
    [
        (64, 4, True), pytest.param(64, 4, False, marks=pytest.mark.slow), pytest.param(128, 8, False, marks=pytest.mark.slow),
        pytest.param(128, 7, False, marks=pytest.mark.slow), pytest.param(128, 4, True, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_compiles(tmp_path: Path, run_script: Any, head_dim: int, group: int, narrow: bool) -> None:
    """wgmma stays asynchronous: exponentials stand between the issue of one and the wait for it. fp8 keys use fp8 MMAs."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, __file__, str(head_dim), str(group), *["narrow"] * narrow]
    run = run_script(command, timeout=280, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert found["shared"] <= kernel_prefill_hopper.SHARED_BYTES <= 232_448
    assert "cp.async.bulk.tensor.3d" in found["ptx"] and "setmaxnreg.dec" in found["ptx"]
    assert ("QGMMA" in found["instructions"]) == narrow
    # Consumer, conversion and producer warps carry the next item and their place in the rings from item to item. Triton 3.6
    # drops carried values that are only bounds of an inner loop.
    assert found["carried"] == ([6, 6, 3, 7, 5] if narrow else [6, 6, 7, 5])
    found["instructions"] = ["HGMMA" if name == "QGMMA" else name for name in found["instructions"]]
    counts = Counter(found["instructions"])
    # Where the assembler cannot keep a wgmma asynchronous it waits after every one.
    assert counts["HGMMA"] > 40 and counts["WARPGROUP.DEPBAR"] <= 16 and counts["UTMALDG"] > 16
    runs = [(name, len(list(same))) for name, same in itertools.groupby(found["instructions"])]
    overlapped = [
        runs[at + 2][1] for at in range(len(runs) - 3)
        if [name for name, _ in runs[at : at + 4]] == ["HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2", "WARPGROUP.DEPBAR"]
    ]
    assert len(overlapped) >= 2 and min(overlapped) >= 64


# ── the kernel, on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────

on_hopper = pytest.mark.skipif(
    not kernel_prefill_hopper._has_tma(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="needs a GPU of compute capability 9",
)
ROWS = [
    [(1, 70), (100, 100), (3, 300), (1, 1), (33, 161)],
    [(1, 9), (40, 168), (129, 129), (65, 330)],
    [(512, 512)],
    [(1, 1), (1, 1), (7, 135), (32, 128), (31, 128), (128, 1024)],
    [(2, 2), (16, 16), (17, 17), (500, 777), (1, 128), (1, 129), (64, 128)],
]


@on_hopper
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype", "kv_dtype"),
    [
        (32, 8, 128, 16, "bfloat16", None), (8, 2, 64, 16, "bfloat16", None), (14, 2, 128, 16, "bfloat16", None),
        (4, 4, 128, 16, "bfloat16", None), (9, 3, 64, 16, "bfloat16", None), (8, 4, 64, 32, "bfloat16", None),
        (8, 2, 128, 8, "bfloat16", None), (8, 2, 64, 64, "float16", None), (64, 1, 128, 16, "bfloat16", None),
        (32, 8, 128, 16, "bfloat16", E4M3), (8, 2, 64, 8, "bfloat16", E4M3), (14, 2, 128, 16, "bfloat16", E4M3),
        (8, 2, 64, 32, "bfloat16", E4M3), (64, 1, 128, 64, "bfloat16", E4M3),
    ],
)
def test_prompts_agree_with_the_definition(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: str, kv_dtype: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With NaN in every hidden slot and decodes before the prompts; and the same bits every time."""
    calls: list[None] = []
    launch = kernel_prefill_hopper.prompt_attention
    monkeypatch.setattr(kernel_prefill_hopper, "prompt_attention", lambda *args: calls.append(launch(*args)))
    tolerance = paged_attention.tolerance[dtype]
    for number, rows in enumerate(ROWS):
        generator = torch.Generator().manual_seed(5)
        args, options = paged_attention.inputs(
            generator, getattr(torch, dtype), "cuda", rows=tuple(rows), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            block_size=block_size, window=None, softcap=None, scattered=number % 2 == 1, kv_dtype=kv_dtype,
        )
        wanted = paged_attention_reference(*map(_wide, args), **{key: _wide(value) for key, value in options.items()})
        found = [paged_attention_triton(*args, **options).cpu() for _ in range(2)]
        assert len(calls) == 2 * (number + 1)
        torch.testing.assert_close(found[0].double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute)
        assert torch.equal(*found)


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cpu", torch.float64) if value.is_floating_point() else value.cpu()


@on_hopper
def test_what_is_not_plain_goes_to_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the Hopper kernel was launched")

    monkeypatch.setattr(kernel_prefill_hopper, "prompt_attention", refuse)
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 64, "block_size": 16, "window": None, "softcap": None}
    for change in ({"window": 20}, {"softcap": 3.0}, {"head_dim": 80}, {"heads": 10}, {"kv_dtype": "float8_e5m2"},
                   {"kv_dtype": "int8"}, {"kv_dtype": ("int8", E4M3)}, {"kv_dtype": (None, E4M3)}):
        args, options = paged_attention.inputs(
            torch.Generator().manual_seed(5), torch.bfloat16, "cuda", rows=((50, 70),), **{**sizes, **change}
        )
        assert paged_attention_triton(*args, **options).isfinite().all()
    args, options = paged_attention.inputs(torch.Generator().manual_seed(5), torch.bfloat16, "cuda", rows=((50, 70),), **sizes)
    fixed = AttentionWork(0, 50, deterministic=True)
    assert paged_attention_triton(*args, **options, work=fixed).isfinite().all()


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3)))
