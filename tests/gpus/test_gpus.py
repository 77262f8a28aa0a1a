"""NVML through a stand-in library: what is read, what is left out, in which thread, and what the samples say."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.config import EngineConfig
from ridgeline.gpus import gpu_log, nvml
from ridgeline.gpus.clocks import SUMS, Clocks, sample, shown
from ridgeline.gpus.gpu_log import GpuLog, GpuSums, Sampler, clocks, summary
from ridgeline.gpus.nvml import Nvml, Reading, open_nvml
from ridgeline.runner.start.gpu_names import gpu_names

NO_PERMISSION, NOT_SUPPORTED = 4, 3
CAPPED = Reading(watts=692.0, limit_w=700.0, most_limit_w=700.0, sm_mhz=1275, max_sm_mhz=1980, memory_mhz=3201,
                 temperature_c=61, memory_used_mib=112_257.0, reasons=0x4)
FREE = Reading(watts=546.0, limit_w=700.0, most_limit_w=700.0, sm_mhz=1980, max_sm_mhz=1980, temperature_c=43, reasons=0)
IDLE = Reading(watts=120.0, limit_w=700.0, most_limit_w=700.0, sm_mhz=345, max_sm_mhz=1980, temperature_c=35, reasons=0x1)


class StandIn:
    """A library as ctypes shows it: functions that write through pointers and return a status. `refused`: by name, the status."""

    def __init__(self, refused: dict[str, int] | None = None, lacks: tuple[str, ...] = ()) -> None:
        self.refused, self.lacks = refused or {}, lacks
        self.threads: set[int] = set()
        self.calls: list[str] = []
        self.read_often = threading.Event()
        self.numbers = {
            "nvmlDeviceGetCount_v2": 2, "nvmlDeviceGetPowerUsage": 692_000, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 61, "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
        }
        self.clocks = {"nvmlDeviceGetClockInfo": {1: 1275, 2: 3201}, "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 3201}}
        self.texts = {"nvmlDeviceGetName": b"NVIDIA H200", "nvmlSystemGetDriverVersion": b"570.1"}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml") or name in self.lacks:
            raise AttributeError(name)

        def call(*given: Any) -> int:
            self.threads.add(threading.get_ident())
            self.calls.append(name)
            if self.calls.count("nvmlDeviceGetPowerUsage") >= 3:
                self.read_often.set()
            if name in self.refused or "*" in self.refused:
                return self.refused.get(name, self.refused.get("*", 0))
            self._write(name, given)
            return 0

        return call

    def _write(self, name: str, given: tuple[Any, ...]) -> None:
        if name in self.numbers:
            given[-1]._obj.value = self.numbers[name]
        elif name in self.clocks:
            given[-1]._obj.value = self.clocks[name][given[1]]
        elif name in self.texts:
            ctypes.memmove(given[-2], self.texts[name] + b"\0", len(self.texts[name]) + 1)
        elif "GetHandle" in name:
            given[-1]._obj.value = 7
        elif name == "nvmlDeviceGetMemoryInfo":
            given[-1]._obj.used = 112_257 * 2**20
        elif name == "nvmlDeviceGetPowerManagementLimitConstraints":
            given[1]._obj.value, given[2]._obj.value = 200_000, 700_000


# -- the library -------------------------------------------------------------------------------------------------------


def test_a_reading_has_everything_in_plain_units() -> None:
    reader = open_nvml(lambda name: StandIn())
    assert reader is not None
    [gpu] = reader.handles(["GPU-1234"])
    assert reader.read(gpu) == CAPPED
    assert reader.facts(gpu) == {
        "name": "NVIDIA H200", "driver": "570.1", "power_limit_w": "700.00", "max_sm_clock_mhz": "1980",
        "max_memory_clock_mhz": "3201", "persistence": "Enabled",
    }


def test_a_gpu_is_found_by_index_or_uuid() -> None:
    library = StandIn(refused={"nvmlDeviceGetHandleByUUID": 6})
    assert len(Nvml(library).handles(["1", "GPU-unknown"])) == 1
    assert library.calls == ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID"]


def test_a_sample_asks_for_seven_values() -> None:
    """Each call gives Python's lock back and takes it again; what does not change is asked for once."""
    library = StandIn()
    reader = Nvml(library)
    [gpu] = reader.handles(["0"])
    first = reader.read(gpu)
    library.calls.clear()
    assert reader.read(gpu) == first and len(library.calls) == 7


