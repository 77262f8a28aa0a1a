"""The device of a benchmark: its kind, and the name and limits of the GPU that torch uses (gpus/)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ridgeline.gpus.nvml import facts
from ridgeline.runner.start.gpu_names import gpu_names


def device_kind(options: Mapping[str, Any]) -> str:
    """Where an engine with these options will run."""
    asked: str = options.get("device", "auto")
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def gpu_facts() -> dict[str, Any]:
    """The GPU's name and limits; empty without one."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    known: dict[str, Any] = {
        "name": properties.name, "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
    }
    return facts(gpu_names()) | known
