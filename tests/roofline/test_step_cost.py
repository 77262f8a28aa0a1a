"""The cost of a step against arithmetic done by hand, and against itself: sums, windows, ranks, arrays."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.bench.workload.shapes import write_shape
from ridgeline.models.expert_config import Experts
from ridgeline.models.latent_config import Latent
from ridgeline.models.model_config import load_model_config
from ridgeline.roofline.decoder_shape import DecoderShape, decoder_shape, kv_element_bytes, step_counts
from ridgeline.roofline.step_cost import LINEARS, OPS, PARTS, OpCost, Peaks, cost_of, expected_tokens, step_cost
from ridgeline.roofline.vectorised import StepCosts
from ridgeline.sizes.op_costs import Cost

LLAMA_8B = DecoderShape(
    hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256,
)
LLAMA_70B = DecoderShape(
    hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128, layers=80, vocab=128256,
)
SMOLLM2 = DecoderShape(
    hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, layers=30, vocab=49152,
    weight_bytes=4, kv_bytes=4, activation_bytes=4,
)
TINY = DecoderShape(
    hidden=8, intermediate=12, heads=4, kv_heads=2, head_dim=4, layers=3, vocab=20, block_size=4, window=3,
    window_layers=2, last_windowed=True,
)


def test_costs_need_no_torch() -> None:
    code = "import sys, ridgeline.roofline.step_cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- what everybody knows ----------------------------------------------------------------------------------------------


def test_kv_of_llama_70b_at_4096_tokens_is_1_34_gb() -> None:
    assert LLAMA_70B.kv_bytes_per_token * 4096 == 1_342_177_280
    assert step_cost(LLAMA_70B, [(1, 4096)]).total.kv_read == 1_342_177_280
    assert step_cost(LLAMA_70B, [(4096, 4096)]).total.kv_written == 1_342_177_280


def test_the_ridge_of_an_h100_in_bf16_is_295_flops_per_byte() -> None:
    assert round(Peaks(3.35e12, 989e12).ridge) == 295
    assert round(Peaks(4.8e12, 989e12).ridge) == 206                     # H200
    assert round(Peaks(2.04e12, 312e12).ridge) == 153                    # A100


def test_expected_tokens_of_speculation() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2) == pytest.approx(3.3616)
    assert expected_tokens(0.0, 5) == 1.0                                # the token of the model itself
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.7, 0) == pytest.approx(1.0)                 # no drafts


def test_linears_of_llama_8b_are_6_98_billion_weights() -> None:
    assert LLAMA_8B.linear_weights == 6_979_321_856
    assert LLAMA_8B.kv_bytes_per_token == 131_072                        # 128 KiB


# -- whole steps of Llama-3.1-8B by hand -------------------------------------------------------------------------------


def test_a_decode_step_of_llama_8b_by_hand() -> None:
    """One token behind 999 others, bf16 everywhere."""
    cost = step_cost(LLAMA_8B, [(1, 1000)])
    two = 2                                                              # bytes of an element
    matrices = 4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096
    head = 4096 * 128256
    # Weights: the linears, the head, one row of the embedding, and 65 norms of 4,096.
    assert cost.total.weights == two * (32 * matrices + head + 4096 + 65 * 4096) == 15_009_857_536
    # KV: 1,000 positions are read, one is written; 32 layers × (K and V) × 8 heads × 128 × 2 bytes each.
    assert cost.total.kv_read == 1000 * 131_072
    assert cost.total.kv_written == 131_072
    # FLOPs: two per weight; attention has 1,000 pairs × 32 heads × (two products of 128, five for softmax), a division.
    assert cost.linear_flops == 32 * 2 * matrices == 13_958_643_712
    assert cost.head_flops == 2 * head == 1_050_673_152
    assert cost.attention_flops == 32 * 32 * (1000 * (4 * 128 + 5) + 128) == 529_539_072
    assert cost.matrix_flops == 15_538_855_936
    # Activations, elements of two bytes: into and out of each linear and the head …
    linears = 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)
    # … each norm (stream and residual in and out; the first has no residual), gate and up in, their product out …
    others = 2 * 4096 + 64 * 4 * 4096 + 32 * 3 * 14336
    # … queries in and out of rotation and attention, keys and values into the write, the embedded token, the logits.
    attention = 32 * (2 * 4096 + 2 * 4096 + 2 * 1024) + 4096 + (4096 + 128256) + 128256
    # Integers: cosines and sines, position and slot per layer; block tables; the token; the choice.
    integers = 32 * (128 * 4 + 16) + 32 * 4 * (63 + 2 + 1) + 8 + 25
    assert cost.total.activations == two * (linears + others + attention) + integers
    # Nearly all of it is weights: about one FLOP per byte.
    assert 1.0 < cost.flops / cost.bytes < 1.05


def test_a_prefill_step_of_llama_8b_by_hand() -> None:
    """A prompt of 512 tokens. The last layer computes K and V of all, and the rest for the last token alone."""
    cost = step_cost(LLAMA_8B, [(512, 512)])
    qkv, rest = 4096 * 6144, 4096 * 4096 + 4096 * 28672 + 14336 * 4096
    assert cost.linear_flops == 2 * (32 * 512 * qkv + 31 * 512 * rest + rest)
    assert cost.head_flops == 2 * 4096 * 128256
    pairs = 512 * 513 // 2
    assert cost.attention_flops == 31 * 32 * (pairs * 517 + 512 * 128) + 32 * (512 * 517 + 128)
    assert cost.total.kv_written == cost.total.kv_read == 512 * 131_072
    assert cost.total.weights == 2 * (6_979_321_856 + 4096 * 128256 + 512 * 4096 + 65 * 4096)
    # Somebody who reads every hidden state makes the last layer as dear as the others.
    every = step_cost(LLAMA_8B, [(512, 512)], every_hidden=True)
    assert every.linear_flops == 2 * 32 * 512 * (qkv + rest) and every.head_flops == cost.head_flops
    assert every.attention_flops == 32 * 32 * (pairs * 517 + 512 * 128)


def test_a_middle_chunk_ends_at_the_last_layers_cache() -> None:
    chunk = step_cost(LLAMA_8B, [(256, 512)], logits=[0])
    assert chunk.head_flops == chunk.ops["head"].bytes == chunk.ops["sample"].bytes == 0
    assert chunk.total.kv_read == 31 * 512 * 4096 and chunk.total.kv_written == 256 * 131_072
    assert chunk.ops["qkv"].calls == 32 and chunk.ops["down"].calls == 31
    assert chunk.total.weights == step_cost(LLAMA_8B, [(256, 512)]).total.weights - 2 * (
        4096 * 128256 + (4096 * 4096 + 3 * 4096 * 14336) + 2 * 4096
    )


# -- what the parts are ------------------------------------------------------------------------------------------------


def test_a_step_is_the_sum_of_its_ops() -> None:
    cost = step_cost(LLAMA_8B, [(1, 1000), (5, 40)])
    assert tuple(cost.ops) == OPS == tuple(PARTS)
    assert cost.bytes == sum(op.bytes for op in cost.ops.values()) == cost.total.cost.bytes
    assert cost.flops == sum(op.flops for op in cost.ops.values())
    assert OpCost(1, 2, 3, 4, 5, 6).cost == Cost(2, 18)


def test_batching_moves_weights_once_and_kv_per_row() -> None:
    one, eight = (step_cost(SMOLLM2, [(1, 256)] * rows) for rows in (1, 8))
    for name in (*LINEARS, "head"):
        assert eight.ops[name].weights == one.ops[name].weights
        assert eight.ops[name].activations == 8 * one.ops[name].activations
        assert eight.ops[name].flops == 8 * one.ops[name].flops
    assert eight.total.kv_read == 8 * one.total.kv_read and eight.total.kv_written == 8 * one.total.kv_written
    assert eight.attention_flops == 8 * one.attention_flops


def test_a_shared_prefix_is_read_once() -> None:
    apart = step_cost(LLAMA_8B, [(1, 2100)] * 8)
    shared = step_cost(LLAMA_8B, [(1, 2100)] * 8, shared=7 * 2000)
    assert apart.total.kv_read - shared.total.kv_read == 7 * 2000 * 131_072
    assert apart.flops == shared.flops and apart.bytes - shared.bytes == 7 * 2000 * 131_072


def test_drafts_are_verified_with_logits_for_each() -> None:
    plain, verified = step_cost(LLAMA_8B, [(1, 1000)]), step_cost(LLAMA_8B, [(5, 1004)], logits=[5])
    assert verified.linear_flops == 5 * plain.linear_flops and verified.head_flops == 5 * plain.head_flops
    assert verified.total.kv_written == 5 * plain.total.kv_written
    assert verified.total.weights - plain.total.weights == 4 * 4096 * 2  # four more rows of the embedding


def test_windows_read_no_more_than_they_see() -> None:
    windowed = replace(LLAMA_8B, window=1000, window_layers=16)
    full, cut = (step_cost(shape, [(1, 5000)]) for shape in (LLAMA_8B, windowed))
    assert cut.total.kv_read == (16 * 5000 + 16 * 1000) * 4096
    assert full.total.kv_read == 32 * 5000 * 4096
    last = step_cost(replace(windowed, last_windowed=True), [(1, 5000)])
    assert last.total.kv_read == cut.total.kv_read                       # a decode is alike in all layers …
    prompt = [step_cost(replace(windowed, last_windowed=each), [(2000, 2000)]).total.kv_read for each in (True, False)]
    assert prompt == [(16 * 2000 + 15 * 2000 + 1000) * 4096, 32 * 2000 * 4096]       # … the end of a prompt is not


def test_precision_of_each_tensor() -> None:
    base = step_cost(LLAMA_8B, [(1, 1000)])
    int4 = step_cost(replace(LLAMA_8B, weight_bytes=0.5625, head_bytes=2, embedding_bytes=2), [(1, 1000)])
    assert base.total.weights - int4.total.weights == 6_979_321_856 * (2 - 0.5625)
    assert kv_element_bytes("float8_e4m3fn", 128) == 1 + 4 / 128 and kv_element_bytes("bfloat16", 128) == 2
    fp8 = step_cost(replace(LLAMA_8B, kv_bytes=kv_element_bytes("float8_e4m3fn", 128)), [(1, 1000)])
    assert fp8.total.kv_read == 1000 * 32 * 2 * 8 * (128 + 4)
    assert fp8.total.activations == base.total.activations and fp8.flops == base.flops


def test_one_rank_of_eight() -> None:
    shard = LLAMA_70B.shard(8)
    whole, part = step_cost(LLAMA_70B, [(1, 1000)]), step_cost(shard, [(1, 1000)])
    assert (shard.heads, shard.kv_heads, shard.intermediate, shard.vocab) == (8, 1, 3584, 16032)
    assert part.linear_flops * 8 == whole.linear_flops and part.total.kv_read * 8 == whole.total.kv_read
    assert whole.collectives == 0 and part.collectives == 162            # embedding, two in each layer, the logits
    assert part.collective_bytes == (161 * 8192 + 128256) * 2


def test_the_shape_of_a_checkpoint() -> None:
    shape = decoder_shape(load_model_config(write_shape("llama-3.1-8b")), "bfloat16")
    assert replace(shape, rotary_dim=None, embedding_bytes=None) == LLAMA_8B and shape.rotary_dim == 128


def test_biases_and_norms_of_heads_count() -> None:
    plain = step_cost(TINY, [(1, 6)])
    more = step_cost(replace(TINY, qkv_bias=True, qk_norm=True), [(1, 6)])
    assert more.total.weights - plain.total.weights == 3 * 2 * (4 * 4 + 2 * 2 * 4) + 3 * 2 * 4 * 2
    assert more.ops["qkv"].flops - plain.ops["qkv"].flops == 3 * 32
    post = step_cost(replace(TINY, post_norms=True), [(1, 6)])
    assert post.ops["norms"].calls == plain.ops["norms"].calls + 6


# -- many steps at once ------------------------------------------------------------------------------------------------

STEP = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.booleans()), min_size=1, max_size=6)


PLAIN = replace(TINY, window=None, window_layers=0, last_windowed=False, qk_norm=True, qkv_bias=True)
MIXTURE = replace(TINY, experts=Experts(6, 2, 5, shared=3, dense=(0,), shared_gate=True, bias=True, router_bias=True))
LATENT = replace(PLAIN, kv_heads=1, head_dim=6, qk_norm=False, qkv_bias=False, latent=Latent(5, 2, 4, 3, query_rank=7))
SHAPES = [
    (each, StepCosts(each))
    for each in (TINY, PLAIN, replace(TINY, last_windowed=False, post_norms=True), MIXTURE, replace(PLAIN, norms=1, gated=False),
                 LATENT)
]


def test_latents_are_counted_as_they_are_computed() -> None:
    """Three layers, four heads; up to sixteen queries of a row are absorbed, more are widened, but for the last layer's one."""
    rows = [(1, 50), (16, 16), (17, 17), (40, 90)]
    cost = step_cost(LATENT, rows).ops
    near, wide = 2 * (2 * 5 + 2) + 5, 2 * (4 + 2 + 3) + 5
    few, many = 50 + 16 * 17 // 2, 17 * 18 // 2 + 40 * 51 + 40 * 39 // 2
    last = 50 + 16 + 17 + 90
    assert cost["attention"].flops == 4 * (2 * (few * near + many * wide) + last * near)
    assert cost["attention"].kv_read == (2 * last + last) * (5 + 2) * 2
    assert cost["rotary_write"].kv_written == 3 * 74 * 7 * 2 and LATENT.kv_bytes_per_token == 3 * 7 * 2
    matrices = 8 * (7 + 7) + 7 * 4 * 6 + 5 * 4 * (4 + 3)
    assert cost["qkv"].weights == 3 * matrices * 2 and cost["qkv"].flops == 3 * 74 * 2 * matrices
    assert LATENT.linears["output"][:2] == (4 * 3, 8)
    quantised = replace(LATENT, weight_bytes=1.0)        # all but what widens keys and values
    assert step_cost(quantised, rows).ops["qkv"].weights == 3 * (matrices + 5 * 4 * 7)
    together = StepCosts(LATENT).of(
        np.array([4]), np.array([new for new, _ in rows], np.int32), np.array([kv for _, kv in rows], np.int32),
        np.ones(4, np.int8), shared=np.array([0]), every_hidden=np.array([False]),
    )
    for index, name in enumerate(OPS):
        assert OpCost(*(int(column[0, index]) for column in together.columns)) == cost[name], name


