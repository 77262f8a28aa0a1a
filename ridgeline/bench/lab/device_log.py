"""The GPU that torch uses: its name and limits, and its clocks and power during a measurement (`nvidia_smi.py`)."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.bench.lab.nvidia_smi import SmiLog, query


def gpu_facts() -> dict[str, Any]:
    """The GPU's name and limits; empty without one."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Any] = {
        "name": properties.name, "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
    }
    names = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem", "persistence_mode")
    line = query(names, torch_gpus())
    if line is not None:
        facts |= dict(zip(("driver", "power_limit_w", "max_sm_clock_mhz", "max_memory_clock_mhz", "persistence"), line,
                          strict=True))
    return facts


class DeviceLog(SmiLog):
    """`with DeviceLog() as log: …; log.between(begin, end)`, with times of `time.time()`."""

    def __init__(self) -> None:
        super().__init__(torch_gpus())


def torch_gpus() -> list[str]:
    """nvidia-smi's name of torch's first GPU; empty without a GPU."""
    if not torch.cuda.is_available():
        return []
    device = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return [device if device.startswith("GPU-") else f"GPU-{device}"] if device else ["0"]
