"""`ridgeline plan --fit`: the constants of prediction.py from the records of one model on one device.

Fitted are what a decode step of the uniform workloads takes, what first tokens take, and, where a record has them, the
kernels' times by part. Every figure counts by its relative error. A constant that the records hardly touch stays near what
it is expected to be (`_EXPECTED`); so the fit has one answer. Levenberg–Marquardt on logarithms, in numpy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import ConfigError
from ridgeline.graph_shapes import decode_sizes
from ridgeline.plan.prediction import MOST_ROWS, Constants, Setup, step_parts, step_seconds
from ridgeline.plan.records import MeasuredRow, Record
from ridgeline.plan.steps import Steps, count_rows, decode_rows, gather, workload_counts

# What each constant is expected to be, and how far it may be off: a standard deviation of its logarithm. The times of a
# kernel and the overlap are what single matrices of Llama-3.1-8B on the H200 say, small ones beside large ones: with one
# row a + bytes / rate with a = 2.5 µs, with 128 rows about 4.5 µs above the roofline with p = 4.
_EXPECTED: dict[str, tuple[float, float]] = {
    "linear_read": (0.87, 0.1), "linear_compute": (0.65, 0.2), "overlap": (4.0, 0.3), "kernel_one_s": (2.5e-6, 0.15),
    "kernel_many_s": (4.5e-6, 0.15), "attention_call_s": (6e-6, 0.5), "attention_read": (0.8, 0.15),
    "attention_compute": (0.6, 0.4), "layer_one_s": (2e-6, 0.7), "layer_many_s": (6e-6, 0.7), "step_s": (20e-6, 0.7),
    "idle_s": (0.7e-3, 0.3),
}  # fmt: skip
_ERROR = 0.02                        # of a measured figure: what the runs of a record differ by
_PART_ERROR = 0.05                   # of a part's: the trace slows things down a little


@dataclass(frozen=True, slots=True)
class Observation:
    name: str
    measured: float                  # seconds
    predict: Callable[[Setup], float]
    error: float                     # relative, expected


def observations(record: Record) -> list[Observation]:
    """What of a record is fitted: workloads whose requests are alike and share nothing."""
    found: list[Observation] = []
    setup = record.setup
    for row in record.rows:
        if row.shared or len(set(row.asked)) > 1:
            continue
        found += _parts(setup, row)
        if not row.first_seconds:
            continue
        first = _steps(setup, record, [(tokens_in, 1) for tokens_in, _ in row.asked])
        found.append(Observation(f"{row.workload} first tokens", row.first_seconds, _sum(first), _ERROR))
        if row.tpot_seconds:
            whole, count = _steps(setup, record, row.asked), row.asked[0][1] - 1
            found.append(Observation(f"{row.workload} TPOT", row.tpot_seconds, _tpot(whole, first, count), _ERROR))
    return found


def _steps(setup: Setup, record: Record, asked: Sequence[tuple[int, int]]) -> Steps:
    counts = workload_counts(setup.shape, asked, record.budget, record.max_rows, graphs=setup.graphs)
    return gather(setup.shape, counts, setup.model)


def _sum(steps: Steps) -> Callable[[Setup], float]:
    return lambda setup: float(step_seconds(setup, steps).sum()) + setup.used.idle_s


def _tpot(whole: Steps, first: Steps, count: int) -> Callable[[Setup], float]:
    return lambda setup: float(step_seconds(setup, whole).sum() - step_seconds(setup, first).sum()) / count


def _parts(setup: Setup, row: MeasuredRow) -> list[Observation]:
    """Kernels of a decode step by part: products, attention, and all others in layers and behind them."""
    measured = {
        "linears and head": row.parts.get("linears and head", 0.0), "attention": row.parts.get("attention", 0.0),
        "the rest": sum(seconds for part, seconds in row.parts.items() if part not in ("linears and head", "attention")),
    }
    batch = len(row.asked)
    padded = next((size for size in decode_sizes(MOST_ROWS) if size >= batch), 0) if setup.graphs else 0
    counts = count_rows(setup.shape, decode_rows(batch, row.parts_context), padded_to=padded)
    steps = gather(setup.shape, [counts], setup.model)
    names = {"linears and head": ("linears", "head"), "attention": ("attention",), "the rest": ("small", "step")}

    def predict(part: str) -> Callable[[Setup], float]:
        return lambda setup: float(sum(step_parts(setup, steps)[name][0] for name in names[part]))

    found = [
        Observation(f"{row.workload} {part}", seconds, predict(part), _PART_ERROR)
        for part, seconds in measured.items() if seconds > 0
    ]
    if row.step_seconds is not None:
        whole = Observation(f"{row.workload} step", row.step_seconds, lambda setup: float(step_seconds(setup, steps)[0]), _ERROR)
        found.append(whole)
    return found


def host_constants(path: str | Path) -> dict[str, float]:
    """What a step costs the host, from a record of `ridgeline bench host`: so much, and so much for each row."""
    try:
        figures = json.loads(Path(path).read_text(encoding="utf-8"))["figures"]
        rows, seconds = (256, 1024), [
            (figures[f"running_{count}"]["plan_and_pack_ms"]["median"] + figures[f"running_{count}"]["update_ms"]["median"])
            / 1e3 for count in (256, 1024)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a record of `ridgeline bench host` ({type(error).__name__}: {error})") from None
    per_row = (seconds[1] - seconds[0]) / (rows[1] - rows[0])
    return {"host_s": seconds[0] - rows[0] * per_row, "host_row_s": per_row}


def fit(records: Sequence[Record], host: dict[str, float] | None = None) -> tuple[Constants, list[dict[str, Any]]]:
    """The constants, and every fitted figure with its error. `host` is measured apart, not fitted."""
    seen = [(record.setup, each, record.name) for record in records for each in observations(record)]
    if len(seen) < 3:
        raise ConfigError("these records have too few workloads to fit: there must be first tokens and decodes")
    names = list(_EXPECTED)
    expected = np.log([_EXPECTED[name][0] for name in names])
    widths = np.array([_EXPECTED[name][1] for name in names])

    def constants(logs: np.ndarray) -> Constants:
        return Constants(**dict(zip(names, np.exp(logs).tolist(), strict=True)), **(host or {}))

    def residuals(logs: np.ndarray) -> np.ndarray:
        made = constants(logs)
        off = [math.log(each.predict(replace(setup, constants=made)) / each.measured) / each.error
               for setup, each, _ in seen]  # fmt: skip
        return np.concatenate([off, (logs - expected) / widths])

    best = constants(_least_squares(residuals, expected))
    errors = [
        {"record": name, "figure": each.name, "measured": each.measured,
         "predicted": (predicted := each.predict(replace(setup, constants=best))),
         "error": predicted / each.measured - 1}
        for setup, each, name in seen
    ]  # fmt: skip
    return best, errors


def _least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Levenberg–Marquardt with differences for derivatives."""
    at, damping = start, 1e-2
    now = residuals(at)
    for _ in range(200):
        slopes = np.array([(residuals(at + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(at))]).T
        system, gradient = slopes.T @ slopes, slopes.T @ now
        move = np.linalg.solve(system + damping * np.diag(np.diag(system)), -gradient)
        then = residuals(at + move)
        if (then**2).sum() < (now**2).sum():
            gained = (now**2).sum() - (then**2).sum()
            at, now, damping = at + move, then, damping / 3
            if gained < 1e-9 * (now**2).sum():
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return at


def write_fit(path: str | Path, constants: Constants, errors: list[dict[str, Any]], files: Sequence[str]) -> None:
    """`files`: names of the records."""
    content = {
        "fitted_on": list(files),
        "constants": {name: float(f"{value:.6g}") for name, value in constants.values().items()},
        "errors": [each | {name: float(f"{each[name]:.5g}") for name in ("measured", "predicted", "error")}
                   for each in errors],
    }  # fmt: skip
    Path(path).write_text(json.dumps(content, indent=1) + "\n")
