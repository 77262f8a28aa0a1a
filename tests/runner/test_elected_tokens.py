"""Ranks that divide the vocabulary find the token of the whole: each says which of its own ids can be chosen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.distributed.sharding import even_shard
from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request
from ridgeline.ops.sampling import divided_logits
from ridgeline.ops.sampling.divided_logits import Division, best_here, elect, enough
from ridgeline.ops.sampling.greedy import greedy
from ridgeline.ops.sampling.sample import CHOICE, sample
from ridgeline.sampling_params import SamplingParams


def buffers(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_elected_token_is_the_best_of_all(ranks: int) -> None:
    """Also where several are equal, where a logit is NaN or infinite, and where a rank has no ids."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = 11 if ranks < 7 else 6
    logits = torch.randint(-3, 4, (40, vocabulary), generator=generator).to(torch.float32)
    logits[3, 5], logits[4, 0] = torch.nan, torch.inf
    if ranks < 7:                    # a rank that has no finite logit at all is taken to be broken
        logits[5, 5] = -torch.inf
    logits[6] = 2.0
    whole, one, parts = buffers(40), buffers(40), []
    greedy(logits, *whole)
    for rank in range(ranks):
        shard = even_shard(vocabulary, rank, ranks)
        parts.append(best_here(logits[:, shard.start : shard.stop].contiguous(), shard.start, buffers(40)[1]))
    assert all(part.shape == (40, 2) for part in parts)
    elect(torch.stack(parts, dim=1), *one)
    assert torch.equal(one[0], whole[0]) and torch.equal(one[1], whole[1])
    assert whole[1].sum() == 2 and whole[0][6] == 0


def test_launches_that_are_only_collected_leave_columns_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """While kernels are compiled ahead none of them runs. The room for tokens then still has ids of the whole vocabulary."""
    monkeypatch.setattr(divided_logits, "choose_greedy", lambda *given: None)
    logits = torch.arange(6.0).view(2, 3)
    assert best_here(logits, 100, buffers(2)[1]).tolist() == [[0.0, 100.0], [3.0, 100.0]]


# How rows choose, and whether the kind can do without all logits.
KINDS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({}, True), ({"temperature": 1.0}, True), ({"temperature": 0.3}, True), ({"temperature": 2.0, "top_k": 1}, True),
    ({"temperature": 1.5, "top_k": 5}, True), ({"temperature": 1.0, "top_k": 40, "top_p": 0.9}, True),
    ({"temperature": 1.2, "top_k": 20, "min_p": 0.05}, True),
    ({"temperature": 3.0, "top_k": 128, "top_p": 0.99, "min_p": 1e-3}, True),
    ({"temperature": 1.0, "top_p": 0.8}, False), ({"temperature": 1.0, "min_p": 0.1}, False),
    ({"temperature": 1.0, "top_k": 129}, False), ({"temperature": 1.0, "top_k": 9, "typical_p": 0.7}, False),
)


