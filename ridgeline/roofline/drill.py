"""Builds a diagnosis as one tree of plain numbers, from the application down, for JSON, text and page.

    application   TTFT, TPOT and goodput against the SLO
    steps         where the time goes, phase by phase; gaps; the slowest 1 % and their causes
    ops           the profiled parts, each against its roof; the share of matrix products
    patterns      known patterns found in the trace
    verdict       the bottleneck
    remedies      what to change, ranked by predicted gain

Callers pass the measurements in. This module measures nothing and does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.roofline.facts import Facts
from ridgeline.roofline.patterns import Finding
from ridgeline.roofline.remedies import Recommended
from ridgeline.roofline.slow import StepTimes, slowest
from ridgeline.roofline.steps import PHASES, PhaseSums
from ridgeline.roofline.verdict import Verdict


def steps_section(steps: Sequence[StepTimes], sums: Mapping[str, PhaseSums] | None = None) -> dict[str, Any]:
    """Where the time goes, from every logged step; predicted times come from the recorder's sums."""
    whole = sum(step.seconds for step in steps)
    found: dict[str, Any] = {
        "count": len(steps), "seconds": whole, "device": sum(min(step.device, step.seconds) for step in steps),
        "host": sum(step.host for step in steps), "collecting": sum(step.collecting for step in steps),
        "lost": sum(step.lost for step in steps),
        "phases": {}, "slowest": slowest(steps),
    }
    for phase in PHASES:
        mine = [step for step in steps if step.phase == phase]
        if mine:
            found["phases"][phase] = _phase_row(mine, whole, (sums or {}).get(phase))
    return found


def _phase_row(mine: Sequence[StepTimes], whole: float, predicted: PhaseSums | None) -> dict[str, Any]:
    own = sorted(step.seconds for step in mine)
    row: dict[str, Any] = {
        "steps": len(own), "seconds": sum(own), "share": sum(own) / whole if whole else 0.0,
        "median_ms": own[len(own) // 2] * 1e3, "p99_ms": own[min(len(own) - 1, int(0.99 * len(own)))] * 1e3,
        "tokens": sum(step.tokens for step in mine), "rows": sum(step.rows for step in mine) / len(mine),
        "gap_share": sum(step.host for step in mine) / sum(own) if sum(own) else 0.0,
    }
    device = sum(min(step.device, step.seconds) * step.kept for step in mine)
    if predicted is not None and device:                 # relative to the time in which it had a CPU
        roof = predicted.on_compute + predicted.on_weights + predicted.on_kv + predicted.on_activations
        row["at_roof"] = roof / device
    return row


def ops_section(facts: Facts) -> dict[str, Any]:
    """Every profiled part, the longest first, and how the rest of the traced time is divided."""
    rows = []
    for name, part in sorted(facts.parts.items(), key=lambda item: -item[1].seconds):
        row: dict[str, Any] = {
            "part": name, "calls_per_step": part.calls / facts.steps, "ms_per_step": part.seconds * 1e3 / facts.steps,
            "share": facts.share(part.seconds),
        }
        if part.floor and part.seconds:
            row |= {
                "floor_ms_per_step": part.floor * 1e3 / facts.steps, "at_roof": part.floor / part.seconds,
                "gb_s": part.bytes / part.seconds / 1e9, "gflop_s": part.flops / part.seconds / 1e9,
                "bound": "compute" if part.computes > part.floor / 2 else "memory",
            }
        rows.append(row)
    return {
        "device": facts.device, "steps": facts.steps, "seconds": facts.seconds, "busy": facts.busy,
        "matrix_share": facts.matrix_share, "kernels_per_step": facts.kernels / max(1, facts.steps),
        "median_kernel_us": facts.kernel_seconds * 1e6, "parts": rows,
        "gaps": {"launch": facts.launch, "waiting": facts.waiting, "allocation": facts.allocation,
                 **{f"host: {name}": seconds for name, seconds in facts.host.items()}},
    }


def verdict_section(verdict: Verdict) -> dict[str, Any]:
    return {
        "term": verdict.term, "share": verdict.share, "headroom": verdict.headroom, "why": verdict.why,
        "parts": dict(verdict.parts),
    }


def patterns_section(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [
        {"pattern": each.pattern, "term": each.term, "share": each.share, "evidence": each.evidence,
         "remedies": [advice.what for advice in each.advice]}
        for each in findings
    ]


def remedies_section(remedies: Sequence[Recommended]) -> list[dict[str, Any]]:
    return [
        {"what": each.what, "gain": each.gain if each.gain != 1.0 else None, "from": each.source, "why": each.why,
         "trade_off": each.trade_off, "options": dict(each.options), "is_code": each.is_code}
        for each in remedies
    ]
