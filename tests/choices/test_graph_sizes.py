"""The largest captured prompts follow from the model and the GPU, and the memory ledger counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.choices.graph_sizes import (
    COMPUTED,
    FEWEST,
    GAIN,
    OP_SECONDS,
    READ,
    UNKNOWN_BOUND,
    device_seconds,
    largest_captured,
    launch_bound,
    launch_seconds,
    peaks_of,
)
from ridgeline.config import EngineConfig
from ridgeline.plan.capacity import Capacity, captured_tokens
from ridgeline.plan.prediction import Setup, fitted
from ridgeline.plan.public_models import CONFIGS, find_model
from ridgeline.resolve import DeviceFacts, ResolvedConfig, resolve
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.roofline.step_cost import step_cost
from ridgeline.sizes import ledger
from ridgeline.sizes.graph_shapes import PROMPT_TOKENS, GraphShapes, Shape
from ridgeline.sizes.hardware import find_device

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"
H200 = DeviceFacts("cuda", 150_109_880_320, ("bfloat16",), 760 * 2**20, 0, "NVIDIA H200")


def largest(model: str, gpu: str = "H200", **options: Any) -> int:
    return largest_captured(EngineConfig.of(**options), find_model(model).config, find_device(gpu), "bfloat16", "bfloat16")


def resolved(folder: Path, shape: str, facts: DeviceFacts = H200, **options: Any) -> ResolvedConfig:
    (folder / shape).mkdir(exist_ok=True)
    (folder / shape / "config.json").write_text(json.dumps(CONFIGS[shape]))
    return resolve(EngineConfig.of(model=str(folder / shape), load_format="dummy", **options), facts)


def test_small_models_have_graphs_of_longer_prompts() -> None:
    assert largest("llama-3.1-8b") == largest("llama-3.1-70b") == FEWEST
    assert (largest("qwen2.5-1.5b"), largest("qwen2.5-0.5b")) == (1536, 4096)
    assert largest("qwen2.5-1.5b", "L4") == FEWEST < largest("llama-3.2-3b", "B200"), "a slower GPU computes for longer"


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-3b", "qwen3-30b-a3b"])
def test_a_captured_size_gains_by_the_estimate(model: str) -> None:
    device = find_device("H200")
    peaks = peaks_of(device, "bfloat16")
    shape = decoder_shape(find_model(model).config, "bfloat16")
    for size in PROMPT_TOKENS:
        cost = step_cost(shape, [(size, size)])
        gains = GAIN * device_seconds(cost, peaks) <= launch_seconds(cost)
        assert gains == (size <= largest(model)) or size <= FEWEST


def test_the_constants_are_those_of_the_study() -> None:
    """The host's time for an op, where the GPU is faster than the host; and no size is captured that gained nothing."""
    rows = json.loads((STUDIES / "prompt_graphs" / "result.json").read_text())["figures"]["rows"]
    bound = [row["us_an_op"] for row in rows if row["gain"] > 1.3]
    assert len(bound) == 3
    assert sum(bound) / len(bound) == pytest.approx(1e6 * OP_SECONDS, rel=0.02)
    for row in rows:
        if FEWEST < row["tokens"] <= largest(row["model"]):
            assert row["gain"] > 1.1


def test_up_to_some_tokens_launches_take_longer_than_the_step() -> None:
    def bound(model: str, gpu: str | None = "H200") -> int:
        return launch_bound(find_model(model).config, find_device(gpu) if gpu else None, "bfloat16", "bfloat16")

    assert bound("llama-3.1-70b") == 0, "its weights alone take longer to read"
    assert bound("llama-3.1-70b") < bound("llama-3.1-8b") < bound("llama-3.2-3b") < bound("qwen2.5-1.5b")
    assert bound("llama-3.1-8b", "L4") < bound("llama-3.1-8b") == pytest.approx(UNKNOWN_BOUND, abs=64)
    assert bound("llama-3.1-8b", None) == UNKNOWN_BOUND


def test_what_is_asked_for_decides() -> None:
    assert largest("llama-3.1-8b", max_cudagraph_capture_size=2000) == 1792, "the next smaller size that is captured"
    assert largest("qwen2.5-1.5b", max_cudagraph_capture_size=512) == 512
    assert largest("qwen2.5-1.5b", max_cudagraph_capture_size=0) == 0
    assert largest("qwen2.5-1.5b", tensor_parallel_size=2) == FEWEST
    config = find_model("qwen2.5-1.5b").config
    assert largest_captured(EngineConfig.of(), config, None, "bfloat16", "bfloat16") == FEWEST, "a GPU without a data sheet"


def test_shapes_end_there() -> None:
    assert GraphShapes(64, 8192).fit(0, 1, 2000) is None
    assert GraphShapes(64, 8192, most_prompt=4096).fit(0, 1, 2000) == Shape(0, 1, 2048)
    assert GraphShapes(64, 8192, most_prompt=4096).fit(1, 1, 2000) is None, "only one prompt alone"
    assert GraphShapes(64, 8192, most_prompt=4096).fit(0, 2, 2000) is None
    assert GraphShapes(64, 2048, most_prompt=4096).prompt_tokens[-1] == 2048
    none = GraphShapes(64, 8192, most_prompt=0)
    assert none.fit(0, 1, 10) is None and none.fit(3, 0, 0) == Shape(4)


def test_the_ledger_counts_the_bytes_of_the_graphs(tmp_path: Path) -> None:
    few = resolved(tmp_path, "qwen2.5-coder-1.5b", max_num_seqs=64, max_cudagraph_capture_size=1280)
    auto = resolved(tmp_path, "qwen2.5-coder-1.5b", max_num_seqs=64)
    assert (few.graph_tokens, auto.graph_tokens) == (1280, 1536)
    model = auto.model
    per_token = 2 * (4 * model.hidden_size + (model.num_heads + 2 * model.num_kv_heads) * model.head_dim + model.mlp_elements)
    assert auto.graph_bytes - few.graph_bytes == (1536 - 1280) * per_token
    assert auto.memory[ledger.STEPS] - few.memory[ledger.STEPS] == auto.graph_bytes - few.graph_bytes
    assert resolve(auto.pinned(), H200).graph_tokens == 1536
    decodes = resolved(tmp_path, "qwen2.5-coder-1.5b", max_num_seqs=64, max_cudagraph_capture_size=0)
    assert decodes.graphs and decodes.graph_tokens == 0 < decodes.graph_bytes < few.graph_bytes
    eager = resolved(tmp_path, "qwen2.5-coder-1.5b", enforce_eager=True)
    assert eager.graph_tokens == eager.graph_bytes == 0


def test_a_plan_counts_what_the_engine_does(tmp_path: Path) -> None:
    for shape in ("qwen2.5-coder-1.5b", "llama-3.1-8b"):
        setup = Setup(model=find_model(shape), device=find_device("H200"))
        engine = resolved(tmp_path, shape, max_model_len=2048)
        capacity = Capacity.of(setup, 2048)
        assert captured_tokens(setup) == engine.graph_tokens == capacity.memory.graph_tokens
        assert capacity.memory.pools(1, capacity.budget)[1] > 0


def test_the_shares_of_the_data_sheet_are_those_of_the_plan() -> None:
    assert fitted().linear_read == pytest.approx(READ, abs=5e-4)
    assert fitted().linear_compute == pytest.approx(COMPUTED, abs=5e-4)
