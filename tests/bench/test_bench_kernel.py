"""The harness for candidate kernels: the right one passes, and each way of fooling oneself is found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.__main__ import main
from ridgeline.bench import kernel, ops
from ridgeline.bench.workload import candidate
from ridgeline.ops.registry import Implementation, Site
from ridgeline.roofline.peaks import MachinePeaks

RIGHT = """
import torch

def rms_norm(x, weight, eps, *, residual=None, weight_offset=0.0):
    if residual is not None:
        x = x + residual
    wide = x.float()
    out = torch.empty_like(x)
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + weight_offset))
    return out if residual is None else (out, x)
"""
# Each is the right one with a fault; the words are in what is said about it.
FAULTY = {
    "forgets the weight": (RIGHT.replace("(weight.float() + weight_offset)", "1.0"), "wrong result"),
    "forgets the weight's offset": (RIGHT.replace("(weight.float() + weight_offset)", "weight.float()"), "wrong result (offset"),
    "wrong on odd widths": (RIGHT.replace("wide = x.float()", "wide = x.float()\n    if x.shape[-1] % 2: wide = wide + 0.1"),
                            "wrong result (odd"),
    "leaves the last column": (
        RIGHT.replace("out.copy_(", "out[..., :-1].copy_((").replace("weight_offset))", "weight_offset))[..., :-1])"),
        "memory that was never written",
    ),
    "one buffer for all": (RIGHT.replace("out = torch.empty_like(x)", "out = _buffer(x)") + """
_kept = {}
def _buffer(x):
    return _kept.setdefault((x.shape, x.dtype), torch.empty_like(x))
""", "stale buffer"),
    "remembers by address": (RIGHT.replace("def rms_norm", "def _compute") + """
_kept = {}
def rms_norm(x, weight, eps, **more):
    key = (x.data_ptr(), x.shape, x.dtype)
    if key not in _kept:
        _kept[key] = (x, _compute(x, weight, eps, **more))
    return _kept[key][1]
""", "remembered result"),
    "always the first result": (RIGHT.replace("def rms_norm", "def _compute") + """
_kept = {}
def rms_norm(x, weight, eps, **more):
    return _kept.setdefault((x.shape, x.dtype), _compute(x, weight, eps, **more))
""", "stale result"),
    "falls back": ("""
from ridgeline.ops.rms_norm import rms_norm_reference
def rms_norm(x, weight, eps, **more):
    try:
        raise ValueError
    except ValueError:
        return rms_norm_reference(x, weight, eps, **more)
""", "silent fallback"),
    "calls the op": ("""
from ridgeline.ops import rms_norm as module
def rms_norm(x, weight, eps, **more):
    return module.rms_norm(x, weight, eps, **more)
""", "silent fallback"),
    "falls back for large inputs": (RIGHT.replace("def rms_norm", "def _compute") + """
from ridgeline.ops.rms_norm import rms_norm_native
def rms_norm(x, weight, eps, **more):
    large = x.shape[0] > 100 and x.dtype == torch.float32
    return (rms_norm_native if large else _compute)(x, weight, eps, **more)
""", "silent fallback (prefill-512, float32): it ran the current implementation"),
    "writes into its input": (RIGHT.replace("x = x + residual", "x += residual"), "changed argument"),
    "gives its input back": ("""
def rms_norm(x, weight, eps, *, residual=None, weight_offset=0.0):
    return (x, residual)[: 1 + (residual is not None)]
