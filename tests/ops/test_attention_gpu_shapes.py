"""What attention is told besides its tensors: shapes of a step, shared prefixes, formats of the cache, workspaces."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from ridgeline.ops.attention import paged_attention as attention
from ridgeline.ops.attention import split_kv
from ridgeline.ops.attention.paged_attention import AttentionWork, KVFormat, OlderKV, ScaleLayout, paged_attention
from ridgeline.ops.registry import TRITON_INTERPRETED

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 4, "window": None, "softcap": None}
E4M3 = torch.float8_e4m3fn


def inputs(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Any, dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    return paged_attention.inputs(generator, dtype, "cpu", rows=tuple(rows), **{**SIZES, **changes})


def test_the_definition_needs_no_host_lists_and_writes_where_it_is_told() -> None:
    args, options = inputs([(1, 9), (1, 0), (3, 12)], scattered=True)
    expected = paged_attention(*args, **options)
    assert not expected[1].any()
    out = torch.full_like(expected, torch.nan)
    options |= {"query_start_host": None, "kv_len_host": None, "out": out}
    assert attention.paged_attention_reference(*args, **options) is out
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("window", [None, 6])
def test_older_positions_may_have_another_format(window: int | None) -> None:
    """A row whose first blocks are in a cache of their own equals the row with all of them in one."""
    lengths = [8, 0, 4]
    form = KVFormat(E4M3, E4M3, "token", "block")
    args, options = inputs([(1, 11), (1, 6), (3, 9)], window=window)
    q, k_cache, v_cache, table, query_start, kv_len = args
    k_cache, v_cache = k_cache.nan_to_num(), v_cache.nan_to_num()
    scales = [torch.rand(attention.scale_shape(layout, *k_cache.shape)) for layout in ("token", "block")]
    old = [(cache * 50).to(torch.float32).to(E4M3) for cache in (k_cache, v_cache)]
    plain = [
        cache.double() * attention._scale_per_value(scale.double(), layout)
        for cache, scale, layout in zip(old, scales, (form.k_scale, form.v_scale), strict=True)
    ]
    # The same block ids in both caches: the first blocks of each row mean the old one, the others the new one.
    both = [torch.cat((new, stored)) for new, stored in zip((k_cache, v_cache), plain, strict=True)]
    is_old = torch.arange(table.shape[1]) < torch.tensor(lengths).unsqueeze(1) // SIZES["block_size"]
    expected = paged_attention(
        q, *both, torch.where(is_old, table + len(k_cache), table), query_start, kv_len, **options
    )
    older = OlderKV(
        *old, torch.where(is_old, table, 0), torch.tensor(lengths, dtype=torch.int32), form, scales[0], scales[1]
    )
    actual = paged_attention(
        q, k_cache, v_cache, torch.where(is_old, 0, table), query_start, kv_len, **options, older=older
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", ["tensor", "head", "token", "channel", "block"])
def test_what_is_written_is_what_is_read(layout: ScaleLayout) -> None:
    """New tokens, quantised for a cache, come back within half a step of e4m3: 2^-4 of their size, or of the smallest."""
    values = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1))
    largest = torch.finfo(E4M3).max
    whole = values.abs().amax() / largest
    scale = {
        "tensor": whole.view(1), "head": values.abs().amax(dim=(0, 2)) / largest,
        "channel": values.abs().amax(dim=0) / largest, "token": attention.token_scales(values, E4M3),
        "block": attention.token_scales(values, E4M3).amax(dim=0).expand(6, 2),
    }[layout]  # fmt: skip
    stored = attention.quantise_kv(values, scale, layout, E4M3)
    assert stored.dtype == E4M3
    cache_scale = scale.unsqueeze(0) if layout == "token" else scale[:1] if layout == "block" else scale
    read = stored.unsqueeze(0).float() * attention._scale_per_value(cache_scale, layout)
    torch.testing.assert_close(read[0], values, rtol=2**-4, atol=float(cache_scale.max()) * 2**-10)
    beyond = attention.quantise_kv(100 * values, scale, layout, E4M3)
    assert beyond.float().abs().max() == largest


def test_zeros_have_a_scale() -> None:
    scales = attention.token_scales(torch.zeros(1, 2, 4), E4M3)
    assert torch.equal(scales, torch.ones(1, 2))


def test_rows_of_a_prefix_are_cut_into_tiles() -> None:
    size = attention.prefix_tile_rows(40)
    assert size == 3
    prefix = attention.shared_prefix([([5, 1, 2, 7], 32), ([0], 16)], 9, 40, table_rows=list(range(10, 19)), tiles=4)
    assert prefix.tile_row.tolist() == [15, 17, 10, 0]
    assert prefix.tile_len.tolist() == [32, 32, 16, 0]
    assert prefix.tile_first.tolist() == [0, 3, 4, 0]
    assert prefix.tile_count.tolist() == [3, 1, 1, 0]
    assert prefix.members.tolist() == [5, 1, 2, 7, 0, 0, 0, 0, 0]
    assert prefix.prefix_len.tolist() == [16, 32, 32, 0, 0, 32, 0, 32, 0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_workspace_is_large_enough_for_every_number_of_rows(deterministic: bool) -> None:
    floats = attention.workspace_floats(
        300, 32, 8, 128, multiprocessors=132, prefix_tiles=12, deterministic=deterministic
    )
    for rows in range(1, 301):
        items = split_kv.num_items(rows, split_kv.programs_at_once(132, 8), deterministic)
        assert (items + rows * attention.prefix_shares(rows, 4, 8, 132)) * 32 * (128 + 2) <= floats
    assert floats * 4 < 1 << 28
    with_older = attention.workspace_floats(300, 32, 8, 128, multiprocessors=132, deterministic=deterministic, older=True)
    for rows in range(1, 301):
        programs = split_kv.programs_at_once(132, 8)
        cut, _ = attention.older_shares(rows, programs, deterministic)
        assert (split_kv.num_items(rows, programs, deterministic) + rows * cut) * 32 * (128 + 2) <= with_older
    assert attention.older_shares(1, 66, False) == (16, 64) and attention.older_shares(128, 66, False) == (1, 64)
    assert attention.older_shares(1, 66, True) == attention.older_shares(500, 66, True)


# ── the Triton kernels, in the interpreter ───────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(TRITON_INTERPRETED or torch.cuda.is_available(), reason="the kernels run in this process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", __file__, "-k", "kernel_"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert run.stdout.count("PASSED ") == 11


kernels_run = pytest.mark.skipif(not (TRITON_INTERPRETED or torch.cuda.is_available()), reason="no Triton kernels here")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(rows: list[tuple[int, int]], **changes: Any) -> tuple[Any, dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    return paged_attention.inputs(generator, torch.float32, DEVICE, rows=tuple(rows), **{**SIZES, **changes})


@kernels_run
def test_kernel_deterministic_rows_do_not_depend_on_their_batch() -> None:
    (q, k, v, table, starts, kv_len), options = on_device([(1, 600), (1, 9), (1, 40)], block_size=16)
    options = {"scale": options["scale"]}
    together = attention.paged_attention_triton(
        q, k, v, table, starts, kv_len, work=AttentionWork(3, 0, deterministic=True), **options
    )
    for row in range(3):
        one = slice(row, row + 1)
        alone = attention.paged_attention_triton(
            q[one], k, v, table[one], starts[:2], kv_len[one], work=AttentionWork(1, 0, deterministic=True), **options
        )
        assert torch.equal(alone[0], together[row])


@kernels_run
def test_kernel_workspace_serves_one_launch_after_another() -> None:
    """Partials of other launches, NaN among them, never show, and the counters are at zero again."""
    (q, k, v, table, starts, kv_len), options = on_device([(1, 200), (1, 0), (1, 130)], block_size=16)
    options = {"scale": options["scale"]}
    expected = attention.paged_attention_reference(q, k, v, table, starts, kv_len, **options)
    workspace = attention.make_workspace(
        attention.workspace_floats(3, 4, 2, 16, multiprocessors=132), 3, 2, torch.device(DEVICE)
    )
    workspace.partials.fill_(torch.nan)
    for _ in range(2):
        out = torch.full_like(q, torch.nan)
        returned = attention.paged_attention_triton(
            q, k, v, table, starts, kv_len, work=AttentionWork(3, 0), workspace=workspace, out=out, **options
        )
        assert returned is out
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert not workspace.arrived.any()


@kernels_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_long_rows_among_short_ones_are_cut(dtype: torch.dtype) -> None:
    """By the list alone: rows in any order, shares of one row of one size, items of nobody at the end."""
    (q, k, v, table, starts, kv_len), options = on_device([(1, 300), (1, 20), (1, 0)], block_size=16)
    options = {"scale": options["scale"]}
    expected = attention.paged_attention_reference(q, k, v, table, starts, kv_len, **options)
    lists = ([2, 0, 0, 0, 0, 0, 1, -1, -1], [1, 6, 0], [64, 32, 32])
    shares = split_kv.DeviceShares(*(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in lists))
    workspace = attention.make_workspace(9 * 4 * (16 + 2), 3, 2, torch.device(DEVICE))
    workspace.partials.fill_(torch.nan)
    actual = attention.paged_attention_triton(
        *(tensor.to(dtype) for tensor in (q, k, v)), table, starts, kv_len, work=AttentionWork(3, 0), shares=shares,
        workspace=workspace, **options,
    )  # fmt: skip
    left = workspace.partials[: 9 * 4 * 16].view(9, -1).isnan().all(dim=1)       # partial results of the shares alone
    assert left.tolist() == [True, False, False, False, False, False, True, True, True]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@kernels_run
def test_kernel_prefix_tiles_may_all_be_unused() -> None:
    (q, k, v, table, starts, kv_len), options = on_device([(1, 20), (1, 7)])
    options = {"scale": options["scale"]}
    expected = attention.paged_attention_reference(q, k, v, table, starts, kv_len, **options)
    prefix = attention.shared_prefix([], 2, 2, tiles=2, device=DEVICE)
    actual = attention.paged_attention_triton(
        q, k, v, table, starts, kv_len, work=AttentionWork(2, 0), prefix=prefix, **options
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@kernels_run
def test_kernel_prefix_is_merged_by_the_only_program_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "prefix_shares", lambda rows, group, kv_heads, multiprocessors: 3)
    monkeypatch.setattr(attention, "PREFIX_MINIMUM", 32)
    args, options = on_device(
        [(1, 150), (1, 9), (1, 141), (1, 0)], shared=(((0, 2), 136),), softcap=3.0, scattered=True
    )
    expected = attention.paged_attention_reference(*args, **options)
    torch.testing.assert_close(
        attention.paged_attention_triton(*args, **options), expected, rtol=1e-5, atol=1e-5
    )


# ── rows with older positions in another format ──────────────────────────────────────────────────────────────────────

OLDER: dict[str, Any] = {"block_size": 16, "older": (160, 0, 32, 48), "older_format": ("float8_e4m3fn", "token") * 2}
OLDER_ROWS = [(1, 200), (1, 7), (1, 40), (20, 90)]


def as_float16(older: OlderKV) -> OlderKV:
    """float32 queries, as the other tests here: eight-bit floats are then read value by value."""
    return dataclasses.replace(older, k_cache=older.k_cache.half(), v_cache=older.v_cache.half())


@kernels_run
@pytest.mark.parametrize("window", [None, 30])
def test_kernel_older_positions_without_the_definition(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes and a merge; with a window the definition, which is right as well."""
    args, options = on_device(OLDER_ROWS, window=window, **OLDER)
    options["older"] = as_float16(options["older"])
    expected = attention.paged_attention_reference(*args, **options)
    called = []
    definition = attention.paged_attention_reference
    monkeypatch.setattr(attention, "paged_attention_reference", lambda *a, **k: called.append(1) or definition(*a, **k))
    actual = attention.paged_attention_triton(*args, **options)
    assert bool(called) == (window is not None)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@kernels_run