def test_an_older_driver_has_an_older_name_for_the_reasons() -> None:
    reader = Nvml(StandIn(lacks=("nvmlDeviceGetCurrentClocksEventReasons",)))
    assert reader.read(reader.handles(["0"])[0]).reasons == 0x4


def test_what_may_not_be_read_is_none_and_the_rest_stays() -> None:
    reader = Nvml(StandIn(refused={"nvmlDeviceGetPowerUsage": NO_PERMISSION, "nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}))
    found = reader.read(reader.handles(["0"])[0])
    assert found.watts is None and found.memory_used_mib is None and found.sm_mhz == 1275
    assert sample([found]) is None, "half a sample would be a wrong mean"


def missing(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("load", [
    missing, lambda name: StandIn(refused={"nvmlInit_v2": 9}), lambda name: StandIn(lacks=("nvmlInit_v2",)),
], ids=["no library", "no driver", "another library"])
def test_without_a_driver_there_is_silence(load: Callable[[str], Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert open_nvml(load) is None and nvml.visible(load) == [] and nvml.facts(["0"], load) == {}
    with GpuLog(["0"], lambda: open_nvml(load)) as log:
        pass
    assert log.between((0, 1e12)) == {} and log.clocks((0, 1e12)) is None
    sums = GpuSums(["0"], lambda: open_nvml(load))
    sums.close()
    assert sums.values() == [] and capfd.readouterr() == ("", "")


def test_a_container_that_may_read_nothing_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_log, "ENGINE_SECONDS", 0.001)
    library = StandIn(refused=dict.fromkeys(("nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"), NO_PERMISSION))
    sums = GpuSums(["0"], lambda: Nvml(library))
    assert library.read_often.wait(60)
    sums.close()
    assert sums.values() == []


def test_the_gpus_that_a_server_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert nvml.visible(lambda name: StandIn()) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-5")
    assert nvml.visible(lambda name: StandIn()) == ["1", "GPU-5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert nvml.visible(lambda name: StandIn()) == []


@pytest.mark.parametrize(("given", "found"), [
    (None, [5]), ({}, [5]), ({"tensor_parallel_size": 2}, [0, 1]), ({"tensor_parallel_size": 16}, list(range(8))),
    ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, [5]),
])
def test_the_gpus_of_an_engine(given: dict[str, Any] | None, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Ray the process sees all GPUs of its machine, and those with the first numbers may be another program's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(uuid=f"uuid-{place}"))
    parallel = None if given is None else EngineConfig.of(**given).parallel
    assert gpu_names(parallel) == [f"GPU-uuid-{place}" for place in found]


# -- the thread --------------------------------------------------------------------------------------------------------


def test_the_driver_is_never_asked_on_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to open the library, not to sample, and not when the engine reads the sums."""
    monkeypatch.setattr(gpu_log, "ENGINE_SECONDS", 0.001)
    monkeypatch.setattr(gpu_log, "_LAST_SECONDS", 60.0)  # a busy machine may need more than one to end a thread
    library = StandIn()
    sums = GpuSums(["0"], lambda: open_nvml(lambda name: library))
    assert library.read_often.wait(60)
    sums.close()
    found = Clocks.of(sums.values())
    assert found is not None and found.samples >= 2 and (found.watts, found.sm_mhz, found.limited_by) == (692.0, 1275.0, "power")
    assert "nvmlInit_v2" in library.calls and threading.get_ident() not in library.threads and len(library.threads) == 1
    assert library.calls[-1] == "nvmlShutdown"


def test_without_gpus_there_is_no_thread() -> None:
    before = threading.enumerate()
    sampler = Sampler([], lambda when, readings: None, 0.001, lambda: pytest.fail("there is nothing to ask for"))
    sampler.start()
    assert not set(threading.enumerate()) - set(before)
    sampler.stop()


def test_a_log_keeps_what_was_read() -> None:
    library = StandIn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_log, "LOG_SECONDS", 0.001)
        with GpuLog(["0"], lambda: Nvml(library)) as log:
            assert library.read_often.wait(60)
    found = log.between((0, 1e12))
    assert found["samples"] >= 2 and found["limited_by"] == "power" and found["sm_clock_mean_mhz"] == 1275
    assert log.between((0, 1)) == {"samples": 0} and log.clocks((0, 1)) is None


# -- what samples say --------------------------------------------------------------------------------------------------


def test_samples_are_summed_up_over_a_stretch() -> None:
    hot = Reading(watts=None, limit_w=700.0, sm_mhz=1605, max_sm_mhz=1980, temperature_c=64, memory_mhz=3201, reasons=0x24)
    assert summary([[CAPPED], [hot], [IDLE]]) == {
        "samples": 3, "sm_clock_mhz": [345, 1605], "memory_clock_mhz": [3201, 3201], "power_w": [120.0, 692.0],
        "temperature_c": [35, 64], "memory_used_mib": [112_257.0, 112_257.0], "power_mean_w": 406.0,
        "throttle_reasons": ["software power cap", "software thermal slowdown"],
        "busy_power_w": 692.0, "sm_clock_mean_mhz": 1275, "max_sm_clock_mhz": 1980, "power_limit_w": 700.0,
        "power_capped": 1.0, "heat_capped": 0.0, "limited_by": "power",
    }
    assert summary([]) == {"samples": 0}
    assert summary([[CAPPED, FREE]], devices=2)["power_mean_w"] == 692.0 + 546.0


def test_the_slowest_gpu_speaks_for_all() -> None:
    found = clocks([[FREE, CAPPED], [CAPPED, FREE]])
    assert found is not None and (found.samples, found.sm_mhz, found.power_capped) == (2, 1275, 1.0)
    assert clocks([[IDLE], [IDLE, IDLE]]) is None, "an idle GPU has a low clock because it may"


@pytest.mark.parametrize(("bits", "power", "heat"), [
    (0x0, 0, 0), (0x2, 0, 0), (0x4, 1, 0), (0x80 | 0x8, 1, 0), (0x20, 0, 1), (0x40 | 0x8, 0, 1), (0x20 | 0x8, 0, 1), (0x8, 1, 0),
    (0x24, 1, 1),
])
def test_reasons_are_power_or_heat(bits: int, power: int, heat: int) -> None:
    row = sample([Reading(watts=600.0, limit_w=700.0, sm_mhz=1500, max_sm_mhz=1980, reasons=bits)])
    assert row is not None
    said = dict(zip(SUMS, row, strict=True))
    assert (said["power_capped"], said["heat_capped"]) == (power, heat)


def test_a_reason_counts_if_it_holds_mostly_and_lowers_the_clock() -> None:
    def limit(*readings: Reading) -> str:
        found = clocks([[each] for each in readings])
        assert found is not None
        return found.limited_by

    hardly = Reading(watts=699.0, limit_w=700.0, sm_mhz=1965, max_sm_mhz=1980, reasons=0x4)
    hot = Reading(watts=500.0, limit_w=700.0, sm_mhz=1200, max_sm_mhz=1980, temperature_c=88, reasons=0x20)
    assert limit(CAPPED, CAPPED, FREE) == "power" and limit(CAPPED, FREE, FREE) == "" and limit(hardly) == ""
    assert limit(hot) == "temperature"


def test_clocks_are_written_and_read_again() -> None:
    found = clocks([[CAPPED]])
    assert found is not None and Clocks.read(shown(found)) == found and shown(None) == {} and Clocks.read({}) is None
    assert shown(found)["line"] == "692 of 700 W, SM clock 1,275 of 1,980 MHz"
