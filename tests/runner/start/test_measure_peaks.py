"""A machine's peaks: measured in pieces, remembered by device, driver and torch, measured again when they are beaten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.ops.cpu import native
from ridgeline.process import platform
from ridgeline.roofline.peaks import MachineKey, MachinePeaks, cached_peaks, remember
from ridgeline.runner.start import measure_peaks

H200 = MachinePeaks("NVIDIA H200", 4.38e12, {"bfloat16": 793e12, "float32": 50e12}, 1e-6, "then", 4e-6)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.library()                                     # from the usual cache
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setitem(measure_peaks.MATRIX, "cpu", 32)
    monkeypatch.setitem(measure_peaks.BUFFER, "cpu", 2**16)


def test_peaks_are_measured_once_and_remembered(tmp_path: Path) -> None:
    first = measure_peaks.machine_peaks("cpu")
    assert first.read_bytes_s > 0 and first.rate("float32") > 0 and first.rate("float64") == first.rate("float32")
    assert first.launch_s > 0 and first.host_launch_s > 0 and first.peaks("float32").ridge > 0
    assert measure_peaks.machine_peaks("cpu") == first
    [path] = tmp_path.glob("peaks-*.json")
    path.write_text("{")
    assert measure_peaks.machine_peaks("cpu").device == first.device             # cut short: measured again


@pytest.mark.skipif(native.library() is None, reason="no native kernels")
def test_peaks_without_the_rates_of_packed_products_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older engine has remembered them."""
    first = measure_peaks.machine_peaks("cpu")
    assert {"int4", "int8"} <= first.flops_s.keys() and min(first.flops_s.values()) > 0
    remember(measure_peaks.machine_key("cpu"), replace(first, flops_s={"float32": 1e18}))
    again = measure_peaks.PeakMeter.remembering("cpu")
    while again.prepare():
        pass
    assert again.peaks is not None and {"int4", "int8"} <= again.peaks.flops_s.keys() and again.peaks.rate("float32") == 1e18
    monkeypatch.setattr(native, "library", lambda: None)                 # without a compiler there are none
    remember(measure_peaks.machine_key("cpu"), replace(first, flops_s={"float32": 1e18}))
    assert not measure_peaks.PeakMeter.remembering("cpu").prepare()


def test_another_driver_or_torch_is_another_machine(tmp_path: Path) -> None:
    key = MachineKey("NVIDIA H200", "cuda13000", "2.11.0+cu130")
    remember(key, H200)
    assert cached_peaks(key) == H200
    for other in (replace(key, driver="cuda12080"), replace(key, torch="2.13.0"), replace(key, device="NVIDIA H100")):
        assert cached_peaks(other) is None
    assert [path.name for path in tmp_path.iterdir()] == ["peaks-NVIDIA-H200-cuda13000-torch2.11.0-cu130.json"]


def test_an_engine_measures_in_its_spare_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = measure_peaks.PeakMeter.remembering("cpu")
    assert meter.peaks is None
    packed = 2 if native.library() is not None else 0
    pieces, wanted = 0, 2 + len(platform.cpu_fast_dtypes()) + packed     # read, each dtype, packed products, launch
    while meter.prepare():
        pieces += 1
        assert (meter.peaks is not None) == (pieces == wanted)
    assert meter.peaks is not None and not meter.prepare()
    again = measure_peaks.PeakMeter.remembering("cpu")
    assert again.peaks == meter.peaks and not again.prepare()            # it is known: nothing to do
    # A step was faster than these peaks allow: they are measured again, and the better of each is kept.
    monkeypatch.setattr(measure_peaks, "read_bandwidth", lambda device="cpu": 1.0)
    monkeypatch.setattr(measure_peaks, "_matrix_rate", lambda device, dtype: 1e18)
    monkeypatch.setattr(measure_peaks, "_packed_rate", lambda kind, block: 1e18)
    monkeypatch.setattr(measure_peaks, "_launch_time", lambda device: 1e-9)
    again.beaten()
    while again.prepare():
        pass
    assert again.peaks is not None
    assert again.peaks.read_bytes_s == meter.peaks.read_bytes_s and again.peaks.rate("float32") == 1e18
    again.beaten()
    assert not again.prepare()                                           # not every moment
    monkeypatch.setattr(measure_peaks, "_AGAIN_SECONDS", -1.0)
    again.beaten()
    while again.prepare():
        pass
    again.beaten()
    assert not again.prepare()                                           # nothing better was found: it has settled


def test_peaks_that_cannot_be_remembered_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(measure_peaks, "remember", no_room)
    assert measure_peaks.machine_peaks("cpu").read_bytes_s > 0


def test_what_cannot_be_measured_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measure_peaks, "read_bandwidth", no_memory)
    meter = measure_peaks.PeakMeter.remembering("cpu")
    while meter.prepare():
        pass
    assert meter.peaks is None                                           # nothing to divide by, and nothing remembered
    assert cached_peaks(measure_peaks.machine_key("cpu")) is None
