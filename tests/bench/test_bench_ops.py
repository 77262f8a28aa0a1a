"""The micro-benchmark of the ops: it runs, its figures are those of the cost model, and its outputs can be read."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.__main__ import main
from ridgeline.bench import ops
from ridgeline.bench.workload import cascade, op_cases
from ridgeline.ops.registry import Implementation
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.runner import shared_prefix
from ridgeline.sizes.op_costs import Case, Cost

REGISTRY = ops.all_ops()
PEAKS = MachinePeaks("a machine", 1e10, {"float32": 1e11}, 1e-9, "now")


@pytest.fixture(autouse=True)
def known_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "machine_peaks", lambda device, again=False: PEAKS)


def small_cases(monkeypatch: pytest.MonkeyPatch, name: str, *cases: Case) -> None:
    monkeypatch.setattr(REGISTRY[name], "cases", cases)


ROWS = ((1, 20), (1, 20))
ATTENTION = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 4, "window": None, "softcap": None}


def test_every_implementation_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small_cases(monkeypatch, "rms_norm", Case("small", {"tokens": 2, "width": 32, "residual": True}, timed=True))
    small_cases(monkeypatch, "paged_attention", Case("decode", {"rows": ROWS, **ATTENTION}, timed=True))
    out = tmp_path / "ops.json"
    words = ["--op", "rms_norm", "paged_attention", "--device", "cpu", "--samples", "3", "--out", str(out)]
    assert main(["bench", "ops", *words]) == 0
    page = capsys.readouterr().out
    assert "| rms_norm" in page and "a machine: reads 10 GB/s" in page
    rows = json.loads(out.read_text())["figures"]["rows"]
    names = {(row["op"], row["implementation"]) for row in rows}
    assert {("rms_norm", "reference"), ("paged_attention", "reference"), ("paged_attention", "contiguous")} <= names
    cost = REGISTRY["rms_norm"].case_cost(REGISTRY["rms_norm"].cases[0], "float32")
    for row in rows:
        assert not row["error"] and row["timed_by"] == "clock" and row["regime"] in ("memory", "compute", "launch")
        if row["op"] == "rms_norm":
            seconds = row["microseconds"]["median"] / 1e6
            assert row["gb_s"] == pytest.approx(cost.bytes / seconds / 1e9)
            assert row["roofline"] == pytest.approx(max(cost.bytes / 1e10, cost.flops / 1e11) / seconds)
            assert row["intensity"] == pytest.approx(cost.flops / cost.bytes)
    assert "paged / contiguous attention, reference decode float32" in page


@pytest.mark.parametrize("form", ["csv", "json"])
def test_lists_are_a_cross_product(form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"tokens": 2, "width": 32, "residual": False}
    small_cases(monkeypatch, "rms_norm", Case("a", sizes, timed=True), Case("b", sizes, timed=True), Case("c", sizes))
    words = ["--op", "rms_norm", "--dtype", "float32", "bfloat16", "--implementation", "reference", "--device", "cpu"]
    assert main(["bench", "ops", *words, "--samples", "3", "--format", form]) == 0
    text = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(text))) if form == "csv" else json.loads(text)["figures"]["rows"]
    assert [(row["case"], row["dtype"]) for row in rows] == [
        ("a", "float32"), ("a", "bfloat16"), ("b", "float32"), ("b", "bfloat16")
    ]


def test_a_case_that_no_longer_fits_is_a_row_not_a_crash() -> None:
    case = Case("old", {"tokens": 1, "breadth": 4}, timed=True)
    [row] = ops.measure_case(REGISTRY["rms_norm"], case, "float32", "cpu", PEAKS, 3)
    assert "no inputs" in row.error and "no inputs" in row.cells()["µs"]


@pytest.mark.parametrize("name", sorted(ops.GPU_CASES))
def test_gpu_cases_fit_their_ops(name: str) -> None:
    """Counted without being made: the costs take the sizes, and there is something to move."""
    op = REGISTRY[name]
    cases = ops.cases(op, "cuda")
    assert [case.name for case in cases] == list(ops.GPU_CASES[name])
    for case in cases:
        dtype = ops.dtypes(case, "cuda", None)[0]
        assert op.case_cost(case, dtype).bytes > 0


def test_contiguous_attention_is_the_same_attention() -> None:
    case = Case("decode", {"rows": ROWS, **ATTENTION}, timed=True)
    function, args, kwargs = op_cases.contiguous_attention(case, torch.float32, "cpu")
    assert function(*args, **kwargs).shape == (2, 4, 1, 16)
    assert op_cases.contiguous_attention(Case("chunk", {"rows": ((3, 20),), **ATTENTION}), torch.float32, "cpu") is None
    assert op_cases.contiguous_attention(Case("uneven", {"rows": ((1, 20), (1, 9)), **ATTENTION}), torch.float32, "cpu") is None


def test_inputs_are_copied_until_a_cache_cannot_hold_them() -> None:
    small, large = (torch.zeros(4),), (torch.zeros(2**24),)
    assert len(ops._copies(small, {}, "cpu")) == ops.MOST_COPIES
    copies = ops._copies(large, {"k": 3}, "cpu")
    assert len(copies) == 3 and copies[1][0][0].data_ptr() != large[0].data_ptr() and copies[1][1] == {"k": 3}


def test_cascade_study_times_a_point_both_ways(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`on` is one of the two, as the rule of runner/shared_prefix.py says; rows share their first blocks and no others."""
    monkeypatch.setattr(cascade, "SHAPES", {"tiny": (4, 2, 16)})
    monkeypatch.setattr(shared_prefix, "FEWEST_SAVED", 64)
    monkeypatch.setattr(shared_prefix, "FEWEST_ROWS", 2)
    found = cascade.cascade("cpu", ("tiny",), (1, 2), (0, 32, 64), 3)["tiny"]
    assert [row["chosen"] for row in found["rows"]] == [False, False, False, False, False, True]
    for row in found["rows"]:
        assert (row["forced_us"] is None) == (row["batch"] == 1 or row["shared"] == 0)
        assert row["on_us"] == (row["forced_us"] if row["chosen"] else row["off_us"])
    assert found["least"] == min(row["off_us"] / row["on_us"] for row in found["rows"])
    assert "tiny × 2" in capsys.readouterr().out
    tables, _ = cascade._calls((4, 2, 16), 3, 32, "cpu")
    assert (tables[:, :2] == tables[0, :2]).all() and len(set(tables[:, 2:].ravel())) == tables[:, 2:].size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cascade_study_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "studies", "--study", "cascade"]) != 0
    assert "torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(("op", "case"), [("decode_attention", "rows-1x640"), ("paged_attention", "prefill-1x512")])
