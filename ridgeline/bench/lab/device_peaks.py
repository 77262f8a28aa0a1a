"""The device kind that an engine will use, and that device's peak rates (measured by runner/start/measure_peaks)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.runner.start.measure_peaks import machine_peaks, read_bandwidth

__all__ = ["MachinePeaks", "device_kind", "machine_peaks", "read_bandwidth"]


def device_kind(options: Mapping[str, Any]) -> str:
    """Where an engine with these options will run."""
    asked: str = options.get("device", "auto")
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
