"""Pipelines in `plan`: what a stage's device holds, and how fast several stages are together."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from ridgeline.__main__ import main
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.distributed.comm import Communicator
from ridgeline.distributed.pipeline import Stage
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.models.expert_config import Experts
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import fullest_weight_bytes, stage_config, stage_parameters
from ridgeline.ops.kernel_table import H200
from ridgeline.plan.capacity import Capacity, rank_bytes, textbook
from ridgeline.plan.division import all_reduce_seconds, all_to_all_seconds, bubble, expert_loads, largest_of
from ridgeline.plan.operation import Traffic, by_ranks, operate
from ridgeline.plan.precision import weight_bytes
from ridgeline.plan.prediction import Setup, hop_seconds, stage_bubble, step_parts
from ridgeline.plan.public_models import find_model
from ridgeline.plan.search import YES, candidates, effects, missing
from ridgeline.plan.workload_steps import count_rows, decode_rows, gather
from ridgeline.quant.choose import schemes
from ridgeline.quant.scheme import Unquantised
from ridgeline.sizes.abilities import MOST_RANKS
from ridgeline.sizes.hardware import INFINIBAND, Link, find_device
from ridgeline.sizes.mesh_shape import MeshShape, stage_layers

TRAFFIC = Traffic(1000, 200)


def setup(model: str, stages: int, ranks: int = 1) -> Setup:
    return Setup(model=find_model(model), device=find_device("H200"), stages=stages, ranks=ranks)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-30b-a3b", "deepseek-v2-lite"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_have_all_parameters_together(model: str, stages: int) -> None:
    """A head that shares the embedding is on the last stage a second time; the last norm is counted on each."""
    config = find_model(model).config
    found = sum(stage_parameters(config, stage, stages) for stage in range(stages))
    again = (config.tied and stages > 1) * config.vocab_size * config.hidden_size + (stages - 1) * config.hidden_size
    assert found == config.num_parameters + again
    layers = [stage_config(config, stage_layers(config.num_layers, stage, stages)) for stage in range(stages)]
    assert sum(each.num_plain for each in layers) == config.num_plain


@pytest.mark.parametrize(("shape", "dtype"), [
    ("llama-3.1-8b-q4_k_m", "float16"), ("gpt-oss-20b", "bfloat16"), ("llama-3.2-1b", "bfloat16"),
])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_ledger_counts_what_the_fullest_stage_holds(shape: str, dtype: str, stages: int) -> None:
    """The embedding has 16 bits where layers have fewer, and lies whole on the first stage."""
    config, other = load_model_config(write_shape(shape, 8)), H200._replace(hopper=False)
    choose = schemes(LinearFormats(config, "none", "cuda", 1, dtype), Unquantised())
    held = []
    for number in range(stages):
        stage = Stage()
        stage.number, stage.count = number, stages
        held.append(Decoder(config, Communicator(stages=stage), getattr(torch, dtype), "meta", 64, choose).weight_bytes)
    counted = fullest_weight_bytes(config, dtype, "cuda", MeshShape(1, stages), kernels=other)
    assert counted == pytest.approx(max(held), rel=1e-4)         # sinks are float32
    halves = fullest_weight_bytes(config, dtype, "cuda", MeshShape(2, stages), kernels=other)
    assert halves == pytest.approx(counted / 2, rel=0.01)


def test_a_stage_holds_its_part() -> None:
    """70B in 16 bits fits on no H200 alone, and on two as stages; each keeps half of the KV."""
    one, two = (setup("llama-3.1-70b", stages) for stages in (1, 2))
    assert not Capacity.of(one, 4096).fits and Capacity.of(two, 4096).fits
    assert rank_bytes(two.model, two) == pytest.approx(rank_bytes(one.model, one) / 2, rel=0.02)
    small, halves = (Capacity.of(setup("llama-3.1-8b", stages), 4096) for stages in (1, 2))
    assert halves.memory.per_block * 2 == small.memory.per_block
    assert halves.kv_bytes_per_token == small.kv_bytes_per_token
    assert two.devices == 2 and "2 × H200, 2 stages" in two.label


def test_narrow_weights_leave_the_embedding_wide_on_the_first_stage() -> None:
    """8 of 32 layers of 218 M weights in 4.16 bits, and 128,256 × 4096 numbers in 16."""
    made = replace(setup("llama-3.1-8b", 4), weights="int4")
    layers = 8 * 218_103_808 * weight_bytes("int4")
    assert rank_bytes(made.model, made) == pytest.approx(layers + 2 * 128_256 * 4096, rel=1e-3)
    assert rank_bytes(made.model, replace(made, ranks=2)) == pytest.approx(rank_bytes(made.model, made) / 2, rel=1e-6)


def test_stages_serve_more_and_answer_no_sooner() -> None:
    one, two = (operate(setup("llama-3.1-8b", stages), 64, TRAFFIC) for stages in (1, 2))
    half = operate(setup("llama-3.1-8b", 1), 32, TRAFFIC)
    wait = stage_bubble(setup("llama-3.1-8b", 2), 32, TRAFFIC.mean_context)
    assert two.tok_s == pytest.approx(half.tok_s * 2 / wait) and two.tok_s > one.tok_s
    assert two.tpot == pytest.approx(half.tpot * wait)
    alone = operate(setup("llama-3.1-8b", 2), 1, TRAFFIC)
    assert alone.tpot > operate(setup("llama-3.1-8b", 1), 1, TRAFFIC).tpot


def test_the_way_between_stages() -> None:
    three = setup("llama-3.1-8b", 3)
    link = three.device.link
    assert hop_seconds(three, 128) == pytest.approx(2 * (link.latency + 128 * 4096 * 2 / link.bandwidth))
    assert hop_seconds(replace(three, stages=1), 128) == 0.0


def test_all_devices_of_a_pipeline_count() -> None:
    two = setup("llama-3.1-8b", 2)
    assert [one.setup.ranks for one, _ in by_ranks(two, TRAFFIC, 4)] == [1, 2]
    assert [one.setup.ranks for one, _ in by_ranks(two, TRAFFIC, 1)] == [1]          # what was asked for
    assert {point.setup.devices for point in candidates(two, TRAFFIC, 4, lossy=False)} == {2, 4}
    assert textbook(two, 4096).batch > 2 * textbook(replace(two, stages=1), 4096).batch
    assert not missing(two) and "several devices" in missing(replace(two, stages=MOST_RANKS["cuda"] + 1))


def test_drafts_run_in_a_pipeline() -> None:
    found = effects(setup("llama-3.1-8b", 2), TRAFFIC, hit_rate=0.5, drafts=3, acceptance=0.7)
    assert [each.here for each in found if "drafts" in each.technique] == [YES]


# -- what waits for what -----------------------------------------------------------------------------------------------


def test_stages_wait_for_the_slowest() -> None:
    """32 layers of 1 ms and 2 ms of head: two stages take 16 and 18 ms, so 36 ms pass for 34 of work. 30 in 4 stages: 8, 8, 7 and
    7 + 2 ms; 36 for 32."""
    assert bubble(32, 2, 32e-3, 2e-3) == pytest.approx(36 / 34)
    assert bubble(30, 4, 30e-3, 2e-3) == pytest.approx(36 / 32)
    assert bubble(32, 1, 32e-3, 2e-3) == 1.0 and bubble(32, 4, 32e-3, 0.0) == 1.0


def test_hops_between_machines_are_longer() -> None:
    """Four stages on two machines: two hops inside, one between. 64 tokens × 4096 × 2 bytes = 524,288."""
    four = replace(setup("llama-3.1-8b", 4), nodes=2, node_link=Link(10e9, 50e-6))
    near, size = four.device.link, 524_288
    assert hop_seconds(four, 64) == pytest.approx(2 * (near.latency + size / near.bandwidth) + 50e-6 + size / 10e9)
    plain = replace(four, node_link=None)
    assert hop_seconds(plain, 64) - hop_seconds(replace(plain, nodes=1), 64) == pytest.approx(
        INFINIBAND.latency + size / INFINIBAND.bandwidth - near.latency - size / near.bandwidth
    )
    with pytest.raises(ConfigError, match="2 machines need as many stages"):
        replace(setup("llama-3.1-8b", 1), nodes=2)


def test_the_rank_with_the_most_experts_to_compute() -> None:
    """8 experts, 2 of them for each token, on 4 ranks: with 100 tokens 50 pairs a rank on average, of variance 37.5. Of four
    normal numbers the largest is 1.05 deviations above (Blom): 56.4 pairs. All experts are read."""
    experts = Experts(8, 2)
    beyond = largest_of(4)
    assert beyond == pytest.approx(1.0491, abs=1e-3) and largest_of(1) == 0
    computed, read = expert_loads(experts, 4, np.array([1.0, 100.0]))
    assert computed[1] == pytest.approx((50 + beyond * math.sqrt(37.5)) / 50) and read[1] == pytest.approx(1.0, abs=1e-3)
    # One token: 2 of 8 are chosen; a rank has 2 of them, each with a probability of 1/4.
    assert computed[0] == pytest.approx((0.5 + beyond * math.sqrt(0.375)) / 0.5)
    assert read[0] == pytest.approx((2 / 4 + beyond * math.sqrt(2 * 3 / 16)) / (8 / 4 / 4))
    # 9 experts on 4 ranks: the fullest has 3.
    assert expert_loads(Experts(9, 2), 4, np.array([1e9]))[0] == pytest.approx(3 / 9 * 4, rel=1e-3)


def test_an_all_to_all_by_hand() -> None:
    link = Link(100e9, 10e-6)
    assert all_to_all_seconds(link, 4, 4e6) == pytest.approx(10e-6 + 3e6 / 100e9)
    assert all_reduce_seconds(link, 4, 4e6) == pytest.approx(10e-6 + 6e6 / 100e9)
    assert all_to_all_seconds(link, 1, 4e6) == all_reduce_seconds(link, 1, 4e6) == 0.0


def test_whole_experts_take_as_long_as_the_fullest_rank() -> None:
    plain = replace(setup("qwen3-30b-a3b", 1, 4))
    whole = replace(plain, expert_parallel=True)
    steps = gather(plain.shape, [count_rows(plain.shape, decode_rows(64, 1000))], plain.model)
    before, after = (step_parts(each, steps) for each in (plain, whole))
    assert after["linears"] > before["linears"] and all(after[name] == before[name] for name in before if name != "linears")
    assert operate(whole, 64, TRAFFIC).tpot > operate(plain, 64, TRAFFIC).tpot


def test_divided_contexts_hold_more() -> None:
    """One latent for all heads: on four ranks four times, or once."""
    plain = replace(setup("deepseek-v2-lite", 1, 4))
    divided = replace(plain, context_parallel=True)
    small, large = (Capacity.of(each, 4096) for each in (plain, divided))
    assert large.largest_batch() > 3.5 * small.largest_batch()
    assert large.kv_bytes_per_token == pytest.approx(small.kv_bytes_per_token)


def test_a_plan_offers_every_division(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-30b-a3b", "--gpu", "H100", "--tp", "2", "--ep", "--most", "4", "--objective", "chat"]) == 0
    said = capsys.readouterr().out
    assert "no speed of this engine on several GPUs is measured" in said and "whole experts: with 64 rows" in said
    assert "not in this engine yet:" not in said and re.search(r"^ +2 +2 .*whole experts$", said, re.MULTILINE)
    assert {len(line) for line in said.splitlines() if line.endswith("  whole experts")} == {80}, "rows fit a terminal"
    assert main(["plan", "llama-3.1-8b", "--gpu", "H100", "--nodes", "2", "--most", "2", "--objective", "chat"]) == 0
    assert "2 machines, 2 stages" in capsys.readouterr().out
