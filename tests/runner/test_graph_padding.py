"""Steps padded to shapes with CUDA graphs: decodes whose own shape has no graph yet use a larger one for a while, and with drafts
every token keeps its own position, slot and logits."""

from __future__ import annotations

import gc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_model import write_model

from ridgeline import LLM
from ridgeline.messages import RowAdded, StepPlan, StepResult, Want
from ridgeline.ops.attention.attention_reference import paged_attention_reference
from ridgeline.runner import cuda_graphs
from ridgeline.runner.cuda_graphs import PASSING_USES, SPACING, STAND_INS, GraphForward, StandIns, without_collection
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import GraphShapes, Shape
from ridgeline.sizes.kv_spec import KVGroupSpec

_NONE = np.zeros(0, np.int32)
BLOCK = 4


@pytest.fixture
def forward() -> GraphForward:
    """Without a device: only the choice of shapes."""
    made = GraphForward.__new__(GraphForward)
    made._shapes, made._shape, made._uses = GraphShapes(256, 2048), None, cuda_graphs.USES
    made._choice, made._stand_ins, made._captured = StandIns(), True, OrderedDict()
    return made


def captured(forward: GraphForward, *sizes: int, forms: tuple[bool, ...] = (True, False), shared: bool = False) -> None:
    forward._choice.forms.update({(Shape(size), greedy, shared): 1 for size in sizes for greedy in forms})


def plan(*counts: int, want: Want = Want.TOKEN) -> Any:
    rows = np.arange(len(counts), dtype=np.int32)
    return StepPlan(0, _NONE, [], _NONE.reshape(0, 4), rows, np.array(counts, np.int32), np.full(len(counts), want, np.int8))


def test_the_time_of_a_larger_graph_counts_once_it_has_run_often(forward: GraphForward) -> None:
    """It may run for hundreds of steps. Drafts are chosen by measured times, and without them no row would have any."""
    captured(forward, 48)
    found = []
    for _ in range(STAND_INS + 2):
        assert forward.shape(plan(*[1] * 37), False) == Shape(48) and forward.stood_in
        found.append(forward.passing)
    assert found == [True] * (STAND_INS - 1) + [False] * 3
    assert forward.shape(plan(*[1] * 48), False) == Shape(48) and not forward.passing


