"""The laws for attention in chunks: Llama-4's tiny checkpoint, experts included, in float64. Blocks behind a chunk are freed as
behind a window, and steps cut prompts where they will."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_laws import ACTIVE, PLAIN, TOGETHER, USUAL, requests, run, switched_on
from tiny_models import save_checkpoint

Answers = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama4", tmp_path_factory.mktemp("chunks") / "model", attention_chunk_size=11)


@pytest.fixture(scope="module")
def reference(model: Path) -> Answers:
    """One request at a time, contiguous KV, whole prompts, nothing cached."""
    return run(model, PLAIN, requests()).answers


def test_all_techniques_together(model: Path, reference: Answers) -> None:
    here = [each for each in TOGETHER if each.name != "shared-prefix attention"]
    outcome = run(model, switched_on(*here), requests())
    assert outcome.answers == reference
    assert all(ACTIVE[technique.name](outcome.core) for technique in here)


@pytest.mark.parametrize("budget", [3, pytest.param(17, marks=pytest.mark.slow)])
def test_chunk_size(budget: int, model: Path, reference: Answers) -> None:
    outcome = run(model, USUAL | {"max_num_batched_tokens": budget}, requests())
    assert outcome.answers == reference


@pytest.mark.slow
def test_preemption(model: Path) -> None:
    options: dict[str, Any] = USUAL | {
        "num_gpu_blocks_override": 34, "max_model_len": 60, "enable_prefix_caching": True, "max_num_batched_tokens": 16,
    }
    outcome = run(model, options, requests(long=True))
    assert outcome.answers == run(model, PLAIN, requests(long=True)).answers
    assert outcome.core.scheduler.counters.preemptions > 0
