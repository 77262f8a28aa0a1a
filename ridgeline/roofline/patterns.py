"""What shapes of a trace mean, and what helps: one table. A pattern is seen in facts, never in a model's name.

A pattern says how much of the time it stands for, in a sentence with its figures, and its remedies say how much of that
they would save: from the divided time of the trace and the cost model's floors. What is only likely saves nothing here
that could be counted, and says so with a gain of 1. Thresholds are parts of the traced time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.roofline.facts import Facts, PartFacts

WORTH = 0.1                          # of the time: less is not worth a change
SHORT = 25e-6                        # a kernel that takes no longer than issuing a few of them
MANY = 30                            # kernels in a step
FAST = 0.55                          # of the bandwidth: a reader that cannot read much faster …
SLOW = 0.3                           # … and of the matrix rate: a product that hardly computes
BELOW = 0.5                          # of its roof: an op that has something wrong with it
REACHED = 0.75                       # of its roof: what a good kernel gets
BESIDE = 0.45                        # of the busy time: matrix products should be more than this
UNEVEN = 1.15                        # a rank's work, by the mean of the ranks
STRAGGLES = 1.5                      # a step on one rank, by the median of its steps
SPIKE, SPIKE_BYTES = 1.3, 2**28      # memory: by what is usual, and beyond it
WAITS = 1.5                          # blocking calls in a step; one brings the step's tokens
_TEXT_WORK = ("tokenize", "tokenise", "detokenize", "detokenise", "text", "stream", "template")


@dataclass(frozen=True, slots=True)
class Remedy:
    what: str
    saves: Callable[[Facts], float]  # seconds of the trace; 0: the facts cannot say
    trade_off: str                   # to check before it is kept
    key: str = ""                    # remedies with the same one are the same change
    device: str = ""                 # the kind it is for; empty: any


@dataclass(frozen=True, slots=True)
class Pattern:
    name: str
    term: str                        # of the verdict that it belongs to
    seen: Callable[[Facts], str]     # what was seen, with figures; empty: not seen
    costs: Callable[[Facts], float]  # seconds of the trace that it stands for
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    what: str
    gain: float                      # predicted: times as fast; 1: not known
    trade_off: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    pattern: str
    term: str
    share: float                     # of the time
    evidence: str
    advice: tuple[Advice, ...]       # the most promising first


def find_patterns(facts: Facts) -> list[Finding]:
    """Every pattern that the facts show, what costs most first."""
    found = []
    for pattern in PATTERNS:
        evidence = pattern.seen(facts) if facts.seconds else ""
        if evidence:
            advice = sorted(
                (Advice(each.what, gain(facts, each.saves(facts)), each.trade_off, each.key)
                 for each in pattern.remedies if each.device in ("", facts.device)),
                key=lambda one: -one.gain,
            )  # fmt: skip
            found.append(Finding(pattern.name, pattern.term, facts.share(pattern.costs(facts)), evidence, tuple(advice)))
    return sorted(found, key=lambda finding: -finding.share)


def gain(facts: Facts, saved: float) -> float:
    return facts.seconds / max(facts.seconds - saved, 0.05 * facts.seconds) if facts.seconds else 1.0


# -- what is seen --------------------------------------------------------------------------------------------------------


def _short_kernels(facts: Facts) -> str:
    per_step = facts.kernels / facts.steps
    if facts.share(facts.launch) < WORTH or per_step < MANY or (facts.device == "cuda" and facts.kernel_seconds > SHORT):
        return ""
    what = "kernels" if facts.device == "cuda" else "ops"
    return (f"{per_step:.0f} {what} a step, the median one {facts.kernel_seconds * 1e6:.0f} µs; gaps between them are "
            f"{facts.share(facts.launch):.0%} of the time")  # fmt: skip


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
    return f"products run at {read:.0%} of the bandwidth and {computed:.1%} of the matrix rate: they wait for weights"


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
    return f"products take {facts.share(part.seconds):.0%} of the time at {part.floor / part.seconds:.0%} of their roof"


def _little_matrix(facts: Facts) -> str:
    beside = _beside(facts)
    if facts.busy < 0.5 * facts.seconds or facts.matrix_share >= BESIDE or not beside:
        return ""
    name = max(beside, key=lambda part: beside[part])
    return (f"matrix products are {facts.matrix_share:.0%} of the busy time; {name} alone "
            f"{beside[name] / facts.busy:.0%}")  # fmt: skip


def _beside(facts: Facts) -> dict[str, float]:
    own = ("linears and head", "attention", "communication")
    return {name: part.seconds for name, part in facts.parts.items() if name not in own}


def _cpu_bound(facts: Facts) -> str:
    if facts.share(facts.between) < WORTH:
        return ""
    name = max(facts.host, key=lambda each: facts.host[each])
    return (f"between steps the device waits for the host for {facts.share(facts.between):.0%} of the time, longest in "
            f"{name} ({facts.share(facts.host[name]):.0%})")  # fmt: skip


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
    """(rank, step) of those that took much longer than that rank usually does, unless all ranks did."""
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
    return f"memory in use rises to {facts.memory_peak / 2**20:,.0f} MiB where {facts.memory_usual / 2**20:,.0f} are usual"


def _allocates(facts: Facts) -> str:
    calls = facts.allocations / max(1, facts.steps - 1)
    if facts.share(facts.allocation) < 0.02 or calls < 0.2:
        return ""
    return (f"the driver is asked for memory {calls:.1f} times a step, and {facts.share(facts.allocation):.0%} of the time "
            f"nothing runs meanwhile")  # fmt: skip


def _blocks(facts: Facts) -> str:
    calls = facts.waits / facts.steps
    if calls < WAITS or facts.share(facts.waiting) < 0.05:
        return ""
    return (f"{calls:.1f} calls a step wait until the device has run dry; it then has nothing to do for "
            f"{facts.share(facts.waiting):.0%} of the time")  # fmt: skip


def _bare_collectives(facts: Facts) -> str:
    part = facts.parts.get("communication")
    if part is None or facts.share(part.seconds) < WORTH or _uneven_ranks(facts) or _stragglers(facts):
        return ""
    return (f"collectives take {facts.share(facts.collectives):.0%} of the time, "
            f"{part.seconds / max(facts.collectives, 1e-12):.0%} of it with nothing beside them")  # fmt: skip


def _taken(facts: Facts) -> str:
    return f"other programs had the processor for {facts.lost:.0%} of the time" if facts.lost >= WORTH else ""


# -- what it costs -------------------------------------------------------------------------------------------------------


def _part(name: str, share: float = 1.0) -> Callable[[Facts], float]:
    return lambda facts: share * facts.parts[name].seconds if name in facts.parts else 0.0


def _excess(name: str) -> Callable[[Facts], float]:
    """What the part takes beyond a good kernel's time."""
    return lambda facts: max(0.0, facts.parts[name].seconds - facts.parts[name].floor / REACHED)


