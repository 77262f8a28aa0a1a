"""Known patterns of inefficiency in a trace, with their remedies: one table. Patterns look at facts, never at a model's name.

A pattern reports its share of the time in a sentence with figures. A remedy's saving comes from the trace's times and the
cost model's floors; an unknown saving is a gain of 1. Thresholds are shares of the traced time. A remedy that no setting can
make, but only work on the engine's code, says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.gpus.clocks import POWER, TEMPERATURE
from ridgeline.roofline.facts import Facts, PartFacts
from ridgeline.roofline.verdict import COOL, MORE_GPUS
from ridgeline.sizes.abilities import BY_FLAG, UNTIMED, WORTH_ITS_LOSS, factor_at

WORTH = 0.1                          # of the time: less is not worth a change
SHORT = 25e-6                        # a kernel that takes no longer than a few launches
MANY = 30                            # kernels in a step
FAST = 0.55                          # of the bandwidth: above, an op is memory-bound …
SLOW = 0.3                           # … if it also stays below this share of the matrix rate
BELOW = 0.5                          # of its roof: an op below has a problem
REACHED = 0.75                       # of its roof: what a good kernel reaches
BESIDE = 0.45                        # of the busy time: matrix products should take more than this
UNEVEN = 1.15                        # a rank's work over the mean of the ranks
STRAGGLES = 1.5                      # a step's time on one rank over the median of its steps
SPIKE, SPIKE_BYTES = 1.3, 2**28      # peak memory over the usual, as a factor and in bytes
WAITS = 1.5                          # blocking calls per step; one of them fetches the step's tokens
_TEXT_WORK = ("tokenize", "tokenise", "detokenize", "detokenise", "text", "stream", "template")


@dataclass(frozen=True, slots=True)
class Remedy:
    what: str
    saves: Callable[[Facts], float]  # seconds of the trace; 0: unknown
    trade_off: str                   # to check before it is kept
    key: str = ""                    # remedies with one key are the same change
    device: str = ""                 # device kind; empty: any
    is_code: bool = False            # it is a change of the engine's code
    option: str = ""                 # a narrower format for this option: one remedy for each that is available


@dataclass(frozen=True, slots=True)
class Pattern:
    name: str
    term: str                        # of the verdict
    seen: Callable[[Facts], str]     # the evidence, with figures; empty: not found
    costs: Callable[[Facts], float]  # seconds of the trace
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    what: str
    gain: float                      # predicted: times as fast; 1: not known
    trade_off: str
    key: str = ""
    is_code: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    pattern: str
    term: str
    share: float                     # of the time
    evidence: str
    advice: tuple[Advice, ...]       # the most promising first


def find_patterns(facts: Facts) -> list[Finding]:
    """Every pattern in the facts, the most costly first."""
    found = []
    for pattern in PATTERNS:
        evidence = pattern.seen(facts) if facts.seconds else ""
        if evidence:
            advice = sorted(
                (one for each in pattern.remedies if each.device in ("", facts.device) for one in _advice(each, facts)),
                key=lambda one: -one.gain,
            )
            found.append(Finding(pattern.name, pattern.term, facts.share(pattern.costs(facts)), evidence, tuple(advice)))
    return sorted(found, key=lambda finding: -finding.share)


def _advice(remedy: Remedy, facts: Facts) -> list[Advice]:
    """Of narrower formats one for each that gains. Of those of weights, what `saves` is the time that they scale."""
    if not remedy.option:
        return [Advice(remedy.what, gain(facts, remedy.saves(facts)), remedy.trade_off, remedy.key, remedy.is_code)]
    found = []
    for each in (BY_FLAG[flag] for flag in facts.faster if BY_FLAG[flag].option == remedy.option):
        saved = remedy.saves(facts)
        if remedy.option == "quantization":
            saved *= facts.linear_share * (1 - factor_at(facts.faster[each.flag], facts.rows))
        predicted = gain(facts, saved)
        if predicted >= WORTH_ITS_LOSS:
            marked = UNTIMED if each.flag in facts.untimed else ""
            found.append(Advice(f"{each.flag}: {remedy.what}{marked}", predicted, each.trade_off, each.flag))
    return found


def gain(facts: Facts, saved: float) -> float:
    return facts.seconds / max(facts.seconds - saved, 0.05 * facts.seconds) if facts.seconds else 1.0


# -- what is seen --------------------------------------------------------------------------------------------------------


def _short_kernels(facts: Facts) -> str:
    per_step = facts.kernels / facts.steps
    if facts.share(facts.launch) < WORTH or per_step < MANY or (facts.device == "cuda" and facts.kernel_seconds > SHORT):
        return ""
    what = "kernels" if facts.device == "cuda" else "ops"
    return (f"{per_step:.0f} {what} a step, the median one {facts.kernel_seconds * 1e6:.0f} µs; gaps between them are "
            f"{facts.share(facts.launch):.0%} of the time")


def _products(facts: Facts) -> PartFacts | None:
    part = facts.parts.get("linears and head")
    return part if part and part.seconds and facts.share(part.seconds) >= 2 * WORTH else None


def _reads_without_computing(facts: Facts) -> str:
    part = _products(facts)
    if part is None or not (facts.read_bytes_s and facts.flops_s):
        return ""
    read, computed = part.bytes / part.seconds / facts.read_bytes_s, part.flops / part.seconds / facts.flops_s
    if read < FAST or computed > SLOW:
        return ""
    return f"matrix products run at {read:.0%} of the bandwidth and {computed:.1%} of the matrix rate: they wait for weights"


def _attention_below(facts: Facts) -> str:
    part = facts.parts.get("attention")
    if part is None or not part.floor or facts.share(part.seconds) < WORTH or part.floor / part.seconds >= BELOW:
        return ""
    rate = f", {part.bytes / part.seconds / facts.read_bytes_s:.0%} of the bandwidth" if facts.read_bytes_s else ""
    return f"attention takes {facts.share(part.seconds):.0%} of the time at {part.floor / part.seconds:.0%} of its roof{rate}"


def _products_below(facts: Facts) -> str:
    part = _products(facts)
    if part is None or not part.floor or part.floor / part.seconds >= BELOW:
        return ""
    return f"matrix products take {facts.share(part.seconds):.0%} of the time at {part.floor / part.seconds:.0%} of their roof"


def _little_matrix(facts: Facts) -> str:
    beside = _beside(facts)
    if facts.busy < 0.5 * facts.seconds or facts.matrix_share >= BESIDE or not beside:
        return ""
    name = max(beside, key=lambda part: beside[part])
    return (f"matrix products are {facts.matrix_share:.0%} of the busy time; {name} alone "
            f"{beside[name] / facts.busy:.0%}")


def _beside(facts: Facts) -> dict[str, float]:
    own = ("linears and head", "attention", "communication")
    return {name: part.seconds for name, part in facts.parts.items() if name not in own}


def _cpu_bound(facts: Facts) -> str:
    if facts.share(facts.between) < WORTH:
        return ""
    name = max(facts.host, key=lambda each: facts.host[each])
    return (f"between steps the device waits for the host for {facts.share(facts.between):.0%} of the time, longest in "
            f"{name} ({facts.share(facts.host[name]):.0%})")


def _preempts(facts: Facts) -> str:
    if not facts.preemptions or facts.recomputed < 0.02:
        return ""
    return f"{facts.preemptions} preemptions; {facts.recomputed:.0%} of the tokens were computed again"


def _uneven_ranks(facts: Facts) -> str:
    means = [statistics.fmean(steps) for steps in facts.rank_steps]
    if len(means) < 2 or max(means) < UNEVEN * statistics.fmean(means) or _straggling(facts):
        return ""
    worst = means.index(max(means))
    return f"rank {worst} works {max(means) / statistics.fmean(means):.2f} times as long as the mean of {len(means)} ranks"


def _straggling(facts: Facts) -> list[tuple[int, int]]:
    """(rank, step) where a step took much longer than usual on that rank and not on all ranks."""
    found = []
    for rank, steps in enumerate(facts.rank_steps):
        usual = statistics.median(steps)
        for step, seconds in enumerate(steps):
            others = [each[step] for each in facts.rank_steps if each is not steps and step < len(each)]
            if seconds > STRAGGLES * usual and others and seconds > STRAGGLES * statistics.median(others):
                found.append((rank, step))
    return found


def _stragglers(facts: Facts) -> str:
    late = _straggling(facts)
    if len(facts.rank_steps) < 2 or not late or facts.share(_straggle_seconds(facts)) < 0.02:
        return ""
    ranks = sorted({rank for rank, _ in late})
    return f"rank {', '.join(map(str, ranks))} was late in {len(late)} of {facts.steps} steps, and all others waited"


def _straggle_seconds(facts: Facts) -> float:
    return sum(facts.rank_steps[rank][step] - statistics.median(facts.rank_steps[rank]) for rank, step in _straggling(facts))


def _spikes(facts: Facts) -> str:
    if facts.memory_peak < max(SPIKE * facts.memory_usual, facts.memory_usual + SPIKE_BYTES):
        return ""
    return f"memory in use rises to {facts.memory_peak / 2**20:,.0f} MiB; usual are {facts.memory_usual / 2**20:,.0f} MiB"


def _allocates(facts: Facts) -> str:
    calls = facts.allocations / max(1, facts.steps - 1)
    if facts.share(facts.allocation) < 0.02 or calls < 0.2:
        return ""
    return (f"{calls:.1f} allocations from the driver per step, during which the device is idle for "
            f"{facts.share(facts.allocation):.0%} of the time")


def _blocks(facts: Facts) -> str:
    calls = facts.waits / facts.steps
    if calls < WAITS or facts.share(facts.waiting) < 0.05:
        return ""
    return (f"{calls:.1f} calls per step wait until the device has finished; it is then idle for "
            f"{facts.share(facts.waiting):.0%} of the time")


def _bare_collectives(facts: Facts) -> str:
    part = facts.parts.get("communication")
    if part is None or facts.share(part.seconds) < WORTH or _uneven_ranks(facts) or _stragglers(facts):
        return ""
    return (f"collectives take {facts.share(facts.collectives):.0%} of the time, "
            f"{part.seconds / max(facts.collectives, 1e-12):.0%} of it not overlapped with computation")


def _taken(facts: Facts) -> str:
    return f"other programs used the CPU for {facts.lost:.0%} of the time" if facts.lost >= WORTH else ""


def _lowered_by(reason: str) -> Callable[[Facts], str]:
    def seen(facts: Facts) -> str:
        if facts.clocks is None or facts.clocks.limited_by != reason or facts.share(_at_full_clock(facts)) < WORTH:
            return ""
        return f"{reason} lowers the clock: {facts.clocks.line}"

    return seen


# -- what it costs -------------------------------------------------------------------------------------------------------


def _part(name: str, share: float = 1.0) -> Callable[[Facts], float]:
    return lambda facts: share * facts.parts[name].seconds if name in facts.parts else 0.0


def _excess(name: str) -> Callable[[Facts], float]:
    """The part's time beyond that of a good kernel."""
    return lambda facts: max(0.0, facts.parts[name].seconds - facts.parts[name].floor / REACHED)


