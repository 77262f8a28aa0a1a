"""Which term of the iron law binds, how far it is to the roof, and which change to try next. One pure function: judge.

A stretch of time is divided into parts that add up:

    seconds = without work + busy
    busy    = io + host + device                         host: between steps, where the device has nothing to do
    device  = roof + communication + launch + the rest   roof: every op at its own roof, predicted by the cost model;
                                                         launch: the device waits for kernels to be issued

The roof is divided by what binds each op: computing, or reading weights, KV or activations. I/O, host, launch and
communication are ruled out first: while one of them takes a quarter of the time, the roof is not what to work on. Then
come admission, an implementation that is far below its roofs, and last the roofs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

IO, HOST, LAUNCH, COMMUNICATION = "io", "host", "launch", "communication"
IDLE, QUEUE, IMPLEMENTATION = "idle", "queue", "implementation"
WEIGHTS, KV, COMPUTE = "weight_bandwidth", "kv_bandwidth", "compute"
TERMS = (IDLE, IO, HOST, LAUNCH, COMMUNICATION, QUEUE, WEIGHTS, KV, COMPUTE, IMPLEMENTATION)
OVERHEADS = (IO, HOST, LAUNCH, COMMUNICATION)

BINDS = 0.25                         # of the busy time: an overhead of that share is what to work on first
BUSY = 0.5                           # of the whole time: with less work than that, arrivals limit the throughput
NEAR = 0.5                           # of the device's time at the roof: with less, the implementation is what binds
FULL = 0.9                           # of the rows or of the KV blocks: nobody else gets in


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, in seconds by where they went."""

    seconds: float                   # the whole of it
    busy: float                      # with work to do
    device: float                    # measured on the device, from a step's first kernel to its last
    on_compute: float = 0.0          # predicted, of ops that are at their best bound by computing …
    on_weights: float = 0.0          # … by reading weights …
    on_kv: float = 0.0               # … by reading and writing the KV cache …
    on_activations: float = 0.0      # … and by what lies between ops
    io: float = 0.0                  # steps waited for storage or the network
    communication: float = 0.0       # ranks waited for each other
    launch: float = 0.0              # predicted, of the host issuing all kernels
    waiting: float = 0.0             # requests in the queue, on average over the busy time …
    running: float = 0.0             # … and sequences in a step
    steps: int = 0

    @property
    def roof(self) -> float:
        return self.on_compute + self.on_weights + self.on_kv + self.on_activations

    def parts(self) -> dict[str, float]:
        """Seconds of the busy time by part; what was not spent is 0."""
        communication = min(self.communication, self.device)
        # Launching hides behind computing as long as it is the shorter of the two.
        launch = max(0.0, min(self.launch, self.device - communication) - self.roof)
        return {
            IO: self.io,
            HOST: max(0.0, self.busy - self.device - self.io),
            LAUNCH: launch,
            COMMUNICATION: communication,
            IMPLEMENTATION: max(0.0, self.device - self.roof - communication - launch),
            WEIGHTS: self.on_weights,
            KV: self.on_kv,
            COMPUTE: self.on_compute,
            "activations": self.on_activations,
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """How the engine is set: what could still be changed."""

    device: str = "cuda"
    max_rows: int = 0                # 0: no limit is known
    kv_usage: float = 0.0            # part of the KV blocks that sequences hold
    preemptions: int = 0             # in the window
    weight_bytes: float = 2.0        # per element
    kv_bytes: float = 2.0
    graphs: bool = True
    overlap: bool = True
    prefix_caching: bool = True
    ranks: int = 1
    decoding: bool = True            # are the steps mostly decodes?


@dataclass(frozen=True, slots=True)
class Change:
    what: str
    gain: float                      # predicted: times as many tokens per second; 1: not known
    trade_off: str                   # to check before it is kept


@dataclass(frozen=True, slots=True)
class Verdict:
    term: str                        # one of TERMS
    share: float                     # of the busy time that the term takes; of all time where nothing runs
    headroom: float                  # times as fast if every op were at its roof and nothing else took time
    why: str
    changes: tuple[Change, ...]      # to try next, the most promising first
    parts: Mapping[str, float]       # seconds by part

    @property
    def next(self) -> str:
        return self.changes[0].what if self.changes else ""


def judge(window: Window, setting: Setting | None = None) -> Verdict:
    setting = setting or Setting()
    parts = window.parts()
    term, share, why = _binding(window, setting, parts)
    headroom = window.busy / window.roof if window.roof > 0 else 1.0
    changes = [
        Change(remedy.what, _gain(window, remedy.saves(window, setting)), remedy.trade_off)
        for remedy in REMEDIES if remedy.term == term and remedy.applies(window, setting)
    ]  # fmt: skip
    changes.sort(key=lambda change: -change.gain)
    return Verdict(term, share, max(1.0, headroom), why, tuple(changes), parts)


def _binding(window: Window, setting: Setting, parts: Mapping[str, float]) -> tuple[str, float, str]:
    """The term, its share, and a sentence."""
    if not window.steps or window.busy <= 0:
        return IDLE, 1.0, "no steps: nobody asked for anything"
    busy = window.busy
    if busy < BUSY * window.seconds and window.waiting < 1:
        idle = 1 - busy / window.seconds
        return IDLE, idle, f"there was nothing to do for {idle:.0%} of the time"
    overhead = max(OVERHEADS, key=lambda name: parts[name])
    rest = max(seconds for name, seconds in parts.items() if name not in OVERHEADS)
    share = parts[overhead] / busy
    if share >= BINDS or parts[overhead] > rest:
        return overhead, share, _WHY[overhead].format(share=share)
    roofs = {name: parts[name] for name in (WEIGHTS, KV, COMPUTE, "activations")}
    roof = max(roofs, key=lambda name: roofs[name])
    reached = window.roof / (window.device - parts[COMMUNICATION]) if window.device else 1.0
    if _admission_binds(window, setting) and roof == WEIGHTS:
        full = "KV blocks" if setting.kv_usage >= FULL else "rows"
        return QUEUE, parts[roof] / busy, (
            f"{window.waiting:.0f} requests wait for {full} while {window.running:.0f} share each reading of the weights"
        )
    if reached < NEAR:
        why = f"steps reach {reached:.0%} of their roof, and no overhead explains it"
        return IMPLEMENTATION, parts[IMPLEMENTATION] / busy, why
    if roof == "activations":
        return IMPLEMENTATION, parts[roof] / busy, "what ops hand to each other is most of what moves"
    share = parts[roof] / busy
    return roof, share, f"{_WHY[roof].format(share=share)}; steps reach {min(reached, 1.0):.0%} of their roof"


def _admission_binds(window: Window, setting: Setting) -> bool:
    if window.waiting < max(1.0, 0.1 * window.running):
        return False
    return setting.kv_usage >= FULL or bool(setting.max_rows and window.running >= FULL * setting.max_rows)


_WHY = {
    IO: "steps wait for storage or the network for {share:.0%} of the time",
    HOST: "the device waits for the host between steps for {share:.0%} of the time",
    LAUNCH: "issuing kernels takes longer than they do: {share:.0%} of the time",
    COMMUNICATION: "ranks wait for each other for {share:.0%} of the time",
    WEIGHTS: "reading the weights takes {share:.0%} of the time",
    KV: "reading the KV cache takes {share:.0%} of the time",
    COMPUTE: "matrix products take {share:.0%} of the time",
}


# -- what to do about it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remedy:
    term: str
    what: str
    saves: Callable[[Window, Setting], float]            # seconds of the window; 0: the model cannot say
    trade_off: str
    applies: Callable[[Window, Setting], bool] = lambda window, setting: True


def _part(name: str, share: float = 1.0) -> Callable[[Window, Setting], float]:
    return lambda window, setting: share * window.parts()[name]


def _unknown(window: Window, setting: Setting) -> float:
    return 0.0


def _gain(window: Window, saved: float) -> float:
    return window.busy / max(window.busy - saved, 0.05 * window.busy) if window.busy else 1.0


def _larger_batch(window: Window, setting: Setting) -> float:
    """Twice the rows read the weights once: half of it per token. KV and computing grow with the rows."""
    return 0.5 * window.parts()[WEIGHTS]


REMEDIES = (
    Remedy(IDLE, "send more requests at once, or serve this load on a smaller device", _unknown, "each request's latency"),
    Remedy(IO, "put the model and what is swapped on faster or nearer storage", _part(IO), "cost of the storage"),
    Remedy(HOST, "async_scheduling: plan a step while the one before it runs", _part(HOST, 0.8),
           "a stop is noticed one step late", lambda window, setting: not setting.overlap and setting.device != "cpu"),
    Remedy(HOST, "find what the host does between steps: `ridgeline diagnose`", _part(HOST, 0.5), "none"),
    Remedy(LAUNCH, "CUDA graphs (leave enforce_eager off)", _part(LAUNCH, 0.9), "memory of the graphs",
           lambda window, setting: not setting.graphs and setting.device != "cpu"),
    Remedy(LAUNCH, "fewer and larger kernels: fuse what runs side by side", _part(LAUNCH, 0.5), "a kernel more to maintain"),
    Remedy(COMMUNICATION, "fewer ranks, if the model fits", _part(COMMUNICATION, 0.5), "memory left for the KV cache",
           lambda window, setting: setting.ranks > 1),
    Remedy(COMMUNICATION, "overlap collectives with the next layer's products", _part(COMMUNICATION, 0.5), "none"),
    Remedy(QUEUE, "raise max_num_seqs", _larger_batch, "time per output token of each request",
           lambda window, setting: setting.kv_usage < FULL),
    Remedy(QUEUE, "kv_cache_dtype fp8: twice the sequences in the same memory", _larger_batch, "quality: `ridgeline eval`",
           lambda window, setting: setting.kv_usage >= FULL and setting.kv_bytes >= 2 and setting.device != "cpu"),
    Remedy(QUEUE, "more memory for KV: gpu_memory_utilization, fewer weight bits, or another device", _larger_batch,
           "what else needs the memory", lambda window, setting: setting.kv_usage >= FULL),
    Remedy(WEIGHTS, "more requests in a step: they share each reading of the weights", _larger_batch,
           "time per output token of each request"),
    Remedy(WEIGHTS, "weights of 8 bits", _part(WEIGHTS, 0.5), "quality: `ridgeline eval`",
           lambda window, setting: setting.weight_bytes >= 2),
    Remedy(WEIGHTS, "weights of 4 bits", _part(WEIGHTS, 0.7), "quality: `ridgeline eval`; products cost more in large batches",
           lambda window, setting: setting.weight_bytes >= 2 and setting.device != "cpu"),
    Remedy(WEIGHTS, "speculation: several tokens from one reading of the weights", _part(WEIGHTS, 0.4),
           "wasted where drafts are rejected", lambda window, setting: setting.decoding and window.running < 16),
    Remedy(KV, "kv_cache_dtype fp8: half the bytes of the cache", _part(KV, 0.48), "quality: `ridgeline eval`",
           lambda window, setting: setting.kv_bytes >= 2 and setting.device != "cpu"),
    Remedy(KV, "shared prefixes and shorter contexts: fewer positions to read", _unknown, "what the model can look back at"),
    Remedy(COMPUTE, "matrix products in fp8, at twice the rate", _part(COMPUTE, 0.45), "quality: `ridgeline eval`",
           lambda window, setting: setting.weight_bytes >= 2 and setting.device != "cpu"),
    Remedy(COMPUTE, "prefix caching: compute what requests share once", _unknown, "none",
           lambda window, setting: not setting.prefix_caching),
    Remedy(COMPUTE, "more devices: tensor_parallel_size or another replica", _part(COMPUTE, 0.4), "cost"),
    Remedy(IMPLEMENTATION, "find the ops below their roof: `ridgeline diagnose`", _part(IMPLEMENTATION, 0.5),
           "a kernel more to maintain"),
)  # fmt: skip
