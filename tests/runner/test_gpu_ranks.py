"""Ranks on GPUs over NCCL: two of them, which may share one card, say what one says, launched kernel by kernel and as graphs.
`make test-gpu` runs it. All cases run in one child process with a limit: what waits for another rank waits for long."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import import_path
from tiny_models import VOCAB, save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SECONDS = 120                        # for all cases together
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {         # model, options
    "dense": ("dense", {}),
    "tensor": ("dense", {"tensor_parallel_size": 2}),
    "tensor, eager": ("dense", {"tensor_parallel_size": 2, "enforce_eager": True}),
    "mixture": ("mixture", {}),
    "experts": ("mixture", EXPERTS),
    "pipeline, eager": ("dense", {"pipeline_parallel_size": 2, "enforce_eager": True}),
    "pipeline": ("dense", {"pipeline_parallel_size": 2}),
    "experts, eager": ("mixture", EXPERTS | {"enforce_eager": True}),
}
Case = tuple[dict[str, list[int]], int]                  # answers, and steps that were CUDA graphs


def run(model: Path, options: dict[str, Any]) -> Case:
    """Greedy answers of twelve requests, some beside each other. In float32: products of divided matrices are rounded in other
    places, which must not change a token."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}
    sizes |= {"device": "cuda", "dtype": "float32"}
    core = EngineCore.start(EngineConfig.of(model=str(model), **sizes | options))
    rng = random.Random(5)
    answers: dict[str, list[int]] = {}
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


def run_all(folder: Path) -> None:
    for name, (model, options) in CASES.items():
        found = run(folder / model, options)
        (folder / f"{name}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Of the cases that came to an end."""
    folder = tmp_path_factory.mktemp("ranks")
    save_checkpoint("qwen3", folder / "dense", tie_word_embeddings=False, num_hidden_layers=4)
    save_checkpoint("qwen3_moe", folder / "mixture", tie_word_embeddings=False)
    command = ["timeout", "-k", "5", str(SECONDS), sys.executable, __file__, str(folder)]
    subprocess.run(["env", f"PYTHONPATH={import_path()}", *command], check=False)
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


@pytest.mark.parametrize("name", [name for name, (_, options) in CASES.items() if options])
def test_two_ranks_say_what_one_says(results: dict[str, Case], name: str) -> None:
    model, options = CASES[name]
    assert name in results, "it failed, or did not come to an end"
    answers, replays = results[name]
    assert answers == results[model][0]
    assert (replays > 0) != options.get("enforce_eager", False)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