def test_a_mixture_costs_the_experts_that_are_read() -> None:
    """Two layers with experts; a token visits two of six in each."""
    one = step_cost(MIXTURE, [(1, 6)]).ops
    expert = 3 * 5 * MIXTURE.hidden
    biases = 2 * 5 + MIXTURE.hidden
    assert one["experts"].weights == 2 * 2 * (expert + biases) * 2
    # The plain MLP of the first layer, routers with biases, gates of the shared expert, and the shared expert itself.
    plain = MIXTURE.intermediate * MIXTURE.hidden
    beside = 2 * (6 * MIXTURE.hidden + 6 + MIXTURE.hidden + 2 * 3 * MIXTURE.hidden)
    assert one["gate_up"].weights == 2 * (2 * plain + beside) and one["down"].weights == 2 * (plain + 2 * 3 * MIXTURE.hidden)
    many = step_cost(MIXTURE, [(1, 6)] * 50).ops
    assert many["experts"].weights == pytest.approx(2 * 6 * (expert + biases) * 2, rel=1e-6)     # all of them
    counts = step_counts(MIXTURE, [(1, 6)] * 50)
    assert cost_of(MIXTURE, counts, experts_read=7).ops["experts"].weights == 7 * (expert + biases) * 2
    counted = StepCosts(MIXTURE).of(
        np.array([2]), np.array([1, 1]), np.array([6, 6]), np.array([1, 1]), np.array([0]), np.array([False]),
        experts=np.array([5]),
    )
    assert counted["weights"][0, OPS.index("experts")] == 5 * (expert + biases) * 2
    half = MIXTURE.shard(2)
    assert half.experts is not None and half.experts.width == 3 and half.experts.shared == 2


