"""The ring of x where two parts of a CTA share a tile's outputs (`together`): a slot must stay with one part.

A model of mbarriers: a wait for a parity ends where the last complete phase has that parity. TMA completes fills in any order.
Random orders of all that may happen show whether a part ever reads another block than its own.
"""

from __future__ import annotations

import random

import pytest

from ridgeline.ops.packed.select_packed import PackedGemmPlan


def wrong_reads(stages: int, in_run: int, runs: int, seed: int) -> int:
    """In packed_gemm.py: `_fetch_rows` fills, and each part of `_multiply` reads its half of every run."""
    chosen = random.Random(seed)
    full, empty, holds = [0] * stages, [0] * stages, [-1] * stages       # phases completed; the block in a slot
    half = in_run // 2
    mine = [[run * in_run + part * half + block for run in range(runs) for block in range(half)] for part in (0, 1)]
    filled, under_way, wrong = 0, list[int](), 0
    while True:
        may: list[tuple[str, int]] = [("complete", block) for block in under_way]
        if filled < runs * in_run and empty[filled % stages] % 2 == filled // stages % 2:
            may.append(("fill", filled))
        for part in (0, 1):
            if mine[part] and full[mine[part][0] % stages] % 2 != mine[part][0] // stages % 2:
                may.append(("read", part))
        if not may:
            return wrong + len(mine[0]) + len(mine[1])                   # a part waits for ever
        kind, what = chosen.choice(may)
        if kind == "fill":
            under_way.append(what)
            filled += 1
        elif kind == "complete":
            under_way.remove(what)
            holds[what % stages] = what
            full[what % stages] += 1
        else:
            block = mine[what].pop(0)
            wrong += holds[block % stages] != block
            empty[block % stages] += 1
        if not (mine[0] or mine[1] or under_way):
            return wrong


@pytest.mark.parametrize(("stages", "tiles"), [(8, 4), (6, 4), (4, 2), (5, 4), (5, 2), (6, 2)])
def test_a_plan_takes_the_rings_that_never_give_a_part_the_wrong_block(stages: int, tiles: int) -> None:
    wrong = sum(wrong_reads(stages, 8 // tiles, 16, seed) for seed in range(60))
    if stages % (8 // tiles):
        assert wrong                                                     # the model finds the fault
        with pytest.raises(ValueError, match="its slots change between the parts"):
            PackedGemmPlan(64, 2, 4, 1, tiles, stages, 1, 4, 1, together=True)
    else:
        assert wrong == 0
        PackedGemmPlan(64, 2, 4, 1, tiles, stages, 1, 4, 1, together=True)
