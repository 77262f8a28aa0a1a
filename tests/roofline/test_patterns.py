"""Patterns in traces: planted ones are found, healthy ones have none, and time is divided once."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_verdict import verdict
from trace_cases import H200_FLOPS, H200_READ, PLANTED, Builder, PlantedTrace, build, decode
from verdict_cases import CASES

from ridgeline.__main__ import main
from ridgeline.messages import Want
from ridgeline.roofline.decoder_shape import DecoderShape
from ridgeline.roofline.facts import Facts, facts_of
from ridgeline.roofline.parts import StepRows, part_costs, steps_with
from ridgeline.roofline.patterns import PATTERNS, find_patterns
from ridgeline.roofline.remedies import PLANNED, Planned, key_of, ranked
from ridgeline.roofline.trace import PARTS, Work, part_of, read_trace, trace_of_steps
from ridgeline.roofline.vectorised import StepCosts
from ridgeline.roofline.verdict import REMEDIES


@functools.cache
def _facts(place: int) -> Facts:
    case = PLANTED[place]
    traces = [read_trace(json.loads(json.dumps(builder.document()))) for builder in case.builders]
    return facts_of(traces, case.costs(), flops_s=H200_FLOPS, read_bytes_s=H200_READ, **case.known)


def facts(case: PlantedTrace) -> Facts:
    return _facts([each.name for each in PLANTED].index(case.name))


def judged(case: PlantedTrace) -> str:
    findings = find_patterns(facts(case))
    return findings[0].pattern if findings else ""


def test_planted_terms_and_patterns_are_judged_right() -> None:
    """Those of the verdict and those of the trace together: 95 of a hundred at least."""
    wrong = [(case.name, case.expected, judged(case)) for case in PLANTED if judged(case) != case.expected]
    wrong += [(case.name, case.expected, verdict(case).term) for case in CASES if verdict(case).term != case.expected]
    whole = len(PLANTED) + len(CASES)
    assert whole >= 40 and len({case.name for case in PLANTED}) == len(PLANTED)
    assert len(wrong) <= 0.05 * whole, wrong
    assert sum(case.expected != "" and judged(case) == case.expected for case in PLANTED) >= 0.95 * sum(
        case.expected != "" for case in PLANTED
    )


def test_every_pattern_is_planted_and_every_finding_says_what_to_do() -> None:
    assert {case.expected for case in PLANTED} == {pattern.name for pattern in PATTERNS} | {""}
    for case in PLANTED:
        for finding in find_patterns(facts(case)):
            assert finding.evidence and 0 <= finding.share <= 1 and finding.advice, case.name
            assert all(advice.gain >= 1 and advice.trade_off and advice.what for advice in finding.advice)
            gains = [advice.gain for advice in finding.advice]
            assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_the_time_is_divided_once(case: PlantedTrace) -> None:
    """Busy time and gaps by cause are the whole of it."""
    found = facts(case)
    gaps = found.launch + found.waiting + found.allocation + found.between
    assert found.busy + gaps == pytest.approx(found.seconds, rel=1e-6)
    assert sum(part.seconds for part in found.parts.values()) == pytest.approx(found.busy)


def test_gains_follow_from_what_was_planted() -> None:
    """Gaps of 8 µs behind kernels of 20: graphs take nine tenths of them away."""
    case = next(each for each in PLANTED if each.name.startswith("eager 8B"))
    found = facts(case)
    [finding] = find_patterns(found)
    graphs = next(advice for advice in finding.advice if advice.key == "graphs")
    assert graphs.gain == pytest.approx(found.seconds / (found.seconds - 0.9 * found.launch))
    # Inside a step every kernel has its gap before it; those before a step's first are the host's.
    kernels = found.kernels / found.steps
    assert found.launch == pytest.approx(found.steps * (kernels - 1) * 8e-6)
    assert found.between == pytest.approx((found.steps - 1) * 8e-6)


def test_advice_is_for_the_device() -> None:
    case = next(each for each in PLANTED if each.name.startswith("ops of a tiny model"))
    assert not any(advice.key == "graphs" for finding in find_patterns(facts(case)) for advice in finding.advice)


def test_host_gaps_are_blamed_on_what_the_host_did() -> None:
    slow_text = next(each for each in PLANTED if each.name == "text is made between steps")
    found = facts(slow_text)
    assert max(found.host, key=lambda name: found.host[name]) == "detokenize"
    [finding] = find_patterns(found)
    assert "detokenize" in finding.evidence
    tokeniser = next(advice for advice in finding.advice if advice.key == "tokeniser")
    scheduler = next(advice for advice in finding.advice if advice.key == "scheduler")
    assert tokeniser.gain > 1.3 > scheduler.gain


def test_what_a_profiler_costs_is_taken_off_the_gaps() -> None:
    made = build(lambda builder, number: decode(builder, gap=5.0))
    plain, lighter = facts_of([read_trace(made.document())]), facts_of([read_trace(made.document())], profiler=0.002)
    assert plain.launch - lighter.launch == pytest.approx(0.002) == pytest.approx(plain.seconds - lighter.seconds)
    assert facts_of([read_trace(made.document())], profiler=1e9).launch == 0.0


def test_time_that_others_had_is_not_divided() -> None:
    made = build(lambda builder, number: decode(builder), steps=4)
    whole, half = facts_of([read_trace(made.document())]), facts_of([read_trace(made.document())], kept=[0.5] * 4)
    assert half.busy == pytest.approx(whole.busy / 2)
    assert half.parts["attention"].seconds == pytest.approx(whole.parts["attention"].seconds / 2)


def test_nested_marks_count_once() -> None:
    """An op that calls others counts as one; torch's own below it do not count again."""
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "step", "ts": 0, "dur": 100},
        {"ph": "X", "cat": "user_annotation", "name": "op:rotary_write", "ts": 10, "dur": 20},
        {"ph": "X", "cat": "user_annotation", "name": "op:rotary", "ts": 12, "dur": 5},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mul", "ts": 13, "dur": 3},
        {"ph": "X", "cat": "user_annotation", "name": "op:decode_attention", "ts": 40, "dur": 30},
        {"ph": "X", "cat": "user_annotation", "name": "op:paged_attention", "ts": 45, "dur": 20},
        {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "ts": 80, "dur": 10},
    ]
    work = read_trace({"traceEvents": events}).work
    assert [(each.name, each.part, each.step) for each in work] == [
        ("rotary_write", "rotary and kv_write", 0), ("paged_attention", "attention", 0),
        ("aten::addmm", "linears and head", 0),
    ]


