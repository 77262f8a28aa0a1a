"""What chips promise: memory, bandwidth, matrix rates by number format, links. Data sheets, dense rates, no sparsity.

A format that is not listed for a chip is not native to its matrix units: weights can still be stored in it (fewer bytes),
but GEMMs run in the format in `Device.wide`. The CPU is not in the table: it is measured.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ridgeline.errors import ConfigError
from ridgeline.process import platform

GB, TB, TERA = 1e9, 1e12, 1e12


@dataclass(frozen=True, slots=True)
class Link:
    """What two devices of one machine say to each other, each way, and how long the shortest word takes."""

    bandwidth: float                 # bytes/s of one device, in one direction
    latency: float                   # seconds of one collective step


# NCCL's all-reduce of a few kilobytes takes about 10 µs over NVLink and 25 over PCIe, whatever the number of ranks here.
NVLINK2, NVLINK3 = Link(150 * GB, 10e-6), Link(300 * GB, 10e-6)
NVLINK4, NVLINK5 = Link(450 * GB, 10e-6), Link(900 * GB, 10e-6)
XGMI = Link(448 * GB, 12e-6)         # MI300X: seven links of 64 GB/s
PCIE3, PCIE4, PCIE5 = Link(16 * GB, 25e-6), Link(32 * GB, 25e-6), Link(64 * GB, 25e-6)
INFINIBAND = Link(50 * GB, 20e-6)    # between machines: one NDR port of 400 Gbit/s for each device; the latency is assumed
NO_LINK = Link(float("inf"), 0.0)    # there is only one of them


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory: float                    # bytes, as the data sheet has them
    bandwidth: float                 # bytes/s
    flops: dict[str, float]          # dense FLOP/s of the matrix units, by format; see precision.FORMATS
    link: Link
    sparse: bool = False             # 2:4 sparsity doubles the rates
    kind: str = "cuda"               # as the engine calls it; devices of other kinds can be planned, not used
    torch_names: tuple[str, ...] = field(default=())     # what torch calls it
    inline_ecc: bool = False         # error correction takes a sixteenth of the memory itself, as on servers' GDDR6
    hopper: bool = False             # TMA and wgmma, for which many kernels are written
    taken: float = 0.0               # of a measured CPU: the share of its cores that other programs had meanwhile
    architecture: str = ""           # of a CPU, where it is known

    @property
    def usable(self) -> int:
        """Bytes that the driver reports. Data sheets of GPUs mean GiB; ECC and firmware keep about a hundredth, and of
        Apple's unified memory a GPU may take three quarters."""
        if self.kind == "cpu":
            return int(self.memory)
        return int(self.memory / GB * 2**30 * (0.75 if self.kind == "apple" else 15 / 16 if self.inline_ecc else 0.99))

    @property
    def wide(self) -> str:
        """The format that GEMMs run in where nothing narrower is native."""
        return "bfloat16" if "bfloat16" in self.flops else "float16" if "float16" in self.flops else "float32"

    def rate(self, format: str) -> float:
        """FLOP/s of GEMMs whose operands are in this format; in the wide one where it is not native."""
        return self.flops.get(format, self.flops[self.wide])

    def ridge(self, format: str) -> float:
        """FLOPs per byte at which computing and reading take equally long."""
        return self.rate(format) / self.bandwidth