def test_kernel_older_lengths_are_read_on_the_device() -> None:
    """What a graph replays: nothing is asked of the host, and other lengths in the same tensors give their own result."""
    (q, k, v, _, starts, kv_len), options = on_device(OLDER_ROWS, **OLDER)
    k, v = (torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) for cache in (k, v))
    made = options["older"]
    pages = [torch.randn(made.k_cache.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) for _ in "kv"]
    # Every table has some block everywhere: any length of either part is possible.
    tables = [torch.randint(1, len(cache), (4, 16), dtype=torch.int32).to(DEVICE) for cache in (k, pages[0])]
    older = OlderKV(pages[0], pages[1], tables[1], made.length)
    workspace = attention.make_workspace(
        attention.workspace_floats(3, 4, 2, 16, multiprocessors=132, older=True), 3, 2, torch.device(DEVICE)
    )
    # Shares of 64 keys of as many items as the longest rows need; the rest are nobody's.
    lists = ([0] * 4 + [1] * 4 + [2] * 4 + [-1], [0, 4, 8], [64, 64, 64])
    shares = split_kv.DeviceShares(*(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in lists))
    steps = (([200, 7, 40, 90], [160, 0, 32, 48]), ([17, 250, 0, 150], [16, 0, 0, 128]), ([64] * 4, [48, 0, 16, 32]))
    for lengths, kept in steps[: 2 if TRITON_INTERPRETED else 3]:        # a step takes the interpreter seconds
        kv_len.copy_(torch.tensor(lengths))
        older.length.copy_(torch.tensor(kept))
        workspace.partials.fill_(torch.nan)
        actual = attention.paged_attention_triton(
            q, k, v, tables[0], starts, kv_len, scale=0.25, work=AttentionWork(3, 20), shares=shares, workspace=workspace,
            older=older,
        )  # fmt: skip
        expected = attention.paged_attention_reference(q, k, v, tables[0], starts, kv_len, scale=0.25, older=older)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert not workspace.arrived.any()


