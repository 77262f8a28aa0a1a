"""Which ops were verified on a GPU as they are now. There is none here: stale ones are named, in pytest's summary."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from ridgeline.bench.ops import all_ops

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "h200" / "verified.json"


class StaleVerification(UserWarning):
    """An op's file has changed since the GPU tests last passed with it."""


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problems(record: Any) -> list[str]:
    """What is wrong with the form of a record."""
    if not isinstance(record, dict):
        return ["not an object"]
    found = [f"{name} is missing" for name in ("date", "gpu", "versions", "commit", "sha256") if name not in record]
    hashes = record.get("sha256", {})
    if not isinstance(hashes, dict) or not hashes:
        return [*found, "sha256 is not a table of files"]
    return found + [
        f"{name}: {value!r} is no SHA-256"
        for name, value in hashes.items()
        if not (isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef"))
    ]


def stale_ops(verified: dict[str, str], now: dict[str, str]) -> list[str]:
    """Ops whose own file differs, and files that several ops use."""
    changed = {name for name, value in now.items() if verified.get(name) != value}
    ops = {name: Path(inspect.getfile(op.implementations[-1].function)).name for name, op in all_ops().items()}
    own = [name for name, file in ops.items() if file in changed]
    return sorted(own) + sorted(changed - set(ops.values()))


def test_the_record_is_well_formed_and_stale_ops_are_named() -> None:
    now = script("record_verified").hashes()
    if not RECORD.exists():
        warnings.warn("no op was verified on a GPU yet: `make test-gpu` does it", StaleVerification, stacklevel=1)
        return
    record = json.loads(RECORD.read_text())
    assert problems(record) == []
    stale = stale_ops(record["sha256"], now)
    if stale:
        warnings.warn(f"GPU verification of {record['date'][:10]} is stale for: {', '.join(stale)}; `make test-gpu` renews it",
                      StaleVerification, stacklevel=1)


@pytest.mark.parametrize("record", [
    [], {}, {"sha256": {}}, {"date": "", "gpu": {}, "versions": {}, "commit": "", "sha256": {"linear.py": "abc"}},
])
def test_a_malformed_record_is_seen(record: Any) -> None:
    assert problems(record)


def test_a_changed_file_makes_its_ops_stale() -> None:
    now = script("record_verified").hashes()
    assert stale_ops(now, now) == []
    assert stale_ops(now | {"rms_norm.py": "0" * 64}, now) == ["rms_norm"]
    assert "sample" in stale_ops({name: value for name, value in now.items() if name != "sample.py"}, now)
    assert stale_ops(now | {"registry.py": "0" * 64}, now) == ["registry.py"]


def test_kernels_that_a_sanitizer_can_run() -> None:
    found = script("run_op_cases").with_kernels()
    assert {"rms_norm", "paged_attention"} <= set(found)
    assert all(any(not case.timed for case in op.cases) for op in found.values())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_cases_of_single_kernels_are_right() -> None:
    """Those that the interpreter can run; each compares with the product in float64. On every commit test_linear_kernels.py and
    test_gemm_gated.py run these kernels there."""
    code = "import run_op_cases as r\nfor name in ('gemv', 'small_gemm', 'invariant_gemm', 'gated_gemm'): r.CASES[name]('cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]


def test_what_a_sanitizer_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Every run of every op once, and every case of a kernel."""
    sanitize, cases = script("sanitize_kernels"), script("run_op_cases")
    cases.main(["--list"])
    listed = capsys.readouterr().out.split()
    programs = sanitize.programs(listed)
    given = [word for words in programs.values() for word in words if words[0] == sanitize.CASES]
    for each in listed:
        name = each.partition(":")[0]
        mine = [word for word in given if word.partition(":")[0] == name]
        parts = [word.partition(":")[2].split("/") for word in mine]
        assert mine == [name] or sorted(int(part) for part, _ in parts) == list(range(int(parts[0][1]))), each
    assert {"prompt_kernel", "decode_kernel", "wide_gemm_kernel", "_ring_gemm_kernel"} <= sanitize.launched()


def test_what_a_sanitizer_says_is_sorted_by_kernel() -> None:
    sanitize = script("sanitize_kernels")
    ran = "print('kernels: one_kernel other_kernel')"
    say = f"print('========= Error: Race reported between Write access at one_kernel+0x1a30'); {ran}"
    found = sanitize.run([sys.executable, "-c", f"{say}; raise SystemExit({sanitize.FOUND})"], 60)
    clean = sanitize.run([sys.executable, "-c", ran], 60)
    failed = sanitize.run([sys.executable, "-c", "raise SystemExit(1)"], 60)
    late = sanitize.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    never = sanitize.run([sys.executable, "-c", ran], 0)
    assert [each.state for each in (found, clean, failed)] == ["FOUND", "clean", "FAILED with 1"]
    assert "not ended" in late.state and "not begun" in never.state
    sorted_states = sanitize.by_kernel({"racecheck a": found, "racecheck b": clean, "memcheck b": clean, "memcheck a": failed})
    assert sorted_states == {
        "one_kernel": {"racecheck": "FOUND", "memcheck": "clean"}, "other_kernel": {"racecheck": "clean", "memcheck": "clean"},
    }


def test_races_of_the_compiler_are_classified() -> None:
    sanitize = script("sanitize_kernels")
    lines = sanitize.op_file("gemm_wide.py").read_text().splitlines()
    kernel = next(number for number, line in enumerate(lines, 1) if line.startswith("def wide_gemm_kernel("))
    parts = next(number for number, line in enumerate(lines, 1) if "warp_specialize(" in line)
    own = next(number for number, line in enumerate(lines, 1) if "gl.convert_layout(" in line)

    def state(*places: str) -> str:
        said = "".join(f"print('=========  Write access at {place}')\n" for place in places)
        command = [sys.executable, "-c", f"{said}raise SystemExit({sanitize.FOUND})", "racecheck"]
        return sanitize.run(command, 60).state

    handed = [f"wide_gemm_kernel+0x140 in gemm_wide.py:{line} [8 hazards]" for line in (kernel, parts)]
    assert state(*handed) == sanitize.COMPILERS
    assert state(*handed, f"wide_gemm_kernel+0x99 in gemm_wide.py:{own} [8 hazards]") == "FOUND"
    assert state("decode_kernel+0x8020 in kernel_decode.py:287 [41 hazards]") == sanitize.COMPILERS     # plain Triton
    assert state("decode_kernel+0x8020") == state("other_kernel+0x8 in elsewhere.py:1") == "FOUND"
