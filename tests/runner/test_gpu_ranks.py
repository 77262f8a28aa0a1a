"""Ranks on GPUs over NCCL: two of them, which may share one card, say what one says, launched kernel by kernel and as graphs.
`make test-gpu` runs it. All cases run in one child process with a limit: what waits for another rank waits for long."""

from __future__ import annotations

import faulthandler
import json
import random
import subprocess
import sys
import time
import traceback
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

SECONDS = 240                        # for all cases together; two ranks that share a card need 7 ms for a collective
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
    "context, eager": ("dense", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "enforce_eager": True}),
}
Case = tuple[dict[str, list[int]], int]                  # answers, and steps that were CUDA graphs


def run(model: Path, options: dict[str, Any]) -> Case:
    """Answers of six requests, some beside each other; every second one is sampled, with and without limits on the candidates. In
    float32: products of divided matrices are rounded in other places, which must not change a token."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 100, "gpu_memory_utilization": 0.3}
    sizes |= {"device": "cuda", "dtype": "float32"}
    core = EngineCore.start(EngineConfig.of(model=str(model), **sizes | options))
    rng = random.Random(5)
    answers: dict[str, list[int]] = {}
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True)
    limited = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=4, max_tokens=10, ignore_eos=True)
    asked = dict(zip("abcdef", (greedy, sampled, greedy, limited, greedy, sampled), strict=True))
    try:
        for names in (("a", "b"), ("c", "d", "e", "f")):
            for name in names:
                core.add(Request(name, [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))], asked[name]))
                answers[name] = []
            while core.has_work:
                for delta in core.step():
                    assert not delta.error
                    answers[delta.request_id] += delta.token_ids
            if len(names) == 2:                          # idle: graphs that the start has left are captured, on all ranks
                for _ in range(4):
                    core.prepare()
        return answers, core.executor.runner.forward.replays
    finally:
        core.close()


def run_some(folder: Path, names: list[str]) -> None:
    """Each goes on where one before it failed. What hangs says where."""
    for name in names:
        model, options = CASES[name]
        began = time.monotonic()
        faulthandler.dump_traceback_later(SECONDS / 8)
        try:
            found = run(folder / model, options)
            (folder / f"{name}.json").write_text(json.dumps(found))
            came = f"{found[1]} graphs"
        except Exception as error:
            traceback.print_exc()
            came = f"failed: {error}"
        faulthandler.cancel_dump_traceback_later()
        print(f"{name}: {came}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def save_models(folder: Path) -> Path:
    save_checkpoint("qwen3", folder / "dense", tie_word_embeddings=False, num_hidden_layers=4)
    save_checkpoint("qwen3_moe", folder / "mixture", tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Of the cases that came to an end."""
    folder = save_models(tmp_path_factory.mktemp("ranks"))
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
    run_some(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
