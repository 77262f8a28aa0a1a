"""Mixtures in plan: experts of 4 bits are unpacked, and many tokens fill tiles, as their kernels do it. TPOT: test_plan.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ridgeline.cli.cmd_plan import preset_lengths, shape_file
from ridgeline.ops.experts.expert_products import _measured_tile, row_code_tile_for
from ridgeline.plan import expert_work
from ridgeline.plan.capacity import model_bytes
from ridgeline.plan.check import check
from ridgeline.plan.precision import CODE_COMPUTE
from ridgeline.plan.prediction import EXPERTS, Setup, decode_seconds
from ridgeline.plan.public_models import find_model
from ridgeline.plan.records import read_record
from ridgeline.plan.workload_steps import count_rows, decode_rows, gather
from ridgeline.sizes.hardware import find_device

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks/h200"


def setup(**more: object) -> Setup:
    return Setup(model=find_model("gpt-oss-20b"), device=find_device("H200"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "micros"), [(1, 31.1), (128, 232), (512, 426.7), (2048, 1298.8), (8192, 3655)])
def test_packed_experts_take_what_their_op_takes(tokens: int, micros: float) -> None:
    """benchmarks/studies/experts: the op alone, of one layer. Two tokens are 24 % faster than this says: their kernel has
    as many CTAs for each pair and twice the pairs, so that its last wave is fuller."""
    made = setup()
    steps = gather(made.shape, [count_rows(made.shape, decode_rows(tokens, 8))], made.model)
    unpacked, padded = expert_work.work(made.model.experts, 2880, np.array([float(tokens)]))  # type: ignore[arg-type]
    wide, used = made.device.rate("bfloat16"), made.used
    seconds = unpacked / float(expert_work.unpacks_per_second(wide, "mxfp4", np.array([tokens]))[0])
    flops = steps.product_flops[:, EXPERTS] / made.model.config.num_layers
    computing = flops * padded / (wide * used.linear_compute * CODE_COMPUTE[4])
    both = (seconds**used.overlap + computing**used.overlap) ** (1 / used.overlap)
    found = float(both[0]) + 2 * used.kernel_one_s
    assert abs(found / (micros / 1e6) - 1) < 0.15


def test_experts_have_the_checkpoints_format_unless_another_is_asked_for() -> None:
    assert setup().expert_weights == "mxfp4" and setup(weights="fp8").expert_weights == "fp8"
    assert Setup(model=find_model("qwen3-30b-a3b"), device=find_device("H200")).expert_weights == "bfloat16"
    # As the engine's ledger has it in the record of a run whose scales took two bytes, less one for each group of 32 inputs.
    scales = 24 * 32 * (2 * 2880 + 2880) * 3072 // 32
    assert abs(model_bytes(setup().model, setup()) / (15_075_298_432 - scales) - 1) < 1e-3


@pytest.mark.parametrize("format", ["fp8", "awq"])
def test_a_mixture_of_narrow_weights_takes_what_was_measured(format: str) -> None:
    """A 16-bit model decodes one request at 420 tok/s: both formats gain there, and are told apart from it."""
    record = read_record(RECORDS / f"offline-qwen3-30b-a3b-{format}.json", preset_lengths(), shape_file)
    found = {(each.workload, each.figure): each.error for each in check(record)}
    for preset in ("latency_b1", "batch128"):
        assert abs(found[preset, "TPOT"]) < 0.1
        assert abs(found[preset, "output tok/s"]) < 0.1
    assert abs(found["batch128", "first tokens"]) < 0.15 and abs(found["prefill_8k", "first tokens"]) < 0.1
    plain = Setup(model=find_model("qwen3-30b-a3b"), device=find_device("H200"))
    assert decode_seconds(record.setup, 1, 544) < 0.85 * decode_seconds(plain, 1, 544)


def test_every_pair_of_few_tokens_is_unpacked_and_experts_of_many_fill_tiles() -> None:
    experts = find_model("gpt-oss-20b").experts
    assert experts is not None
    assert expert_work.tiles(experts, np.array([1.0, 8.0])).tolist() == [4, 32]
    assert expert_work.packed_rows(np.array([32.0, 512, 2048, 8192]), 32).tolist() == [16, 32, 64, 128]
    many = expert_work.tiles(experts, np.array([8192.0]))[0]
    assert 8192 * 4 / 128 < many < 1.1 * 8192 * 4 / 128


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite", "mixtral-8x7b", "gpt-oss-20b"])
def test_first_tokens_of_many_requests_are_predicted(name: str) -> None:
    record = read_record(RECORDS / f"offline-{name}.json", preset_lengths())
    found = {each.figure: each.error for each in check(record) if each.workload == "batch128"}
    assert abs(found["first tokens"]) < 0.1 and abs(found["TPOT"]) < 0.1


def test_tiles_are_those_of_the_kernels_and_few_tokens_have_none() -> None:
    experts = find_model("mixtral-8x7b").experts
    assert experts is not None
    for pairs in (8, 72, 73, 160, 161, 768, 769, 10**5):
        assert expert_work.tile_rows(np.array([float(pairs)]), 8)[0] == _measured_tile(pairs, 8, True).rows
        assert expert_work.tile_rows(np.array([float(pairs)]), 8, 8)[0] == row_code_tile_for(pairs, 8, True).rows
    # 128 rows for each expert, in tiles of 128: half of the experts have two.
    padded = expert_work.padded_rows(experts, np.array([1.0, 8.0, 512.0, 1e6]))
    assert padded[:3].tolist() == [1.0, 1.0, 1.5] and padded[3] < 1.001
    moved = expert_work.pair_bytes(experts, 4096, np.array([1.0, 100.0]), 2)
    assert moved.tolist() == [0.0, 100 * 2 * 2 * (4096 + 14336) * 2]