def _weights_only(share: float) -> Callable[[Facts], float]:
    """The memory-bound share of the matrix products' time."""

    def saved(facts: Facts) -> float:
        part = facts.parts["linears and head"]
        return share * part.seconds * (1 - part.computes / part.floor if part.floor else 1.0)

    return saved


def _of(name: str, share: float = 1.0) -> Callable[[Facts], float]:
    return lambda facts: share * float(getattr(facts, name))


def _unknown(facts: Facts) -> float:
    return 0.0


def _most_beside(facts: Facts) -> float:
    """Time outside of matrix products and attention beyond the fifth of the busy time that is acceptable."""
    return max(0.0, sum(_beside(facts).values()) - 0.2 * facts.busy)


def _host_of(names: Sequence[str], share: float, others: bool = False) -> Callable[[Facts], float]:
    def saved(facts: Facts) -> float:
        mine = sum(seconds for phase, seconds in facts.host.items() if any(name in phase for name in names))
        return share * (facts.between - mine if others else mine)

    return saved


def _recomputed(facts: Facts) -> float:
    return facts.recomputed * facts.busy


def _slowest_rank(facts: Facts) -> float:
    means = [statistics.fmean(steps) for steps in facts.rank_steps]
    return facts.steps * (max(means) - statistics.fmean(means)) if means else 0.0


