"""Which ops were verified on a GPU as they are now. There is none here: stale ones are named, in pytest's summary."""

from __future__ import annotations

import importlib.util
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from ridgeline.bench.ops import all_ops

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "h200" / "verified.json"


class StaleVerification(UserWarning):
    """An op's file has changed since the GPU tests last passed with it."""


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
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
                      StaleVerification, stacklevel=1)  # fmt: skip


@pytest.mark.parametrize("record", [
    [], {}, {"sha256": {}}, {"date": "", "gpu": {}, "versions": {}, "commit": "", "sha256": {"linear.py": "abc"}},
])  # fmt: skip
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
