"""Pairs sorted by expert, and the tiles of a grouped product: every pair in one tile, in order, and no more room than said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ridgeline.ops.experts import expert_tiles, experts_op, few_tokens, route
from ridgeline.ops.experts.expert_products import tile_for
from ridgeline.ops.registry import TRITON_INTERPRETED
from ridgeline.sizes.expert_costs import chosen_experts


@pytest.mark.parametrize(("tokens", "used", "experts", "spread", "rows"), [
    (1, 2, 8, 0, 16), (300, 4, 13, 1, 16), (5, 3, 4, 3, 16), (200, 8, 128, 8, 16), (64, 8, 128, 0, 32), (33, 1, 3, 1, 16),
])
def test_every_pair_is_in_one_tile_of_its_expert(tokens: int, used: int, experts: int, spread: int, rows: int) -> None:
    chosen = torch.tensor(chosen_experts(tokens, experts, used, spread))
    reads = torch.zeros(1, dtype=torch.int32)
    order, tiles = expert_tiles._sorted_by_torch(chosen.flatten(), experts, rows, reads)
    number, tiles = int(tiles[-1, 0]), tiles[:-1]
    assert len(tiles) == expert_tiles.most_tiles(tokens * used, experts, rows)
    assert number == int((tiles[:, 0] >= 0).sum()) and not (tiles[:number, 0] < 0).any()
    flat, seen = chosen.flatten().tolist(), []
    for expert, first, stop in tiles.tolist():
        if expert >= 0:
            pairs = order[first:stop].tolist()
            assert 0 < len(pairs) <= rows and pairs == sorted(pairs) and {flat[pair] for pair in pairs} == {expert}
            seen += pairs
    assert sorted(seen) == list(range(tokens * used))
    assert int(reads) == len(set(flat)) == len({expert for expert, *_ in tiles.tolist() if expert >= 0})


def test_pairs_of_experts_that_are_elsewhere_have_no_tile() -> None:
    """Of eight experts this rank has three; the others have the number behind them."""
    chosen = torch.tensor(chosen_experts(40, 8, 3, 0)).clamp(max=3)
    reads = torch.zeros(1, dtype=torch.int32)
    order, tiles = expert_tiles.sorted_pairs(chosen, 3, 16, reads, elsewhere=True)
    seen = [pair for expert, first, stop in tiles[:-1].tolist() if expert >= 0 for pair in order[first:stop].tolist()]
    assert sorted(seen) == (chosen.flatten() < 3).nonzero().flatten().tolist() and int(reads) == 3


@pytest.mark.parametrize("experts", [experts_op.experts_reference, experts_op.experts_visited])
def test_experts_that_are_elsewhere_add_nothing(experts: Callable[..., Tensor]) -> None:
    """The results of two ranks with a part of the experts each add up to that of one with all."""
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(shape, generator=generator).double() for shape in ((9, 16), (5, 24, 16), (5, 16, 12)))
    chosen = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(9)])
    weights = torch.rand((9, 3), generator=generator).double()
    chosen[0] = torch.tensor([3, 4, 3])                  # none of them on the first rank
    parts = [
        experts(x, gate_up[first:stop], down[first:stop], torch.where((chosen >= first) & (chosen < stop), chosen - first,
                stop - first), weights, elsewhere=True)
        for first, stop in ((0, 3), (3, 5))
    ]
    assert not parts[0][0].any()
    torch.testing.assert_close(parts[0] + parts[1], experts(x, gate_up, down, chosen, weights), rtol=0, atol=1e-12)


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    rows = [tile_for(pairs, 128, True).rows for pairs in (8, 128 * 8, 128 * 16, 128 * 32, 128 * 1000)]
    assert rows == [16, 16, 32, 64, 128]
    for pairs in (8, 4000, 10**6):                       # both products go through one list of tiles
        assert tile_for(pairs, 128, True).rows == tile_for(pairs, 128, False).rows


@pytest.mark.parametrize("gated", [True, False])
def test_stages_fit_shared_memory(gated: bool) -> None:
    """An H200 keeps the measured stages in 16 bits; float32, and GPUs with 99 KB, get fewer."""
    pairs = (8, 128 * 16, 128 * 32, 128 * 1000)
    assert [tile_for(each, 128, gated).stages for each in pairs] == ([3, 6, 6, 3] if gated else [4, 4, 6, 3])
    wide = [tile_for(each, 128, gated, itemsize=4).stages for each in pairs]
    assert wide == ([3, 5, 4, 2] if gated else [4, 4, 6, 2])
    for each in pairs:
        for itemsize in (2, 4):
            tile = tile_for(each, 128, gated, itemsize, 101_376)
            assert tile.stages >= 1
            assert tile.stages * (tile.rows + tile.outputs * (1 + gated)) * tile.inputs * itemsize <= 101_376
            assert tile._replace(stages=1) == tile_for(each, 128, gated)._replace(stages=1)


def test_only_visited_experts_are_touched_on_a_cpu() -> None:
    """The weights of the others may be anything."""
    case = next(case for case in experts_op.experts.cases if case.name == "few-alike")
    (x, gate_up, down, chosen, weights, kind), options = experts_op.experts.inputs(
        torch.Generator().manual_seed(0), torch.float64, "cpu", **case.sizes
    )
    expected = experts_op.experts_reference(x, gate_up, down, chosen, weights, kind, **options)
    others = [expert for expert in range(len(gate_up)) if expert not in chosen.unique().tolist()]
    gate_up[others], down[others] = torch.nan, torch.nan
    reads = torch.zeros(1, dtype=torch.int32)
    torch.testing.assert_close(experts_op.experts(x, gate_up, down, chosen, weights, kind, **options, reads=reads), expected)
    assert int(reads) == len(gate_up) - len(others)


@pytest.mark.skipif(not (TRITON_INTERPRETED or torch.cuda.is_available()), reason="no Triton kernels here")
def test_down_takes_a_row_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three for each of three experts and of a shared one; the last is half empty."""
    monkeypatch.setattr(few_tokens, "few_down", lambda *_: few_tokens.Few(8, 16, 4))
    case = next(case for case in experts_op.experts.cases if case.name == "shared-two")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args, options = experts_op.experts.inputs(torch.Generator().manual_seed(0), torch.float32, device, **case.sizes)
    found = experts_op.experts_triton(*args, **options)
    torch.testing.assert_close(found, experts_op.experts_reference(*args, **options), rtol=1e-4, atol=1e-4)


def test_experts_are_chosen_among_the_best_groups() -> None:
    """By hand: groups (0, 1), (2, 3), (4, 5); the best two have the best expert each, and the bias changes the choice alone."""
    logits = torch.tensor([[3.0, 0.0, 2.0, 1.9, 2.5, -1.0]], dtype=torch.float64)
    chosen, weights = route.route(logits, 3, groups=3, top_groups=2, scale=2.0)
    assert chosen.tolist() == [[0, 4, 1]]                # 2 and 3 are better than 1, and in the third group
    torch.testing.assert_close(weights, 2 * logits.softmax(-1)[:, [0, 4, 1]])
    chosen, _ = route.route(logits, 2, score="sigmoid", groups=3, top_groups=1, group_score="best two")
    assert chosen.tolist() == [[2, 3]]                   # together the best pair
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    chosen, weights = route.route(logits, 1, score="sigmoid", bias=bias)
    assert chosen.tolist() == [[1]] and weights.tolist() == [[0.5]]
    _, weights = route.route(logits, 2, score="sigmoid", normalise=True)
    assert weights.sum() == pytest.approx(1.0)
