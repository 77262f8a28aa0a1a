"""The study of a short prompt beside a long one (benchmarks/studies/fairness), with a server that takes no time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[3] / "benchmarks/studies/fairness/run.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fairness_study", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("busy", [0, 2])
def test_neighbours_spin_beside_all_that_is_measured(
    busy: int, study: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What runs alone runs beside them, too: the bar is what a short prompt takes on such a machine. They end with the study."""
    started: list[subprocess.Popen[bytes]] = []
    spinning: list[int] = []
    shorts = threading.Semaphore(0)

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(command, **options)
            if command[0] == sys.executable:                 # git tells the commit
                started.append(self)

    class Server:
        def __init__(self, log: Path, target_ms: float) -> None:
            self.process = self

        def first_token(self, tokens: int, seed: int) -> float:
            spinning.append(sum(process.poll() is None for process in started))
            if seed == 3:                                    # the long prompt waits for two short ones beside it
                assert all(shorts.acquire(timeout=60) for _ in range(2))
            elif seed >= 1000:
                shorts.release()
            return {study.SHORT: 0.1, study.LONG: 20.0}.get(tokens, 1.0)

        def terminate(self) -> None: ...

        def wait(self, timeout: float) -> None: ...

    monkeypatch.setattr(study, "Server", Server)
    monkeypatch.setattr(study.subprocess, "Popen", Popen)
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--gap", "0.01", "--target-ms", "500", "--busy", str(busy), "--out", str(out)])
    study.main()
    made = json.loads(out.read_text())
    assert made["workload"]["busy"] == busy and set(spinning) == {busy} and made["versions"]["torch"]
    assert [process.poll() is None for process in started] == [False] * busy
    assert made["figures"]["short_bound_s"] == pytest.approx(1.6) and made["figures"]["met"] == {"short": True, "long": True}
    assert json.loads(capsys.readouterr().out) == made
