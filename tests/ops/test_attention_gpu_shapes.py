"""Arguments of attention beside its tensors: shape of a step, shared prefixes, quantised caches, workspaces."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from ridgeline.ops.attention import attention_arguments as arguments
from ridgeline.ops.attention import attention_launch, split_kv
from ridgeline.ops.attention.attention_arguments import AttentionWork
from ridgeline.ops.attention.attention_launch import paged_attention_triton
from ridgeline.ops.attention.attention_reference import paged_attention_reference
from ridgeline.ops.attention.paged_attention import paged_attention
from ridgeline.ops.registry import TRITON_INTERPRETED

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 4, "window": None, "softcap": None}
E4M3 = torch.float8_e4m3fn


def inputs(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Any, dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    return paged_attention.inputs(generator, dtype, "cpu", rows=tuple(rows), **{**SIZES, **changes})


def test_the_definition_needs_no_host_lists_and_writes_into_out() -> None:
    args, options = inputs([(1, 9), (1, 0), (3, 12)], scattered=True)
    expected = paged_attention(*args, **options)
    assert not expected[1].any()
    out = torch.full_like(expected, torch.nan)
    options |= {"query_start_host": None, "kv_len_host": None, "out": out}
    assert paged_attention_reference(*args, **options) is out
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=0)


def test_what_is_written_is_what_is_read() -> None:
    """New tokens, quantised for a cache, come back within half a step of e4m3: 2^-4 of their size, or of the smallest."""
    values = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1))
    scale = arguments.token_scales(values, E4M3)
    stored = arguments.quantise_kv(values, scale, E4M3)
    assert stored.dtype == E4M3
    read = stored.float() * scale.unsqueeze(-1)
    torch.testing.assert_close(read, values, rtol=2**-4, atol=float(scale.max()) * 2**-10)
    beyond = arguments.quantise_kv(100 * values, scale, E4M3)
    assert beyond.float().abs().max() == torch.finfo(E4M3).max


def test_integers_are_rounded_to_the_nearest_and_symmetric() -> None:
    values = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1))
    scale = arguments.token_scales(values, torch.int8)
    stored = arguments.quantise_kv(values, scale, torch.int8)
    assert int(stored.abs().amax(dim=-1).min()) == 127   # every head uses the whole range
    assert (stored.float() - values / scale.unsqueeze(-1)).abs().max() <= 0.5001
    assert torch.equal(arguments.quantise_kv(-values, scale, torch.int8), -stored)
    assert arguments.quantise_kv(-100 * values, scale, torch.int8).min() == -127


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_zeros_have_a_scale(dtype: torch.dtype) -> None:
    scales = arguments.token_scales(torch.zeros(1, 2, 4), dtype)
    assert torch.equal(scales, torch.ones(1, 2))


def test_rows_of_a_prefix_are_cut_into_tiles() -> None:
    size = arguments.prefix_tile_rows(40)
    assert size == 3
    prefix = arguments.shared_prefix([([5, 1, 2, 7], 32), ([0], 16)], 9, 40, table_rows=list(range(10, 19)), tiles=4)
    assert prefix.tile_row.tolist() == [15, 17, 10, 0]
    assert prefix.tile_len.tolist() == [32, 32, 16, 0]
    assert prefix.tile_first.tolist() == [0, 3, 4, 0]
    assert prefix.tile_count.tolist() == [3, 1, 1, 0]
    assert prefix.members.tolist() == [5, 1, 2, 7, 0, 0, 0, 0, 0]
    assert prefix.prefix_len.tolist() == [16, 32, 32, 0, 0, 32, 0, 32, 0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_workspace_is_large_enough_for_every_number_of_rows(deterministic: bool) -> None:
    floats = arguments.workspace_floats(
        300, 32, 8, 128, multiprocessors=132, prefix_tiles=12, deterministic=deterministic
    )
    for rows in range(1, 301):
        items = split_kv.num_items(rows, split_kv.programs_at_once(132, 8), deterministic)
        assert (items + rows * arguments.prefix_shares(rows, 4, 8, 132)) * 32 * (128 + 2) <= floats
    assert floats * 4 < 1 << 28


# ── the Triton kernels, in the interpreter ───────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(TRITON_INTERPRETED or torch.cuda.is_available(), reason="the kernels run in this process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter(run_interpreted: Any) -> None:
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", __file__, "-k", "kernel_"]
    run = run_interpreted(command)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert run.stdout.count("PASSED ") == 7


kernels_run = pytest.mark.skipif(not (TRITON_INTERPRETED or torch.cuda.is_available()), reason="no Triton kernels here")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(rows: list[tuple[int, int]], **changes: Any) -> tuple[Any, dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    return paged_attention.inputs(generator, torch.float32, DEVICE, rows=tuple(rows), **{**SIZES, **changes})


@kernels_run
def test_kernel_deterministic_rows_do_not_depend_on_their_batch() -> None:
    (q, k, v, table, starts, kv_len), options = on_device([(1, 600), (1, 9), (1, 40)], block_size=16)
    options = {"scale": options["scale"]}
    together = paged_attention_triton(
        q, k, v, table, starts, kv_len, work=AttentionWork(3, 0, deterministic=True), **options
    )
    for row in range(3):
        one = slice(row, row + 1)
        alone = paged_attention_triton(
            q[one], k, v, table[one], starts[:2], kv_len[one], work=AttentionWork(1, 0, deterministic=True), **options
        )
        assert torch.equal(alone[0], together[row])


@kernels_run
def test_kernel_workspace_serves_one_launch_after_another() -> None:
    """Partials of other launches, NaN among them, never show, and the counters are at zero again."""
    (q, k, v, table, starts, kv_len), options = on_device([(1, 200), (1, 0), (1, 130)], block_size=16)
    options = {"scale": options["scale"]}
    expected = paged_attention_reference(q, k, v, table, starts, kv_len, **options)
    workspace = arguments.make_workspace(
        arguments.workspace_floats(3, 4, 2, 16, multiprocessors=132), 3, 2, torch.device(DEVICE)
    )
    workspace.partials.fill_(torch.nan)
    for _ in range(2):
        out = torch.full_like(q, torch.nan)
        returned = paged_attention_triton(
            q, k, v, table, starts, kv_len, work=AttentionWork(3, 0), workspace=workspace, out=out, **options
        )
        assert returned is out
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert not workspace.arrived.any()


@kernels_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_long_rows_among_short_ones_are_cut(dtype: torch.dtype) -> None:
    """By the list alone: rows in any order, shares of one row of one size, unused items at the end."""
    (q, k, v, table, starts, kv_len), options = on_device([(1, 300), (1, 20), (1, 0)], block_size=16)
    options = {"scale": options["scale"]}
    expected = paged_attention_reference(q, k, v, table, starts, kv_len, **options)
    lists = ([2, 0, 0, 0, 0, 0, 1, -1, -1], [1, 6, 0], [64, 32, 32])
    shares = split_kv.DeviceShares(*(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in lists))
    workspace = arguments.make_workspace(9 * 4 * (16 + 2), 3, 2, torch.device(DEVICE))
    workspace.partials.fill_(torch.nan)
    actual = paged_attention_triton(
        *(tensor.to(dtype) for tensor in (q, k, v)), table, starts, kv_len, work=AttentionWork(3, 0), shares=shares,
        workspace=workspace, **options,
    )
    left = workspace.partials[: 9 * 4 * 16].view(9, -1).isnan().all(dim=1)       # partial results of the shares alone
    assert left.tolist() == [True, False, False, False, False, False, True, True, True]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@kernels_run
def test_kernel_prefix_tiles_may_all_be_unused() -> None:
    (q, k, v, table, starts, kv_len), options = on_device([(1, 20), (1, 7)])
    options = {"scale": options["scale"]}
    expected = paged_attention_reference(q, k, v, table, starts, kv_len, **options)
    prefix = arguments.shared_prefix([], 2, 2, tiles=2, device=DEVICE)
    actual = paged_attention_triton(
        q, k, v, table, starts, kv_len, work=AttentionWork(2, 0), prefix=prefix, **options
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@kernels_run
def test_kernel_prefix_is_merged_by_the_only_program_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "prefix_shares", lambda rows, group, kv_heads, multiprocessors: 3)
    monkeypatch.setattr(attention_launch, "PREFIX_MINIMUM", 32)
    args, options = on_device(
        [(1, 150), (1, 9), (1, 141), (1, 0)], shared=(((0, 2), 136),), softcap=3.0, scattered=True
    )
    expected = paged_attention_reference(*args, **options)
    torch.testing.assert_close(
        paged_attention_triton(*args, **options), expected, rtol=1e-5, atol=1e-5
    )


@kernels_run
def test_kernel_workspace_that_is_too_small_is_refused() -> None:
    (q, k, v, table, starts, kv_len), options = on_device([(1, 200), (1, 7), (1, 40)], block_size=16)
    small = arguments.make_workspace(arguments.workspace_floats(1, 4, 2, 16, multiprocessors=1), 3, 2, torch.device(DEVICE))
    with pytest.raises(ValueError, match="made for fewer than 3 decodes, or without prefixes"):
        paged_attention_triton(q, k, v, table, starts, kv_len, scale=options["scale"], workspace=small)