""", "returned its input"),
    "raises": ("def candidate(*args, **kwargs):\n    raise ValueError('no such kernel')\n", "ValueError: no such kernel"),
    "another dtype": (
        RIGHT.replace("torch.empty_like(x)", "torch.empty_like(x, dtype=torch.float32)"), "is torch.float32, not bfloat16",
    ),
}


@pytest.fixture(autouse=True)
def known_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "machine_peaks", lambda device: MachinePeaks("a machine", 1e10, {"float32": 1e11}, 1e-9, "now"))


def bench(folder: Path, text: str, *words: str, op: str = "rms_norm") -> tuple[int, dict[str, Any]]:
    path, out = folder / "candidate.py", folder / "kernel.json"
    path.write_text(text)
    code = main(["bench", "kernel", str(path), "--op", op, "--device", "cpu", "--samples", "3", "--out", str(out), *words])
    return code, json.loads(out.read_text())


def test_a_right_candidate_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, made = bench(tmp_path, RIGHT, "--case", "one", "odd", "residual", "decode-32")
    assert code == 0 and made["figures"]["faults"] == [] and made["figures"]["checked"] == 8
    [row] = made["figures"]["rows"]
    assert row["case"] == "decode-32" and row["current"] in ("native", "reference") and 0 < row["roofline"] < 1.5
    assert row["speedup"] == pytest.approx(row["current µs"]["median"] / row["candidate µs"]["median"])
    assert made["quality"] == "within the op's tolerance" and made["peak_memory"] and made["workload"]["seed"] >= 0
    assert "times the current implementation" in capsys.readouterr().out


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_candidate_is_found_out(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = FAULTY[name]
    code, made = bench(tmp_path, text, "--check-only")
    assert code == 1 and made["quality"] == "faulty" and made["figures"]["rows"] == []
    assert any(said in fault for fault in made["figures"]["faults"]), made["figures"]["faults"]
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["x, weight", "x, weight, eps", "x, weight, eps, *, residual=None"])
def test_another_signature_is_one_line(arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also without arguments that only some cases have: each of these was a fault of its own, without the signature."""
    path = tmp_path / "mine.py"
    path.write_text(f"def rms_norm({arguments}):\n    return x\n")
    assert main(["bench", "kernel", str(path), "--op", "rms_norm", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "it must be called like rms_norm(x: " in said and "eps" in said and said.count("\n") == 1


def test_an_output_that_was_handed_over_is_poisoned(tmp_path: Path) -> None:
    """kv_write returns nothing: what it does not write stays NaN."""
    code, made = bench(tmp_path, "def kv_write(*args, **kwargs):\n    pass\n", "--check-only", op="kv_write")
    assert code == 1 and "memory that was never written" in made["figures"]["faults"][0]


def test_inputs_are_new_each_time(tmp_path: Path) -> None:
    seeds = {bench(tmp_path, RIGHT, "--check-only", "--case", "one")[1]["workload"]["seed"] for _ in range(3)}
    assert len(seeds) == 3
    assert bench(tmp_path, RIGHT, "--check-only", "--case", "one", "--seed", "5")[1]["workload"]["seed"] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "defines neither a function rms_norm"),
        ("import nothing_like_it\n", "cannot be imported: ModuleNotFoundError"),
        (RIGHT + "\ndef supports(site):\n    return False\n", "supports none of the selected cases"),
        ("from ridgeline.ops.rms_norm import rms_norm\n", "defines neither a function rms_norm"),
    ],
)
def test_a_file_that_is_no_candidate(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "candidate.py"
    path.write_text(text)
    assert main(["bench", "kernel", str(path), "--op", "rms_norm"]) == 2 and message in capsys.readouterr().err
    assert main(["bench", "kernel", str(tmp_path / "none.py"), "--op", "rms_norm"]) == 2


@pytest.mark.parametrize("name", sorted(ops.all_ops()))
def test_what_runs_now_has_no_fault_but_that_it_is_not_new(name: str) -> None:
    op = ops.all_ops()[name]
    checked = 0
    for case in [case for case in op.cases if not case.timed][:4]:
        for dtype in [dtype for dtype in case.dtypes if dtype in ("float32", "bfloat16") and dtype in op.tolerance]:
            args, _ = op.inputs(torch.Generator().manual_seed(0), getattr(torch, dtype), "cpu", **case.sizes)
            current = op.choose(Site("cpu", getattr(torch, dtype), args[0].shape[-1]))
            found = candidate.check(op, Implementation("candidate", current.function, current.supports), case, dtype, "cpu", 7)
            assert [fault.kind for fault in found] == ["silent fallback"], found
            checked += 1
    assert checked