def test_attention_over_narrow_pages_is_the_same_case(op: str, case: str) -> None:
    """What plan --fit --ops compares: the same rows and FLOPs, a little over half of the bytes of the cache."""
    found = {each.name: each for each in ops.cases(REGISTRY[op], "cuda")}
    wide, narrow = found[case], found[f"fp8-{case}"]
    assert narrow.sizes["rows"] == wide.sizes["rows"]
    costs = [REGISTRY[op].case_cost(each, "bfloat16") for each in (wide, narrow)]
    tokens = sum(length for _, length in wide.sizes["rows"])
    assert costs[0].flops == costs[1].flops
    assert costs[0].bytes - costs[1].bytes == pytest.approx(2 * tokens * 8 * (128 * 2 - 128 - 4), rel=0.02)
    # A sixteenth of the tokens is attended to: a CPU without bfloat16 takes half a minute for all.
    short = tuple((max(queries // 16, 1), length // 16) for queries, length in narrow.sizes["rows"])
    few = dataclasses.replace(narrow, sizes={**narrow.sizes, "rows": short})
    args, kwargs = op_cases.make_inputs(REGISTRY[op], few, torch.bfloat16, "cpu")
    assert torch.isfinite(REGISTRY[op].implementations[-1].function(*args, **kwargs)).all()


# -- what a GPU is measured with ---------------------------------------------------------------------------------------

SMALL_ATTENTION = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 4, "window": None, "softcap": None}


@pytest.mark.parametrize("rows", [((1, 20), (1, 9), (1, 33)), ((5, 12), (3, 3)), ((1, 30), (6, 30))])
@pytest.mark.parametrize("narrow", [False, True])
def test_attention_inputs_are_those_of_the_op(rows: tuple[tuple[int, int], ...], narrow: bool) -> None:
    """Made for a device at once: the same arguments as the op's own generator makes, and attention of contiguous tensors."""
    sizes: dict[str, Any] = SMALL_ATTENTION | ({"kv_dtype": "float8_e4m3fn"} if narrow else {})
    args, kwargs = op_cases.attention_inputs("paged_attention", torch.float32, "cpu", 1, rows=rows, **sizes)
    theirs, their_kwargs = REGISTRY["paged_attention"].inputs(torch.Generator(), torch.float32, "cpu", rows=rows, **sizes)
    assert set(kwargs) - {"work", "workspace"} == set(their_kwargs)
    assert [(arg.dtype, arg.ndim) for arg in args] == [(arg.dtype, arg.ndim) for arg in theirs]
    out = REGISTRY["paged_attention"](*args, **kwargs)
    q, k_cache, v_cache, table, *_ = args
    first = 0
    for row, (queries, length) in enumerate(rows):
        slots = table[row].long().repeat_interleave(4)[:length] * 4 + torch.arange(length) % 4
        keys, values = (
            ((cache.float() * scale.unsqueeze(-1) if scale is not None else cache).flatten(0, 1)[slots])
            for cache, scale in ((k_cache, kwargs.get("k_scale")), (v_cache, kwargs.get("v_scale")))
        )
        mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[first : first + queries].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), mask, enable_gqa=True
        ).transpose(0, 1)
        torch.testing.assert_close(out[first : first + queries], expected, rtol=1e-4, atol=1e-4)
        first += queries


