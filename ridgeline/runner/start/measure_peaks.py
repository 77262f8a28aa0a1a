"""Measures this machine's peaks: read bandwidth, GEMM rate by dtype, and the cost of a launch.

Read bandwidth is a sum over a buffer larger than any cache; the GEMM rate a large square product of random data. Each
figure is a piece of a few hundredths of a second, so that an engine can measure in moments without work (PeakMeter). On a
GPU the buffers come from a pool of their own, which is given back: what the engine has reserved stays as it is.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from ridgeline.errors import ConfigError
from ridgeline.ops.cpu import native
from ridgeline.ops.cpu.matrix import Matrix, Part
from ridgeline.ops.linear.gguf_blocks import block_linear_native
from ridgeline.process import platform
from ridgeline.process.log import get_logger
from ridgeline.roofline.peaks import MachineKey, MachinePeaks, cached_peaks, remember

logger = get_logger("peaks")

MATRIX = {"cuda": 8192, "cpu": 1024}         # side of the square product
BUFFER = {"cuda": 2**32, "cpu": 2**29}       # bytes that are read
# Products of a CPU with packed weights, by the name of their width: a type of block, and its bytes for 32 weights.
PACKED = {"int4": ("Q4_0", 18), "int8": ("Q8_0", 34)}
PACKED_ROWS = 64                             # of activations: as many as share an unpacked tile, several times
_SPARE = 2**30                               # bytes of a GPU that measuring leaves alone
_AGAIN_SECONDS = 600.0                       # between two measurements, however often the peaks are beaten


def machine_key(device: str) -> MachineKey:
    if device == "cuda":
        return MachineKey(torch.cuda.get_device_name(), f"cuda{_driver_version()}", torch.__version__)
    return MachineKey(f"{platform.cpu_name()} x{torch.get_num_threads()}", "", torch.__version__)


def machine_peaks(device: str, again: bool = False) -> MachinePeaks:
    """The peaks of this device, from the cache directory if they were measured before."""
    key = machine_key(device)
    known = cached_peaks(key)
    if known is not None and not again and _rates_on(device) <= known.flops_s.keys():
        return known
    meter = PeakMeter(device, key, known)
    while meter.prepare():
        pass
    assert meter.peaks is not None
    return meter.peaks


class PeakMeter:
    """Measures piece by piece, whenever there is a moment; then remembers."""

    def __init__(self, device: str, key: MachineKey | None = None, known: MachinePeaks | None = None) -> None:
        self._device = device
        self._key = key or machine_key(device)
        self._known = known
        self.peaks = known
        self._pieces = _pieces(device)
        self._found: dict[str, float] = {}
        self._measured_at = -_AGAIN_SECONDS
        self._settled = False                            # measuring again found nothing better

    @classmethod
    def remembering(cls, device: str) -> PeakMeter:
        """One that has nothing to do where the peaks are known."""
        key = machine_key(device)
        meter = cls(device, key, cached_peaks(key))
        if meter.peaks is not None and _rates_on(device) <= meter.peaks.flops_s.keys():
            meter._pieces = iter(())
        return meter

    @property
    def device(self) -> str:
        """Its name."""
        return self._key.device

    def prepare(self) -> bool:
        """Measure one figure more. False: everything is known."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        if self._device == "cuda" and torch.cuda.mem_get_info()[0] < 2 * _SPARE:
            # The allocator would give back what steps have reserved before it gave up.
            logger.info("no GPU memory is left to measure peaks; the data sheet's are used")
            self._pieces = iter(())
            return False
        name, measure = piece
        try:
            with _own_memory(self._device) if name != "launch" else torch.inference_mode():      # a graph has its own
                self._found[name] = measure()
        except Exception as error:                       # no memory for it, no kernel for this dtype: no reason to end
            logger.debug("%s was not measured: %s", name, error)
        if name == "launch":                             # the last
            self._finish()
        return True

    def beaten(self) -> None:
        """A step was faster than the peaks allow: something else was running when they were measured."""
        if not self._settled and time.monotonic() - self._measured_at > _AGAIN_SECONDS:
            self._known, self._pieces = self.peaks, _pieces(self._device)
            self._measured_at = time.monotonic()

    def _finish(self) -> None:
        self._measured_at = time.monotonic()
        rates = {name: rate for name, rate in self._found.items() if name not in ("read", "launch", "host launch")}
        if "float32" not in rates or not {"read", "launch"} <= self._found.keys():
            return
        when = f"{time.strftime('%Y-%m-%d', time.gmtime())}, torch {torch.__version__}"
        new = MachinePeaks(
            self._key.device, self._found["read"], rates, self._found["launch"], when,
            self._found.get("host launch", self._found["launch"]), self._key.driver, self._key.torch,
        )
        self.peaks = new if self._known is None else self._known.best(new)
        self._settled = self._known is not None and not self._is_better(new)
        try:
            remember(self._key, self.peaks)
        except (OSError, ConfigError) as error:          # the next engine measures again, and this one goes on
            logger.info("the measured peaks could not be saved: %s", error)
        logger.info(
            "measured peaks: read %.1f GB/s, %s; launch %.1f µs", self.peaks.read_bytes_s / 1e9,
            ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in self.peaks.flops_s.items()),
            self.peaks.launch_s * 1e6,
        )

    def _is_better(self, new: MachinePeaks) -> bool:
        """Noticeably, in anything. Else a model lives in the caches, and no measurement of memory explains it."""
        assert self._known is not None
        known = self._known
        faster = any(rate > 1.02 * known.flops_s.get(dtype, 0.0) for dtype, rate in new.flops_s.items())
        return faster or new.read_bytes_s > 1.02 * known.read_bytes_s


