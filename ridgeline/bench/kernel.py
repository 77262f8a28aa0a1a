"""`ridgeline bench kernel FILE --op NAME`: a harness for a candidate kernel.

FILE is a Python file that defines a function with the op's name (or `candidate`), called like the op's definition, and
may define `supports(site)`. It is checked first (`candidate.py`); only one without a fault is timed, in turn with the
current implementation, on the op's timed cases, against the roofline. Exit code 1 for a candidate with a fault.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ridgeline.bench import ops
from ridgeline.bench.lab import table
from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import record, write
from ridgeline.bench.lab.sweep import cross
from ridgeline.bench.workload.candidate import Fault, check, watched
from ridgeline.errors import ConfigError
from ridgeline.ops.registry import TRITON_INTERPRETED, Implementation, Op, Site
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.runner.start.measure_peaks import machine_peaks
from ridgeline.sizes.op_costs import Case

ROUNDS = 3                           # candidate and current in turn, so that a noisy machine is unfair to neither


def run(args: argparse.Namespace) -> int:
    op = ops.all_ops()[args.op]
    args.device = ops.device_of(args.device)
    candidate = load(Path(args.file), op)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**31)
    checked, faults = check_all(op, candidate, args, seed)
    if not checked:
        raise ConfigError(f"the candidate supports none of the selected cases of {op.name} on {args.device}")
    rows: list[dict[str, Any]] = []
    if not faults and not args.check_only:
        rows = compare(op, candidate, args, machine_peaks(args.device))
        faults = [fault for row in rows if (fault := row.pop("fault"))]
    figures = {
        "checked": checked, "faults": [str(fault) for fault in faults], "rows": rows,
        **({"speedup": statistics.geometric_mean(row["speedup"] for row in rows)} if rows else {}),
    }
    setting = {"op": op.name, "file": Path(args.file).name, "device": args.device, "seed": seed, "samples": args.samples}
    gpu = gpu_facts() if args.device == "cuda" else None
    made = record("kernel", setting, figures, "within the op's tolerance" if not faults else "faulty", gpu)
    if args.out:
        write(made, Path(args.out))
    _print_report(args, made)
    return 1 if faults else 0


def _print_report(args: argparse.Namespace, made: dict[str, Any]) -> None:
    figures, setting = made["figures"], made["workload"]
    if args.format != "md":
        print(table.rendered(figures["rows"], args.format, made))
        return
    for fault in figures["faults"]:
        print(fault)
    print(f"{setting['op']}: {figures['checked']} cases checked with seed {setting['seed']}, {len(figures['faults'])} faults")
    if figures["rows"]:
        print(f"\n{table.as_markdown(figures['rows'])}\n\n{figures['speedup']:.2f} times the current implementation "
              "(geometric mean)")


def load(path: Path, op: Op[Any, Any]) -> Implementation:
    """The candidate that a file defines. Running it is the point: it is the user's own file."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file")
    spec = importlib.util.spec_from_file_location(f"candidate_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:                               # anything may be wrong in it
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from None
    function = getattr(module, op.name, None) or getattr(module, "candidate", None)
    if isinstance(function, Op) or function is None or not callable(function):
        raise ConfigError(f"{path} defines neither a function {op.name} nor one named candidate")
    _require_signature(path, function, op)
    return Implementation("candidate", function, getattr(module, "supports", lambda site: True))


def _require_signature(path: Path, function: Callable[..., Any], op: Op[Any, Any]) -> None:
    """One line with the signature, instead of a TypeError for every case."""
    for case in (case for case in op.cases if not case.timed):           # small ones; some have arguments that others leave out
        call, named = op.inputs(torch.Generator().manual_seed(0), getattr(torch, case.dtypes[0]), "cpu", **case.sizes)
        try:
            inspect.signature(function).bind(*call, **named)
        except ValueError:                               # a function without a signature
            return
        except TypeError as error:
            wanted = inspect.signature(op.implementations[-1].function)
            raise ConfigError(f"{path}: it must be called like {op.name}{wanted}, but {error}") from None


def check_all(
    op: Op[Any, Any], candidate: Implementation, args: argparse.Namespace, seed: int
) -> tuple[int, list[Fault]]:
    """Every case that the candidate supports, small and odd ones first."""
    # Where hardware rounds to the nearest narrow number, Triton's interpreter cuts: twice the error.
    slack = 2.0 if TRITON_INTERPRETED else 1.0
    checked, faults = 0, []
    for case in sorted(op.cases, key=lambda case: case.timed):
        if (args.case and not any(word in case.name for word in args.case)) or (case.timed and TRITON_INTERPRETED):
            continue
        for dtype in (dtype for dtype in case.dtypes if dtype != "float64" and dtype in (args.dtype or case.dtypes)):
            if dtype not in op.tolerance or not _supported(op, candidate, case, dtype, args.device):
                continue
            checked += 1
            faults += check(op, candidate, case, dtype, args.device, seed + 16 * checked, slack)
    return checked, faults


def _supported(op: Op[Any, Any], candidate: Implementation, case: Case, dtype: str, device: str) -> bool:
    call, _ = op.inputs(torch.Generator().manual_seed(0), getattr(torch, dtype), device, **case.sizes)
    return candidate.supports(Site(device, getattr(torch, dtype), call[0].shape[-1]))


def compare(op: Op[Any, Any], candidate: Implementation, args: argparse.Namespace, peaks: MachinePeaks) -> list[dict[str, Any]]:
    """A row per timed case: the candidate, what runs there now, and their ratio."""
    rows = []
    for chosen in cross({"case": range(len(ops.cases(op, args.device))), "dtype": args.dtype or [""]}):
        case = ops.cases(op, args.device)[chosen["case"]]
        if args.case and not any(word in case.name for word in args.case):
            continue
        for dtype in ops.dtypes(case, args.device, [chosen["dtype"]] if chosen["dtype"] else None):
            call = ops.make_inputs(op, case, getattr(torch, dtype), args.device)
            site = Site(args.device, getattr(torch, dtype), call[0][0].shape[-1])
            if not candidate.supports(site):
                continue
            pair = copy.copy(op)
            pair.implementations = [candidate, op.choose(site)]
            rounds = [list(ops.measure_case(pair, case, dtype, args.device, peaks, args.samples)) for _ in range(ROUNDS)]
            rows.append(_row(op, case, dtype, rounds, candidate, call))
    return rows


def _row(
    op: Op[Any, Any], case: Case, dtype: str, rounds: list[list[ops.Row]], candidate: Implementation, call: Any
) -> dict[str, Any]:
    mine, current = (_middle([pair[place] for pair in rounds]) for place in (0, 1))
    fault = None
    for measured in (mine, current):
        if measured.error:
            raise ConfigError(f"{op.name} {measured.implementation} {case.name} {dtype}: {measured.error}")
    with torch.inference_mode(), watched(op) as ran:         # after the timing too: it may have switched over meanwhile
        candidate.function(*call[0], **call[1])
    if ran:
        fault = Fault("silent fallback", case.name, dtype, f"while it was timed, it ran {', '.join(dict.fromkeys(ran))}")
    return {
        "case": case.name, "dtype": dtype, "current": current.implementation, "candidate µs": mine.microseconds,
        "current µs": current.microseconds, "speedup": current.microseconds["median"] / mine.microseconds["median"],
        "roofline": mine.roofline, "current roofline": current.roofline, "regime": mine.regime, "fault": fault,
    }


def _middle(rows: list[ops.Row]) -> ops.Row:
    """The round whose median is the median one."""
    failed = next((row for row in rows if row.error), None)
    return failed or sorted(rows, key=lambda row: row.microseconds["median"])[len(rows) // 2]
