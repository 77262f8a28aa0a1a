"""The GPU that torch uses: its name and limits, and its clocks and power during a measurement (`nvidia_smi.py`)."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.bench.lab.nvidia_smi import SmiLog, facts


def gpu_facts() -> dict[str, Any]:
    """The GPU's name and limits; empty without one."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    known: dict[str, Any] = {
        "name": properties.name, "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
    }
    return facts(torch_gpus()) | known


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
