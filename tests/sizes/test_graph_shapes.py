"""Which steps are recorded, and what they are padded to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.sizes.graph_shapes import GraphShapes, Shape, decode_sizes


@given(max_rows=st.integers(1, 1100), budget=st.integers(1, 9000), data=st.data())
def test_a_shape_holds_the_step_and_stays_in_bounds(max_rows: int, budget: int, data: st.DataObject) -> None:
    shapes = GraphShapes(max_rows, budget)
    decodes = data.draw(st.integers(0, min(max_rows, budget)))
    prompts = data.draw(st.integers(0, min(10, max_rows - decodes)))
    tokens = data.draw(st.integers(2 * prompts, max(2 * prompts, min(1400, budget - decodes)))) if prompts else 0
    shape = shapes.fit(decodes, prompts, tokens)
    if shape is not None:
        assert shape.decodes >= decodes and shape.prompts >= prompts and shape.prompt_tokens >= tokens
        assert shape.decodes + shape.prompts <= max_rows and shape.decodes + shape.prompt_tokens <= shapes.most_tokens
        assert (shape.prompts == 0) == (prompts == 0) and (shape.decodes == 0) == (decodes == 0)
    elif not prompts:
        raise AssertionError("every decode is recorded")


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 128, 256, 512, 777, 1024])
def test_padding_is_bounded(max_rows: int) -> None:
    sizes = decode_sizes(max_rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_rows
    for rows in range(33, max_rows + 1):
        assert next(size for size in sizes if size >= rows) <= rows * 1.25


def test_long_prompts_and_many_rows_are_left_alone() -> None:
    shapes = GraphShapes(1024, 8192)
    assert shapes.fit(0, 1, 512) == Shape(0, 1, 512) and shapes.fit(0, 3, 500) == Shape(0, 4, 512)
    assert shapes.fit(0, 1, 1281) is None and shapes.fit(0, 9, 200) is None
    assert shapes.fit(40, 1, 70) == Shape(64, 1, 128), "beside prompts decodes come in fewer sizes"
    assert shapes.fit(40, 0, 0) == Shape(40, 0, 0)


@pytest.mark.parametrize("max_rows", [5, 32, 256])
def test_a_full_engine_has_a_shape_for_the_prompt_that_takes_the_free_row(max_rows: int) -> None:
    """Where requests wait, all rows but those that have just ended decode beside their prompts. Three prompts, padded to four,
    would have a row too many: such steps were launched kernel by kernel, always."""
    shapes = GraphShapes(max_rows, 2048)
    for prompts in range(1, min(8, max_rows) + 1):
        found = shapes.fit(max_rows - prompts, prompts, 100)
        assert found == Shape(max_rows - prompts, prompts, 128)
    assert shapes.fit(max_rows - 4, 3, 100) == Shape(max_rows - 4, 4, 128), "fewer rows are padded"
