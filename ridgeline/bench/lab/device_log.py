"""The GPU that torch uses: its name and limits (gpus/), and the name under which its clocks and power are logged."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.gpus.nvml import facts
from ridgeline.runner.start.gpu_names import gpu_names


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


def torch_gpus() -> list[str]:
    """For Watch; empty without a GPU."""
    return gpu_names()
