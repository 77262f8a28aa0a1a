"""The costs against counts done by hand or by brute force, and the promise that they need no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.costs import (
    Cost,
    DecoderShape,
    decoder_step,
    decoder_step_parts,
    gated_activation_cost,
    kv_bytes,
    kv_write_cost,
    logprobs_cost,
    paged_attention_cost,
    rms_norm_cost,
    rotary_cost,
    visible_keys,
    visible_pairs,
)

LLAMA_8B = DecoderShape(
    hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256,
)  # fmt: skip
SMOLLM2 = DecoderShape(
    hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, layers=30, vocab=49152,
    weight_bytes=4, kv_bytes=4, activation_bytes=4,
)  # fmt: skip


def test_costs_need_no_torch() -> None:
    code = "import sys, ridgeline.costs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cost_adds_and_multiplies() -> None:
    cost = Cost(10, 4) + Cost(2, 2) * 3
    assert cost == Cost(16, 10)


def test_kv_of_llama_70b_at_4096_tokens_is_1_34_gb() -> None:
    assert kv_bytes(tokens=4096, layers=80, kv_heads=8, head_dim=128, element_bytes=2) == 1_342_177_280


def test_linears_of_llama_8b_are_6_98_billion_weights() -> None:
    assert LLAMA_8B.linear_weights == 6_979_321_856
    assert LLAMA_8B.kv_bytes_per_token == 131_072                        # 128 KiB


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


def test_a_decode_step_streams_every_weight_once() -> None:
    parts = decoder_step_parts(LLAMA_8B, [(1, 1000)])
    activations = 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096) * 2
    assert parts["linears"] == Cost(2 * 6_979_321_856, 2 * 6_979_321_856 + activations)
    assert parts["head"] == Cost(2 * 4096 * 128256, 2 * 4096 * 128256 + (4096 + 128256) * 2)
    kv = 1000 * LLAMA_8B.kv_bytes_per_token
    assert kv < parts["attention"].bytes < kv * 1.01
    assert decoder_step(LLAMA_8B, [(1, 1000)]) == sum(parts.values(), Cost())
    # At batch 1 nearly everything that moves is weights: less than one FLOP per byte.
    one = decoder_step(LLAMA_8B, [(1, 1)])
    assert 0.9 < one.flops / one.bytes < 1.0


def test_batching_moves_weights_once_and_kv_per_row() -> None:
    one, eight = (decoder_step_parts(SMOLLM2, [(1, 256)] * rows) for rows in (1, 8))
    weights = SMOLLM2.linear_weights * 4
    assert eight["linears"].bytes - weights == 8 * (one["linears"].bytes - weights)
    assert eight["linears"].flops == 8 * one["linears"].flops
    assert eight["attention"].flops == 8 * one["attention"].flops
    table = 30 * 7 * 4                                                   # query_start has one entry more than rows
    assert eight["attention"].bytes == 8 * one["attention"].bytes - table


def test_windows_and_fractions_of_bytes() -> None:
    rows = [(1, 5000)]
    windowed = DecoderShape(
        hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256,
        window=1000, window_layers=16, weight_bytes=0.5625,
    )  # fmt: skip
    full = decoder_step_parts(LLAMA_8B, rows)
    parts = decoder_step_parts(windowed, rows)
    assert parts["attention"].bytes == pytest.approx(full["attention"].bytes * (0.5 + 0.5 * 0.2), rel=1e-2)
    assert full["linears"].bytes - parts["linears"].bytes == 6_979_321_856 * (2 - 0.5625)


def test_logits_are_counted_where_they_are_needed() -> None:
    prompt = [(512, 512)]
    last, every = (decoder_step_parts(SMOLLM2, prompt, logits_rows=count)["head"] for count in (1, 512))
    assert decoder_step_parts(SMOLLM2, prompt)["head"] == last
    assert every.flops == 512 * last.flops
