"""Planted traces: Chrome traces as torch's profiler writes them, each with one thing wrong, or nothing.

A trace is built step by step: kernels with their launches on the host, gaps where they were put, calls that block or
allocate, collectives, ranks. `expected` is the pattern that was planted; the empty string says that nothing was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verdict_cases import CAPPED, HARDLY, HOT

from ridgeline.roofline.facts import PartFacts

H200_FLOPS, H200_READ = 793e12, 4.38e12
MiB = 2**20


@dataclass
class Builder:
    """One rank's trace. Times in microseconds; `now` is the device's clock."""

    rank: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    now: float = 1000.0
    correlation: int = 0
    seconds: dict[str, float] = field(default_factory=dict)      # of the device, by kernel
    device: str = "cuda"

    def kernel(self, name: str, length: float, gap: float = 0.0, start: float | None = None, stream: int = 7) -> None:
        self.correlation += 1
        begin = self.now + gap if start is None else start
        launch = self.step_start + 0.5                   # the host is ahead, inside the step
        self.events.append(_event("cuda_runtime", "cudaLaunchKernel", launch, 0.1, correlation=self.correlation))
        self.events.append(_event("kernel", name, begin, length, correlation=self.correlation, stream=stream))
        self.seconds[name] = self.seconds.get(name, 0.0) + length * 1e-6
        if start is None:
            self.now = begin + length

    def op(self, name: str, length: float, gap: float = 0.0) -> None:
        """On a CPU."""
        self.events.append(_event("user_annotation", f"op:{name}", self.now + gap, length))
        self.seconds[name] = self.seconds.get(name, 0.0) + length * 1e-6
        self.now += gap + length

    def call(self, name: str, start: float, length: float) -> None:
        self.events.append(_event("cuda_runtime", name, start, length, correlation=-1))

    def phase(self, name: str, start: float, length: float) -> None:
        self.events.append(_event("user_annotation", f"phase:{name}", start, length))

    def memory(self, taken: int, total: int) -> None:
        self.events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": self.now,
                            "args": {"Bytes": taken, "Total Allocated": total}})

    def begin(self) -> None:
        self.step_start = self.now

    def end(self) -> None:
        self.events.append(_event("user_annotation", "step", self.step_start, self.now - self.step_start - 0.01))

    def document(self) -> dict[str, Any]:
        return {"traceEvents": self.events, "distributedInfo": {"rank": self.rank}}


def _event(category: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": args}


def build(step: Callable[[Builder, int], None], steps: int = 10, rank: int = 0) -> Builder:
    made = Builder(rank)
    for number in range(steps):
        made.begin()
        step(made, number)
        made.end()
    return made


def decode(
    made: Builder, product: float = 150.0, attention: float = 40.0, small: float = 6.0, gap: float = 0.5, layers: int = 16
) -> None:
    """A step of decodes: per layer four products, attention and three small kernels."""
    for _ in range(layers):
        made.kernel("triton_rms_norm_kernel", small, gap)
        made.kernel("nvjet_hsh_gemm", product, gap)
        made.kernel("_rotary_write_kernel", small, gap)
        made.kernel("decode_kernel", attention, gap)
        made.kernel("nvjet_hsh_gemm", product, gap)
        made.kernel("nvjet_hsh_gemm", 2 * product, gap)
        made.kernel("_gated_activation_kernel", small, gap)


@dataclass(frozen=True)
class PlantedTrace:
    name: str
    expected: str                    # the pattern that costs most; empty: none
    builders: list[Builder]
    # Of the parts, what the cost model would say: part -> (share of its time at the roof, of the matrix rate, computes).
    roofs: dict[str, tuple[float, float]] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)

    def costs(self) -> dict[str, PartFacts]:
        """At the given part of the roof; the second number is the part of the matrix rate that is reached."""
        parts = {"linears and head": ("gemm", "linear", "gemv"), "attention": ("decode_kernel", "attention")}
        found = {}
        for part, (at_roof, rate) in self.roofs.items():
            first = self.builders[0].seconds
            taken = sum(seconds for name, seconds in first.items() if any(word in name for word in parts[part]))
            floor = at_roof * taken
            computes = floor if rate >= at_roof else 0.0
            found[part] = PartFacts(0.0, 0, floor, rate * taken * H200_FLOPS, (at_roof if not computes else 0.2 * at_roof)
                                    * taken * H200_READ, computes)
        return found


GOOD = {"linears and head": (0.85, 0.6), "attention": (0.8, 0.1)}        # busy computing, as they should be


def _host_gap(length: float, phase: str) -> Callable[[Builder, int], None]:
    def step(made: Builder, number: int) -> None:
        made.phase(phase, made.now, length)
        made.now += length
        decode(made)

    return step


def _eager(kernel: float, gap: float) -> Callable[[Builder, int], None]:
    return lambda made, number: decode(made, product=kernel, attention=kernel, small=kernel / 2, gap=gap)


def _cpu_ops(length: float, gap: float) -> Callable[[Builder, int], None]:
    def step(made: Builder, number: int) -> None:
        for _ in range(30):
            made.op("rms_norm", length / 4, gap)
            made.op("block_linear", 4 * length, gap)
            made.op("paged_attention", length, gap)

    return step


def _allocates(calls: int, length: float) -> Callable[[Builder, int], None]:
    def step(made: Builder, number: int) -> None:
        decode(made, layers=4)
        for _ in range(calls):
            made.call("cudaMalloc", made.now + 1, length - 2)
            made.now += length
            made.kernel("nvjet_hsh_gemm", 300)
        decode(made, layers=4)

    return step


def _waits(calls: int, length: float, name: str = "cudaStreamSynchronize") -> Callable[[Builder, int], None]:
    def step(made: Builder, number: int) -> None:
        for _ in range(calls):
            decode(made, layers=2)
            made.call(name, made.now - 100, 100 + length / 2)
            made.now += length
        decode(made, layers=2)

    return step


def _spike(usual: int, peak: int) -> Callable[[Builder, int], None]:
    def step(made: Builder, number: int) -> None:
        decode(made)
        made.memory(MiB, usual)
        if number % 5 == 4:
            made.memory(peak - usual, peak)
            made.memory(usual - peak, usual)

    return step


def _collectives(length: float, beside: float = 0.0) -> Callable[[Builder, int], None]:
    """An all-reduce behind each of 16 layers; `beside`: this much of it while the next product runs."""

    def step(made: Builder, number: int) -> None:
        for _ in range(16):
            made.kernel("nvjet_hsh_gemm", 200, 0.5)
            made.kernel("decode_kernel", 40, 0.5)
            begin = made.now
            made.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", length, start=begin, stream=20)
            made.now = begin + length - beside

    return step


def _rank(factor: float, late: tuple[int, ...] = (), by: float = 1.0) -> Callable[[Builder, int], None]:
    """A rank whose work is `factor` times as long, and in the steps `late` another `by` times."""

    def step(made: Builder, number: int) -> None:
        longer = factor * (by if number in late else 1.0)
        for _ in range(16):
            made.kernel("nvjet_hsh_gemm", 200 * longer, 0.5)
            made.kernel("decode_kernel", 40 * longer, 0.5)
            made.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 8 + max(0.0, 1.6 - longer) * 100, 0.5, stream=20)

    return step


def _ranks(*steps: Callable[[Builder, int], None]) -> list[Builder]:
    return [build(step, rank=rank) for rank, step in enumerate(steps)]


def _elementwise(share: float) -> Callable[[Builder, int], None]:
    """Unfused: `share` of the time in norms, activations and copies."""

    def step(made: Builder, number: int) -> None:
        for _ in range(16):
            made.kernel("nvjet_hsh_gemm", 400 * (1 - share), 0.5)
            made.kernel("vectorized_elementwise_kernel", 250 * share, 0.5)
            made.kernel("triton_rms_norm_kernel", 150 * share, 0.5)

    return step


PLANTED: list[PlantedTrace] = [
    PlantedTrace("a healthy batch", "", [build(lambda made, number: decode(made))], GOOD),
    PlantedTrace("a healthy batch without floors", "", [build(lambda made, number: decode(made))]),
    PlantedTrace("healthy, with graphs: gaps of a microsecond", "", [build(_eager(20, 1.0))], GOOD),
    PlantedTrace("healthy on a CPU", "", [build(_cpu_ops(200, 2))]),
    PlantedTrace("healthy on two ranks", "", _ranks(_rank(1.6), _rank(1.6)), GOOD),
    PlantedTrace("healthy, one wait a step", "", [build(_waits(1, 20))], GOOD),
    PlantedTrace("eager 1B: kernels of 4 µs, gaps of 6", "many short kernels with gaps", [build(_eager(4, 6))], GOOD),
    PlantedTrace("eager 8B: kernels of 20 µs, gaps of 8", "many short kernels with gaps", [build(_eager(20, 8))], GOOD),
    PlantedTrace("eager 0.5B: kernels of 2 µs, gaps of 10", "many short kernels with gaps", [build(_eager(2, 10))]),
    PlantedTrace("ops of a tiny model on a CPU", "many short kernels with gaps", [build(_cpu_ops(10, 12))]),
    PlantedTrace("one chat: weights at 85 % of the bandwidth", "low FLOP/s at high bandwidth",
                 [build(lambda made, number: decode(made))], {"linears and head": (0.85, 0.01)}),
    PlantedTrace("eight chats: 70 % of the bandwidth", "low FLOP/s at high bandwidth",
                 [build(lambda made, number: decode(made, attention=60))], {"linears and head": (0.7, 0.05)}),
    PlantedTrace("long contexts, attention at 30 %", "attention below its bandwidth",
                 [build(lambda made, number: decode(made, product=60, attention=300))],
                 {"linears and head": (0.8, 0.5), "attention": (0.3, 0.02)}),
    PlantedTrace("uneven rows, attention at 45 %", "attention below its bandwidth",
                 [build(lambda made, number: decode(made, product=80, attention=200))],
                 {"linears and head": (0.8, 0.5), "attention": (0.45, 0.02)}),
    PlantedTrace("products at 25 % of their roof", "matrix products below their roof",
                 [build(lambda made, number: decode(made))], {"linears and head": (0.25, 0.02), "attention": (0.7, 0.1)}),
    PlantedTrace("prompts whose products compute at 30 %", "matrix products below their roof",
                 [build(lambda made, number: decode(made, product=900, attention=200))],
                 {"linears and head": (0.3, 0.3), "attention": (0.6, 0.4)}),
    PlantedTrace("nothing is fused: products are a third", "little of the time is matrix products", [build(_elementwise(0.65))]),
    PlantedTrace("nothing is fused: products are a quarter", "little of the time is matrix products", [build(_elementwise(0.8))]),
    PlantedTrace("the scheduler takes 3 ms a step", "CPU-bound stretches", [build(_host_gap(3000, "schedule"))], GOOD),
    PlantedTrace("text is made between steps", "CPU-bound stretches", [build(_host_gap(5000, "detokenize"))], GOOD),
    PlantedTrace("results are taken in slowly", "CPU-bound stretches", [build(_host_gap(2000, "update"))], GOOD),
    PlantedTrace("good kernels at the power limit", "power lowers the clock", [build(lambda made, number: decode(made))], GOOD,
                 {"clocks": CAPPED}),
    PlantedTrace("a hot GPU", "heat lowers the clock", [build(lambda made, number: decode(made))], known={"clocks": HOT}),
    PlantedTrace("the limit is reached, the clock is hardly lower", "", [build(lambda made, number: decode(made))], GOOD,
                 {"clocks": HARDLY}),
    PlantedTrace("the cache is too small", "preemptions", [build(lambda made, number: decode(made))], GOOD,
                 {"preemptions": 12, "recomputed": 0.2, "kv_usage": 0.97}),
    PlantedTrace("a few preemptions, much computed again", "preemptions", [build(lambda made, number: decode(made))], GOOD,
                 {"preemptions": 2, "recomputed": 0.12, "kv_usage": 0.9}),
    PlantedTrace("heads that do not divide", "imbalance across ranks", _ranks(_rank(1.6), _rank(1.0)), GOOD),
    PlantedTrace("one of four ranks has more", "imbalance across ranks", _ranks(_rank(1.0), _rank(1.0), _rank(1.5), _rank(1.0))),
    PlantedTrace("a rank is late now and then", "stragglers across ranks", _ranks(_rank(1.0), _rank(1.0, (4, 11), 3.0))),
    PlantedTrace("a rank throttles in one step of ten", "stragglers across ranks",
                 _ranks(_rank(1.0), _rank(1.0), _rank(1.0, (3, 13), 4.0), _rank(1.0))),
    PlantedTrace("log-probabilities of whole prompts", "memory spikes", [build(_spike(2000 * MiB, 6000 * MiB))], GOOD),
    PlantedTrace("a long chunk", "memory spikes", [build(_spike(10_000 * MiB, 14_000 * MiB))], GOOD),
    PlantedTrace("scratch is allocated in every step", "repeated allocation", [build(_allocates(2, 400))], GOOD),
    PlantedTrace("a large buffer each time", "repeated allocation", [build(_allocates(1, 1500))], GOOD),
    PlantedTrace("the host reads after every second layer", "blocking synchronisation", [build(_waits(4, 300))], GOOD),
    PlantedTrace("copies that wait", "blocking synchronisation", [build(_waits(6, 200, "cudaMemcpy"))], GOOD),
    PlantedTrace("all-reduces with nothing beside them", "collectives in idle gaps",
                 _ranks(_collectives(120), _collectives(120)), GOOD),
    PlantedTrace("all-reduces over a slow link", "collectives in idle gaps", _ranks(_collectives(400), _collectives(400))),
    PlantedTrace("all-reduces behind products", "", _ranks(_collectives(120, 118), _collectives(120, 118)), GOOD),
    PlantedTrace("somebody else's program", "the CPU is shared", [build(_cpu_ops(200, 2))], known={"lost": 0.6}),
]
