"""Decode attention of rows with drafts: several queries share one read of the keys, and each sees up to its own position.

Against the reference, in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from ridgeline.ops.attention import attention_arguments as arguments
from ridgeline.ops.attention import fused_decode
from ridgeline.ops.attention.attention_arguments import AttentionWork
from ridgeline.ops.attention.attention_launch import paged_attention_triton
from ridgeline.ops.attention.attention_reference import paged_attention_reference
from ridgeline.ops.attention.late_positions import late_positions, late_positions_on_gpu, late_positions_reference
from ridgeline.ops.attention.paged_attention import paged_attention
from ridgeline.ops.registry import TRITON_INTERPRETED
from ridgeline.ops.sampling.accept import accept, accept_on_gpu, accept_reference
from ridgeline.sizes.graph_shapes import most_queries
from ridgeline.sizes.op_costs import Case
from ridgeline.sizes.sampling_costs import ACCEPT_CASES, LATE_CASES

LLAMA = {"dtype": torch.bfloat16, "heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 16}
SIZES: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 16, "block_size": 4, "window": None, "softcap": None}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(TRITON_INTERPRETED or torch.cuda.is_available(), reason="the kernels run in this process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_drafts_in_the_interpreter(marked: str, run_interpreted: Any) -> None:
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", __file__, "-k", "kernel_", "-m", marked]
    run = run_interpreted(command)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    others = 2 + len(ACCEPT_CASES) + len(LATE_CASES)
    assert run.stdout.count("PASSED ") == (len(REPEATED) if marked == "slow" else len(CASES) - len(REPEATED) + others)


def test_a_workspace_holds_the_partial_results_of_drafts() -> None:
    plain = arguments.workspace_floats(256, 32, 8, 128, multiprocessors=132)
    drafts = arguments.workspace_floats(256, 32, 8, 128, multiprocessors=132, drafts=True)
    assert plain < drafts < 8 * plain and [most_queries(rows) for rows in (1, 32, 33, 64, 65, 1024)] == [16, 16, 8, 8, 4, 4]


def test_one_row_and_four_rows_are_fused() -> None:
    """Two and three are faster in two kernels. A single row of a deterministic engine must sum as it does beside a prompt."""
    assert [rows for rows in range(7) if fused_decode.joined(AttentionWork(rows, 0), rows, None)] == [1, 4, 5, 6]
    assert not fused_decode.joined(AttentionWork(1, 0, deterministic=True), 1, None)
    assert not fused_decode.joined(AttentionWork(0, 1), 1, None)


def test_new_tokens_of_drafts_are_not_fused() -> None:
    """As many rows as tokens may be padding beside rows with several."""
    assert fused_decode.joined(AttentionWork(4, 0), 4, None)
    assert not fused_decode.joined(AttentionWork(4, 0, queries=2), 4, None)


kernels_run = pytest.mark.skipif(not (TRITON_INTERPRETED or torch.cuda.is_available()), reason="no Triton kernels here")

CASES: dict[str, tuple[list[tuple[int, int]], int, dict[str, Any]]] = {      # rows, rows that decode, changes of the sizes
    "one row": ([(4, 9)], 1, {}),
    "widths of all kinds": ([(1, 7), (3, 12), (16, 40), (1, 0), (2, 2), (7, 33)], 6, {}),
    "several shares": ([(5, 400), (1, 300), (2, 130), (8, 290)], 4, {"block_size": 16}),
    "all new": ([(3, 3), (1, 1)], 2, {}),
    "beside prompts": ([(1, 9), (3, 20), (6, 15), (11, 11)], 2, {}),
    "many drafts beside prompts": ([(16, 20), (16, 30), (5, 24), (9, 40), (6, 15), (11, 11)], 4, {}),
    "window": ([(4, 60), (1, 33), (6, 9), (2, 90)], 4, {"window": 21}),
    "window, several shares": ([(6, 500), (1, 400), (3, 350)], 3, {"window": 210, "block_size": 16}),
    "narrow window": ([(9, 40), (4, 30)], 2, {"window": 2}),
    "chunks": ([(4, 62), (1, 41), (6, 9), (2, 90), (1, 0)], 5, {"window": -20}),
    "chunks, several shares": ([(6, 403), (1, 400), (3, 350)], 3, {"window": -200, "block_size": 16}),
    "soft cap": ([(4, 60), (2, 300)], 2, {"softcap": 3.0}),
    "window and soft cap": ([(4, 60), (2, 300)], 2, {"softcap": 2.0, "window": 100}),
    "one head each": ([(5, 30), (2, 8)], 2, {"heads": 2}),
    "odd groups": ([(5, 30), (3, 70), (1, 4)], 3, {"heads": 6, "head_dim": 20, "block_size": 3}),
    "scattered tables": ([(2, 30), (5, 70), (1, 0)], 3, {"scattered": True}),
    "eight bits": ([(4, 60), (2, 300), (1, 20)], 3, {"kv_dtype": "float8_e4m3fn", "head_dim": 32}),
    "sixteen bits": ([(16, 600), (1, 40)], 2, LLAMA),
    "sixteen bits, one row": ([(16, 530)], 1, LLAMA),
    "sixteen bits, a border of shares": ([(8, 36), (16, 40)], 2, LLAMA),
    "a border of shares": ([(16, 40), (5, 34)], 2, {"heads": 4}),
    "eight bits, window": ([(4, 60), (2, 300)], 2, {"kv_dtype": "float8_e4m3fn", "window": 50}),
}
# What the others hold, too, apart or smaller: on a GPU always, in the interpreter with the slow tests.
REPEATED = {
    "one row", "all new", "window, several shares", "chunks, several shares",
    "narrow window", "window and soft cap", "one head each", "sixteen bits",
    "sixteen bits, one row", "eight bits, window",
}


def inputs(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    args, options = paged_attention.inputs(generator, dtype, DEVICE, rows=tuple(rows), **{**SIZES, **changes})
    options.pop("shares", None)                          # of rows with one query
    return args, options


def work_of(rows: list[tuple[int, int]], decodes: int) -> AttentionWork:
    longest = max((count for count, _ in rows[decodes:]), default=0)
    return AttentionWork(decodes, longest, queries=max(count for count, _ in rows[:decodes]))


@kernels_run
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] if DEVICE == "cpu" and name in REPEATED else []) for name in CASES
])
def test_kernel_drafts(name: str) -> None:
    rows, decodes, changes = CASES[name]
    rows = [(0, 0) if length == 0 else (count, length) for count, length in rows]        # padding has no token
    args, options = inputs(rows, **changes)
    expected = paged_attention_reference(*args, **options)
    found = paged_attention_triton(*args, **options, work=work_of(rows, decodes))
    tolerance = 2e-3 if "kv_dtype" in changes else 1e-2 if "dtype" in changes else 2e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@kernels_run
def test_kernel_bounds_may_be_larger() -> None:
    """A graph is captured for the most queries, rows and tokens; shares are made for longer rows."""
    rows = [(2, 130), (1, 40), (0, 0), (0, 0)]
    args, options = inputs(rows, block_size=16)
    expected = paged_attention_reference(*args, **options)
    q = torch.cat([args[0], torch.full((5, *args[0].shape[1:]), torch.nan, device=DEVICE)])
    shares = arguments.device_shares([150, 60, 0, 0], 2, None, None, False, torch.device(DEVICE), 8)
    found = paged_attention_triton(q, *args[1:], **options, shares=shares, work=AttentionWork(4, 0, queries=8))
    torch.testing.assert_close(found[: len(expected)], expected, rtol=2e-5, atol=2e-5)


@kernels_run
def test_kernel_workspace_serves_widths_in_turn() -> None:
    """Partials of other launches, NaN among them, never show, and the counters are at zero again."""
    workspace = arguments.make_workspace(
        arguments.workspace_floats(3, 8, 2, 16, multiprocessors=132, drafts=True), 3, 2, torch.device(DEVICE)
    )
    workspace.partials.fill_(torch.nan)
    for rows in ([(1, 200), (1, 30), (1, 130)], [(5, 200), (1, 30), (3, 130)], [(1, 200), (1, 30), (1, 130)]):
        args, options = inputs(rows, block_size=16)
        expected = paged_attention_reference(*args, **options)
        found = paged_attention_triton(*args, **options, work=work_of(rows, 3), workspace=workspace)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        assert not workspace.arrived.any()


# -- which are accepted -----------------------------------------------------------------------------------------------

def accept_inputs(case: Case) -> list[Any]:
    arguments, _ = accept.inputs(torch.Generator().manual_seed(3), torch.float32, DEVICE, **case.sizes)
    return list(arguments)


@pytest.mark.parametrize("case", ACCEPT_CASES, ids=lambda case: case.name)
def test_accepted_are_those_before_the_first_that_is_wrong(case: Case) -> None:
    given = [each.cpu() if isinstance(each, torch.Tensor) else each for each in accept_inputs(case)]
    before = given[1].tolist()
    accept_reference(*given)
    surplus, last_token, tokens, sampled, failed, _, start, rows, accepted, _ = (
        each.tolist() if isinstance(each, torch.Tensor) else each for each in given
    )
    newest, shorter = dict(enumerate(before)), dict.fromkeys(range(len(before)), 0)
    for place, row in enumerate(rows):
        first, end = start[place], start[place + 1]
        right = 0
        while first + right + 1 < end and not failed[first + right] and sampled[first + right] == tokens[first + right + 1]:
            right += 1
        assert accepted[place] == right
        if end > first:
            newest[row], shorter[row] = sampled[first + right], end - first - 1 - right
    assert last_token == list(newest.values()) and surplus == list(shorter.values())


@kernels_run
@pytest.mark.parametrize("case", ACCEPT_CASES, ids=lambda case: case.name)
def test_kernel_accepts_what_the_definition_does(case: Case) -> None:
    found, expected = accept_inputs(case), accept_inputs(case)
    accept_on_gpu(*found)
    accept_reference(*expected)
    assert all(torch.equal(one, other) for one, other in zip(found[:-1], expected[:-1], strict=True))


# -- rows that are shorter than was assumed -----------------------------------------------------------------------------

@kernels_run
@pytest.mark.parametrize("case", LATE_CASES, ids=lambda case: case.name)
def test_kernel_takes_back_what_the_definition_does(case: Case) -> None:
    made = [late_positions.inputs(torch.Generator().manual_seed(5), torch.float32, DEVICE, **case.sizes)[0] for _ in range(2)]
    late_positions_on_gpu(*made[0])
    late_positions_reference(*made[1])
    for found, expected in zip(*made, strict=True):
        pairs = zip(found, expected, strict=True) if isinstance(found, list) else [(found, expected)]
        assert all(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in pairs)
