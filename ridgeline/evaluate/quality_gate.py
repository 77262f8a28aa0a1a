"""Pass or fail of an evaluation: the worst slice decides, and NaN never passes. No torch."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.evaluate.task import Task

# figure -> (is higher better?, where it is in the result)
GATES = {
    "perplexity": (False, "slices"), "kl": (False, "slices"), "kl_p99": (False, "slices"), "top1": (True, "slices"),
    "perplexity_ratio": (False, "slices"), "needle": (True, "needle"), "choices": (True, "choices"),
}


def parse_gate(words: str) -> dict[str, float]:
    """From words like kl:0.02,top1:0.97."""
    limits = {}
    for word in words.split(","):
        name, colon, number = word.strip().partition(":")
        try:
            limits[name] = float(number)
        except ValueError:
            colon = ""
        if not colon or name not in GATES:
            raise ConfigError(f"{word!r} is not a gate; write name:limit with one of {', '.join(GATES)}")
    return limits


def judge(result: dict[str, Any], limits: dict[str, float]) -> list[dict[str, Any]]:
    """For every gate: the worst figure, its slice, and whether it passes."""
    verdicts = []
    for name, limit in limits.items():
        more, where = GATES[name]
        if where == "slices":
            values = {each: found[name] for each, found in result["slices"].items() if name in found}
        else:
            field = {"needle": "picked", "choices": "accuracy"}[where]
            values = {where: result[where][field]} if where in result else {}
        if not values:
            needs = {"needle": "--needle", "choices": "--choices"}.get(where, "--reference")
            raise ConfigError(f"the gate {name} needs {needs}")
        # NaN is worse than any number: a format that breaks one slice altogether must not pass by the other slices.
        worst = min(values, key=lambda each: -math.inf if math.isnan(values[each]) else values[each] if more else -values[each])
        passed = values[worst] >= limit if more else values[worst] <= limit
        verdicts.append({"figure": name, "limit": limit, "worst": worst, "value": values[worst], "passed": passed})
    return verdicts


def require_gate(limits: dict[str, float], task: Task, reference: str) -> None:
    """Gates that the task cannot answer fail before anything is computed."""
    for name in limits:
        where = GATES[name][1]
        missing = (
            (where == "needle" and not task.needle and "--needle")
            or (where == "choices" and not task.choices and "--choices")
            or (where == "slices" and name != "perplexity" and not reference and "--reference")
        )
        if missing:
            raise ConfigError(f"the gate {name} needs {missing}")