def _at_full_clock(facts: Facts) -> float:
    """Seconds that a full SM clock would save at most: the clock's share, and none below the roof where that is known."""
    beyond = facts.busy - sum(part.floor for part in facts.parts.values())
    return max(0.0, min(facts.clocks.lost * facts.busy, beyond)) if facts.clocks is not None else 0.0


def _lost(facts: Facts) -> float:
    """Seconds lost to other programs."""
    return facts.lost * facts.seconds


PATTERNS = (
    Pattern("the CPU is shared", "host", _taken, _lost, (
        Remedy("keep other programs off these cores, or use other cores", _lost, "the other programs", "cores", "cpu"),
    )),
    Pattern("power lowers the clock", POWER, _lowered_by(POWER), _at_full_clock, (
        Remedy(MORE_GPUS, _unknown, "cost", device="cuda"),
    )),
    Pattern("heat lowers the clock", TEMPERATURE, _lowered_by(TEMPERATURE), _at_full_clock, (
        Remedy(COOL, _at_full_clock, "work on the machine", device="cuda"),
    )),
    Pattern("many short kernels with gaps", "launch", _short_kernels, _of("launch"), (
        Remedy("CUDA graphs (leave enforce_eager off)", _of("launch", 0.9), "memory of the graphs", "graphs", "cuda"),
        Remedy("fuse neighbours into fewer, larger kernels", _of("launch", 0.5), "a kernel more to maintain", "fusion",
               is_code=True),
        Remedy("more rows in a step: the same number of ops for more tokens", _of("launch", 0.5),
               "time per output token of each request", "rows"),
    )),
    Pattern("low FLOP/s at high bandwidth", "weight_bandwidth", _reads_without_computing, _weights_only(1.0), (
        Remedy("more requests in a step: they share each read of the weights", _weights_only(0.5),
               "time per output token of each request", "rows"),
        Remedy("narrower weights", _weights_only(1.0), "quality", option="quantization"),
    )),
    Pattern("attention below its bandwidth", "implementation", _attention_below, _excess("attention"), (
        Remedy("split-KV: cut the context into shares that keep every SM busy", _excess("attention"),
               "partial results to merge", "split", "cuda", is_code=True),
        Remedy("a KV layout with contiguous pages, or larger blocks", _excess("attention"),
               "memory lost in half-filled blocks", "layout", is_code=True),
    )),
    Pattern("matrix products below their roof", "implementation", _products_below, _excess("linears and head"), (
        Remedy("the native kernels of this device: kernels=auto, `ridgeline build`", _excess("linears and head"),
               "none, if the laws hold", "kernels"),
        Remedy("tune tiles for these rows and shapes: `ridgeline bench ops`", _excess("linears and head"),
               "a kernel more to maintain", "tiles", is_code=True),
    )),
    Pattern("little of the time is matrix products", "implementation", _little_matrix, _most_beside, (
        Remedy("fuse norms, activation and copies into their neighbours", _most_beside, "a kernel more to maintain", "fusion",
               is_code=True),
        Remedy("greedy or simpler sampling, if sampling takes the time", _part("sampling", 0.5), "variety of answers",
               "sampling"),
    )),
    Pattern("CPU-bound stretches", "host", _cpu_bound, _of("between"), (
        Remedy("async_scheduling: plan a step while the one before it runs", _of("between", 0.8),
               "a stop is noticed one step late", "overlap", "cuda"),
        Remedy("move tokenising and text out of the engine's process, or onto other cores", _host_of(_TEXT_WORK, 0.9),
               "another process", "tokeniser", is_code=True),
        Remedy("less to plan: fewer, larger requests, or a cheaper scheduling rule", _host_of(_TEXT_WORK, 0.5, others=True),
               "fairness between requests", "scheduler", is_code=True),
    )),
    Pattern("preemptions", "queue", _preempts, _recomputed, (
        Remedy("more tokens in the same memory", _recomputed, "quality", option="kv_cache_dtype"),
        Remedy("admit fewer requests: set max_num_seqs to what the cache holds", _recomputed, "time in the queue", "admission"),
        Remedy("more KV blocks: gpu_memory_utilization, kv_cache_memory_bytes", _recomputed, "other users of the memory",
               "blocks"),
    )),
    Pattern("imbalance across ranks", "communication", _uneven_ranks, _slowest_rank, (
        Remedy("divide heads and columns evenly: a tensor_parallel_size that divides them", _slowest_rank,
               "memory left on each rank", "shards"),
    )),
    Pattern("stragglers across ranks", "communication", _stragglers, _straggle_seconds, (
        Remedy("look at the late rank: clocks, throttling, another program on its cores or device", _straggle_seconds,
               "none", "machine"),
        Remedy("pin each rank to its own cores, and keep garbage collection between steps", _unknown, "cores for others", "pin"),
    )),
    Pattern("memory spikes", "implementation", _spikes, _unknown, (
        Remedy("smaller chunks of prompts: max_num_batched_tokens", _unknown, "time to first token of long prompts", "chunks"),
        Remedy("compute logits and log-probabilities in pieces", _unknown, "a few more launches", "pieces", is_code=True),
    )),
    Pattern("repeated allocation", "implementation", _allocates, _of("allocation"), (
        Remedy("allocate scratch once, for the largest step", _of("allocation", 0.95), "that memory is always taken", "scratch",
               is_code=True),
    )),
    Pattern("blocking synchronisation", "host", _blocks, _of("waiting"), (
        Remedy("read results one step late, into pinned memory, with an event", _of("waiting", 0.9),
               "a stop is noticed one step late", "overlap", is_code=True),
        Remedy("keep data on the device if only it reads them: no .item(), no copies to the host", _of("waiting", 0.9),
               "none", "on-device", is_code=True),
    )),
    Pattern("collectives in idle gaps", "communication", _bare_collectives, _part("communication"), (
        Remedy("overlap collectives with GEMMs: reduce in parts", _part("communication", 0.5),
               "SMs that the collective takes", "overlap-collectives", is_code=True),
        Remedy("fewer ranks, if the model fits", _part("communication", 0.5), "memory left for the KV cache", "ranks"),
    )),
)
