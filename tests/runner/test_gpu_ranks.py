"""Ranks on GPUs over NCCL: two of them, which may share one card, say what one says, launched kernel by kernel and as graphs.
`make test-gpu` runs it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("ranks"), tie_word_embeddings=False, num_hidden_layers=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3_moe", tmp_path_factory.mktemp("experts"), tie_word_embeddings=False)


def run(model: Path, **options: Any) -> tuple[Answers, int]:
    """Greedy answers of twelve requests, some beside each other, and how many steps were CUDA graphs. In float32: products of
    divided matrices are rounded in other places, and must not change a token."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}
    sizes |= {"device": "cuda", "dtype": "float32"}
    core = EngineCore.start(EngineConfig.of(model=str(model), **sizes | options))
    rng = random.Random(5)
    answers: Answers = {}
    said = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    try:
        for number in range(12):
            core.add(Request(str(number), [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))], said))
            answers[str(number)] = []
        while core.has_work:
            for delta in core.step():
                assert not delta.error
                answers[delta.request_id] += delta.token_ids
        return answers, core.executor.runner.forward.replays
    finally:
        core.close()


alone = cache(run)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_say_what_one_says(dense: Path, axis: str, eager: bool) -> None:
    expected, _ = alone(dense)
    found, replays = run(dense, enforce_eager=eager, **{axis: 2})
    assert found == expected
    assert (replays > 0) != eager


@pytest.mark.parametrize("eager", [True, False])
def test_two_ranks_that_divide_the_experts_say_what_one_says(mixture: Path, eager: bool) -> None:
    expected, _ = alone(mixture)
    found, replays = run(mixture, enforce_eager=eager, tensor_parallel_size=2, enable_expert_parallel=True)
    assert found == expected
    assert (replays > 0) != eager
