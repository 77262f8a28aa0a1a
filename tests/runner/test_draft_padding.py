"""Decodes with drafts, padded to the shape of a CUDA graph: every token keeps its own position, slot and logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.messages import RowAdded, StepPlan, Want
from ridgeline.ops.attention.attention_reference import paged_attention_reference
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import GraphShapes, Shape
from ridgeline.sizes.kv_spec import KVGroupSpec

NONE = np.zeros(0, np.int32)
BLOCK = 4


def packed(past: list[int], width: list[int], shape: Shape, given: tuple[int, ...] = (), prompts: tuple[int, ...] = ()) -> Any:
    """Rows with `past` tokens in the cache; row r has blocks 10 r + 1 … The newest token of `given` comes from the host, and
    `prompts` do not sample."""
    rows = DeviceRows([KVGroupSpec((0,), None, BLOCK, 2, 16)], 6, 64, 32, 1, torch.device("cpu"), heads=4, drafts=True)
    added = [
        RowAdded(
            row, np.full(length + (row in given) + 2 * (row in prompts), 70 + row, np.int32), length, length,
            [np.arange(16, dtype=np.int32) + 10 * row + 1], SamplingParams(), 0,
        ) for row, length in enumerate(past)
    ]
    tokens = np.array(width, np.int32) + 1
    want = np.array([0 if row in prompts else Want.TOKEN for row in range(len(past))], np.int8)
    plan = StepPlan(0, NONE, added, NONE.reshape(0, 4), np.arange(len(past), dtype=np.int32), tokens, want)
    plan.width, plan.drafts_from = np.array(width, np.int32), np.array(past, np.int32) + 1
    plan.drafts = np.arange(len(past) * 8, dtype=np.int32).reshape(len(past), 8)
    rows.apply(plan)
    return rows.pack(plan, shape)


@pytest.mark.parametrize(("past", "width", "shape"), [
    ([9, 5, 7], [0, 0, 1], Shape(4, draft_tokens=4, queries=2)),         # as many tokens as there are rows with the padding
    ([9, 5, 7, 3, 6], [0, 0, 0, 0, 1], Shape(6, draft_tokens=8, queries=2)),
    ([9, 5, 7], [0, 0, 3], Shape(4, draft_tokens=8, queries=4)),
    ([11], [4], Shape(1, draft_tokens=8, queries=8)),
])
def test_every_token_has_its_own_position(past: list[int], width: list[int], shape: Shape) -> None:
    batch = packed(past, width, shape)
    positions = [length + number for length, own in zip(past, width, strict=True) for number in range(1 + own)]
    owners = [row for row, own in enumerate(width) for _ in range(1 + own)]
    slots = [(10 * row + 1 + place // BLOCK) * BLOCK + place % BLOCK for row, place in zip(owners, positions, strict=True)]
    total = len(positions)
    assert batch.positions.tolist() == positions + [0] * (shape.draft_tokens - total)
    assert batch.groups[0].slots.tolist() == slots + [0] * (shape.draft_tokens - total)      # padding writes to block 0
    assert batch.kv_len.tolist()[: len(past)] == [length + 1 + own for length, own in zip(past, width, strict=True)]
    assert batch.picks.tolist() == list(range(total))
    assert batch.sample_rows.tolist()[:total] == owners


def test_a_newest_token_from_the_host_beside_its_drafts() -> None:
    batch = packed([9, 5], [0, 2], Shape(2, draft_tokens=4, queries=4), given=(1,))
    assert batch.tokens.tolist()[1:] == [71, 8, 9]       # its own token; then its guesses
    assert batch.newest.tolist() == [0, 1, -1, -1]


def test_a_prompt_of_one_token_is_not_sampled() -> None:
    """Its chunk may be one token long. Its logits are computed, as of all tokens of a graph, and not wanted."""
    batch = packed([9, 5, 7], [0, 2, 0], Shape(4, draft_tokens=8, queries=4), prompts=(2,))
    assert batch.picks.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("most", [20, 100, 512])
def test_no_shape_has_more_tokens_than_a_step(most: int) -> None:
    """The buffers of a step's integers are made for those."""
    shapes = GraphShapes(16, most, 512)
    found = [shapes.fit_drafts(4, tokens, 4) for tokens in range(5, min(most, 64) + 1)]
    assert all(shape is not None and tokens <= shape.draft_tokens <= most for tokens, shape in enumerate(found, 5))


def test_attention_leaves_out_queries_behind_the_rows() -> None:
    """One row of three queries, and one of padding: the row's own must not move."""
    generator = torch.Generator().manual_seed(1)
    q, (k, v) = torch.randn(4, 4, 16, generator=generator), torch.randn(2, 3, BLOCK, 2, 16, generator=generator)
    table, borders, lengths = torch.tensor([[1, 2]]), torch.tensor([0, 3]), torch.tensor([7])
    alone = paged_attention_reference(q[:3], k, v, table, borders, lengths, scale=0.25)
    torch.testing.assert_close(paged_attention_reference(q, k, v, table, borders, lengths, scale=0.25)[:3], alone)
