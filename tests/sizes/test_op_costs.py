"""The costs against counts done by hand or by brute force, and the promise that they need no torch."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.sizes.op_costs import (
    Cost,
    decode_attention_cost,
    gated_activation_cost,
    kv_bytes,
    kv_write_cost,
    paged_attention_cost,
    rms_norm_cost,
    rotary_cost,
    rotary_write_cost,
    visible_keys,
    visible_pairs,
)
from ridgeline.sizes.sampling_costs import logprobs_cost


def test_costs_need_no_torch() -> None:
    code = "import sys, ridgeline.sizes.sampling_costs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cost_adds_and_multiplies() -> None:
    cost = Cost(10, 4) + Cost(2, 2) * 3
    assert cost == Cost(16, 10)


def test_kv_of_llama_70b_at_4096_tokens_is_1_34_gb() -> None:
    assert kv_bytes(tokens=4096, layers=80, kv_heads=8, head_dim=128, element_bytes=2) == 1_342_177_280


def test_small_costs_by_hand() -> None:
    # 2 tokens × 4: 8 squares, 6 + 2 additions, 8 scalings, 8 weights, and per token mean, eps and root.
    assert rms_norm_cost(tokens=2, width=4, residual=False, element_bytes=2) == Cost(2 * (16 + 3), (2 * 8 + 4) * 2)
    assert rms_norm_cost(tokens=2, width=4, residual=True, element_bytes=2) == Cost(2 * (20 + 3), (4 * 8 + 4) * 2)
    # 1 token × 3 heads × 2 pairs, 6 FLOPs each; the 12 values in and out, 4 table entries of 4 bytes, one position.
    rotary = rotary_cost(tokens=1, heads=2, kv_heads=1, head_dim=8, rotary_dim=4, element_bytes=2)
    assert rotary == Cost(36, 48 + 16 + 8)
    assert gated_activation_cost(tokens=2, intermediate=3, kind="silu", element_bytes=4) == Cost(30, 72)
    # K and V of 2 × 1 × 4 values, each read and written, and two slots.
    assert kv_write_cost(tokens=2, kv_heads=1, head_dim=4, block_size=4, element_bytes=2) == Cost(0, 64 + 16)
    assert logprobs_cost(rows=1, vocab=10, top_k=2, element_bytes=4) == Cost(60, 40 + 8 + 36)


def test_attention_by_hand() -> None:
    # One decode row of 5 positions in blocks of 4: 5 pairs × 2 heads, each 4 × 8 in products and 5 in the softmax.
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "block_size": 4, "window": None, "softcap": None}
    cost = paged_attention_cost(rows=[(1, 5)], element_bytes=2, **sizes)
    assert cost.flops == 2 * (5 * 37 + 8)
    assert cost.bytes == 2 * 2 * 8 * 2 + 5 * 2 * 8 * 2 + (2 + 2 + 1) * 4
    # A softcap costs three more per pair; an 8-bit cache halves the KV bytes.
    capped = paged_attention_cost(rows=[(1, 5)], element_bytes=2, kv_element_bytes=1, **{**sizes, "softcap": 30.0})
    assert capped.flops == cost.flops + 2 * 5 * 3
    assert capped.bytes == cost.bytes - 5 * 2 * 8


def test_attention_over_a_quantised_cache_by_hand() -> None:
    # Eight bits with a scale for each token and KV head: half of the bytes of K and V, and 2 × 8 scales.
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "block_size": 4, "softcap": None, "window": None}
    plain = paged_attention_cost(rows=[(1, 5), (1, 3)], element_bytes=2, **sizes)
    narrow = paged_attention_cost(rows=[(1, 5), (1, 3)], element_bytes=2, kv_dtype="float8_e4m3fn", **sizes)
    assert narrow.flops == plain.flops
    assert narrow.bytes == plain.bytes - 8 * 2 * 8 + 2 * 8 * 4


def test_what_stays_on_the_chip_is_not_moved() -> None:
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "block_size": 4}
    rest = {"window": None, "softcap": None}
    rows = [(1, 5), (1, 9)]
    apart = rotary_write_cost(tokens=2, rotary_dim=8, norm=True, element_bytes=2, **sizes)
    apart += paged_attention_cost(rows=rows, element_bytes=2, **sizes, **rest)
    joined = decode_attention_cost(rows=rows, rotary_dim=8, norm=True, element_bytes=2, **sizes, **rest)
    assert joined.flops == apart.flops
    # Queries are neither written nor read, nor is the newest key and value read.
    assert joined.bytes == apart.bytes - 2 * (2 * 2 * 8 * 2) - 2 * (2 * 8 * 2)


@given(st.integers(0, 12), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 40)))
def test_visibility_counts_match_the_definition(query_len: int, before: int, window: int | None) -> None:
    kv_len = before + query_len
    seen = [
        {key for key in range(position + 1) if window is None or key > position - window}
        for position in range(before, kv_len)
    ]
    assert visible_pairs(query_len, kv_len, window) == sum(map(len, seen))
    if query_len:
        assert visible_keys(query_len, kv_len, window) == len(set().union(*seen))
