"""What to change, the most promising first: one list out of three sources that may name the same change.

    planned   the engine's own scheduler went through the workload again with the option changed, and the cost model
              priced every step at the speeds just measured: the best there is, and it knows when a change gains nothing
    trace     a pattern was seen, and the divided time of the trace says what it costs
    roofline  the verdict's own advice for the term that binds

The same change is listed once, with the figure of the first source that knows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.roofline.patterns import Finding
from ridgeline.roofline.verdict import Verdict

PLANNED, TRACE, ROOFLINE = "planned", "trace", "roofline"
WORTH = 1.02                         # a gain below is none
# How the verdict's changes begin, and which change that is.
_KEYS = (
    ("raise max_num_seqs", "rows"), ("more requests in a step", "rows"), ("send more requests", "rows"),
    ("prefix caching", "prefix"), ("CUDA graphs", "graphs"), ("async_scheduling", "overlap"),
    ("kv_cache_dtype fp8", "kv8"), ("weights of 8 bits", "weights"), ("weights of 4 bits", "weights4"),
    ("fewer ranks", "ranks"), ("overlap collectives", "overlap-collectives"), ("more memory for KV", "blocks"),
    ("fewer and larger kernels", "fusion"),
)  # fmt: skip
_POINTER = "`ridgeline diagnose`"    # advice to do what is being done


@dataclass(frozen=True, slots=True)
class Planned:
    """A change that was planned through."""

    key: str
    what: str
    gain: float
    trade_off: str
    options: Mapping[str, Any] = field(default_factory=dict)     # the engine's options that make it


@dataclass(frozen=True, slots=True)
class Recommended:
    what: str
    gain: float                      # predicted: times as fast; 1: not known
    source: str
    trade_off: str
    why: str
    key: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def key_of(what: str) -> str:
    return next((key for start, key in _KEYS if what.startswith(start)), what)


def ranked(
    verdict: Verdict | None, findings: Sequence[Finding] = (), planned: Sequence[Planned] = (), done: Collection[str] = (),
) -> list[Recommended]:  # fmt: skip
    """`done`: keys of changes that this setting has made already."""
    taken = {*done, *(each.key for each in planned)}
    found = [
        Recommended(each.what, each.gain, PLANNED, each.trade_off, "the workload, planned and priced again", each.key,
                    each.options)
        for each in planned
    ]  # fmt: skip
    for finding in findings:
        for advice in finding.advice:
            key = advice.key or advice.what
            if key not in taken:
                taken.add(key)
                found.append(Recommended(advice.what, advice.gain, TRACE, advice.trade_off, finding.pattern, key))
    changes, term = (verdict.changes, verdict.term) if verdict is not None else ((), "")
    for change in changes:
        key = key_of(change.what)
        if key not in taken and _POINTER not in change.what:
            taken.add(key)
            found.append(Recommended(change.what, change.gain, ROOFLINE, change.trade_off, term, key))
    worth = [each for each in found if each.gain >= WORTH or (each.source != PLANNED and each.gain == 1.0)]
    return sorted(worth, key=lambda each: -each.gain)
