"""The gate over two records: which way is better, what is noise, and what it exits with; and the rules of a figure."""

from __future__ import annotations

import copy
import csv
import io
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from ridgeline.__main__ import main
from ridgeline.bench import compare
from ridgeline.bench.lab import price, sustain, sweep, table
from ridgeline.bench.lab.directions import better
from ridgeline.bench.lab.machine_log import CoreLog, throttled
from ridgeline.bench.lab.peak_memory import own_peak, server_peak
from ridgeline.bench.load.latency import Outcome
from ridgeline.errors import ConfigError


def record(**figures: Any) -> dict[str, Any]:
    return {
        "benchmark": "offline", "quality": "exact", "machine": {"cpu": "one", "cores": 2}, "workload": {"model": "tiny"},
        "peak_memory": {"process_bytes": 1000}, "figures": figures,
    }


def spread(median: float, noise: float = 0.0) -> dict[str, float]:
    return {"median": median, "p10": median * (1 - noise), "p90": median * (1 + noise)}


def gate(folder: Path, before: dict[str, Any], after: dict[str, Any], *words: str) -> int:
    for name, made in (("a", before), ("b", after)):
        (folder / name).write_text(json.dumps(made))
    return main(["bench", "compare", str(folder / "a"), str(folder / "b"), *words])


@pytest.mark.parametrize(
    ("path", "direction"),
    [
        (("batch8", "ridgeline", "decode_tok_s"), "higher"), (("latency", "ridgeline", "bytes_per_weight"), ""),
        (("points", "[rate=5]", "figures", "ttft_ms", "p99"), "lower"), (("figures", "request_goodput"), "higher"),
        (("figures", "ttft_ms", "mean"), ""), (("figures", "ttft_ms", "max"), ""), (("figures", "tpot_ms"), "lower"),
        (("rows", "[rms_norm, native]", "microseconds"), "lower"), (("rows", "[x]", "gb_s"), "higher"),
        (("rows", "[x]", "tflop_s"), "higher"), (("rows", "[x]", "roofline"), "higher"), (("ready_s",), "lower"),
        (("rows", "latency_b1", "first_tokens_s"), "lower"), (("rows", "latency_b1", "tokens_in"), ""),
        (("read_bandwidth_gb_s",), ""), (("rows", "x", "floor", "counted", "output_tok_s"), ""),
        (("cost", "usd_per_m_output_tokens"), "lower"), (("cost", "j_per_output_token"), "lower"),
        (("peak_memory", "process_bytes"), "lower"), (("rows", "x", "peak_memory_bytes"), "lower"),
        (("batch8", "transformers", "decode_tok_s"), ""), (("running_256", "plan_ms"), "lower"),
        (("kept_up_tokens_per_second",), "higher"), (("engine", "us_per_mask"), "lower"),
        (("quality", "top1_agreement"), "higher"),
        (("client", "loop_lag_ms", "p99"), ""), (("duration_s",), ""), (("text", "encode_tokens_per_s"), "higher"),
        (("failed",), "lower"), (("speedup",), "higher"),
    ],
)
def test_which_way_is_better(path: tuple[str, ...], direction: str) -> None:
    assert better(path) == direction


