"""Ranks recommended changes by predicted gain, from three sources that may name the same change.

    planned   the engine's own scheduler planned the workload again with the option changed, and the cost model priced every
              step at the speeds just measured: the most exact source, and it also finds changes that gain nothing
    trace     a pattern was found in a trace, and the trace's times say what it costs
    roofline  the verdict's own advice for its bottleneck

A change is listed once, with the figure of the first source that has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.roofline.patterns import Finding
from ridgeline.roofline.verdict import Verdict
from ridgeline.sizes.abilities import KV_FORMATS, WEIGHT_FORMATS

PLANNED, TRACE, ROOFLINE = "planned", "trace", "roofline"
WORTH = 1.02                         # smaller gains are not listed
# The first words of the verdict's changes, and the key of the change.
_KEYS = (
    ("raise max_num_seqs", "rows"), ("more requests in a step", "rows"), ("send more requests", "rows"),
    ("speculative_config", "speculation"), ("prefix caching", "prefix"), ("CUDA graphs", "graphs"),
    ("async_scheduling", "overlap"), ("fewer ranks", "ranks"), ("more memory for KV", "blocks"),
    ("keep other programs off", "cores"),
    *((each.flag, each.flag) for each in (*WEIGHT_FORMATS, *KV_FORMATS)),
)
_POINTER = "`ridgeline diagnose`"    # advice to run the command that is running


@dataclass(frozen=True, slots=True)
class Planned:
    """A change whose workload was planned again."""

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
    is_code: bool = False            # no setting makes it: work on the engine's code


def key_of(what: str) -> str:
    return next((key for start, key in _KEYS if what.startswith(start)), what)


def ranked(
    verdict: Verdict | None, findings: Sequence[Finding] = (), planned: Sequence[Planned] = (), done: Collection[str] = (),
) -> list[Recommended]:
    """`done`: keys of changes that the settings already include."""
    taken = {*done, *(each.key for each in planned)}
    found = [
        Recommended(each.what, each.gain, PLANNED, each.trade_off, "workload planned again with this change", each.key,
                    each.options)
        for each in planned
    ]
    for finding in findings:
        for advice in finding.advice:
            key = advice.key or advice.what
            if key not in taken:
                taken.add(key)
                found.append(Recommended(
                    advice.what, advice.gain, TRACE, advice.trade_off, finding.pattern, key, is_code=advice.is_code
                ))
    changes, term = (verdict.changes, verdict.term) if verdict is not None else ((), "")
    for change in changes:
        key = key_of(change.what)
        if key not in taken and _POINTER not in change.what:
            taken.add(key)
            found.append(Recommended(change.what, change.gain, ROOFLINE, change.trade_off, term, key))
    worth = [each for each in found if each.gain >= WORTH or (each.source != PLANNED and each.gain == 1.0)]
    return sorted(worth, key=lambda each: -each.gain)
