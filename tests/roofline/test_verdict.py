"""Which term binds: planted cases, what the parts add up to, and the changes that are proposed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_cases import CASES, H200, LLAMA_8B, Planted, decode

from ridgeline.roofline.remedies import key_of
from ridgeline.roofline.step_cost import step_cost
from ridgeline.roofline.verdict import COMPUTE, KV, OVERHEADS, REMEDIES, TERMS, WEIGHTS, Setting, Verdict, Window, judge
from ridgeline.sizes.abilities import matrix_dtype

STEPS = 100


def window(case: Planted) -> Window:
    """The case as a stretch of time: its step at the roof, and on top of it what was planted."""
    on = dict.fromkeys(("compute", "weights", "kv", "activations"), 0.0)
    for op in step_cost(case.shape, case.rows).ops.values():
        if op.flops / case.peaks.flops_s > op.bytes / case.peaks.read_bytes_s:
            on["compute"] += op.flops / case.peaks.flops_s
        else:
            on["weights"] += op.weights / case.peaks.read_bytes_s
            on["kv"] += (op.kv_read + op.kv_written) / case.peaks.read_bytes_s
            on["activations"] += op.activations / case.peaks.read_bytes_s
    kernels = max(sum(on.values()) / case.at_roof, case.launches)
    busy = kernels / (1 - case.host - case.io - case.communication)
    whole = STEPS * busy / case.busy
    return Window(
        seconds=whole, busy=STEPS * busy, device=STEPS * (kernels + case.communication * busy),
        **{f"on_{name}": STEPS * seconds for name, seconds in on.items()}, io=STEPS * case.io * busy,
        communication=STEPS * case.communication * busy, launch=STEPS * case.launches, waiting=case.waiting,
        running=len(case.rows), steps=STEPS, lost=STEPS * case.lost * busy, front_end=case.front_end * whole,
        tokenising=case.tokenising * whole,
    )


def verdict(case: Planted) -> Verdict:
    shape = case.shape
    return judge(window(case), Setting(weight_bytes=shape.weight_bytes, kv_bytes=shape.kv_bytes, **case.setting))


def test_planted_cases_are_judged_right() -> None:
    wrong = [(case.name, case.expected, verdict(case).term) for case in CASES if verdict(case).term != case.expected]
    assert len(CASES) >= 40 and {case.expected for case in CASES} == set(TERMS)
    assert len(wrong) <= 0.05 * len(CASES), wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_verdict_says_why_and_what_next(case: Planted) -> None:
    found = verdict(case)
    assert found.why and 0 < found.share <= 1 and found.headroom >= 1
    assert bool(found.next) == (found.term != "idle"), "an engine without work needs no advice"
    assert all(change.gain >= 1 and change.trade_off for change in found.changes)
    gains = [change.gain for change in found.changes]
    assert gains == sorted(gains, reverse=True)


def test_parts_add_up_to_the_busy_time() -> None:
    for case in CASES:
        given_window = window(case)
        assert sum(given_window.parts().values()) == pytest.approx(given_window.busy), case.name


@given(st.floats(0.01, 0.99), st.floats(0, 0.5), st.floats(0.05, 1.0), st.floats(0, 50), st.integers(1, 256))
def test_any_window_has_a_verdict(at_roof: float, host: float, busy: float, waiting: float, rows: int) -> None:
    case = Planted("any", "", LLAMA_8B, H200, decode(rows, 700), at_roof, host, busy=busy, waiting=waiting)
    found = verdict(case)
    assert found.term in TERMS and 0 <= found.share <= 1


def test_a_measurement_that_beats_the_roof_does_not_confuse() -> None:
    """Peaks are what was measured, and a quieter machine may be faster."""
    base = window(CASES[0])
    fast = replace(base, device=0.8 * base.roof, busy=0.85 * base.roof, seconds=base.roof)
    found = judge(fast)
    assert found.term == WEIGHTS and found.headroom == 1.0


def test_nothing_is_idle() -> None:
    found = judge(Window(10.0, 0.0, 0.0))
    assert (found.term, found.share, found.headroom) == ("idle", 1.0, 1.0)


def test_changes_follow_the_setting() -> None:
    chat = window(CASES[0])
    wide = [change.what for change in judge(chat, Setting(weight_bytes=2)).changes]
    narrow = [change.what for change in judge(chat, Setting(weight_bytes=0.5625)).changes]
    assert "--quantization fp8: 8-bit weights" in wide and not any("--quantization" in what for what in narrow)
    eager = next(case for case in CASES if case.name == "0.5B eager")
    assert "CUDA graphs" in verdict(eager).next
    assert not any("recorded" in change.what for change in judge(window(eager), Setting(graphs=True)).changes)
    # Half of the weights' bytes: what is left of the time is the roof's other half and all that is not the weights.
    [eight] = [change for change in judge(chat, Setting()).changes if change.what.startswith("--quantization")]
    assert eight.gain == pytest.approx(chat.busy / (chat.busy - chat.on_weights / 2))


@pytest.mark.parametrize(("setting", "expected"), [
    (Setting(native=("bfloat16", "float8_e4m3fn")), {"--quantization fp8", "--kv-cache-dtype fp8"}),     # as measured
    (Setting(native=("bfloat16", "fp8", "int8")), {"--quantization fp8", "--kv-cache-dtype fp8"}),       # as in a data sheet
    (Setting(native=("bfloat16", "int8")), {"--kv-cache-dtype int8"}),   # an A100 has no fp8
    (Setting(dtype="float16"), {"--kv-cache-dtype fp8"}),                # fp8 weights need bfloat16
    (Setting(weight_bytes=1.0, kv_bytes=1.03), set()),                   # both are in use
    (Setting(device="cpu", weight_bytes=4, kv_bytes=4, dtype="float32"), set()),
], ids=["measured", "sheet", "A100", "float16", "in use", "cpu"])
def test_only_formats_of_this_engine_on_this_device_are_recommended(setting: Setting, expected: set[str]) -> None:
    """For every planted case, whatever binds: no other bits, no drafts, nothing that takes work on the code."""
    said = {change.what for case in CASES for change in judge(window(case), replace(setting, **case.setting)).changes}
    assert {what.split(":")[0] for what in said if what.startswith("--")} == expected
    for word in ("4-bit", "speculative", "fuse", "overlap collectives"):
        assert not any(word in what for what in said), word


def test_products_of_8_bit_weights_are_measured_against_their_own_rate() -> None:
    """Against that of 16 bits they would reach more than all of it."""
    found = [matrix_dtype(name, "cuda", "bfloat16") for name in ("none", "fp8", "fp8-block", "int8", "int4")]
    assert found == ["bfloat16", "float8_e4m3fn", "float8_e4m3fn", "int8", "bfloat16"]
    assert matrix_dtype("int8", "cpu", "float32") == "float32"


def test_drafts_are_recommended_where_reading_the_weights_binds() -> None:
    """Only while speculation is off. The gain is unknown: it depends on the text."""
    said = {case.name: judge(window(case), replace(Setting(speculation=False), **case.setting)) for case in CASES}
    drafts = {name: [each for each in verdict.changes if "speculative_config" in each.what] for name, verdict in said.items()}
    assert any(drafts.values())
    for name, changes in drafts.items():
        assert bool(changes) == (said[name].term == WEIGHTS), name
        assert all(change.gain == 1.0 and key_of(change.what) == "speculation" for change in changes)


def test_every_term_has_a_remedy_that_always_applies() -> None:
    """A verdict without advice would be half a verdict, unless there is nothing to do."""
    for term in (each for each in TERMS if each != "idle"):
        own = [remedy for remedy in REMEDIES if remedy.term == term]
        full = Setting(device="cpu", weight_bytes=0.5, kv_bytes=1, ranks=1, kv_usage=0.95)
        for setting in (Setting(), full):
            assert any(remedy.applies(Window(1.0, 1.0, 1.0, running=100), setting) for remedy in own), term
    assert set(OVERHEADS) | {WEIGHTS, KV, COMPUTE} < set(TERMS)


def test_the_verdict_needs_no_torch() -> None:
    code = "import sys, ridgeline.roofline.live; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