@kernels_run
def test_kernel_older_positions_in_deterministic_mode() -> None:
    """A row's bits depend on that row alone: its older part is always cut alike."""
    (q, k, v, table, starts, kv_len), made = on_device([(1, 700), (1, 9), (1, 40)], block_size=16, older=(624, 0, 16))
    older = made["older"]
    together = attention.paged_attention_triton(
        q, k, v, table, starts, kv_len, work=AttentionWork(3, 0, deterministic=True), scale=0.25, older=older
    )
    for row in range(3):
        one = slice(row, row + 1)
        own = dataclasses.replace(older, block_table=older.block_table[one], length=older.length[one])
        alone = attention.paged_attention_triton(
            q[one], k, v, table[one], starts[:2], kv_len[one], work=AttentionWork(1, 0, deterministic=True), scale=0.25,
            older=own,
        )  # fmt: skip
        assert torch.equal(alone[0], together[row])


@kernels_run
def test_kernel_older_positions_need_room_and_written_tokens() -> None:
    (q, k, v, table, starts, kv_len), options = on_device(OLDER_ROWS[:3], **{**OLDER, "older": (160, 0, 32)})
    small = attention.make_workspace(attention.workspace_floats(1, 4, 2, 16, multiprocessors=1), 3, 2, torch.device(DEVICE))
    with pytest.raises(ValueError, match="or without prefixes or older positions"):
        attention.paged_attention_triton(q, k, v, table, starts, kv_len, **options, workspace=small)
    fresh = attention.FreshTokens(starts, starts, q)
    with pytest.raises(ValueError, match="write new tokens by rotary_write"):
        attention.paged_attention_triton(q, k, v, table, starts, kv_len, **options, fresh=fresh)
