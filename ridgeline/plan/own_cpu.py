"""This machine's CPU as the engine knows it: the best peaks ever measured here, so that a busy moment does not lower them."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

from ridgeline.process import platform
from ridgeline.roofline.peaks import MachineKey, cached_peaks
from ridgeline.sizes.hardware import Device

PACKED = ("int4", "int8")            # rates of the native kernels, which only an engine measures


def best_known(measured: Device) -> Device:
    """With the peaks that an engine has remembered, where those are better than what was measured just now. A machine that is
    busy now stays called busy: it may have been so each time."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return measured
    peaks = cached_peaks(MachineKey(f"{platform.cpu_name()} x{platform.cpu_count()}", "", version))
    if peaks is None:
        return measured
    packed = {name: rate for name, rate in peaks.flops_s.items() if name in PACKED}
    return replace(
        measured, bandwidth=max(measured.bandwidth, peaks.read_bytes_s),
        flops={"float32": max(measured.rate("float32"), peaks.rate("float32"))} | packed,
    )
