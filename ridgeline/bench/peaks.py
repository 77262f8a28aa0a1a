"""What this machine does at best, measured once and remembered: the two terms of the roofline, and a launch's own time.

Read bandwidth is a sum over a buffer larger than any cache; the matrix rate a large square product of random data.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ridgeline import platform

_MATRIX = {"cuda": 8192, "cpu": 1024}        # side of the square product
_BUFFER = {"cuda": 2**32, "cpu": 2**30}      # bytes that are read


@dataclass(frozen=True, slots=True)
class MachinePeaks:
    device: str                      # the device's name, as its maker calls it
    read_bytes_s: float
    flops_s: dict[str, float]        # by dtype
    launch_s: float                  # the least that any operation takes
    measured: str                    # when, and with which torch

    def rate(self, dtype: str) -> float:
        return self.flops_s.get(dtype, self.flops_s["float32"])


def machine_peaks(device: str, again: bool = False) -> MachinePeaks:
    """The peaks of this device, from the cache directory if they were measured before."""
    name = torch.cuda.get_device_name(0) if device == "cuda" else f"{platform.cpu_name()} x{torch.get_num_threads()}"
    path = platform.cache_dir() / f"peaks-{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json"
    if path.is_file() and not again:
        try:
            return MachinePeaks(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            pass                                         # cut short, or of another version: measure again
    peaks = measure(device, name)
    if device == "cuda":
        torch.cuda.empty_cache()                         # what follows may need all of the memory
    path.write_text(json.dumps(asdict(peaks), indent=1) + "\n")
    return peaks


def device_kind(options: Mapping[str, Any]) -> str:
    """Where an engine with these options will run."""
    asked: str = options.get("device", "auto")
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def measure(device: str, name: str) -> MachinePeaks:
    dtypes = ["bfloat16", "float16", "float32"] if device == "cuda" else list(platform.cpu_fast_dtypes())
    flops = {dtype: _matrix_rate(device, getattr(torch, dtype)) for dtype in dtypes}
    launch = _launch_time(device)
    when = f"{time.strftime('%Y-%m-%d', time.gmtime())}, torch {torch.__version__}"
    return MachinePeaks(name, read_bandwidth(device=device), flops, launch, when)


def read_bandwidth(size: int | None = None, device: str = "cpu") -> float:
    """Bytes per second that can be read: the sum over a buffer larger than any cache."""
    size = size or _BUFFER[device]
    buffer = torch.ones(size // 4, device=device)
    seconds = _times(buffer.sum, device, 5)
    if device == "cuda":                                 # in one piece or row by row, whichever reads faster
        seconds += _times(buffer.sum, device, 5, calls=4)
        seconds += _times(lambda: buffer.view(-1, 2**14).sum(1), device, 5, calls=4)
    return size / min(seconds)


def _launch_time(device: str, calls: int = 100) -> float:
    """Of the smallest operation; on a GPU as part of a recorded graph, without the host's share."""
    tiny = torch.zeros(16, device=device)
    if device != "cuda":
        return min(_times(lambda: tiny.add_(1), device, 20, calls))
    tiny.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            tiny.add_(1)
    return min(_times(graph.replay, device, 10)) / calls


def _matrix_rate(device: str, dtype: torch.dtype) -> float:
    side = _MATRIX[device]
    # Random data: zeros and ones take less power, and a GPU then keeps a higher clock than it can with real ones.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return 2 * side**3 / min(_times(lambda: torch.mm(a, b, out=out), device, 5, calls=4))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _times(call: Callable[[], Any], device: str, repeats: int, calls: int = 1) -> list[float]:
    """Seconds per call, after warm-up."""
    call()
    found = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        if device == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            for _ in range(calls):
                call()
            after.record()
            after.synchronize()
            found.append(before.elapsed_time(after) / 1e3 / calls)
        else:
            for _ in range(calls):
                call()
            found.append((time.perf_counter() - start) / calls)
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
