"""The laws for latent attention: DeepSeek-V3's tiny checkpoint, experts included, in float64.

Chunks of more than sixteen tokens widen the latents, shorter ones and decodes absorb the queries: the tokens are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_laws import ACTIVE, PLAIN, TOGETHER, USUAL, requests, run, switched_on
from tiny_models import save_checkpoint

Answers = dict[tuple[str, int], list[int]]
# A latent is never shared by a kernel of its own: every row reads its prefix.
HERE = tuple(each for each in TOGETHER if each.name != "shared-prefix attention")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("deepseek_v3", tmp_path_factory.mktemp("latent") / "model")


@pytest.fixture(scope="module")
def reference(model: Path) -> Answers:
    """One request at a time, contiguous KV, whole prompts, nothing cached."""
    return run(model, PLAIN, requests()).answers


def test_all_techniques_together(model: Path, reference: Answers) -> None:
    outcome = run(model, switched_on(*HERE), requests())
    assert outcome.answers == reference
    assert all(ACTIVE[technique.name](outcome.core) for technique in HERE)


@pytest.mark.parametrize("budget", [3, 17, 256])
def test_chunk_size(budget: int, model: Path, reference: Answers) -> None:
    outcome = run(model, USUAL | {"max_num_batched_tokens": budget}, requests())
    assert outcome.answers == reference
    assert outcome.core.scheduler.manager.counters.hit_tokens > 0


@pytest.mark.parametrize("caching", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_preemption(caching: bool, model: Path) -> None:
    options: dict[str, Any] = USUAL | {
        "num_gpu_blocks_override": 20, "max_model_len": 60, "enable_prefix_caching": caching, "max_num_batched_tokens": 16,
    }
    outcome = run(model, options, requests(long=True)[:4])
    assert outcome.answers == run(model, PLAIN, requests(long=True)[:4]).answers
    assert outcome.core.scheduler.counters.preemptions > 0


def test_n_answers_copy_the_block_in_which_the_prompt_ends(model: Path, reference: Answers) -> None:
    outcome = run(model, USUAL | {"enable_prefix_caching": False, "max_num_seqs": 12}, requests(n=3))
    assert outcome.answers == {(name, index): tokens for (name, _), tokens in reference.items() for index in range(3)}
    assert outcome.core.scheduler.manager.counters.copied_blocks > 0
