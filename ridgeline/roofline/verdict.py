"""Names the bottleneck of a stretch of time, the headroom to the roof, and the change to try next. One pure function: judge.

The time is divided into parts that add up:

    seconds = without work + busy
    busy    = other programs + host + device        other programs: they had this process's core;
                                                         host: between steps, where the device is idle
    device  = roof + communication + launch + the rest   roof: every op at its own roof, predicted by the cost model;
                                                         launch: the device waits for kernels to be launched

The roof is divided by each op's bound: compute, or memory traffic of weights, KV or activations. Other programs, I/O, host,
launch and communication come first: an overhead of a quarter of the time is the bottleneck. Then come a GPU's power or
temperature, if they lower its clock, then admission, kernels far below their roofs, and last the roofs themselves. Where the
engine lacks work, the front end's process may be the bottleneck.

Changes are recommended only if this engine can make them on this device. Narrower formats come as data: those that resolve would
take (choices/format_choices.py), with what `plan`'s cost model predicts of them (engine/core/what_helps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.gpus.clocks import POWER, TEMPERATURE, Clocks
from ridgeline.sizes.abilities import BY_FLAG, UNTIMED, WORTH_ITS_LOSS, Factors, factor_at

SHARED, HOST, LAUNCH, COMMUNICATION = "shared_machine", "host", "launch", "communication"
IDLE, FRONT_END, TOKENISER = "idle", "front_end", "tokeniser"
QUEUE, IMPLEMENTATION = "queue", "implementation"
WEIGHTS, KV, COMPUTE = "weight_bandwidth", "kv_bandwidth", "compute"
CLOCK = "clock"                      # the part that POWER or TEMPERATURE takes
OVERHEADS = (SHARED, HOST, LAUNCH, COMMUNICATION)
TERMS = (IDLE, FRONT_END, TOKENISER, *OVERHEADS, POWER, TEMPERATURE, QUEUE, WEIGHTS, KV, COMPUTE, IMPLEMENTATION)

BINDS = 0.25                         # of the busy time: an overhead of that share is what to work on first
BUSY = 0.5                           # of the whole time: with less work than that, arrivals limit the throughput
SLOWED = 0.1                         # of the busy time: a lowered clock that costs less is said, and does not bind
NEAR = 0.5                           # of the device's time at the roof: with less, the implementation is the bottleneck
FULL = 0.9                           # of the rows or of the KV blocks: no further request is admitted
LOOP_FULL = 0.85                     # of the time that the front end's event loop computes: more it cannot take


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, split by where the seconds went."""

    seconds: float                   # the whole of it
    busy: float                      # with work to do
    device: float                    # measured on the device, from a step's first kernel to its last
    on_compute: float = 0.0          # predicted, of ops bound by compute …
    on_weights: float = 0.0          # … by reading weights …
    on_kv: float = 0.0               # … by reading and writing the KV cache …
    on_activations: float = 0.0      # … and by activations
    communication: float = 0.0       # ranks waited for each other
    launch: float = 0.0              # predicted, of the host launching all kernels
    lost: float = 0.0                # other programs had the core of the engine's process
    front_end: float = 0.0           # the front end's event loop was on a core …
    tokenising: float = 0.0          # … and text became tokens, in any of its threads
    waiting: float = 0.0             # requests in the queue, on average over the busy time …
    running: float = 0.0             # … and sequences in a step
    steps: int = 0
    clocks: Clocks | None = None     # of the GPU; None: not known

    @property
    def roof(self) -> float:
        return self.on_compute + self.on_weights + self.on_kv + self.on_activations

    def within_its_time(self) -> Window:
        """Where steps were faster than the peaks allow, the steps themselves are the roof."""
        if self.roof <= self.busy:
            return self
        part = self.busy / self.roof
        return replace(
            self, on_compute=part * self.on_compute, on_weights=part * self.on_weights, on_kv=part * self.on_kv,
            on_activations=part * self.on_activations,
        )

    def parts(self) -> dict[str, float]:
        """Seconds of the busy time by part; what was not spent is 0."""
        communication = min(self.communication, self.device)
        # Launching hides behind computing as long as it is the shorter of the two.
        launch = max(0.0, min(self.launch, self.device - communication) - self.roof)
        host = max(0.0, self.busy - self.device)
        below = max(0.0, self.device - self.roof - communication - launch)
        # Other programs lengthen what the host does between steps, and on a CPU what the device does.
        lost = min(self.lost, host + below)
        host_kept = max(0.0, host - lost)
        below -= max(0.0, lost - host)
        slowed = self._slowed(below)
        computing = max(0.0, slowed - below)             # of a roof that was itself measured at a lowered clock
        return {
            SHARED: lost,
            HOST: host_kept,
            LAUNCH: launch,
            COMMUNICATION: communication,
            CLOCK: slowed,
            IMPLEMENTATION: below - (slowed - computing),
            WEIGHTS: self.on_weights,
            KV: self.on_kv,
            COMPUTE: self.on_compute - computing,
            "activations": self.on_activations,
        }

    def _slowed(self, below: float) -> float:
        """Seconds that a lowered SM clock costs at most; `below` are those beyond the roof.

        A full clock shortens a kernel by no more than the share of the clock that is missing, and memory is not read faster. The
        matrix rate may have been measured at a lowered clock, too: then products seem to be at their roof, and a full clock
        would lift that roof."""
        if self.clocks is None or not self.clocks.limited_by:
            return 0.0
        lost = self.clocks.lost
        return min(lost * (self.roof + below), max(below, lost * (self.on_compute + below)))


