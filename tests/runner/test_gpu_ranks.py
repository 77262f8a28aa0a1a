"""Ranks on GPUs over NCCL: two of them, which may share one card, say what one says, launched kernel by kernel and as graphs.
`make test-gpu` runs it. Cases run in child processes with a limit: what waits for another rank waits for long.

Small sums by the one-shot kernel (distributed/one_shot.py): torch's variable lets ranks that share a card share memory, too. Two
processes take turns on a card, so a kernel that waits for the other one waits for its turn: a few milliseconds."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
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
from tiny_configs import VOCAB
from tiny_models import save_checkpoint
from torch import Tensor

from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import ProcessAxis
from ridgeline.distributed.meet import meet
from ridgeline.distributed.one_shot import OneShot
from ridgeline.distributed.one_shot_choice import SHARED_GPU
from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.mesh_shape import MeshShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SECONDS = 240                        # for the cases of a process; two ranks that share a card need 7 ms for a collective
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
ONE_SHOT = {f"one-shot {name}": CASES[name] for name in ("tensor", "tensor, eager")}
CASES |= ONE_SHOT
Case = tuple[dict[str, list[int]], int, bool]            # answers, steps that were CUDA graphs, was there a one-shot kernel?
SIZES = (1, 3, 1000, 1025, 4096, 40_001, 131_072)        # numbers of a sum; the last is as large as can be in float32


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
        one_shot = getattr(core.executor.runner._comm.tensor, "one_shot", None)
        return answers, core.executor.runner.forward.replays, one_shot is not None
    finally:
        core.close()


def run_some(folder: Path, names: list[str]) -> None:
    """Each goes on where one before it failed. What hangs says where."""
    for name in names:
        model, options = CASES[name]
        os.environ[SHARED_GPU] = str(int(name in ONE_SHOT))
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
    plain = [name for name in CASES if name not in ONE_SHOT]
    for names in (plain, *([name] for name in ONE_SHOT)):                # a process shares memory with the ranks of one engine
        start("cases", str(folder), *names).wait()
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = ["timeout", "-k", "5", str(SECONDS), sys.executable, __file__, *arguments]
    return subprocess.Popen(["env", f"PYTHONPATH={import_path()}", *command])


@pytest.mark.parametrize("name", [name for name, (_, options) in CASES.items() if options])
def test_two_ranks_say_what_one_says(results: dict[str, Case], name: str) -> None:
    model, options = CASES[name]
    assert name in results, "it failed, or did not come to an end"
    answers, replays, one_shot = results[name]
    assert answers == results[model][0]
    assert (replays > 0) != options.get("enforce_eager", False)
    assert one_shot == (name in ONE_SHOT), "the log says why"


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * size + rank)).to("cuda", dtype)


def sum_some(folder: Path, rank: int) -> None:
    """Of two ranks: sums of all sizes, eager and in CUDA graphs, beside NCCL's. At the end one for which rank 1 does not come."""
    faulthandler.dump_traceback_later(SECONDS / 4)
    torch.cuda.set_device(device := torch.device("cuda", rank % torch.cuda.device_count()))
    mesh = meet(MeshShape(2, 1), rank, folder / "store", "nccl")
    mesh.reach_peers(device)
    axis = mesh.tensor
    assert isinstance(axis, ProcessAxis)
    small = axis.one_shot
    assert small is not None, "the log says why"
    found: dict[str, str] = {}
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)):
        given = [numbers(rank, size, dtype) for size in SIZES]
        expected = [axis.sum_over_group(x.clone()) for x in given]
        eager, graphed = ([x.clone() for x in given] for _ in range(2))
        odd = torch.cat((given[3][:1], given[3]))[1:]    # not a multiple of 16 bytes
        torch.testing.assert_close(small.sum(odd), expected[3], rtol=tolerance, atol=tolerance)
        for x in eager:
            assert small.takes(x) and axis.all_reduce(x) is x
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for x in graphed:
                small.sum(x)
        for _ in range(3):                               # a replay sums what is there by then
            for x, begin in zip(graphed, given, strict=True):
                x.copy_(begin)
            graph.replay()
        torch.cuda.synchronize()
        for x, again, wanted in zip(eager, graphed, expected, strict=True):
            torch.testing.assert_close(x, wanted, rtol=tolerance, atol=tolerance)
            assert torch.equal(x, again)
            found[f"{dtype} {len(x)}"] = hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        del graph
    assert not small.takes(torch.zeros(1, dtype=torch.float64, device=device))
    assert not small.takes(torch.zeros(SIZES[-1] + 1, device=device))
    mesh.agree(True)
    if rank == 0:
        found["lost"] = str(waits_and_is_let_go(small, device))
    (folder / f"sums-{rank}.json").write_text(json.dumps(found))
    mesh.close()


def waits_and_is_let_go(small: OneShot, device: torch.device) -> bool:
    """A kernel waits for a rank that does not come, until it is let go."""
    small.sum(torch.zeros(5000, device=device))
    done = torch.cuda.Event()
    done.record()
    time.sleep(0.5)
    waited = not done.query()
    small.let_go()
    limit = time.monotonic() + 20
    while not done.query() and time.monotonic() < limit:
        time.sleep(0.01)
    return waited and done.query()


def test_sums_of_the_one_shot_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's within rounding, with the same bits on both ranks, eager and in graphs; and no kernel waits without end."""
    monkeypatch.setenv(SHARED_GPU, "1")
    ranks = [start("sums", str(tmp_path), str(rank)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"sums-{rank}.json").read_text()) for rank in range(2))
    assert first.pop("lost") == "True"
    assert first == second and len(first) == 3 * len(SIZES)


if __name__ == "__main__":
    kind, where, *rest = sys.argv[1:]
    if kind == "sums":
        sum_some(Path(where), int(rest[0]))
    else:
        run_some(Path(where), rest or list(CASES))