def test_what_is_inside_another_parts_kernel_has_no_roof_of_its_own() -> None:
    """Of two equal steps, rotation has kernels only in the first: only that one's bytes are held against its time."""
    shape = DecoderShape(hidden=512, intermediate=1024, heads=8, kv_heads=2, head_dim=64, layers=4, vocab=1000)
    rows = StepRows()
    for _ in range(2):
        rows.counts.append(2)
        for values, number in ((rows.new, 1), (rows.wants, int(Want.TOKEN)), (rows.lengths, 100)):
            values.append(np.full(2, number, np.int8 if values is rows.wants else np.int32))
        rows.shared.append(0)
    costs = rows.costs(StepCosts(shape))
    work = [Work("_rotary_write_kernel", 0, 1, 0, "rotary and kv_write"), Work("decode_kernel", 1, 2, 0, "attention"),
            Work("decode_kernel", 3, 4, 1, "attention"), Work("late", 5, 6, 7, "attention")]
    seen = steps_with(work, 2)
    assert seen["rotary and kv_write"].tolist() == [True, False] and seen["attention"].all() and not seen["norms"].any()
    whole, own = part_costs(costs, 1e12, 1e14), part_costs(costs, 1e12, 1e14, seen)
    assert own["rotary and kv_write"].floor == pytest.approx(whole["rotary and kv_write"].floor / 2)
    assert own["rotary and kv_write"].bytes * 2 == whole["rotary and kv_write"].bytes
    assert own["attention"] == whole["attention"] and own["norms"].floor == 0