def _weights_only(share: float) -> Callable[[Facts], float]:
    """Of the products' time, what waits for memory."""

    def saved(facts: Facts) -> float:
        part = facts.parts["linears and head"]
        return share * part.seconds * (1 - part.computes / part.floor if part.floor else 1.0)

    return saved


def _of(name: str, share: float = 1.0) -> Callable[[Facts], float]:
    return lambda facts: share * float(getattr(facts, name))


def _unknown(facts: Facts) -> float:
    return 0.0


def _most_beside(facts: Facts) -> float:
    """What is beside the products, beyond a fifth of the time, which it may be."""
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


def _lost(facts: Facts) -> float:
    """Seconds that were lost beside those of the facts, as a part of both."""
    return facts.lost * facts.seconds


PATTERNS = (
    Pattern("the processor is shared", "host", _taken, _lost, (
        Remedy("keep other programs off these cores, or give the engine others", _lost, "what they are for", "cores", "cpu"),
    )),
    Pattern("many short kernels with gaps", "launch", _short_kernels, _of("launch"), (
        Remedy("CUDA graphs (leave enforce_eager off)", _of("launch", 0.9), "memory of the graphs", "graphs", "cuda"),
        Remedy("fuse neighbours into fewer, larger kernels", _of("launch", 0.5), "a kernel more to maintain", "fusion"),
        Remedy("more rows in a step: as many ops for more tokens", _of("launch", 0.5),
               "time per output token of each request", "rows"),
    )),
    Pattern("low FLOP/s at high bandwidth", "weight_bandwidth", _reads_without_computing, _weights_only(1.0), (
        Remedy("more requests in a step: they share each reading of the weights", _weights_only(0.5),
               "time per output token of each request", "rows"),
        Remedy("weights of 8 bits", _weights_only(0.5), "quality: `ridgeline eval`", "weights", "cuda"),
        Remedy("weights of fewer bits", _weights_only(0.4), "quality: `ridgeline eval`", "weights", "cpu"),
    )),
    Pattern("attention below its bandwidth", "implementation", _attention_below, _excess("attention"), (
        Remedy("cut the past into shares that keep every multiprocessor busy", _excess("attention"),
               "partial results to merge", "split", "cuda"),
        Remedy("a KV layout whose pages are read in one piece; larger blocks", _excess("attention"),
               "memory lost in half-filled blocks", "layout"),
    )),
    Pattern("products below their roof", "implementation", _products_below, _excess("linears and head"), (
        Remedy("the native kernels of this device: kernels=auto, `ridgeline build`", _excess("linears and head"),
               "none, if the laws hold", "kernels"),
        Remedy("tiles for these rows and shapes: `ridgeline bench ops`", _excess("linears and head"),
               "a kernel more to maintain", "tiles"),
    )),
    Pattern("little of the time is matrix products", "implementation", _little_matrix, _most_beside, (
        Remedy("fuse norms, activation and copies into their neighbours", _most_beside, "a kernel more to maintain", "fusion"),
        Remedy("greedy or simpler sampling, where sampling is what is beside", _part("sampling", 0.5), "variety of answers",
               "sampling"),
    )),
    Pattern("CPU-bound stretches", "host", _cpu_bound, _of("between"), (
        Remedy("async_scheduling: plan a step while the one before it runs", _of("between", 0.8),
               "a stop is noticed one step late", "overlap", "cuda"),
        Remedy("take tokenising and text out of the engine's process, or give them cores", _host_of(_TEXT_WORK, 0.9),
               "another process", "tokeniser"),
        Remedy("less to plan: fewer, larger requests, or a cheaper scheduling rule", _host_of(_TEXT_WORK, 0.5, others=True),
               "fairness between requests", "scheduler"),
    )),
    Pattern("preemptions", "queue", _preempts, _recomputed, (
        Remedy("kv_cache_dtype fp8: twice the tokens in the same memory", _recomputed, "quality: `ridgeline eval`",
               "kv8", "cuda"),
        Remedy("admit fewer: max_num_seqs as many as the KV cache holds", _recomputed, "time in the queue", "admission"),
        Remedy("more KV blocks: gpu_memory_utilization, kv_cache_memory_bytes", _recomputed, "what else needs the memory",
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
        Remedy("compute logits and log-probabilities in pieces", _unknown, "a few more launches", "pieces"),
    )),
    Pattern("repeated allocation", "implementation", _allocates, _of("allocation"), (
        Remedy("allocate scratch once, for the largest step", _of("allocation", 0.95), "that memory is always taken", "scratch"),
    )),
    Pattern("blocking synchronisation", "host", _blocks, _of("waiting"), (
        Remedy("read results one step late, into pinned memory, with an event", _of("waiting", 0.9),
               "a stop is noticed one step late", "overlap"),
        Remedy("keep on the device what only the device reads: no .item(), no copies to the host", _of("waiting", 0.9),
               "none", "on-device"),
    )),
    Pattern("collectives in idle gaps", "communication", _bare_collectives, _part("communication"), (
        Remedy("overlap collectives with products: reduce in parts", _part("communication", 0.5),
               "multiprocessors that the collective takes", "overlap-collectives"),
        Remedy("fewer ranks, if the model fits", _part("communication", 0.5), "memory left for the KV cache", "ranks"),
    )),
)  # fmt: skip