@dataclass(frozen=True, slots=True)
class Setting:
    """The engine's settings: they decide which changes are left to recommend."""

    device: str = "cuda"
    max_rows: int = 0                # 0: no limit is known
    kv_usage: float = 0.0            # part of the KV blocks that sequences hold
    preemptions: int = 0             # in the window
    graphs: bool = True
    overlap: bool = True
    prefix_caching: bool = True
    speculation: bool = True
    ranks: int = 1
    faster: Factors = field(default_factory=dict)        # narrower formats that are left to choose
    untimed: Sequence[str] = ()      # those of them whose gain is a data sheet's
    linear_share: float = 1.0        # of the weights that are read, those that a format narrows: not the head


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
    window = window.within_its_time()
    parts = window.parts()
    term, share, why = _binding(window, setting, parts)
    if term not in (IDLE, FRONT_END, TOKENISER, POWER, TEMPERATURE):
        why += _beside(window, parts)
    headroom = window.busy / window.roof if window.roof > 0 else 1.0
    changes = [
        Change(remedy.what, _gain(window, remedy.saves(window, setting)), remedy.trade_off)
        for remedy in REMEDIES if remedy.term == term and remedy.applies(window, setting)
    ] + _narrower(term, window, setting)
    changes.sort(key=lambda change: -change.gain)
    return Verdict(term, share, max(1.0, headroom), why, tuple(changes), parts)


def _binding(window: Window, setting: Setting, parts: Mapping[str, float]) -> tuple[str, float, str]:
    """The term, its share, and a sentence."""
    lacking = _lacks_work(window)
    if lacking is not None:
        return lacking
    busy = window.busy
    overhead = max(OVERHEADS, key=lambda name: parts[name])
    rest = max(seconds for name, seconds in parts.items() if name not in OVERHEADS)
    share = parts[overhead] / busy
    if share >= BINDS or parts[overhead] > rest:
        return overhead, share, _WHY[overhead].format(share=share)
    if window.clocks is not None and parts[CLOCK] >= SLOWED * busy:
        share, limit = parts[CLOCK] / busy, window.clocks.limited_by
        return limit, share, f"{limit} binds: {window.clocks.line}; at the full clock steps would be up to {share:.0%} shorter"
    roofs = {name: parts[name] for name in (WEIGHTS, KV, COMPUTE, "activations")}
    roof = max(roofs, key=lambda name: roofs[name])
    reached = window.roof / (window.device - parts[COMMUNICATION]) if window.device else 1.0
    if _admission_binds(window, setting) and roof == WEIGHTS:
        full = "KV blocks" if setting.kv_usage >= FULL else "rows"
        return QUEUE, parts[roof] / busy, (
            f"{window.waiting:.0f} requests wait for {full} while {window.running:.0f} share each read of the weights"
        )
    if reached < NEAR:
        why = f"steps reach {reached:.0%} of their roof, with no overhead that explains it"
        return IMPLEMENTATION, parts[IMPLEMENTATION] / busy, why
    if roof == "activations":
        return IMPLEMENTATION, parts[roof] / busy, "most of the memory traffic is activations between ops"
    share = parts[roof] / busy
    return roof, share, f"{_WHY[roof].format(share=share)}; steps reach {min(reached, 1.0):.0%} of their roof"