def _rates(**tera: float) -> dict[str, float]:
    return {name: rate * TERA for name, rate in tera.items()}


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("V100", 32 * GB, 0.9 * TB, _rates(float16=125, float32=15.7), NVLINK2,
               torch_names=("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "Tesla V100-PCIE-32GB")),
        Device("A100-40GB", 40 * GB, 1.555 * TB, _rates(bfloat16=312, float16=312, int8=624, float32=19.5), NVLINK3, True,
               torch_names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
        Device("A100", 80 * GB, 2.039 * TB, _rates(bfloat16=312, float16=312, int8=624, float32=19.5), NVLINK3, True,
               torch_names=("NVIDIA A100-SXM4-80GB",)),
        Device("A100-PCIe", 80 * GB, 1.935 * TB, _rates(bfloat16=312, float16=312, int8=624, float32=19.5), PCIE4, True,
               torch_names=("NVIDIA A100 80GB PCIe",)),
        Device("H100", 80 * GB, 3.35 * TB, _rates(bfloat16=989, float16=989, fp8=1979, int8=1979, float32=67), NVLINK4,
               True, torch_names=("NVIDIA H100 80GB HBM3",), hopper=True),
        Device("H100-PCIe", 80 * GB, 2.0 * TB, _rates(bfloat16=756, float16=756, fp8=1513, int8=1513, float32=51), PCIE5,
               True, torch_names=("NVIDIA H100 PCIe",), hopper=True),
        Device("H100-NVL", 94 * GB, 3.9 * TB, _rates(bfloat16=835, float16=835, fp8=1671, int8=1671, float32=60), PCIE5,
               True, torch_names=("NVIDIA H100 NVL",), hopper=True),
        Device("H200", 141 * GB, 4.8 * TB, _rates(bfloat16=989, float16=989, fp8=1979, int8=1979, float32=67), NVLINK4,
               True, torch_names=("NVIDIA H200",), hopper=True),
        Device("GH200", 96 * GB, 4.0 * TB, _rates(bfloat16=989, float16=989, fp8=1979, int8=1979, float32=67), NVLINK4,
               True, torch_names=("NVIDIA GH200 480GB",), hopper=True),
        Device("B200", 180 * GB, 8.0 * TB, _rates(bfloat16=2250, float16=2250, fp8=4500, int8=4500, fp4=9000, float32=80),
               NVLINK5, True, torch_names=("NVIDIA B200",)),
        Device("MI300X", 192 * GB, 5.3 * TB, _rates(bfloat16=1307, float16=1307, fp8=2615, int8=2615, float32=163), XGMI,
               True, kind="rocm", torch_names=("AMD Instinct MI300X", "AMD Instinct MI300X OAM")),
        Device("T4", 16 * GB, 0.32 * TB, _rates(float16=65, int8=130, float32=8.1), PCIE3, torch_names=("Tesla T4",),
               inline_ecc=True),
        Device("A10", 24 * GB, 0.6 * TB, _rates(bfloat16=125, float16=125, int8=250, float32=31.2), PCIE4, True,
               torch_names=("NVIDIA A10",), inline_ecc=True),
        Device("L4", 24 * GB, 0.3 * TB, _rates(bfloat16=121, float16=121, fp8=242, int8=242, float32=30), PCIE4, True,
               torch_names=("NVIDIA L4",), inline_ecc=True),
        Device("L40", 48 * GB, 0.864 * TB, _rates(bfloat16=181, float16=181, fp8=362, int8=362, float32=90.5), PCIE4, True,
               torch_names=("NVIDIA L40",), inline_ecc=True),
        Device("L40S", 48 * GB, 0.864 * TB, _rates(bfloat16=362, float16=362, fp8=733, int8=733, float32=91.6), PCIE4, True,
               torch_names=("NVIDIA L40S",), inline_ecc=True),
        Device("RTX6000Ada", 48 * GB, 0.96 * TB, _rates(bfloat16=364, float16=364, fp8=728, int8=728, float32=91.1), PCIE4, True,
               torch_names=("NVIDIA RTX 6000 Ada Generation",), inline_ecc=True),
        # GeForce: 16-bit and fp8 products with sums in float32, which run at half the rate of those with narrower sums.
        Device("RTX3090", 24 * GB, 0.936 * TB, _rates(bfloat16=71, float16=71, int8=284, float32=35.6), PCIE4, True,
               torch_names=("NVIDIA GeForce RTX 3090",)),
        Device("RTX4080", 16 * GB, 0.717 * TB, _rates(bfloat16=97.5, float16=97.5, fp8=195, int8=390, float32=48.7), PCIE4,
               True, torch_names=("NVIDIA GeForce RTX 4080",)),
        Device("RTX4090", 24 * GB, 1.008 * TB, _rates(bfloat16=165, float16=165, fp8=330, int8=661, float32=82.6), PCIE4,
               True, torch_names=("NVIDIA GeForce RTX 4090",)),
        Device("RTX5090", 32 * GB, 1.792 * TB, _rates(bfloat16=210, float16=210, fp8=419, int8=838, fp4=1676, float32=105),
               PCIE5, True, torch_names=("NVIDIA GeForce RTX 5090",)),
        # Apple: the rate is the GPU's, in 16 and 32 bits.
        Device("M1", 16 * GB, 68 * GB, _rates(float16=2.6, float32=2.6), NO_LINK, kind="apple"),
        Device("M1Max", 64 * GB, 400 * GB, _rates(float16=10.4, float32=10.4), NO_LINK, kind="apple"),
        Device("M2Ultra", 192 * GB, 800 * GB, _rates(float16=27.2, float32=27.2), NO_LINK, kind="apple"),
        Device("M3Max", 128 * GB, 400 * GB, _rates(bfloat16=14.2, float16=14.2, float32=14.2), NO_LINK, kind="apple"),
        Device("M3Ultra", 512 * GB, 819 * GB, _rates(bfloat16=28.4, float16=28.4, float32=28.4), NO_LINK, kind="apple"),
        Device("M4", 32 * GB, 120 * GB, _rates(bfloat16=4.3, float16=4.3, float32=4.3), NO_LINK, kind="apple"),
        Device("M4Max", 128 * GB, 546 * GB, _rates(bfloat16=18.4, float16=18.4, float32=18.4), NO_LINK, kind="apple"),
    )
}


def find_device(name: str) -> Device:
    """By the table's name, however it is written; `cpu` is this machine's, measured now."""
    wanted = _plain(name)
    if wanted == "cpu":
        return measure_cpu()
    found = {_plain(each): device for each, device in DEVICES.items()}.get(wanted) or data_sheet(name)
    if found is None:
        raise ConfigError(f"unknown GPU {name!r}; known are {', '.join(DEVICES)}, and cpu; describe another one with "
                          "--bandwidth GB/s --memory GB --tflops N")
    return found


def data_sheet(torch_name: str) -> Device | None:
    """The table's entry for a device as torch names it, such as "NVIDIA H200". The whole name: what only begins alike
    (laptop chips, "H200 NVL", an L40 beside an L4) is another chip with other rates."""
    named = {each.lower(): device for device in DEVICES.values() for each in device.torch_names}
    return named.get(torch_name.strip().lower())


def _plain(name: str) -> str:
    """Without the words that people leave out: "NVIDIA GeForce RTX 4090" is a 4090."""
    found = "".join(character for character in name.lower() if character.isalnum())
    for word in ("nvidia", "geforce", "rtx"):
        found = found.removeprefix(word)
    return found


# ── the CPU, measured ────────────────────────────────────────────────────────────────────────────────────────────────

_READ_BYTES = 1 << 28                # per thread: no cache holds it
_SIDE = 1024                         # of the matrices


@functools.cache
def measure_cpu() -> Device:
    """Bytes that all cores read per second, and float32 FLOPs of numpy's matrix product; best of a few, a second in all."""
    cores = platform.cpu_count()
    arrays = [np.ones(_READ_BYTES // 8) for _ in range(cores)]

    def read() -> None:
        threads = [threading.Thread(target=array.sum) for array in arrays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    matrix = np.ones((_SIDE, _SIDE), np.float32)
    before = platform.core_seconds()
    bandwidth = cores * _READ_BYTES / _best(read)
    rate = 2 * _SIDE**3 / _best(lambda: matrix @ matrix)
    return Device("CPU", platform.available_memory(), bandwidth, {"float32": rate}, NO_LINK, kind="cpu",
                  torch_names=(f"{os.uname().machine}, {cores} cores",), taken=platform.core_seconds().others_since(before),
                  architecture=os.uname().machine)


def described(
    device: Device | None, bandwidth: float | None, memory: float | None, tflops: float | None, fp8_tflops: float | None
) -> Device:
    """One's own card, or a known one with other figures: GB/s, GB, and dense TFLOP/s in 16 bits and in fp8."""
    for name, value in (("--bandwidth", bandwidth), ("--memory", memory), ("--tflops", tflops), ("--fp8-tflops", fp8_tflops)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be above 0, got {value:g}")
    if device is None:
        if bandwidth is None or memory is None or tflops is None:
            raise ConfigError("a card that is not listed needs --bandwidth GB/s, --memory GB and --tflops N (dense, in 16 bits)")
        device = Device("own card", 0, 0, {}, PCIE4)
    flops = dict(device.flops)
    if tflops is not None:
        flops |= dict.fromkeys(("bfloat16", "float16"), tflops * TERA)
    if fp8_tflops is not None:
        flops["fp8"] = fp8_tflops * TERA
    return replace(
        device, bandwidth=device.bandwidth if bandwidth is None else bandwidth * GB,
        memory=device.memory if memory is None else memory * GB, flops=flops, torch_names=(),
    )


def _best(action: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        found.append(time.perf_counter() - begin)
    return min(found)
