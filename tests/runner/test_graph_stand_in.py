"""Decodes whose own shape has no CUDA graph yet use a larger one that has, for a while."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from ridgeline.messages import StepPlan, Want
from ridgeline.runner import cuda_graphs
from ridgeline.runner.cuda_graphs import MIXED_USES, GraphForward
from ridgeline.sizes.graph_shapes import GraphShapes, Shape

_NONE = np.zeros(0, np.int32)


@pytest.fixture
def forward() -> GraphForward:
    """Without a device: only the choice of shapes."""
    made = GraphForward.__new__(GraphForward)
    made._shapes, made._shape, made._uses = GraphShapes(256, 2048), None, cuda_graphs.USES
    made._forms, made._stood_in, made._stand_ins = Counter(), Counter(), True
    return made


def captured(forward: GraphForward, *sizes: int, forms: tuple[bool, ...] = (True, False)) -> None:
    forward._forms.update({(Shape(size), greedy): 1 for size in sizes for greedy in forms})


def plan(*counts: int, want: Want = Want.TOKEN) -> Any:
    rows = np.arange(len(counts), dtype=np.int32)
    return StepPlan(0, _NONE, [], _NONE.reshape(0, 4), rows, np.array(counts, np.int32), np.full(len(counts), want, np.int8))


def test_its_own_shape_where_that_is_captured(forward: GraphForward) -> None:
    captured(forward, 40, 48)
    assert forward.shape(plan(*[1] * 37)) == Shape(40)


def test_the_next_larger_one_until_it_has_come_often(forward: GraphForward) -> None:
    captured(forward, 48, 64)
    assert [forward.shape(plan(*[1] * 37)) for _ in range(MIXED_USES + 2)] == [Shape(48)] * MIXED_USES + [Shape(40)] * 2
    assert forward.shape(plan(*[1] * 50)) == Shape(64)


def test_not_one_that_is_much_larger_nor_half_captured(forward: GraphForward) -> None:
    captured(forward, 64)
    assert forward.shape(plan(*[1] * 37)) == Shape(40)   # 64 would be 60 % more
    captured(forward, 48, forms=(True,))
    assert forward.shape(plan(*[1] * 37)) == Shape(40)


def test_not_while_graphs_are_captured_ahead_nor_for_prompts(forward: GraphForward) -> None:
    captured(forward, 48)
    with forward.at_first_use():
        assert forward.shape(plan(*[1] * 37)) == Shape(40)
    assert forward.shape(plan(100)) == Shape(0, 1, 128)
    assert forward.shape(plan(1, 1, 60)) == Shape(2, 1, 64)


def test_not_among_several_ranks(forward: GraphForward) -> None:
    """Another rank may not have captured it, and would compute other shapes."""
    captured(forward, 48)
    forward._stand_ins = False
    assert forward.shape(plan(*[1] * 37)) == Shape(40)
