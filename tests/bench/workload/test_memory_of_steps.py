"""The study of what the ledger calls steps: its summary of the allocator's segments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STUDY = Path(__file__).parents[3] / "benchmarks" / "studies" / "memory_of_steps" / "run.py"
MIB = 2**20


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_of_steps", STUDY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def segment(address: int, blocks: list[tuple[int, bool]], pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    made, at = [], address
    for size, active in blocks:
        made.append({"address": at, "size": size * MIB, "state": "active_allocated" if active else "inactive"})
        at += size * MIB
    return {"total_size": sum(size for size, _ in blocks) * MIB, "segment_pool_id": pool, "blocks": made}


def test_free_blocks_beside_weights_are_told_apart_from_free_segments(study: ModuleType) -> None:
    segments = [
        segment(0, [(20, True), (114, False)]), segment(1 << 40, [(20, True), (114, False)]),
        segment(2 << 40, [(500, False)]), segment(3 << 40, [(64, True)]), segment(4 << 40, [(30, False)], (0, 1)),
    ]
    names = {0: "layers.*.mlp.down.weight", 1 << 40: "layers.*.mlp.down.weight"}
    found = study.summary(segments, names)
    default, graphs = found["default"], found["private 0.1"]
    assert default["reserved"] == 832 * MIB and default["active"] == 104 * MIB
    assert default["free_in_used_segments"] == 228 * MIB and default["free_segments"] == 500 * MIB
    assert default["mixed"] == [{
        "segments": 2, "bytes_each": 134 * MIB, "free_each": 114 * MIB, "free": 228 * MIB,
        "holds": {"layers.*.mlp.down.weight": 1},
    }]
    assert default["blocks"][0] == {"bytes": 500 * MIB, "active": False, "name": ""}
    assert graphs["free_segments"] == 30 * MIB and not graphs["mixed"]
    lines = study.told("loaded", {"allocated": 104 * MIB}, found)
    assert "2 segments of 134.0: free 114.0 each, 228.0 in all; hold 1 x layers.*.mlp.down.weight" in lines