def rows_of(number: int, only_some: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """How so many rows choose, kind after kind, and which of them want all logits for other reasons."""
    kinds = [kind for kind, divides in KINDS if divides or not only_some]
    how = np.zeros(number, CHOICE)
    how["top_p"] = how["typical_p"] = 1
    how["seed"], how["index"] = np.arange(number) * 2**40 + 11, np.arange(number) % 5
    for row in range(number):
        for name, value in kinds[row % len(kinds)].items():
            how[name][row] = value
    return how, np.zeros(number, bool) if only_some else np.arange(number) % 17 == 3


def on_ranks(ranks: int, vocabulary: int, work: Callable[[Division], Any]) -> tuple[list[Any], list[int]]:
    """What each rank, a thread here, has found, and the numbers of each row that a rank sent at a time."""
    sent: list[torch.Tensor] = [torch.empty(0)] * ranks
    barrier, found, widths = threading.Barrier(ranks), [None] * ranks, []

    def rank_main(rank: int) -> None:
        shard = even_shard(vocabulary, rank, ranks)

        def gather(x: torch.Tensor) -> torch.Tensor:
            sent[rank] = x
            barrier.wait(60)
            joined = torch.cat(sent, dim=-1)
            if rank == 0:
                widths.append(x.shape[-1])
            barrier.wait(60)
            return joined

        found[rank] = work(Division(shard.start, shard.size, shard.total, ranks, gather))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, widths


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_rows_of_every_kind_sample_the_token_of_the_whole(ranks: int, dtype: torch.dtype) -> None:
    """Of many equal logits, too (bfloat16 in quarters), with late lengths, and where a row is broken on one rank."""
    vocabulary, number = 333, 96
    logits = torch.randn(number, vocabulary, generator=torch.Generator().manual_seed(ranks)).mul_(2).to(dtype)
    if dtype == torch.bfloat16:
        logits = logits.mul(4).round().div(4)
    logits[13, 300], logits[26, 7] = torch.nan, torch.inf
    how, needs_all = rows_of(number)
    late = torch.arange(number) % 3
    late[torch.from_numpy(how["typical_p"] < 1)] = 0
    how["index"] += late.numpy()

    def work(ids: Division) -> torch.Tensor:
        here = logits[:, ids.first : min(ids.first + ids.room, vocabulary)]
        return enough(here, how, needs_all, ids, late)

    found, _ = on_ranks(ranks, vocabulary, work)
    expected, failed = sample(logits, how, late=late)
    assert failed.sum() == 2 and len(expected.unique()) > 40
    for rank in range(ranks):
        tokens, broken = sample(found[rank], how, late=late)
        assert torch.equal(tokens, expected) and torch.equal(broken, failed)
        whole = torch.from_numpy(needs_all)
        assert torch.equal(found[rank][whole].nan_to_num(), logits[whole].nan_to_num())


@pytest.mark.parametrize(("only_some", "widths"), [
    (True, [2 + 4 * 128, 2]),                # the best and twice 128 candidates, two numbers each; then the winner
    (False, [2 + 4 * 128, 2, 1000]),         # and all logits of the other rows
])
def test_what_travels(only_some: bool, widths: list[int]) -> None:
    how, needs_all = rows_of(24, only_some)
    found, sent = on_ranks(4, 4000, lambda ids: enough(torch.randn(24, ids.room), how, needs_all, ids))
    assert sent == widths and found[0].shape == (24, 4000)


def test_few_logits_travel_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(divided_logits.LEAST_BYTES, "cpu", 24 * 4000 * 4 + 1)
    how, needs_all = rows_of(24, only_some=True)
    assert on_ranks(4, 4000, lambda ids: enough(torch.randn(24, ids.room), how, needs_all, ids))[1] == [1000]


def asked() -> list[SamplingParams]:
    """Every kind, and what looks at all logits: penalties, biases, log-probabilities, min_tokens, forbidden words."""
    kinds = [kind | {"temperature": kind.get("temperature", 0.0)} for kind, _ in KINDS if "typical_p" not in kind]
    kinds += [
        {"temperature": 1.0, "presence_penalty": 0.6}, {"temperature": 0.8, "logit_bias": {7: 3.0}},
        {"temperature": 1.0, "logprobs": 3}, {"temperature": 1.0, "min_tokens": 6}, {"temperature": 1.0, "top_k": 4},
        {"temperature": 0.9, "n": 2},
    ]
    return [SamplingParams(seed=number, max_tokens=10, **kind) for number, kind in enumerate(kinds)]


DRAFTS = '{"method": "auto", "num_speculative_tokens": 3, "adaptive": false}'


@pytest.mark.parametrize("mesh", [
    {"tensor_parallel_size": 2},
    *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in (
        {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "speculative_config": DRAFTS},
        {"pipeline_parallel_size": 3, "speculative_config": DRAFTS}, {"tensor_parallel_size": 2, "speculative_config": DRAFTS},
    )),
], ids=lambda mesh: "-".join(map(str, mesh.values())))
def test_ranks_sample_what_one_rank_samples(mesh: dict[str, Any], tmp_path: Path) -> None:
    """Through the engine, in float64, all kinds in the same steps."""
    path = str(save_checkpoint("llama", tmp_path, dtype=torch.float64, tie_word_embeddings=False))
    answers: list[dict[tuple[str, int], list[int]]] = []
    for options in ({}, mesh):
        core = EngineCore.start(EngineConfig.of(
            model=path, dtype="float64", device="cpu", num_gpu_blocks_override=200, max_num_seqs=32, **options
        ))
        for number, params in enumerate(asked()):
            core.add(Request(str(number), [5, 6, 7, 5, 6, 7, 5, 6][: 2 + number % 6], params))
        answers.append({})
        while core.has_work:
            for delta in core.step():
                answers[-1].setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        core.close()
    assert answers[0] == answers[1] and len({str(each) for each in answers[0].values()}) > 12