def test_the_same_record_twice_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = record(batch8={"ridgeline": {"decode_tok_s": spread(100, 0.01), "tpot_ms": spread(10)}})
    assert gate(tmp_path, made, made) == 0
    assert "no regression: none of 3 figures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "before", "after", "code"),
    [
        ("decode_tok_s", spread(100, 0.01), spread(90, 0.01), 1),        # slower, and beyond the noise
        ("decode_tok_s", spread(100, 0.01), spread(110, 0.01), 0),       # faster
        ("decode_tok_s", spread(100, 0.08), spread(90, 0.08), 0),        # the ranges overlap
        ("decode_tok_s", spread(100, 0.001), spread(98, 0.001), 0),      # within the limit
        ("tpot_ms", spread(10, 0.01), spread(11, 0.01), 1), ("tpot_ms", spread(10, 0.01), spread(9, 0.01), 0),
        ("tpot_ms", 10.0, 10.4, 1), ("tpot_ms", 10.0, 10.2, 0),          # single runs: the limit alone decides
        ("failed", 0, 3, 1), ("failed", 3, 0, 0),
    ],
)
def test_regressions(tmp_path: Path, name: str, before: Any, after: Any, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(tmp_path, record(row={name: before}), record(row={name: after})) == code
    said = capsys.readouterr().out
    assert ("no regression" in said) == (not code) and (f"row {name}" in said or not code)


def test_the_limit_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = record(tpot_ms=10.0), record(tpot_ms=10.8)
    assert gate(tmp_path, before, after, "--max-regression", "10%") == 0
    assert gate(tmp_path, before, after, "--max-regression", "0.1") == 0
    assert gate(tmp_path, before, after, "--max-regression", "5%") == 1
    assert gate(tmp_path, before, after, "--only", "nothing") == 2
    for wrong in ("much", "-3%", "150%"):
        assert gate(tmp_path, before, after, f"--max-regression={wrong}") == 2
    assert "must be a share such as 3%" in capsys.readouterr().err


def test_rows_are_matched_by_their_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order does not count, and a row that is gone is named."""
    points = [{"setting": {"request_rate": rate, "max_concurrency": None}, "figures": {"ttft_ms": {"p50": 10.0 * rate}}}
              for rate in (1, 2, 3)]
    which = {"op": "linear", "implementation": "native", "case": "odd", "dtype": "float32"}
    ops = [which | {"microseconds": spread(5.0), "intensity": 3}]
    before, after = record(points=points, rows=ops), record(points=copy.deepcopy(points[:0:-1]), rows=copy.deepcopy(ops))
    assert gate(tmp_path, before, after) == 1 and gate(tmp_path, before, after, "--allow-missing") == 0
    assert gate(tmp_path, before, after, "--only", "microseconds") == 0              # what is missing was not asked for
    said = capsys.readouterr().out
    assert said.count("missing in") == 3 and said.count("--allow-missing") == 1      # two lists of it, and one that it fails
    assert gate(tmp_path, after, before) == 0                                        # more than before is no loss
    capsys.readouterr()
    after["figures"]["points"][0]["figures"]["ttft_ms"]["p50"] = 40.0
    after["figures"]["rows"][0]["microseconds"] = spread(7.0)
    assert gate(tmp_path, before, after, "--format", "json") == 1
    made = json.loads(capsys.readouterr().out)
    assert made["regressions"] == 2 and not made["passed"] and made["missing"] == ["points [request_rate=1] figures ttft_ms p50"]
    assert {row["figure"]: row["change"] for row in made["changes"]} == {
        "points [request_rate=3] figures ttft_ms p50": "+33.3%", "rows [linear, native, odd, float32] microseconds": "+40.0%",
    }


def test_medians_beside_their_spreads_are_read(tmp_path: Path) -> None:
    """As the rows of presets have them."""
    row = {"median": {"decode_tok_s": 100.0}, "p10": {"decode_tok_s": 85.0}, "p90": {"decode_tok_s": 101.0}}
    other = {"median": {"decode_tok_s": 90.0}, "p10": {"decode_tok_s": 89.0}, "p90": {"decode_tok_s": 91.0}}
    assert gate(tmp_path, record(rows={"b1": row}), record(rows={"b1": other})) == 0
    assert gate(tmp_path, record(rows={"b1": row | {"p10": {"decode_tok_s": 99.0}}}), record(rows={"b1": other})) == 1
    assert gate(tmp_path, record(rows={"b1": {"median": row["median"]}}), record(rows={"b1": other})) == 1    # no spread told


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = record(tpot_ms=1.0)
    assert gate(tmp_path, made, made | {"benchmark": "serve"}) == 2
    assert gate(tmp_path, made, made | {"workload": {"model": "other"}}) == 2
    assert gate(tmp_path, made, {"figures": {}}) == 2
    error = capsys.readouterr().err
    assert "two benchmarks" in error and "model is 'tiny' in the first and 'other'" in error and "is not a record" in error
    assert gate(tmp_path, made, made | {"machine": {"cpu": "two", "cores": 2}, "quality": "fp8 KV"}) == 0
    said = capsys.readouterr().out
    assert "different machines: cpu one and two" in said and "different quality: exact and fp8 KV" in said


def test_records_of_this_repository_can_be_judged() -> None:
    root = Path(__file__).resolve().parents[2] / "benchmarks"
    judged = 0
    for path in sorted(root.rglob("*.json")):
        made = json.loads(path.read_text())
        if "benchmark" not in made:
            continue
        changes, missing = compare.compare(made, made, 0.0)
        assert not missing and all(change.verdict == "same" for change in changes), path
        judged += bool(changes)
    assert judged >= 5


# -- the rules of a figure ---------------------------------------------------------------------------------------------


def test_a_figure_needs_runs_and_a_warm_up() -> None:
    assert sweep.figure([3.0, 1.0, 2.0], 1) == {"median": 2.0, "p10": 1.0, "p90": 3.0}
    assert sweep.figure([3.0, 1.0], 1) == {"median": 2.0, "p10": 1.0, "p90": 3.0}            # not the better, nor the worse
    assert sweep.figure([4.0, 1.0, 2.0, 8.0], 1)["median"] == 3.0
    with pytest.raises(ConfigError, match="gives no median with P10 and P90"):
        sweep.figure([1.0], 1)
    with pytest.raises(ConfigError, match="at least one warm-up"):
        sweep.figure([1.0, 2.0, 3.0], 0)


def test_lists_are_gone_through_in_every_combination() -> None:
    found = sweep.cross({"a": [1, 2], "b": ["x", "y", "x"]})
    assert found == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    assert sweep.settings(["m=1", "n=5", "m=2"]) == [["m=1", "n=5"], ["m=2", "n=5"]] and sweep.settings([]) == [[]]


def test_runs_are_merged_figure_by_figure() -> None:
    runs = [{"a": float(number), "deep": {"b": 10 * number}, "word": str(number), "ok": True} for number in (1, 2, 3)]
    found = sweep.merged(runs)
    assert found == {
        "a": {"median": 2.0, "p10": 1.0, "p90": 3.0}, "deep": {"b": {"median": 20.0, "p10": 10.0, "p90": 30.0}}, "word": "3",
        "ok": True,
    }
    assert sweep.merged(runs[:1]) == runs[0] and sweep.middle(found) == {"a": 2.0, "deep": {"b": 20.0}, "word": "3", "ok": True}


def test_tables() -> None:
    rows = [{"name": "a|b", "x": 1234.5, "y": spread(2.0, 0.5)}, {"name": "c", "x": None, "z": 0.00012}]
    made = table.as_markdown(rows)
    assert "1,234" in made and "2 (1–3)" in made and "0.00012" in made and len({len(line) for line in made.splitlines()}) == 1
    read = list(csv.DictReader(io.StringIO(table.as_csv(rows))))
    assert read[0]["y"] == "2.0" and read[0]["y P90"] == "3.0" and read[1]["x"] == "" and read[1]["z"] == "0.00012"
    assert json.loads(table.rendered(rows, "json", {"a": 1})) == {"a": 1} and table.as_markdown([]) == ""


def test_prices() -> None:
    found = price.cost(36.0, 100.0, 1_000_000, 250_000, joules=50_000.0)
    assert found["usd_per_m_output_tokens"] == 4.0 and found["usd_per_m_input_tokens"] == 1.0
    assert found["usd_per_m_all_tokens"] == pytest.approx(0.8)
    assert found["j_per_output_token"] == 0.2 and found["j_per_all_token"] == 0.04
    assert price.cost(None, 1, 1, 1) == {} and "power not reported" in price.line(price.cost(1.0, 1, 1, 1))
    assert "0.2 J per output token" in price.line(found)


# -- over time ---------------------------------------------------------------------------------------------------------


def test_drift_is_told_from_noise() -> None:
    noisy = [(float(at), 100.0 + (-1) ** at) for at in range(50)]
    falling = [(float(at), 100.0 - 0.2 * at) for at in range(50)]
    found = sustain.account({"steady": noisy, "falling": falling}, 1.0, {})
    assert abs(found["figures"]["steady"]["drift"]) < 0.03
    assert found["figures"]["falling"]["drift"] == pytest.approx(-0.088, abs=0.01)
    assert found["figures"]["falling"]["per_hour"] == pytest.approx(-720)
    assert "drifted: falling -8." in found["verdict"] and "does not report its clocks" in found["verdict"]
    machine = {"gpu": {"throttle_reasons": ["software power cap"]}, "cpu": {"throttle_events": 2}}
    assert "throttled by software power cap, 2 thermal" in sustain.account({}, 1.0, machine)["verdict"]
    assert throttled({}) == []


def test_what_comes_by_chance_is_no_drift() -> None:
    """One and two answers in a stretch: twice as many at the end as at the beginning, and nothing has changed."""
    few = [(float(at), value) for at, value in enumerate([1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0])]
    found = sustain.account({"request_throughput": few}, 1.0, {})
    assert found["figures"]["request_throughput"]["drift"] > 0.3 and "steady: no drift" in found["verdict"]
    stepped = [(float(at), 100.0 + (-1) ** at - 10.0 * (at >= 25)) for at in range(50)]
    assert "drifted: speed -10.0%" in sustain.account({"speed": stepped}, 1.0, {})["verdict"]
    assert "too short to detect drift" in sustain.account({"speed": stepped[:4]}, 1.0, {})["verdict"]


def test_stretches_have_answers_enough() -> None:
    def run(count: int) -> list[Outcome]:
        return [Outcome(number / 10, sent=number / 10, events=array("d", [number / 10 + 0.05]), ended=number / 10 + 0.05,
                        tokens_out=1) for number in range(count)]

    assert sustain.stretches(run(69)) == [] and len(sustain.stretches(run(70))) == 5
    assert len(sustain.stretches(run(6000))) == 58
    assert {round(each["request_throughput"]) for each in sustain.stretches(run(1000))} == {10}


def test_a_single_bad_stretch_does_not_turn_the_slope() -> None:
    points = [(float(at), 50.0) for at in range(20)]
    points[13] = (13.0, 5.0)
    assert sustain.slope(points) == 0.0


def test_the_cores_tell_clocks_throttling_and_energy(tmp_path: Path) -> None:
    def write(name: str, value: int) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

    for core, clock in ((0, 3_000_000), (1, 1_500_000)):
        write(f"devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", clock)
    write("devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", 7)
    write("class/powercap/intel-rapl:0/energy_uj", 1_000_000)
    log = CoreLog(tmp_path)
    log.sample()
    write("devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", 9)
    write("class/powercap/intel-rapl:0/energy_uj", 51_000_000)
    log.sample()
    (first, *_), (last, *_) = log._samples
    log._samples[-1] = (first + 10.0, *log._samples[-1][1:])             # ten seconds later
    found = log.between(first, first + 10.0)
    assert found == {"clock_mhz": [1500.0, 3000.0], "throttle_events": 2, "power_mean_w": pytest.approx(5.0)}
    assert CoreLog(tmp_path / "nothing").between(0, 1e12) == {} and last >= first


def test_peak_memory_of_this_process_and_of_a_server(tmp_path: Path) -> None:
    assert own_peak()["process_bytes"] > 2**24

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("net/tcp", "head\n 0: 0100007F:1F40 00000000:0000 0A 0 0 0 0 0 777\n 1: 0100007F:1F41 00000000:0000 0A 0 0 0 0 0 778\n")
    for pid, parent, peak in ((10, 1, 100), (11, 10, 2000), (12, 11, 5), (20, 1, 7)):
        write(f"{pid}/status", f"Name: x\nPPid:\t{parent}\nVmHWM:\t{peak} kB\n")
    (tmp_path / "10/fd").mkdir()
    (tmp_path / "10/fd/3").symlink_to("socket:[777]")
    assert server_peak(8000, tmp_path) == (100 + 2000 + 5) * 1024        # with its children and theirs
    assert server_peak(8001, tmp_path) is None and server_peak(80, tmp_path) is None


def test_a_wide_table_fits_the_terminal() -> None:
    rows = [{"name": f"row {place}"} | {f"column {each}": place * each for each in range(20)} for place in range(1, 3)]
    whole = table.as_markdown(rows, 1000)
    assert table.as_markdown(rows) == whole and len(whole.splitlines()) == 4
    sideways = table.as_markdown(rows, 60).splitlines()
    assert max(map(len, sideways)) <= 60 and len(sideways) == 23 and sideways[2].split("|")[1].strip() == "name"
    several = table.as_markdown([*rows] * 30, 60)
    assert max(map(len, several.splitlines())) <= 60 and several.count("\n\n") >= 3
    assert all(block.startswith("| name ") for block in several.split("\n\n"))
    assert {f"column {each}" for each in range(20)} <= {cell.strip() for cell in several.replace("\n", "|").split("|")}
