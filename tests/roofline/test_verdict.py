"""Which term binds: planted cases, what the parts add up to, and the changes that are proposed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_cases import CAPPED, CASES, H200, HARDLY, HOT, LLAMA_8B, Planted, decode

from ridgeline.gpus.clocks import Clocks
from ridgeline.roofline.remedies import key_of
from ridgeline.roofline.step_cost import step_cost
from ridgeline.roofline.verdict import (
    COMPUTE,
    IMPLEMENTATION,
    KV,
    OVERHEADS,
    REMEDIES,
    TERMS,
    WEIGHTS,
    Setting,
    Verdict,
    Window,
    judge,
)
from ridgeline.sizes.abilities import BY_FLAG

STEPS = 100
# As an H200 has them: 4 bits are read fast, and multiplied slowly.
INT4, FP8, FP8_KV = "--quantization int4", "--quantization fp8", "--kv-cache-dtype fp8"
FASTER = {INT4: [(1, 0.4), (16, 0.45), (64, 0.65), (128, 1.05), (4096, 1.2)], FP8: [(1, 0.6), (4096, 0.6)], FP8_KV: [(1, 0.62)]}


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
    busy = kernels / (1 - case.host - case.communication)
    whole = STEPS * busy / case.busy
    return Window(
        seconds=whole, busy=STEPS * busy, device=STEPS * (kernels + case.communication * busy),
        **{f"on_{name}": STEPS * seconds for name, seconds in on.items()},
        communication=STEPS * case.communication * busy, launch=STEPS * case.launches, waiting=case.waiting,
        running=len(case.rows), steps=STEPS, lost=STEPS * case.lost * busy, front_end=case.front_end * whole,
        tokenising=case.tokenising * whole, clocks=case.clocks,
    )


def verdict(case: Planted) -> Verdict:
    return judge(window(case), Setting(faster=FASTER, **case.setting))


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
    said = {change.what: change for change in judge(chat, Setting(faster=FASTER, linear_share=0.9)).changes}
    assert not any(what.startswith("--") for what in (change.what for change in judge(chat, Setting()).changes))
    eager = next(case for case in CASES if case.name == "0.5B eager")
    assert "CUDA graphs" in verdict(eager).next
    assert not any("recorded" in change.what for change in judge(window(eager), Setting(graphs=True)).changes)
    # Of the weights nine tenths are narrowed. What is left of the time is their new share and all that is not the weights.
    eight, four = said[f"{FP8}: 8-bit weights"], said[f"{INT4}: 4-bit weights"]
    assert eight.gain == pytest.approx(chat.busy / (chat.busy - 0.9 * 0.4 * chat.on_weights - 0.4 * chat.on_compute))
    assert four.gain > eight.gain and judge(chat, Setting(faster=FASTER)).next == f"{INT4}: 4-bit weights"
    assert "KL 0.49 with SmolLM2-135M" in four.trade_off and "ridgeline eval" in four.trade_off


def test_a_gain_that_was_not_timed_is_marked() -> None:
    said = [change.what for change in judge(window(CASES[0]), Setting(faster=FASTER, untimed=[FP8])).changes]
    assert f"{FP8}: 8-bit weights (by the data sheet: not timed on this kind of GPU)" in said and f"{INT4}: 4-bit weights" in said


@pytest.mark.parametrize(("rows", "best"), [(1, INT4), (16, INT4), (256, FP8)])
def test_the_format_depends_on_the_rows(rows: int, best: str) -> None:
    """4 bits for a few, 8 for many, where 4 would lose."""
    busy = Window(1.0, 1.0, 1.0, on_weights=0.8, on_compute=0.1, running=rows, steps=STEPS)
    changes = [change for change in judge(busy, Setting(faster=FASTER, speculation=True)).changes if "-bit" in change.what]
    assert changes[0].what.startswith(best) and all(change.gain > 1.02 for change in changes)
    assert (len(changes) == 2) == (rows < 128)


def test_only_formats_of_this_engine_on_this_device_are_recommended() -> None:
    """For every planted case, whatever binds: what is given as data, and nothing that takes work on the code."""
    for known in ({}, {FP8: FASTER[FP8]}, FASTER):
        setting = Setting(faster=known)
        said = {change.what for case in CASES for change in judge(window(case), replace(setting, **case.setting)).changes}
        assert {what.split(":")[0] for what in said if what.startswith("--")} == set(known) <= set(BY_FLAG)
        for word in ("fuse", "overlap collectives"):
            assert not any(word in what for what in said), word


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
        full = Setting(device="cpu", ranks=1, kv_usage=0.95)
        for setting in (Setting(), full):
            assert any(remedy.applies(Window(1.0, 1.0, 1.0, running=100), setting) for remedy in own), term
    assert set(OVERHEADS) | {WEIGHTS, KV, COMPUTE} < set(TERMS)


def test_the_verdict_needs_no_torch() -> None:
    code = "import sys, ridgeline.roofline.live; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- a lowered clock -----------------------------------------------------------------------------------------------------


def at(clocks: Clocks | None, **more: float) -> Window:
    """A decode step a quarter above its roof."""
    times = {"on_weights": 0.5, "on_kv": 0.2, "on_compute": 0.1} | more
    return Window(1.0, 1.0, 1.0, **times, running=128.0, steps=STEPS, clocks=clocks)


def test_a_cap_that_is_active_is_named_and_one_that_is_not_is_not() -> None:
    """Whatever binds, and everywhere but in an engine without work."""
    for case in CASES:
        capped, free = (judge(replace(window(case), clocks=each), Setting(**case.setting)) for each in (CAPPED, HARDLY))
        assert "power" not in free.why and free.term not in ("power", "temperature"), case.name
        if capped.term not in ("idle", "front_end", "tokeniser"):
            assert "692 of 700 W, SM clock 1,275 of 1,980 MHz" in capped.why and "power" in capped.why, case.name
    unknown, capped = judge(at(None)), judge(at(CAPPED))
    assert "power" not in unknown.why and capped.term == "power" and capped.why.startswith("power binds: 692 of 700 W")


def test_how_far_it_is_to_the_full_clock() -> None:
    """As far as the roof, where kernels are near it; no further than the clock allows, where they are not."""
    near, far = judge(at(CAPPED)), judge(at(CAPPED, on_weights=0.1, on_kv=0.05, on_compute=0.05))
    assert near.share == pytest.approx(0.2) and near.headroom == pytest.approx(1.25) and near.why.endswith("up to 20% shorter")
    assert far.share == pytest.approx(1 - 1275 / 1980) and far.parts[IMPLEMENTATION] == pytest.approx(0.8 - far.share)
    # Products at a roof that was measured at this clock: a full clock lifts it.
    products = judge(at(CAPPED, on_weights=0.0, on_kv=0.0, on_compute=1.0))
    assert products.term == "power" and products.parts[COMPUTE] == pytest.approx(1275 / 1980)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(300, 1980), st.floats(0, 0.3))
def test_parts_at_a_lowered_clock_add_up(
    compute: float, memory: float, waits: float, host: float, mhz: float, lost: float
) -> None:
    roof = compute + memory
    given_window = Window(
        seconds=3.0, busy=roof + waits + host + 0.1, device=roof + waits + 0.1, on_compute=compute, on_weights=memory,
        communication=waits, lost=lost, steps=1, clocks=replace(CAPPED, sm_mhz=mhz),
    )
    parts = given_window.parts()
    assert sum(parts.values()) == pytest.approx(given_window.busy) and min(parts.values()) >= -1e-9


def test_what_to_change_at_the_power_limit() -> None:
    """A limit is raised only where the board takes more; formats come without a figure, because energy is not predicted."""
    def changes(clocks: Clocks) -> dict[str, float]:
        return {each.what: each.gain for each in judge(at(clocks), Setting(faster=FASTER)).changes}

    capped, lower = changes(CAPPED), changes(replace(CAPPED, limit_w=500.0, watts=498.0))
    assert not any("power limit (nvidia-smi" in what for what in capped)
    assert max(lower, key=lambda what: lower[what]).startswith("raise the GPU's power limit") and max(lower.values()) == 1.25
    assert capped[f"{FP8}: 8-bit weights"] == 1.0 and capped[f"{FP8_KV}: fewer bytes of the cache"] == 1.0
    assert [each.what for each in judge(at(HOT)).changes] == ["cool the GPU: airflow, fans, the room, its neighbours"]
    assert "88 °C" in judge(at(HOT)).why
