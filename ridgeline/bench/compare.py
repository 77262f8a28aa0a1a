"""`ridgeline bench compare A B --max-regression 3%`: a gate over two records of the same benchmark.

Figures are matched by name and setting; `directions.py` knows from the name whether higher is better. A figure is a regression
if its median is worse by more than the limit and, where both records have P10 and P90, the two ranges do not overlap. Exit code
1 on a regression, and also if the second record lacks a figure of the first: it may be the one that got worse.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.bench.lab import table
from ridgeline.bench.lab.directions import HIGHER, better
from ridgeline.bench.lab.sweep import parse_share
from ridgeline.errors import ConfigError
from ridgeline.user_files import read_json

# Fields that identify a row of a list; a list whose rows have none is not compared.
IDENTITY = (
    "setting", "op", "implementation", "case", "dtype", "name", "model", "workload", "preset", "rate", "streams", "offered",
    "requests", "batch", "rows", "part",
)
WORKLOAD = ("model", "dtype", "device", "dataset", "endpoint", "turns", "slo")     # settings of a record that should agree


@dataclass(frozen=True, slots=True)
class Figure:
    median: float
    p10: float | None = None         # None: a single run, whose noise is unknown
    p90: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    name: str
    direction: str                   # which way is better
    before: Figure
    after: Figure
    limit: float

    @property
    def worse_by(self) -> float:
        """Above 0: worse, as a share of what it was; infinite where there was nothing before."""
        gone = self.before.median - self.after.median if self.direction == HIGHER else self.after.median - self.before.median
        if gone == 0:
            return 0.0
        return gone / abs(self.before.median) if self.before.median else float("inf") if gone > 0 else float("-inf")

    @property
    def within_noise(self) -> bool:
        ranges = (self.before.p10, self.before.p90, self.after.p10, self.after.p90)
        if any(end is None for end in ranges):
            return False
        low_before, high_before, low_after, high_after = (float(end) for end in ranges if end is not None)
        return low_before <= high_after and low_after <= high_before

    @property
    def verdict(self) -> str:
        if abs(self.worse_by) <= self.limit:
            return "same"
        if self.within_noise:
            return "noise"
        return "worse" if self.worse_by > 0 else "better"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="a record: the baseline")
    parser.add_argument("after", metavar="B", help="a record of the same benchmark")
    parser.add_argument("--max-regression", default="3%", help="how much worse a median may be, as 3%% or 0.03 (default: 3%%)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD",
                        help="compare only figures whose name contains one of these")
    parser.add_argument("--allow-missing", action="store_true", help="do not fail on figures that only A has")
    parser.add_argument("--all", action="store_true", help="also show figures that did not change")
    table.add_format(parser)


def run(args: argparse.Namespace) -> int:
    limit = parse_share(args.max_regression, "--max-regression")
    before, after = read(args.before), read(args.after)
    check_same(before, after)
    changes, missing = compare(before, after, limit, args.only)
    if not changes:
        raise ConfigError("the two records have no comparable figure in common")
    worse = [change for change in changes if change.verdict == "worse"]
    shown = changes if args.all else [change for change in changes if change.verdict != "same"]
    order = {"worse": 0, "better": 1, "noise": 2, "same": 3}
    rows = [row(change) for change in sorted(shown, key=lambda change: (order[change.verdict], -abs(change.worse_by)))]
    passed = not worse and (args.allow_missing or not missing)
    made = {"limit": limit, "compared": len(changes), "regressions": len(worse), "missing": missing, "passed": passed,
            "changes": rows}
    if args.format == "md":
        for line in differences(before, after):
            print(line)
        _print_report(args, made)
    else:
        print(table.rendered(rows, args.format, made))
    return 0 if passed else 1


def _print_report(args: argparse.Namespace, made: Mapping[str, Any]) -> None:
    if made["changes"]:
        print(table.as_markdown(made["changes"]))
    for name in made["missing"]:
        print(f"missing in {args.after}: {name}")
    if made["regressions"]:
        print(f"{made['regressions']} of {made['compared']} figures got worse by more than {made['limit']:.1%}")
    else:
        print(f"no regression: none of {made['compared']} figures got worse by more than {made['limit']:.1%} beyond its noise")
    if made["missing"] and not args.allow_missing:
        count = len(made["missing"])
        print(f"{count} figures of {args.before} are missing in {args.after}: measure them, or give --allow-missing")


def read(path: str) -> dict[str, Any]:
    made = read_json(path, "a record")
    if not isinstance(made, dict) or "benchmark" not in made or "figures" not in made:
        raise ConfigError(f"{path} is not a record: `bench … --out FILE` writes one")
    return made


def check_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    if before["benchmark"] != after["benchmark"]:
        raise ConfigError(f"records of two benchmarks cannot be compared: {before['benchmark']} and {after['benchmark']}")
    for name in WORKLOAD:
        one, other = (made.get("workload", {}).get(name) for made in (before, after))
        if one is not None and other is not None and one != other:
            raise ConfigError(f"the records have different workloads: {name} is {one!r} in the first and {other!r} in the second")


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What a reader should know before believing a difference."""
    one, other = (made.get("machine", {}) for made in (before, after))
    for name in ("cpu", "cores"):
        if one.get(name) != other.get(name):
            yield f"different machines: {name} {one.get(name)} and {other.get(name)}"
    gpus = [(made.get("gpu") or {}).get("name") for made in (one, other)]
    if gpus[0] != gpus[1]:
        yield f"different GPUs: {gpus[0]} and {gpus[1]}"
    if before.get("quality") != after.get("quality"):
        yield f"different quality: {before.get('quality')} and {after.get('quality')}"


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], limit: float, only: list[str] | None = None
) -> tuple[list[Change], list[str]]:
    """The comparable figures of both, and the names that only the first has."""
    old, new = figures_of(before), figures_of(after)
    names = [name for name in old if not only or any(word in " ".join(name) for word in only)]
    changes = [
        Change(" ".join(name), better(name), old[name], new[name], limit) for name in names if name in new and better(name)
    ]
    return changes, [" ".join(name) for name in names if name not in new and better(name)]


