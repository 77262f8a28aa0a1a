"""`ridgeline plan --fit`: the constants of prediction.py from the records of one model on one device.

Fits decode steps of the uniform workloads, first tokens, kernel times by part where a record has them, and with a record of
`bench ops` the attention kernel alone (a decode step is the difference of two runs, which is inexact where prompts take most of
both). All figures have the same weight, by relative error; parts have less. A constant that the records hardly determine
stays near its expected value (`_EXPECTED`), so the fit is unique. Levenberg–Marquardt on logarithms, in numpy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import ConfigError
from ridgeline.plan.prediction import (
    MOST_ROWS,
    Constants,
    Setup,
    fitted_as,
    idle_seconds,
    paces,
    step_parts,
    step_seconds,
)
from ridgeline.plan.records import MeasuredRow, Record, of_card
from ridgeline.plan.workload_steps import Steps, count_rows, decode_rows, gather, workload_counts
from ridgeline.sizes.graph_shapes import decode_sizes
from ridgeline.sizes.hardware import Device, data_sheet
from ridgeline.user_files import read_json

# The expected value of each constant, and the standard deviation of its logarithm. Kernel times and the overlap come from single
# matrices of Llama-3.1-8B on the H200: with one row a + bytes / rate with a = 2.5 µs, with 128 rows about 4.5 µs above the
# roofline with p = 4. Cards of 4.8 TB/s by their data sheet read 4.38 to 4.44 as measured.
_EXPECTED_GPU: dict[str, tuple[float, float]] = {
    "linear_read": (0.87, 0.03), "linear_compute": (0.65, 0.2), "overlap": (4.0, 0.3), "kernel_one_s": (2.5e-6, 0.15),
    "kernel_many_s": (4.5e-6, 0.15), "attention_call_s": (6e-6, 0.5), "attention_read": (0.8, 0.15),
    "attention_compute": (0.6, 0.4), "layer_one_s": (2e-6, 0.7), "layer_many_s": (6e-6, 0.7), "step_s": (20e-6, 0.7),
    "power_drop": (0.1, 0.5), "power_s": (0.3, 0.3),
    "idle_s": (0.1e-3, 0.5),         # without adding and scheduling requests, which are counted separately
    # How much longer a new request takes in a running engine than in `bench host`.
    "host": (1.0, 0.3),
}
# On a CPU the times of kernels are those of benchmarks/studies/cpu_step: a product of one row of SmolLM2-135M takes 9 µs beyond
# reading its weights, norms, rotation and activation of a layer 6 µs, the host 1.1 ms of every step. Attention of one row over
# 190 tokens reads 5 GB/s, of 8 rows 8.7, where a sum reads 19.5.
_EXPECTED_CPU: dict[str, tuple[float, float]] = {
    "linear_read": (0.85, 0.05), "linear_compute": (0.6, 0.3), "overlap": (2.0, 0.3), "kernel_one_s": (9e-6, 0.2),
    "kernel_many_s": (20e-6, 0.7), "attention_call_s": (10e-6, 0.3), "attention_read": (0.5, 0.2),
    "attention_compute": (0.3, 0.7), "layer_one_s": (6e-6, 0.2), "layer_many_s": (150e-6, 0.7), "step_s": (1.1e-3, 0.1),
    "idle_s": (1e-3, 0.5),
}
# The same study on a Neoverse N1. Its records have the rate of packed products as it was measured, of which a step's products
# leave little out.
_EXPECTED_AARCH64 = _EXPECTED_CPU | {"linear_compute": (0.9, 0.2), "layer_one_s": (9e-6, 0.2), "step_s": (0.75e-3, 0.1)}
_EXPECTED = {"cuda": _EXPECTED_GPU, "cpu": _EXPECTED_CPU, "cpu-aarch64": _EXPECTED_AARCH64}
_ADMISSION = ("host_add_s", "host_add_token_s", "host_request_s", "host_token_s", "host_cached_s")
_ERROR = 0.02                        # of every measured figure: cards of one kind differ by at least this much
OPS_HEADS = (32, 8, 128)             # heads, KV heads and their size in `bench ops`: Llama-3.1-8B's
_PART_ERROR = 0.05                   # of a part's time, which comes from one trace; tracing slows steps down a little


@dataclass(frozen=True, slots=True)
class Observation:
    name: str
    measured: float                  # seconds
    predict: Callable[[Setup], float]
    error: float                     # relative, expected


def observations(record: Record) -> list[Observation]:
    """The fitted figures of a record: of workloads with requests of equal lengths. With a shared prefix, and with mostly prompts
    (whose TPOT is inexact), the total time is fitted."""
    found: list[Observation] = []
    setup = record.setup
    for row in record.rows:
        if len(set(row.asked)) > 1:
            continue
        if row.shared:
            if row.seconds:
                steps = _steps(setup, record, row.asked, row.shared)
                found.append(Observation(f"{row.workload} total", row.seconds, _sum(steps), _ERROR))
            continue
        found += _parts(setup, row)
        if not row.first_seconds:
            continue
        first = _steps(setup, record, [(tokens_in, 1) for tokens_in, _ in row.asked])
        found.append(Observation(f"{row.workload} first tokens", row.first_seconds, _sum(first), _ERROR))
        if not row.tpot_seconds:
            continue
        whole, count = _steps(setup, record, row.asked), row.asked[0][1] - 1
        if row.seconds and row.is_mostly_prompts:
            found.append(Observation(f"{row.workload} total", row.seconds, _sum(whole), _ERROR))
        else:
            found.append(Observation(f"{row.workload} TPOT", row.tpot_seconds, _tpot(whole, first, count), _ERROR))
    return found


def _steps(setup: Setup, record: Record, asked: Sequence[tuple[int, int]], shared: int = 0) -> Steps:
    counts = workload_counts(setup.shape, asked, record.budget, record.max_rows, shared, setup.graphs)
    return gather(setup.shape, counts, setup.model)


def _sum(steps: Steps) -> Callable[[Setup], float]:
    return lambda setup: float(step_seconds(setup, steps).sum()) + idle_seconds(setup, steps)


def _tpot(whole: Steps, first: Steps, count: int) -> Callable[[Setup], float]:
    return lambda setup: float(step_seconds(setup, whole).sum() - step_seconds(setup, first).sum()) / count


def _parts(setup: Setup, row: MeasuredRow) -> list[Observation]:
    """Kernel times of a decode step by part: matrix products, attention, and all others."""
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
        def seconds(setup: Setup) -> float:
            parts = step_parts(setup, steps, paces(setup, steps, steady=True))
            return float(sum(parts[name][0] for name in names[part]))

        return seconds

    found = [
        Observation(f"{row.workload} {part}", seconds, predict(part), _PART_ERROR)
        for part, seconds in measured.items() if seconds > 0
    ]
    if row.step_seconds is not None:
        found.append(Observation(
            f"{row.workload} step", row.step_seconds, lambda setup: float(step_seconds(setup, steps, steady=True)[0]),
            _ERROR,
        ))
    return found


def kernel_observations(path: str | Path, setup: Setup) -> list[Observation]:
    """Decodes' attention of one layer, from a record of `ridgeline bench ops`; nothing for other heads than it has."""
    shape = setup.shape
    if (shape.heads, shape.kv_heads, shape.head_dim) != OPS_HEADS:
        return []
    found = []
    for row in _attention_rows(path):
        sizes = re.fullmatch(r"rows-(\d+)x(\d+)", row["case"])
        if sizes is None or row["op"] != "decode_attention":
            continue
        batch, context = map(int, sizes.groups())
        steps = gather(shape, [count_rows(shape, decode_rows(batch, context - 1))], setup.model)
        found.append(Observation(
            f"kernel of attention, {row['case']}", row["microseconds"]["median"] / 1e6, _attention_of_a_layer(steps), _PART_ERROR
        ))
    return found