def _beside(window: Window, parts: Mapping[str, float]) -> str:
    """What is to be said of a lowered clock that is not the bottleneck."""
    if window.clocks is None or not window.clocks.limited_by:
        return ""
    share = parts[CLOCK] / window.busy
    return f"; {window.clocks.limited_by} lowers the clock ({window.clocks.line}), which costs at most {share:.0%}"


def _lacks_work(window: Window) -> tuple[str, float, str] | None:
    """The term if the engine waits for requests; None: it does not."""
    if window.seconds and window.front_end >= LOOP_FULL * window.seconds and window.busy <= (1 - BINDS) * window.seconds:
        return _front_end(window)
    if not window.steps or window.busy <= 0:
        return IDLE, 1.0, "no steps: there were no requests"
    if window.busy < BUSY * window.seconds and window.waiting < 1:
        idle = 1 - window.busy / window.seconds
        return IDLE, idle, f"the engine had no work for {idle:.0%} of the time"
    return None


def _front_end(window: Window) -> tuple[str, float, str]:
    share, idle = min(1.0, window.front_end / window.seconds), 1 - window.busy / window.seconds
    term, what = (FRONT_END, "the front end's process computes")
    if window.tokenising >= 0.5 * window.front_end:
        term, what = TOKENISER, "the front end's process computes, mostly tokenising,"
    return term, share, f"{what} for {share:.0%} of the time, and the engine has no work for {idle:.0%} of it"


def _admission_binds(window: Window, setting: Setting) -> bool:
    if window.waiting < max(1.0, 0.1 * window.running):
        return False
    return setting.kv_usage >= FULL or bool(setting.max_rows and window.running >= FULL * setting.max_rows)


_WHY = {
    SHARED: "other programs had the engine's core for {share:.0%} of the time",
    HOST: "the device waits for the host between steps for {share:.0%} of the time",
    LAUNCH: "the device waits for kernel launches for {share:.0%} of the time",
    COMMUNICATION: "ranks wait for each other for {share:.0%} of the time",
    WEIGHTS: "reading the weights takes {share:.0%} of the time",
    KV: "reading the KV cache takes {share:.0%} of the time",
    COMPUTE: "matrix products take {share:.0%} of the time (compute-bound)",
}


# -- what to do about it -----------------------------------------------------------------------------------------------


MORE_GPUS = "more GPUs: tensor_parallel_size or another replica; each has its own power limit"
COOL = "cool the GPU: airflow, fans, the room, its neighbours"


@dataclass(frozen=True, slots=True)
class Remedy:
    term: str
    what: str
    saves: Callable[[Window, Setting], float]            # seconds of the window; 0: unknown
    trade_off: str
    applies: Callable[[Window, Setting], bool] = lambda window, setting: True


def _part(name: str, share: float = 1.0) -> Callable[[Window, Setting], float]:
    return lambda window, setting: share * window.parts()[name]


def _unknown(window: Window, setting: Setting) -> float:
    return 0.0


def _gain(window: Window, saved: float) -> float:
    return window.busy / max(window.busy - saved, 0.05 * window.busy) if window.busy else 1.0


def _can_raise(window: Window, setting: Setting) -> bool:
    """Is the power limit below the highest that the board takes?"""
    return window.clocks is not None and window.clocks.most_limit_w > 1.01 * window.clocks.limit_w


def _larger_batch(window: Window, setting: Setting) -> float:
    """Twice the rows share each read of the weights: half per token. KV and compute grow with the rows."""
    return 0.5 * window.parts()[WEIGHTS]


