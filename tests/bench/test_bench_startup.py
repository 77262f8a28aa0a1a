"""The start-up account: phases sum to the wall clock, inside the process and as seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from served_model import one_thread, write_model

from ridgeline.__main__ import main
from ridgeline.process import start_phases


@pytest.fixture(autouse=True)
def no_phases() -> None:
    start_phases._seconds.clear()


class Clock:
    """Both clocks of the module: it goes on when it is told to."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def __init__(self) -> None:
        self.now = time.clock_gettime(time.CLOCK_BOOTTIME)

    def perf_counter(self) -> float:
        return self.now

    def clock_gettime(self, which: int) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(start_phases, "time", made)
    return made


def test_phases_and_the_rest_sum_to_the_wall_clock(clock: Clock) -> None:
    start_phases.until_now("before")
    with start_phases.phase("weights"):
        clock.sleep(0.02)
    with start_phases.phase("weights"):
        clock.sleep(0.01)
    clock.sleep(0.02)
    found = start_phases.report()
    assert list(found) == ["before", "weights", "other"]
    assert found["weights"] == pytest.approx(0.03) and found["other"] == pytest.approx(0.02)
    assert sum(found.values()) == pytest.approx(start_phases.since_start())


def test_a_phase_within_a_phase_is_counted_once(clock: Clock) -> None:
    start_phases.until_now("before")
    with start_phases.phase("engine"):
        clock.sleep(0.01)
        with start_phases.phase("kernels"):
            clock.sleep(0.03)
    found = start_phases.report()
    assert found["kernels"] == pytest.approx(0.03) and found["engine"] == pytest.approx(0.01)
    assert sum(found.values()) == pytest.approx(start_phases.since_start())


def test_a_phase_that_fails_is_counted_too() -> None:
    with pytest.raises(ValueError, match="broken"), start_phases.phase("weights"):
        raise ValueError("broken")
    assert "weights" in start_phases.report() and start_phases._open == []


def test_the_table_ends_with_the_sum() -> None:
    assert start_phases.table({"imports": 1.5, "other": 0.25}).splitlines()[-1].split() == ["total", "1.750", "s"]


def test_since_start_counts_from_the_start_of_the_process() -> None:
    code = "import time; time.sleep(0.3); from ridgeline.process import start_phases; print(start_phases.since_start())"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    outside = time.perf_counter() - began
    assert 0.3 <= float(done.stdout) <= outside + 0.02           # the system counts in hundredths


def test_the_module_needs_no_torch() -> None:
    code = "import sys; import ridgeline.process.start_phases; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=one_thread())
    assert not {"torch", "numpy", "msgspec"} & set(done.stdout.split())


def test_an_engine_is_started_and_accounts_for_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, out = write_model(tmp_path / "tiny"), tmp_path / "startup.json"
    options = ["load_format=dummy", "max_num_seqs=2", "num_gpu_blocks_override=600", "device=cpu"]
    assert main(["bench", "startup", str(model), "--starts", "2", "--cold", "--set", *options, "--out", str(out)]) == 0
    made = json.loads(out.read_text())
    start, _ = made["figures"]["starts"]
    assert made["quality"] == "exact" and made["peak_memory"]["engine"]["process_bytes"] > 2**26
    assert next(iter(start["phases"])) == "process and imports" and list(start["phases"])[-1] == "other"
    assert sum(start["phases"].values()) == pytest.approx(start["first token"], abs=1e-6)
    assert start["late compilations"] == 0               # a CPU has nothing to compile
    assert start["ready"] < start["first token"] <= start["outside_s"] + 0.02
    said = capsys.readouterr()
    assert "total" in said.out and '"benchmark"' not in said.out and f"wrote {out}" in said.err  # the record is in its file


@pytest.mark.parametrize(
    ("words", "says"), [
        ([], "nothing does not exist"),
        (["--set", "x"], "'x' is not an engine option of the form name=value"),
        (["--set", "device=cpu", "device=tpu"], "device"),       # the second combination, before the first is started
    ]
)
def test_a_start_that_is_refused_is_one_line_before_anything_is_started(
    tmp_path: Path, words: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child imports torch, for seconds, before it can say the same."""
    monkeypatch.setattr("ridgeline.bench.startup.start_child", lambda *_, **options: pytest.fail("a child was started"))
    model = tmp_path / "nothing" if words != ["--set", "device=cpu", "device=tpu"] else write_model(tmp_path / "tiny")
    assert main(["bench", "startup", str(model), "--starts", "2", *words]) == 2
    said = capfd.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize(("code", "status", "says"), [(1, 1, "ended with code 1"), (2, 2, "error: too large for this GPU")])
def test_a_start_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int, status: int, says: str
) -> None:
    child = ["sh", "-c", f"echo too large for this GPU; exit {code}"]    # what only the child can find out
    monkeypatch.setattr("ridgeline.bench.startup.start_child", lambda *_, **options: subprocess.Popen(child, stdout=-1))
    assert main(["bench", "startup", str(write_model(tmp_path / "tiny")), "--starts", "2"]) == status
    said = capfd.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_single_start_is_no_median(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", str(tmp_path), "--starts", "1"]) == 2
    assert "--starts 1 gives no median" in capsys.readouterr().err
