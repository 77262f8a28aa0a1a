"""Reading a device trace: busy and idle time, steps, and the time of every kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.bench import idle
from ridgeline.bench.workload.bench_engine import Engine

BASE = 1_700_000_000_000_000_000     # nanoseconds
STEP_US = 1000.0


def event(category: str, name: str, start: float, duration: float, correlation: int) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {"correlation": correlation}}


def made_trace(steps: int) -> dict[str, Any]:
    """Per step: two kernels that overlap, a gap of 10 µs, a third; then 40 µs until the next. The host is a step ahead."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {}}]
    for step in range(steps):
        start = (step + 1) * STEP_US
        for number, (name, begin, duration) in enumerate(
            (("nvjet_gemm", 0, 500), ("_rms_norm_kernel", 450, 100), ("_paged_attention_kernel", 560, 400))
        ):
            correlation = 10 * step + number
            events.append(event("cuda_runtime", "cudaLaunchKernel", step * STEP_US + 5 + number, 2, correlation))
            events.append(event("kernel", name, start + begin, duration, correlation))
    return {"traceEvents": events, "baseTimeNanoseconds": BASE}


def begins(steps: int) -> list[int]:
    return [BASE + int(step * STEP_US * 1e3) for step in range(steps)]


def test_idle_time_is_what_no_interval_covers() -> None:
    found = idle.analyse(idle.device_work(made_trace(4), begins(4)), 4)
    span = 3 * STEP_US + 960
    assert found["span_us"] == span and found["busy_us_per_step"] == 950
    assert found["idle_share"] == pytest.approx(1 - 4 * 950 / span)
    assert found["idle_between_steps_share"] == pytest.approx(3 * 40 / span)
    assert found["launches_per_step"] == 3 and found["steps_seen"] == 4
    assert [row["name"] for row in found["kernels"]] == ["nvjet_gemm", "_paged_attention_kernel", "_rms_norm_kernel"]
    # The norm begins while the product runs: only what lies behind the product's end is its own.
    assert found["us_per_step_by_part"] == {"linears and head": 500, "norms": 50, "attention": 400}
    assert (found["kernels"][2]["median_own_us"], found["kernels"][2]["median_us"]) == (50, 100)
    page = idle.text(found, 2)
    assert "3.0 launches a step" in page and "MISSED" in page and "1 more" in page


def test_a_trace_without_host_times_says_nothing_of_steps() -> None:
    found = idle.analyse(idle.device_work(made_trace(2)), 2)
    assert found["idle_between_steps_share"] is None and "between steps unknown" in idle.text(found, 5)


def test_a_trace_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(made_trace(3)))
    assert main(["bench", "idle", "--trace", str(path), "--steps", "3"]) == 0
    assert "_paged_attention_kernel" in capsys.readouterr().out


def test_an_empty_trace_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    assert main(["bench", "idle", "--trace", str(tmp_path / "trace.json")]) == 2
    assert "no device kernels" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "idle", "--shape", "llama-3.2-1b"]) == 2
    assert "--trace FILE" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "part"), [
    ("nvjet_tst_128x64_64x8_1x2_h_bz_splitK_TNT", "linears and head"), ("_gemv_kernel", "linears and head"),
    ("_paged_attention_kernel", "attention"), ("flash_fwd_splitkv_kernel", "attention"), ("_rms_norm_kernel", "norms"),
    ("Memcpy DtoH (Device -> Pinned)", "copies"), ("_gated_activation_kernel", "activation"),
    ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
])
def test_kernels_belong_to_parts(name: str, part: str) -> None:
    assert idle.part_of(name) == part


def test_decode_steps_are_timed_and_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with a made trace in place of the device's: all requests decode in every step that counts."""
    steps, seen = 5, []

    def traced(engine: Engine, steps: int, path: Path) -> list[int]:
        for _ in range(steps):
            seen.append(len(engine.core.step()))
        path.write_text(json.dumps(made_trace(steps)))
        return begins(steps)

    monkeypatch.setattr(idle, "_traced", traced)
    model = str(write_model(tmp_path / "tiny"))
    engine = Engine(model, load_format="dummy", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=512, device="cpu")
    found = idle.profile_decode(engine, 3, 40, steps)
    assert seen == [3] * steps and found["step_ms"] > 0 and not engine.core.has_work
