"""Pipelines in `plan`: what a stage's device holds, and how fast several stages are together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.models.stages import stage_config, stage_parameters
from ridgeline.plan.capacity import Capacity, rank_bytes, textbook
from ridgeline.plan.operation import Traffic, by_ranks, operate
from ridgeline.plan.prediction import Setup, hop_seconds
from ridgeline.plan.public_models import find_model
from ridgeline.plan.search import candidates, effects, missing
from ridgeline.sizes.hardware import find_device
from ridgeline.sizes.mesh_shape import stage_layers

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


def test_a_stage_holds_its_part() -> None:
    """70B in 16 bits fits on no H200 alone, and on two as stages; each keeps half of the KV."""
    one, two = (setup("llama-3.1-70b", stages) for stages in (1, 2))
    assert not Capacity.of(one, 4096).fits and Capacity.of(two, 4096).fits
    assert rank_bytes(two.model, two) == pytest.approx(rank_bytes(one.model, one) / 2, rel=0.02)
    small, halves = (Capacity.of(setup("llama-3.1-8b", stages), 4096) for stages in (1, 2))
    assert halves.memory.per_block * 2 == small.memory.per_block
    assert halves.kv_bytes_per_token == small.kv_bytes_per_token
    assert two.devices == 2 and "2 × H200, 2 stages" in two.label


def test_stages_serve_more_and_answer_no_sooner() -> None:
    one, two = (operate(setup("llama-3.1-8b", stages), 64, TRAFFIC) for stages in (1, 2))
    half = operate(setup("llama-3.1-8b", 1), 32, TRAFFIC)
    assert half.tok_s * 1.9 < two.tok_s < half.tok_s * 2 and two.tok_s > one.tok_s
    assert half.tpot < two.tpot < half.tpot + 2 * hop_seconds(setup("llama-3.1-8b", 2), 32)
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
    assert "several devices" in missing(two) and "several devices" not in missing(replace(two, stages=1))


def test_drafts_do_not_run_in_a_pipeline() -> None:
    for stages, here in ((1, True), (2, False)):
        found = effects(setup("llama-3.1-8b", stages), TRAFFIC, hit_rate=0.5, drafts=3, acceptance=0.7)
        assert [each.here for each in found if "drafts" in each.technique] == [here]