def _narrower(term: str, window: Window, setting: Setting) -> list[Change]:
    """Formats of weights and KV that this engine has for this device. Those of weights change decode and prompts: 4 bits are read
    fast and multiplied slowly."""
    parts, found, slowed = window.parts(), [], term in (POWER, TEMPERATURE)
    for flag, points in setting.faster.items():
        each, few = BY_FLAG[flag], factor_at(points, window.running)
        if each.option == "quantization" and (slowed or term in (WEIGHTS, COMPUTE)):
            saved = setting.linear_share * (1 - few) * parts[WEIGHTS] + (1 - points[-1][1]) * parts[COMPUTE]
            marked = UNTIMED if flag in setting.untimed else ""
            found.append(Change(f"{flag}: {each.bits}-bit weights{marked}", _gain(window, saved), each.trade_off))
        elif each.option == "kv_cache_dtype" and (slowed or term == KV):
            found.append(Change(f"{flag}: fewer bytes of the cache", _gain(window, (1 - few) * parts[KV]), each.trade_off))
        elif each.option == "kv_cache_dtype" and term == QUEUE and setting.kv_usage >= FULL:
            gain = _gain(window, _larger_batch(window, setting))
            found.append(Change(f"{flag}: more sequences in the same memory", gain, each.trade_off))
    worth = [change for change in found if change.gain >= WORTH_ITS_LOSS]
    # Energy limits the steps then, and the cost model predicts time.
    return [replace(change, gain=1.0) for change in worth] if slowed else worth


REMEDIES = (
    Remedy(FRONT_END, "run another server beside this one, on other cores", _unknown, "memory of a second engine"),
    Remedy(TOKENISER, "send prompts as token ids, or the same text less often", _unknown, "work of the client"),
    Remedy(SHARED, "keep other programs off these cores, or use other cores", _part(SHARED), "the other programs"),
    Remedy(HOST, "async_scheduling: plan a step while the one before it runs", _part(HOST, 0.8),
           "a stop is noticed one step late", lambda window, setting: not setting.overlap and setting.device != "cpu"),
    Remedy(HOST, "find the host's work between steps: `ridgeline diagnose`", _part(HOST, 0.5), "none"),
    Remedy(LAUNCH, "CUDA graphs (leave enforce_eager off)", _part(LAUNCH, 0.9), "memory of the graphs",
           lambda window, setting: not setting.graphs and setting.device != "cpu"),
    Remedy(LAUNCH, "more requests in a step: the same launches for more tokens", _part(LAUNCH, 0.5),
           "time per output token of each request"),
    Remedy(COMMUNICATION, "fewer ranks, if the model fits", _part(COMMUNICATION, 0.5), "memory left for the KV cache"),
    Remedy(POWER, "raise the GPU's power limit (nvidia-smi -pl), if you may", _part(CLOCK), "power and cooling of the machine",
           _can_raise),
    Remedy(POWER, MORE_GPUS, _unknown, "cost"),
    Remedy(POWER, "fewer requests in a step of each GPU: less energy per step, a higher clock", _unknown,
           "tokens per second of all requests", lambda window, setting: window.running > 1),
    Remedy(TEMPERATURE, COOL, _part(CLOCK), "work on the machine"),
    Remedy(QUEUE, "raise max_num_seqs", _larger_batch, "time per output token of each request",
           lambda window, setting: setting.kv_usage < FULL),
    Remedy(QUEUE, "more memory for KV: gpu_memory_utilization, or another device", _larger_batch,
           "other users of the memory", lambda window, setting: setting.kv_usage >= FULL),
    Remedy(WEIGHTS, "more requests in a step: they share each read of the weights", _larger_batch,
           "time per output token of each request"),
    Remedy(WEIGHTS, "speculative_config auto: several tokens of a request for one read of the weights, if text repeats",
           _unknown, "none: equal tokens, and no drafts where they do not pay", lambda window, setting: not setting.speculation),
    Remedy(KV, "shared prefixes and shorter contexts: fewer positions to read", _unknown, "the context that the model sees"),
    Remedy(COMPUTE, "prefix caching: compute a common prefix once", _unknown, "none",
           lambda window, setting: not setting.prefix_caching),
    Remedy(COMPUTE, "more devices: tensor_parallel_size or another replica", _part(COMPUTE, 0.4), "cost"),
    Remedy(IMPLEMENTATION, "find the ops below their roof: `ridgeline diagnose`", _part(IMPLEMENTATION, 0.5), "none"),
)