def test_every_kernel_of_ours_belongs_to_a_part() -> None:
    """By what a trace calls it. A product with a norm or an activation in it is a product; "other" would have no roof."""
    expected = {"gemm": "linears and head", "gemv": "linears and head", "attention": "attention", "sampl": "sampling",
                "rms_norm": "norms", "rotary": "rotary and kv_write", "kv_write": "rotary and kv_write",
                "activation": "activation"}
    kernels = {}
    for path in sorted((Path(__file__).resolve().parents[2] / "ridgeline/ops").rglob("*.py")):
        for decorated in re.finditer(r"^@\w*(triton|gluon)_kernel\(.*\)\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE):
            kernels[decorated[2]] = path.stem
    assert {"_gated_gemm_kernel", "prompt_kernel", "decode_kernel", "_rms_norm_kernel"} <= set(kernels)
    for name, file in kernels.items():
        wanted = next((part for word, part in expected.items() if word in file), None)
        assert part_of(name) == wanted or (wanted is None and part_of(name) != "other"), (name, file, part_of(name))


def test_kernels_are_known_by_their_names() -> None:
    assert part_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL") == "communication"
    assert part_of("nvjet_tst_128x256_gemm") == "linears and head" and part_of("decode_kernel") == "attention"
    assert part_of("one_row_kernel") == "attention" and part_of("_one_row_gemm_kernel") == "linears and head"


def test_the_name_of_a_kernel_is_looked_at_once_however_often_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    search = re.search
    monkeypatch.setattr(re, "search", lambda pattern, name, *flags: looked_at.append(name) or search(pattern, name, *flags))
    assert {part_of("a_kernel_of_others") for _ in range(5)} == {"other"}
    assert looked_at.count("a_kernel_of_others") == len(PARTS)


def test_a_step_that_launched_nothing_has_no_number() -> None:
    """With a step in flight, the engine's loop goes round once more to take it in: whoever counts steps does not know of it."""
    made = Builder()
    for launches in (True, True, False, True):
        made.begin()
        if launches:
            made.phase("launch", made.now, 5.0)
            made.kernel("decode_kernel", 30.0, 10.0)
        else:
            made.phase("collect", made.now, 5.0)
            made.now += 40.0
        made.end()
    trace = read_trace(made.document())
    assert len(trace.steps) == 3 and [work.step for work in trace.work] == [0, 1, 2]


def test_the_same_change_is_listed_once_with_the_best_figure() -> None:
    case = next(each for each in PLANTED if each.name.startswith("one chat"))
    findings = find_patterns(facts(case))
    found = verdict(CASES[0])
    assert found.term == "weight_bandwidth"
    more = Planned("rows", "max_num_seqs 1 → 8", 3.0, "latency", {"max_num_seqs": 8})
    listed = ranked(found, findings, [more])
    assert [each.key for each in listed].count("rows") == 1 and listed[0].source == PLANNED
    gains = [each.gain for each in listed]
    assert gains == sorted(gains, reverse=True)
    # Planned through, and worth nothing: nobody else may promise it.
    nothing = ranked(found, findings, [Planned("rows", "max_num_seqs 1 → 8", 1.0, "latency")])
    assert "rows" not in [each.key for each in nothing]
    # Done already.
    assert "--quantization fp8" in [each.key for each in ranked(found, findings)]
    assert "--quantization fp8" not in [each.key for each in ranked(found, findings, done={"--quantization fp8"})]


def test_the_verdicts_changes_have_keys() -> None:
    """Those that a trace or a plan can name too; the others stand for themselves."""
    keys = {key_of(remedy.what) for remedy in REMEDIES}
    assert {"rows", "prefix", "graphs", "overlap", "cores", "ranks", "blocks"} <= keys
    assert key_of("--kv-cache-dtype fp8: fewer bytes of the cache") == "--kv-cache-dtype fp8"


def test_narrower_formats_come_from_what_the_engine_has() -> None:
    case = next(each for each in PLANTED if each.name.startswith("one chat"))
    seen = facts(case)
    factors = {"--quantization fp8": [(1, 0.6)], "--quantization int4": [(1, 0.4), (100, 1.1)]}
    without, few, many = (
        {one.what: one.gain for each in find_patterns(replace(seen, faster=known, rows=rows)) for one in each.advice}
        for known, rows in (({}, 1), (factors, 1), (factors, 100))
    )
    assert not any("weights" in what and "--" in what for what in without)
    assert few["--quantization int4: narrower weights"] > few["--quantization fp8: narrower weights"] > 1.2
    assert [what for what in many if what.startswith("--")] == ["--quantization fp8: narrower weights"]
    unsure = find_patterns(replace(seen, faster=factors, untimed=["--quantization fp8"], rows=1))
    assert [one.what.partition(" (")[2] for each in unsure for one in each.advice if one.key == "--quantization fp8"] == [
        "by the data sheet: not timed on this kind of GPU)"]
    assert not any("--" in one.what for each in find_patterns(replace(seen, faster={"--quantization fp8": [(1, 0.999)]}, rows=1))
                   for one in each.advice), "a gain of 1.00 is not worth its loss"


def test_work_on_the_code_is_told_apart() -> None:
    """An operator reads what settings change; whoever writes kernels reads the rest."""
    keys = {remedy.key: remedy.is_code for pattern in PATTERNS for remedy in pattern.remedies if not remedy.option}
    assert not any(keys[key] for key in ("cores", "graphs", "rows", "admission", "blocks", "ranks", "chunks", "shards"))
    assert all(keys[key] for key in ("fusion", "split", "tiles", "scratch", "on-device", "overlap-collectives"))


def test_steps_become_a_chrome_trace() -> None:
    points = [{"start": 0.5, "seconds": 0.01, "device": 0.008, "phase": "decode", "rows": 4, "tokens": 4}]
    events = trace_of_steps(points, {"rows": "rows"})["traceEvents"]
    [step] = [event for event in events if event["name"] == "decode step"]
    [device] = [event for event in events if event["name"] == "on the device"]
    assert (step["ts"], step["dur"]) == (pytest.approx(5e5), pytest.approx(1e4))
    assert device["ts"] + device["dur"] == pytest.approx(step["ts"] + step["dur"])
    assert any(event["ph"] == "C" and event["args"] == {"rows": 4} for event in events)


def test_traces_of_ranks_are_read_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(each for each in PLANTED if each.name.startswith("heads that"))
    paths = []
    for builder in case.builders:
        paths.append(tmp_path / f"rank-{builder.rank}.json")
        paths[-1].write_text(json.dumps(builder.document()))
    assert main(["diagnose", "--from-trace", *map(str, paths)]) == 0
    page = capsys.readouterr().out
    assert "imbalance across ranks" in page and "tensor_parallel_size" in page
    assert main(["diagnose", "--from-trace", str(paths[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["ops"]["steps"] == 10


def test_a_trace_that_says_what_profiling_took_is_read_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(each for each in PLANTED if each.expected == "many short kernels with gaps")
    path, document = tmp_path / "trace.json", case.builders[0].document()

    def patterns() -> set[str]:
        path.write_text(json.dumps(document))
        assert main(["diagnose", "--from-trace", str(path), "--json"]) == 0
        return {each["pattern"] for each in json.loads(capsys.readouterr().out)["figures"]["patterns"]}

    assert "many short kernels with gaps" in patterns()
    document["ridgeline"] = {"profiler_s": 1e6}          # all of the gaps, and no more than those
    assert "many short kernels with gaps" not in patterns()


def test_what_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[1]")
    assert main(["diagnose", "--from-trace", str(wrong)]) == 2 and "not a Chrome trace" in capsys.readouterr().err
    wrong.write_text('{"traceEvents": []}')
    assert main(["diagnose", "--from-trace", str(wrong)]) == 2 and "no device kernels" in capsys.readouterr().err
    assert main(["diagnose", "--from-trace", str(tmp_path / "missing")]) == 2
    assert "cannot be read" in capsys.readouterr().err


