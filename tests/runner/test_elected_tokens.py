"""Ranks that divide the vocabulary find the greedy token of the whole: each says its own best, and no logits travel."""

from __future__ import annotations

import pytest
import torch

from ridgeline.distributed.sharding import even_shard
from ridgeline.ops.sampling.greedy import greedy
from ridgeline.runner import forward
from ridgeline.runner.forward import best_here, elect


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
    monkeypatch.setattr(forward, "choose_greedy", lambda *given: None)
    logits = torch.arange(6.0).view(2, 3)
    assert best_here(logits, 100, buffers(2)[1]).tolist() == [[0.0, 100.0], [3.0, 100.0]]