def _attention_of_a_layer(steps: Steps) -> Callable[[Setup], float]:
    return lambda setup: float(step_parts(setup, steps)["attention"][0]) / setup.shape.layers


def host_constants(*paths: str | Path) -> dict[str, float]:
    """The host's cost of a step and of a new request, from records of `ridgeline bench host`; a later record wins.

    A step has a fixed cost and a cost per row: a line through the fewest and the most rows of a record.
    """
    found: dict[str, float] = {}
    for path in paths:
        try:
            raw = read_json(path, "a record")
            if raw["benchmark"] != "host":
                raise KeyError(f"it is a record of `bench {raw['benchmark']}`")
            if "model" in raw["workload"] and raw["workload"]["device"] == "cpu":
                raise ValueError("its steps compute on the host; `bench host --shape` needs a GPU: leave --shape out")
            found |= _step_constants(raw["figures"]) | _admission_constants(raw["figures"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a record of `ridgeline bench host` ({type(error).__name__}: {error})") from None
    if "host_s" not in found:
        raise ConfigError("none of these records has steps at two numbers of rows: `ridgeline bench host --running 256 1024`")
    return found


def _step_constants(figures: dict[str, Any]) -> dict[str, float]:
    rows = sorted(int(name.removeprefix("running_")) for name in figures if name.startswith("running_"))
    if len(rows) < 2:
        return {}
    few, many = (figures[f"running_{count}"]["host_ms"]["median"] / 1e3 for count in (rows[0], rows[-1]))
    per_row = (many - few) / (rows[-1] - rows[0])
    return {"host_s": few - rows[0] * per_row, "host_row_s": per_row}


def _admission_constants(figures: dict[str, Any]) -> dict[str, float]:
    """Adding and scheduling a request: a fixed cost, and a cost per prompt token, which is lower for a cached token."""
    if "admitting_2048" not in figures:
        return {}
    short, long, cached = (figures[name] for name in ("admitting_64", "admitting_2048", "admitting_2048_cached"))

    def line(name: str) -> tuple[float, float]:
        few, many = (each[name]["median"] / 1e3 for each in (short, long))
        token = max(0.0, (many - few) / (2048 - 64))
        return max(0.0, few - 64 * token), token

    (add, add_token), (request, token) = line("add_ms"), line("plan_ms")
    return {
        "host_add_s": add, "host_add_token_s": add_token, "host_request_s": request, "host_token_s": token,
        "host_cached_s": max(0.0, (cached["plan_ms"]["median"] / 1e3 - request) / 2048),
    }


def narrow_constants(path: str | Path, call_s: float) -> dict[str, float]:
    """Speed of attention over an fp8 KV cache relative to a 16-bit one, from a record of `ridgeline bench ops`.

    Compares the same rows over both: decodes (fused with rotation and KV write) are memory-bound, prompts compute-bound. `call_s`
    is the fixed time of a call; calls that are little more are skipped, of the others the geometric mean counts.
    """
    rows = {row["case"]: row for row in _attention_rows(path)}
    found = {}
    for name, kind, rate in (("narrow_kv_read", "rows-", "gb_s"), ("narrow_kv_compute", "prefill-", "tflop_s")):
        pairs = [(rows[f"fp8-{case}"], row) for case, row in rows.items() if case.startswith(kind) and f"fp8-{case}" in rows
                 and row["microseconds"]["median"] / 1e6 > 4 * call_s]
        if pairs:
            found[name] = math.exp(np.mean([math.log(_speed(narrow, rate, call_s) / _speed(wide, rate, call_s))
                                            for narrow, wide in pairs]))
    if len(found) < 2:
        raise ConfigError(f"{path} has no attention over both 16-bit and fp8 KV: make one with `ridgeline bench ops --op "
                          "decode_attention paged_attention` on a GPU")
    return found


def _card(path: str | Path) -> Device | None:
    """The card of a record of `ridgeline bench ops`, if the record has its peak rates."""
    try:
        raw = read_json(path, "a record")
        device, peaks = data_sheet(raw["machine"]["gpu"]["name"]), raw["workload"]["peaks"]
        return device and of_card(device, peaks["read_bytes_s"] / 1e12, peaks["flops_s"]["bfloat16"] / 1e12)
    except (ConfigError, ValueError, KeyError, TypeError):
        return None                                      # _attention_rows reports what is wrong


def _attention_rows(path: str | Path) -> list[dict[str, Any]]:
    try:
        raw = read_json(path, "a record")
        if raw["benchmark"] != "ops":
            raise KeyError(f"it is a record of `bench {raw['benchmark']}`")
        ops = ("decode_attention", "paged_attention")
        rows = [row for row in raw["figures"]["rows"] if row["op"] in ops and row["implementation"] == "triton"]
        return [row for row in rows if not row["error"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a record of `ridgeline bench ops` ({type(error).__name__}: {error})") from None


def launch_constants(path: str | Path) -> dict[str, float]:
    """The host's time to launch a kernel, from the peaks in a record of `ridgeline bench ops`; empty if it has none."""
    try:
        seconds = read_json(path, "a record")["workload"]["peaks"]["host_launch_s"]
    except (ConfigError, ValueError, KeyError, TypeError):
        return {}
    return {"launch_s": float(seconds)}


def _speed(row: dict[str, Any], rate: str, call_s: float) -> float:
    """What is read or computed in a second of the time beyond a call's own."""
    seconds = row["microseconds"]["median"] / 1e6
    return float(row[rate] * seconds / (seconds - call_s))


def one_kind(records: Sequence[Record]) -> str:
    """The kind of device that all of these were measured on, of FITTED."""
    kinds = {fitted_as(record.setup.device) for record in records} or {"cuda"}
    if len(kinds) > 1:
        raise ConfigError(f"constants are fitted for one kind of device: these records are of {' and '.join(sorted(kinds))}")
    return kinds.pop()


def fit(
    records: Sequence[Record], host: dict[str, float] | None = None, ops: str | Path | None = None
) -> tuple[Constants, list[dict[str, Any]]]:
    """The constants, and every fitted figure with its error. `host` is measured separately; only the host's speed is fitted.
    `ops`: a record of `bench ops`."""
    seen = [(record.setup, each, record.name) for record in records for each in observations(record)]
    if ops is not None and records:
        setup = replace(records[0].setup, device=_card(ops) or records[0].setup.device)
        seen += [(setup, each, Path(ops).stem) for each in kernel_observations(ops, setup)]
    if len(seen) < 3:
        raise ConfigError("these records have too few workloads to fit: first tokens and decodes are needed")
    kind = one_kind(records)
    names = list(_EXPECTED[kind])
    expected = np.log([_EXPECTED[kind][name][0] for name in names])
    widths = np.array([_EXPECTED[kind][name][1] for name in names])

    def constants(logs: np.ndarray) -> Constants:
        values: dict[str, float] = dict(zip(names, np.exp(logs).tolist(), strict=True))
        if kind != "cuda":
            return Constants(**values, launch_s=0.0)     # a recorded step launches nothing
        factor = values.pop("host")
        measured = {name: value * (factor if name in _ADMISSION else 1) for name, value in (host or {}).items()}
        return Constants(**values, **measured)

    def residuals(logs: np.ndarray) -> np.ndarray:
        made = constants(logs)
        off = [math.log(each.predict(replace(setup, constants=made)) / each.measured) / each.error
               for setup, each, _ in seen]
        return np.concatenate([off, (logs - expected) / widths])

    best = constants(_least_squares(residuals, expected))
    errors = [
        {"record": name, "figure": each.name, "measured": each.measured,
         "predicted": (predicted := each.predict(replace(setup, constants=best))),
         "error": predicted / each.measured - 1}
        for setup, each, name in seen
    ]
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
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n")