def read_bandwidth(device: str = "cpu") -> float:
    """Bytes per second that can be read: the sum over a buffer larger than any cache."""
    size = _buffer_bytes(device)
    buffer = torch.ones(size // 4, device=device)
    seconds = _times(buffer.sum, device, 5)
    if device == "cuda":                                 # in one piece or row by row, whichever reads faster
        seconds += _times(buffer.sum, device, 5, calls=4)
        seconds += _times(lambda: buffer.view(-1, 2**14).sum(1), device, 5, calls=4)
    return size / min(seconds)


def _pieces(device: str) -> Iterator[tuple[str, Callable[[], float]]]:
    yield "read", lambda: read_bandwidth(device)
    if device == "cuda":
        for dtype in ("bfloat16", "float16", "float32"):
            yield dtype, partial(_matrix_rate, device, getattr(torch, dtype))
        yield "float8_e4m3fn", _fp8_rate
        yield "int8", _int8_rate
        yield "host launch", _host_launch_time
    else:
        for dtype in platform.cpu_fast_dtypes():
            yield dtype, partial(_matrix_rate, device, getattr(torch, dtype))
        for name in _rates_on(device):
            yield name, partial(_packed_rate, *PACKED[name])
    yield "launch", lambda: _launch_time(device)


def _rates_on(device: str) -> set[str]:
    """Of packed products, which older files of peaks do not have."""
    return set(PACKED) if device == "cpu" and native.library() is not None else set()


def _buffer_bytes(device: str) -> int:
    """What is there of the wanted size, in halves."""
    size = BUFFER[device]
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else platform.available_memory() // 2
    while size > 2**26 and size > free - (_SPARE if device == "cuda" else 0):
        size //= 2
    return size


def _launch_time(device: str, calls: int = 100) -> float:
    """Of the smallest operation; on a GPU as part of a CUDA graph, without the host's share."""
    tiny = torch.zeros(16, device=device)
    if device != "cuda":
        return min(_times(lambda: tiny.add_(1), device, 20, calls))
    tiny.add_(1)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):                      # torch.cuda.graph() would empty the allocator's cache first
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(calls):
            tiny.add_(1)
        graph.capture_end()
    return min(_times(graph.replay, device, 10)) / calls


def _host_launch_time(calls: int = 200) -> float:
    """Of the smallest operation on the host, which does not wait for the device."""
    tiny = torch.zeros(16, device="cuda")
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            tiny.add_(1)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def _matrix_rate(device: str, dtype: torch.dtype) -> float:
    side = MATRIX[device] // (2 if device == "cuda" and dtype == torch.float32 else 1)       # no matrix units: slow
    # Random data: zeros and ones take less power, and a GPU then keeps a higher clock than it can with real ones.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        calls = 4 if device == "cuda" else 1
        return 2 * side**3 / min(_times(lambda: torch.mm(a, b, out=out), device, 5, calls))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _packed_rate(kind: str, block: int) -> float:
    """With activations in 8 bits, by the native kernels."""
    side = MATRIX["cpu"]
    part = Part(kind, side, side)
    part.put_blocks(torch.full((side, side // 32 * block), 0x33, dtype=torch.uint8))     # their scale is 0.22
    matrix, x = Matrix([part]), torch.ones(PACKED_ROWS, side)
    # Calls of half a millisecond: of many, one has all cores for itself, on a busy machine too.
    return 2 * PACKED_ROWS * side**2 / min(_times(lambda: block_linear_native(x, matrix, integers=True), "cpu", 80))


def _fp8_rate() -> float:
    """e4m3 with a scale for each whole matrix, results in bfloat16."""
    side = MATRIX["cuda"]
    a, b = (torch.randn(side, side, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> Any:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * side**3 / min(_times(product, "cuda", 5, 4))


def _int8_rate() -> float:
    side = MATRIX["cuda"]
    a, b = (torch.randint(-127, 128, (side, side), device="cuda", dtype=torch.int8) for _ in range(2))
    return 2 * side**3 / min(_times(lambda: torch._int_mm(a, b.t()), "cuda", 5, 4))


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


@contextmanager
def _own_memory(device: str) -> Iterator[None]:
    """What is allocated inside leaves the allocator with it."""
    with torch.inference_mode(), torch.cuda.use_mem_pool(torch.cuda.MemPool()) if device == "cuda" else nullcontext():
        yield


def _driver_version() -> str:
    """The newest CUDA that the driver knows, as its interface counts: 13000 is 13.0."""
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):              # torch sees a GPU, so it is there, if perhaps by another name
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return str(version.value)