@settings(deadline=None)
@given(st.lists(st.tuples(STEP, st.booleans(), st.integers(0, 3)), min_size=1, max_size=5))
def test_many_steps_at_once_cost_what_they_cost_alone(steps: list[tuple[list[tuple[int, int, bool]], bool, int]]) -> None:
    # Who shares a prefix decodes, so there are logits.
    steps = [(parts, every, shared if any(part[2] for part in parts) else 0) for parts, every, shared in steps]
    for shape, costs in SHAPES:
        rows = [[(new, before + new) for new, before, _ in parts] for parts, _, _ in steps]
        logits = [[int(wanted) for _, _, wanted in parts] for parts, _, _ in steps]
        found = costs.of(
            np.array([len(each) for each in rows]), np.array([new for each in rows for new, _ in each], np.int32),
            np.array([kv for each in rows for _, kv in each], np.int32), np.concatenate(logits).astype(np.int8),
            shared=np.array([shared for _, _, shared in steps]), every_hidden=np.array([every for _, every, _ in steps]),
        )
        for place, (step, wanted, (_, every, shared)) in enumerate(zip(rows, logits, steps, strict=True)):
            alone = step_cost(shape, step, wanted, shared, every)
            for index, name in enumerate(OPS):
                op = OpCost(*(int(column[place, index]) for column in found.columns))
                assert op == alone.ops[name], (name, step)