@pytest.mark.parametrize("passing", [False, True])
def test_a_step_is_typical_unless_it_passes(tmp_path: Path, passing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(write_model(tmp_path / "tiny"), load_format="dummy", device="cpu", dtype="float64", num_gpu_blocks_override=40)
    forward, collect, typical = llm.core.executor.runner.forward, llm.core.executor.collect, []

    def collected() -> StepResult:
        result = collect()
        typical.append(result.typical)
        return result

    monkeypatch.setattr(type(forward), "stood_in", True)
    monkeypatch.setattr(type(forward), "passing", passing)
    monkeypatch.setattr(llm.core.executor, "collect", collected)
    llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    llm.close()
    assert typical == [not passing] * 3


def test_its_own_shape_where_that_is_captured(forward: GraphForward) -> None:
    captured(forward, 40, 48)
    assert forward.shape(plan(*[1] * 37), False) == Shape(40)


def test_the_next_larger_one_until_it_has_come_often(forward: GraphForward) -> None:
    """Of few tokens not before long: running requests would wait for the capture of a graph that is hardly faster."""
    captured(forward, 48, 64, 320)
    assert {forward.shape(plan(*[1] * 37), False) for _ in range(STAND_INS + 2)} == {Shape(48)}
    forward._choice._steps += SPACING
    assert forward.shape(plan(*[1] * 37), False) == Shape(40) and not forward.stood_in
    forward._choice.captured((Shape(24), True, False))           # another was meanwhile
    assert forward.shape(plan(*[1] * 37), False) == Shape(48)
    assert forward.shape(plan(*[1] * 50), False) == Shape(64) and forward.stood_in       # its time is not that of its own shape


def test_one_that_is_much_larger_only_for_a_shape_that_may_not_come_again_and_none_that_is_half_captured(
    forward: GraphForward,
) -> None:
    captured(forward, 64)
    found = [forward.shape(plan(*[1] * 37), False) for _ in range(PASSING_USES + 1)]
    assert found == [Shape(64)] * PASSING_USES + [Shape(40)]     # 64 is 60 % more
    assert forward.shape(plan(*[1] * 9), False) == Shape(12)     # more than four times as many
    captured(forward, 48, forms=(True,))
    assert forward.shape(plan(*[1] * 37), False) == Shape(40)


def test_decodes_behind_a_shared_prefix_have_graphs_of_their_own(forward: GraphForward) -> None:
    captured(forward, 128, 160)
    captured(forward, 256, shared=True)
    forward._captured[Shape(256), True, (True, False)] = None    # type: ignore[assignment]
    assert forward.shape(plan(*[1] * 128), True) == Shape(256) and forward.stood_in      # not 128 or 160: they share none
    captured(forward, 128, shared=True)
    assert forward.shape(plan(*[1] * 128), True) == Shape(128) and not forward.stood_in
    forward._captured[Shape(256), True, (False, False)] = None   # type: ignore[assignment]
    assert forward.shape(plan(*[1] * 140), True) == Shape(160)
    assert forward.shape(plan(*[1] * 256), True) == Shape(256)   # the step before may have been launched kernel by kernel


def test_the_greedy_half_is_enough_for_greedy_rows(forward: GraphForward) -> None:
    """Requests that end one after the other at temperature 0: the other half may never be captured."""
    captured(forward, 48, forms=(True,))
    assert forward.shape(plan(*[1] * 37), True) == Shape(48) and forward.stood_in


def test_not_while_graphs_are_captured_ahead_nor_for_prompts(forward: GraphForward) -> None:
    captured(forward, 48)
    with forward.at_first_use():
        assert forward.shape(plan(*[1] * 37), False) == Shape(40)
    assert forward.shape(plan(100), False) == Shape(0, 1, 128)
    assert forward.shape(plan(1, 1, 60), False) == Shape(2, 1, 64)


def test_not_among_several_ranks(forward: GraphForward) -> None:
    """Another rank may not have captured it, and would compute other shapes."""
    captured(forward, 48)
    forward._stand_ins = False
    assert forward.shape(plan(*[1] * 37), False) == Shape(40)


# -- prompts ----------------------------------------------------------------------------------------------------------

def beside(decodes: int, *prompts: int) -> Any:
    return plan(*[1] * decodes, *prompts)


def test_a_larger_shape_stands_in_for_a_prompt_beside_decodes(forward: GraphForward) -> None:
    """Such shapes are many, and most of a first busy minute are met for the first time."""
    forward._shapes = GraphShapes(32, 2048)
    assert forward.shape(beside(31, 100), True) == Shape(31, 1, 128)         # none can: it is captured, or launched
    others = [Shape(30, 2, 256), Shape(31, 1, 64), Shape(31, 1, 640), Shape(32), Shape(32, draft_tokens=256, queries=16)]
    forward._choice.forms.update({(each, True, False): 1 for each in others})
    assert forward.shape(beside(31, 100), True) == Shape(31, 1, 128)
    forward._choice.forms.update({(Shape(31, 1, 256), True, False): 1})
    assert forward.shape(beside(31, 100), True) == Shape(31, 1, 256) and forward.stood_in
    assert forward.shape(beside(20, 20), True) == Shape(31, 1, 64) and not forward.stood_in      # its own
    assert forward.shape(beside(30, 70, 90), True) == Shape(30, 2, 256) and forward.stood_in
    assert forward.shape(beside(31, 100), False) == Shape(31, 1, 128)        # of rows that sample none is captured
    assert forward.shape(beside(31, 300), True) == Shape(31, 1, 320)         # 640 are too many
    assert forward.shape(beside(31, 500), True) == Shape(31, 1, 640) and forward.stood_in
    assert forward.shape(plan(100), True) == Shape(30, 2, 256)               # a prompt alone


def test_a_shape_with_many_tokens_is_captured_once_it_has_come_often(forward: GraphForward) -> None:
    """Its padding costs more. It need not be launched kernel by kernel before."""
    forward._shapes = GraphShapes(32, 2048)
    forward._choice.forms.update({(Shape(31, 1, 640), True, False): 1})
    found = [forward.shape(beside(31, 450), True) for _ in range(STAND_INS + 1)]
    assert found == [Shape(31, 1, 640)] * STAND_INS + [Shape(31, 1, 512)]
    assert forward._uses_before(Shape(31, 1, 512), True) == 0 and forward._uses_before(Shape(31, 1, 512), False) == 1
    assert forward.wanted() == [(Shape(31, 1, 512), True)]                   # or while the engine is idle
    forward._choice.captured((Shape(31, 1, 512), True, False))
    assert forward.wanted() == [] and forward.shape(beside(31, 450), True) == Shape(31, 1, 512)


@pytest.mark.parametrize("rows", [2, 4, 7, 20, 32, 100, 256, 1024])
def test_some_shapes_stand_in_for_all_with_prompts(rows: int) -> None:
    """By count: whatever mixture comes first, a graph that was captured ahead holds it."""
    shapes, choice = GraphShapes(rows, 8192), StandIns()
    mixed = shapes.mixed(8192)
    choice.forms.update({(each, greedy, False): 1 for each in mixed for greedy in (True, False)})
    assert len(choice.forms) <= 2 * 44
    assert all(shapes.fit(each.decodes, each.prompts, each.prompt_tokens) == each for each in mixed)
    fitting = {shapes.fit(decodes, prompts, tokens) for decodes in range(rows) for prompts in range(1, 9)
               for tokens in shapes.prompt_tokens if decodes + prompts <= rows} - {None}
    for shape in fitting:
        assert shape is not None
        larger = choice.choose(shape, True, False)
        assert larger in mixed or shape.prompt_tokens > 1152, shape
        assert larger.tokens <= max(cuda_graphs.FEW_MIXED, 2 * shape.tokens)


def test_none_stands_in_where_launches_take_less_time_than_the_step(forward: GraphForward) -> None:
    """A large model: its steps hide the launches, and a larger step would take longer."""
    forward._shapes, forward._choice = GraphShapes(32, 2048), StandIns(300)
    forward._choice.forms.update({(each, True, False): 1 for each in GraphShapes(32, 2048).mixed(2048)})
    assert forward.shape(beside(31, 100), True) == Shape(31, 1, 256)
    assert forward.shape(beside(31, 300), True) == Shape(31, 1, 320)
    assert {each.prompt_tokens for each in GraphShapes(32, 2048).mixed(300)} == {256}
    assert not GraphShapes(32, 2048).mixed(0)


@pytest.mark.parametrize("rows", [4, 32, 64, 256])
def test_some_shapes_stand_in_for_most_with_drafts(rows: int) -> None:
    shapes, choice = GraphShapes(rows, 8192, 512), StandIns()
    wide = shapes.wide()
    choice.forms.update({(each, True, False): 1 for each in wide})
    assert len(wide) <= 10 and set(wide) <= set(shapes.drafted())
    held = [shape for shape in shapes.drafted() if choice.choose(shape, True, False) in wide]
    assert len(held) >= 0.75 * len(shapes.drafted())


# -- drafts -----------------------------------------------------------------------------------------------------------

def drafted(*width: int) -> Any:
    made = plan(*(1 + each for each in width))
    made.width = np.array(width, np.int32)
    return made


def test_a_larger_shape_with_drafts_stands_in(forward: GraphForward) -> None:
    """One of its own kind, with as many rows, tokens and queries, until its own has come often."""
    forward._shapes = GraphShapes(256, 2048, 512)
    own = Shape(8, draft_tokens=48, queries=16)
    assert forward.shape(drafted(*[5] * 7), True) == own
    others = [Shape(64), Shape(4, draft_tokens=64, queries=16), Shape(8, draft_tokens=64, queries=4)]
    forward._choice.forms.update({(each, True, False): 1 for each in (*others, Shape(16, draft_tokens=112, queries=16))})
    forward._choice.forms.update({(Shape(8, draft_tokens=48, queries=16), False, False): 1})
    assert forward.shape(drafted(*[5] * 7), True) == own
    larger = [Shape(32, draft_tokens=64, queries=16), Shape(16, draft_tokens=80, queries=16)]
    forward._choice.forms.update({(each, True, False): 1 for each in larger})
    found = {forward.shape(drafted(*[5] * 7), True) for _ in range(STAND_INS)}
    assert found == {Shape(32, draft_tokens=64, queries=16)}
    forward._choice._steps += SPACING
    assert forward.shape(drafted(*[5] * 7), True) == own
    assert forward.shape(drafted(*[5] * 7), False) == own        # of rows that sample it is captured
    with forward.at_first_use():
        assert forward.shape(drafted(*[15] * 2), True) == Shape(4, draft_tokens=32, queries=16)



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
    plan = StepPlan(0, _NONE, added, _NONE.reshape(0, 4), np.arange(len(past), dtype=np.int32), tokens, want)
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


def test_no_garbage_is_collected_while_a_graph_is_captured() -> None:
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()                        # the engine's own policy may have switched it off
    finally:
        gc.enable()