def test_inputs_of_decode_attention_end_at_the_newest_token() -> None:
    sizes = SMALL_ATTENTION | {"rotary_dim": 16, "norm": True}
    args, kwargs = op_cases.attention_inputs("decode_attention", torch.float32, "cpu", 1, rows=((1, 20), (1, 9)), **sizes)
    _, positions, slots, *_, table, _, kv_len = args
    assert positions.tolist() == [19, 8] and kv_len.tolist() == [20, 9]
    assert slots.tolist() == [int(table[0, 4]) * 4 + 3, int(table[1, 2]) * 4]
    assert torch.isfinite(REGISTRY["decode_attention"](*args, **kwargs)).all()


def test_rows_that_share_a_prefix_have_its_blocks() -> None:
    sizes = SMALL_ATTENTION | {"shared": (((0, 1, 2), 16),)}
    args, kwargs = op_cases.attention_inputs("paged_attention", torch.float32, "cpu", 1, rows=((1, 20),) * 3, **sizes)
    table = args[3]
    assert (table[:, :4] == table[0, :4]).all() and len(set(table[:, 4].tolist())) == 3
    assert kwargs["prefix"].prefix_len.tolist() == [16] * 3
    whole = REGISTRY["paged_attention"](*args, **kwargs)
    torch.testing.assert_close(whole, REGISTRY["paged_attention"](*args, **kwargs | {"prefix": None}))


def test_linears_are_measured_at_every_number_of_rows_that_has_a_plan_of_its_own() -> None:
    """Through the ops that the engine's schemes call: those with a norm before them, and those without."""
    rows = {1, 8, 32, 64, 128, 256, 1024, 8192}
    for op, matrices in (("normed_linear", ("qkv", "gate_up")), ("linear", ("o", "down", "head"))):
        for matrix in matrices:
            found = {case["tokens"] for name, case in op_cases.GPU_CASES[op].items() if name.rpartition("-")[0] == matrix}
            assert found == (rows - {8192} if matrix == "head" else rows)
    assert op_cases.GPU_CASES["normed_linear"]["gate_up-8"]["gate"] == "silu"


def test_a_product_onto_the_residual_counts_the_residual() -> None:
    x, weight = torch.randn(6, 8), torch.randn(4, 8)
    found = op_cases.onto(x, weight, Cost(100, 1000))
    out = found.function(*found.args)
    torch.testing.assert_close(out, x @ weight.t())
    assert out.data_ptr() == found.args[0].data_ptr() and found.cost == Cost(100 + 24, 1000 + 96)


def test_a_gpu_measures_what_an_engine_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"kv_write", "rotary", "block_linear"}.isdisjoint(ops.engine_ops("cuda")) and "linear" in ops.engine_ops("cuda")
    assert set(ops.engine_ops("cpu")) == set(REGISTRY)
    case = Case("small", {"tokens": 2, "width": 32, "residual": True}, timed=True)
    monkeypatch.setattr(ops, "make_inputs", lambda op, case, dtype, device: op_cases.make_inputs(op, case, dtype, "cpu"))
    norm = REGISTRY["rms_norm"]
    kernel = Implementation("triton", norm.implementations[-1].function, lambda site: True)
    monkeypatch.setattr(norm, "implementations", [kernel, norm.implementations[-1]])
    assert "reference" not in {run.name for run in ops.runs_of(norm, case, "float32", "cuda", None)}
    assert [run.name for run in ops.runs_of(norm, case, "float32", "cuda", ["reference"])] == ["reference"]
