"""A benchmark's record: the figures with their machine, versions, commit and workload."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import platform as python_platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline.bench.lab.peak_memory import own_peak
from ridgeline.errors import ConfigError
from ridgeline.process import platform
from ridgeline.version import __version__

PACKAGE = Path(__file__).resolve().parents[2]


def record(
    name: str, workload: dict[str, Any], figures: dict[str, Any], quality: str = "exact", gpu: dict[str, Any] | None = None,
    peak_memory: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`quality`: "exact", or the lossy techniques that were on. `peak_memory`: default this process's own."""
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpu": platform.cpu_name(),
            "architecture": python_platform.machine(),
            "cores": platform.cpu_count(),
            "load_before": os.getloadavg()[0],
            **({"gpu": gpu} if gpu else {}),
        },
        "versions": {
            "ridgeline": __version__,
            "python": python_platform.python_version(),
            **{package: _version(package) for package in ("torch", "numpy", "tokenizers", "transformers", "triton")},
        },
        "commit": commit(),
        "source": source_hash(),
        "quality": quality,
        "peak_memory": own_peak() if peak_memory is None else peak_memory,
        "workload": workload,
        "figures": figures,
    }


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write the record to this file")
    parser.add_argument("--json", action="store_true", help="print the record as one line of JSON, last")


def finish(result: dict[str, Any], args: argparse.Namespace) -> None:
    """The record goes where --out and --json say; people have read the figures already."""
    if args.out:
        write(result, Path(args.out))
        print(f"wrote {args.out}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))


def write(result: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def command(out: str | None) -> str:
    """As this process was started, but where its record goes; files elsewhere by their names alone."""
    words = [word for word in sys.argv if word not in ("--out", out)]
    return " ".join(Path(word).name if Path(word).is_absolute() else word for word in words)


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, P10 and P90. P10 and P90 are values of real runs (of few runs, the extremes). The median of an even number is the
    mean of the middle two: taking one of them would flatter either times or rates."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return {"median": statistics.median(ordered), "p10": at(0.1), "p90": at(0.9)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def commit() -> str:
    """The commit. RIDGELINE_COMMIT overrides it, for a tree that was copied without its history."""
    if given := os.environ.get("RIDGELINE_COMMIT", ""):
        return given
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return ""
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True, text=True, check=False,
    )
    return done.stdout.strip()


@functools.cache
def source_hash() -> str:
    """Hash of the package's files: a commit does not identify a changed tree."""
    digest = hashlib.sha256()
    for path in sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.c"))):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