def figures_of(made: Mapping[str, Any]) -> dict[tuple[str, ...], Figure]:
    """Every number of a record's figures, and its peak memory, by its path."""
    found = dict(_walk(made["figures"], ()))
    return found | dict(_walk(made.get("peak_memory") or {}, ("peak_memory",)))


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Figure]]:
    if isinstance(tree, bool) or tree is None:
        return
    if isinstance(tree, int | float):
        yield path, Figure(float(tree))
    elif isinstance(tree, Mapping):
        yield from _walk_mapping(tree, path)
    elif isinstance(tree, list):
        for value in tree:
            identity = _identity(value)
            if identity:
                yield from _walk(value, (*path, identity))


def _walk_mapping(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Figure]]:
    spread = ("median", "p10", "p90")
    if set(spread) <= set(tree) and not isinstance(tree["median"], Mapping):
        yield path, Figure(*(float(tree[name]) for name in spread))
        return
    if isinstance(tree.get("median"), Mapping):              # medians by name, with their spreads next to them
        low, high = (tree.get(name) or {} for name in ("p10", "p90"))
        for name, median in tree["median"].items():
            yield (*path, str(name)), Figure(float(median), low.get(name), high.get(name))
    for name, value in tree.items():
        if name not in spread or not isinstance(value, Mapping):
            yield from _walk(value, (*path, str(name)))


def _identity(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ""
    parts = []
    for name in IDENTITY:
        each = value.get(name)
        if isinstance(each, Mapping):
            parts += [f"{key}={inner}" for key, inner in each.items() if inner is not None]
        elif isinstance(each, str | int | float):
            parts.append(str(each))
    return "[" + ", ".join(parts) + "]" if parts else ""


def row(change: Change) -> dict[str, Any]:
    def shown(figure: Figure) -> Any:
        if figure.p10 is None or figure.p90 is None:
            return figure.median
        return {"median": figure.median, "p10": figure.p10, "p90": figure.p90}

    relative = -change.worse_by if change.direction == HIGHER else change.worse_by
    return {
        "figure": change.name, "better": change.direction, "before": shown(change.before), "after": shown(change.after),
        "change": f"{relative:+.1%}", "verdict": change.verdict,
    }
