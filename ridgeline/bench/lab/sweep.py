"""Rules for every benchmark: options may be lists, and a figure is a median with P10 and P90 after warm-up.

Single runs and runs without warm-up, which measure compilers and cold caches, are refused here for all commands.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.bench.lab.record import percentiles
from ridgeline.config import declared_options
from ridgeline.errors import ConfigError

LEAST_RUNS = 2                       # one run has no spread


def cross(lists: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values; the last option varies fastest. A value that is given twice counts once."""
    values = [list(dict.fromkeys(options)) for options in lists.values()]
    return [dict(zip(lists, chosen, strict=True)) for chosen in itertools.product(*values)]


def settings(words: Sequence[str]) -> list[list[str]]:
    """Engine options as words like max_num_seqs=64; a name that is given several times is a list to go through."""
    by_name: dict[str, list[str]] = {}
    for word in words:
        by_name.setdefault(word.partition("=")[0].replace("-", "_"), []).append(word)
    return [list(chosen.values()) for chosen in cross(by_name)]


def parse_options(words: list[str]) -> dict[str, Any]:
    """Engine options from words like max_num_seqs=64, each in its declared type."""
    kinds = {declared.name: kind for declared, kind, _ in declared_options()}
    options: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in kinds:
            raise ConfigError(f"{word!r} is not an engine option of the form name=value")
        options[name] = _value(name, text, kinds[name])
    return options


def _value(name: str, text: str, kind: type) -> Any:
    switches = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
    try:
        return switches[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {text!r}") from None


def check_runs(runs: int, warm_ups: int, option: str = "--repeats") -> None:
    """Refuse a figure without a spread or without warm-up."""
    if runs < LEAST_RUNS:
        raise ConfigError(f"{option} {runs} gives no median with P10 and P90: {LEAST_RUNS} runs or more are needed")
    if warm_ups < 1:
        raise ConfigError("at least one warm-up run is needed: without warm-up a figure measures compilers and cold caches")


def figure(values: Sequence[float], warm_ups: int, option: str = "--repeats") -> dict[str, float]:
    """Median with P10 and P90 of the runs after `warm_ups` uncounted ones."""
    check_runs(len(values), warm_ups, option)
    return percentiles(list(values))


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several runs' figures as one tree of the same shape: every number its median with P10 and P90.

    One run stays as it is. Text and lists, which have no median, are the last run's.
    """
    last = dict(runs[-1])
    if len(runs) == 1:
        return last
    found: dict[str, Any] = {}
    for name, value in last.items():
        all_of = [run[name] for run in runs if name in run]
        if isinstance(value, Mapping):
            found[name] = merged([each for each in all_of if isinstance(each, Mapping)])
        elif isinstance(value, bool) or not isinstance(value, int | float):
            found[name] = value
        else:
            found[name] = percentiles([float(each) for each in all_of])
    return found


def parse_share(text: str, option: str) -> float:
    """As 3% or 0.03; all of it is 100%."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{option} must be a share such as 3% or 0.03, got {text!r}")
    return share


def middle(tree: Any) -> Any:
    """A tree of figures with medians in the place of their spreads."""
    if not isinstance(tree, Mapping):
        return tree
    if {"median", "p10", "p90"} <= set(tree):
        return tree["median"]
    return {name: middle(each) for name, each in tree.items()}
