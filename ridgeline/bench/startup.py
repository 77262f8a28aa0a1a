"""`ridgeline bench startup`: starts an engine in a fresh process several times, and shows where the time goes.

The child imports, starts an engine, answers one request with one token, and prints its phases
(`ridgeline/process/start_phases.py`), which sum to the wall-clock time since the process was started; the parent measures the
same from outside. With `--cold` every start has an empty Triton cache (and byte-code cache, if ours is used) and compiles its
kernels; otherwise the first start, which may fill both, is not counted. Shapes and engine options may be lists: every
combination is started.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ridgeline import interrupt
from ridgeline.bench.lab import table
from ridgeline.bench.lab.peak_memory import own_peak
from ridgeline.bench.lab.record import record, write
from ridgeline.bench.lab.sweep import check_runs, cross, figure, parse_options, settings
from ridgeline.bench.workload.shapes import SHAPES, write_shape
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError, EngineDead, RidgelineError, one_line
from ridgeline.metrics import HAPPENED
from ridgeline.process import head_start, start_phases
from ridgeline.process.children import child_environment, start_child
from ridgeline.process.cold import cold_start

READY = "ready"                      # the main figure: everything before the first request is accepted
FIRST_TOKEN = "first token"
LATE = "late compilations"           # kernels that a step had to wait for; 0 if all were compiled ahead
REFUSED = 2                          # exit code of a child whose model or options cannot be used; it prints why
_LONGEST = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="",
                        help="name in the HF cache, directory or .gguf file; default: the embedded model")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), help="use public models' shapes with dummy weights")
    parser.add_argument("--layers", type=int, help="with --shape: number of layers (default: the model's)")
    parser.add_argument("--written", action="store_true",
                        help="with --shape: write the weights to disk first, so that a start reads a checkpoint")
    parser.add_argument("--starts", type=int, default=3, help="number of measured starts")
    parser.add_argument("--cold", action="store_true",
                        help="empty the kernel caches before every start, so that kernels are compiled")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="engine options; a name may be repeated")
    table.add_format(parser)
    parser.add_argument("--out", help="also write the record to this file")


def run(args: argparse.Namespace) -> None:
    check_runs(args.starts, 1, "--starts")               # warm starts are warmed up below; cold ones must not be
    figures: dict[str, Any] = {}
    rows = []
    combinations = cross({"shape": args.shape or [""], "words": [tuple(words) for words in settings(args.set)]})
    models = checked_models(args, combinations)
    for chosen in combinations:
        found = measure(args, models[chosen["shape"]], engine_words(args, chosen["shape"], chosen["words"]))
        named = ", ".join(filter(None, [chosen["shape"], *chosen["words"]]))
        figures |= {named: found} if len(combinations) > 1 else found
        cells = {"ready s": found["ready_s"], "first token s": found["first_token_s"]}
        rows.append({"model": chosen["shape"] or args.model or "embedded", "options": " ".join(chosen["words"])} | cells)
    setting = {
        "model": ", ".join(args.shape or []) or Path(args.model).name or "embedded", "layers": args.layers, "cold": args.cold,
        "weights": "written to disk, in the page cache" if args.written else "dummy" if args.shape else "the model's own",
        "options": args.set,
    }
    made = record("startup", setting, figures, found["quality"], found["starts"][-1]["gpu"] or None,
                  {"engine": found["peak_memory"]})
    if args.format == "md":
        if len(rows) > 1:
            print(f"\n{table.as_markdown(rows)}\n")
        if args.out:
            write(made, Path(args.out))
            print(f"wrote {args.out}", file=sys.stderr)
        return
    if args.out:
        write(made, Path(args.out))
    print(table.rendered(rows, args.format, made))


def engine_words(args: argparse.Namespace, shape: str, options: Sequence[str]) -> list[str]:
    """The engine options of one combination, those included that a shape without weights or tokenizer needs."""
    dummy = ["load_format=dummy"] if shape and not args.written else []
    return [*dummy, *(["skip_tokenizer_init=on"] if shape else []), *options]


def checked_models(args: argparse.Namespace, combinations: list[dict[str, Any]]) -> dict[str, str]:
    """The model of each shape. ConfigError or ModelError for what can be refused without torch, in any of the combinations: a
    child imports it first. It finds the rest, a GPU's limits for example."""
    # It imports numpy, which in the child, that is this module too, must come after head_start.begin.
    early_check = importlib.import_module("ridgeline.early_check")
    models: dict[str, str] = {}
    for chosen in combinations:
        shape = chosen["shape"]
        options = parse_options(engine_words(args, shape, chosen["words"]))
        models.setdefault(shape, str(write_shape(shape, args.layers)) if shape else args.model)
        early_check.checked_model(EngineConfig.of(**options | {"model": models[shape]}).for_one_engine())
    return models


def measure(args: argparse.Namespace, model: str, words: list[str]) -> dict[str, Any]:
    """All starts of one combination."""
    if args.shape and args.written:
        began = time.perf_counter()
        written = interrupt.import_module("ridgeline.bench.workload.written_weights").write_weights(Path(model))
        print(f"wrote {written / 1e9:.1f} GB in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if not args.cold:
        start_once(model, words)
    starts = []
    for number in range(args.starts):
        with tempfile.TemporaryDirectory(prefix="ridgeline-cold-") as empty:
            starts.append(start_once(model, words, cold_environment(empty) if args.cold else {}))
        if args.format == "md":
            print(f"start {number + 1}: ready after {starts[-1][READY]:.2f} s, "
                  f"first token after {starts[-1][FIRST_TOKEN]:.2f} s", flush=True)
    if args.format == "md":
        middle = sorted(starts, key=lambda each: each[READY])[len(starts) // 2]
        print(f"\nphases of the median start ({'cold' if args.cold else 'warm'} kernel cache):")
        print(start_phases.table(middle["phases"]))
        print(f"measured from outside: {middle['outside_s']:.3f} s; kernels compiled late: {middle[LATE]}")
    return {
        "ready_s": figure([each[READY] for each in starts], 1, "--starts"),
        "first_token_s": figure([each[FIRST_TOKEN] for each in starts], 1, "--starts"),
        "starts": starts, "quality": starts[-1]["quality"], "peak_memory": starts[-1]["peak_memory"],
    }


def cold_environment(empty: str) -> dict[str, str]:
    """An environment in which a child finds no cached kernels or byte code, and writes them as ever."""
    here = {"PYTHONPYCACHEPREFIX": f"{empty}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
    return {"TRITON_CACHE_DIR": f"{empty}/triton"} | (here if head_start.byte_code_folder() else {})


def start_once(model: str, words: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """One fresh process: its phases, and its time by the parent's clock."""
    told = child_environment() | (environment or {})
    began = time.perf_counter()
    child = start_child(__name__, model, *words, environment=told, stdout=subprocess.PIPE)
    try:
        output, _ = child.communicate(timeout=_LONGEST)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode == REFUSED:
        raise ConfigError(output.decode().strip().splitlines()[-1])
    if child.returncode != 0:
        raise EngineDead(f"the timed engine ended with code {child.returncode}")
    account: dict[str, Any] = json.loads(output.splitlines()[-1])
    account["outside_s"] = time.perf_counter() - began
    return account


def main(argv: list[str]) -> None:
    """The child: starts, answers with one token, and prints its phases."""
    gpu = "device=cpu" not in argv
    cold_start.begin(gpu)
    head_start.begin(gpu)
    # These import torch, which must come after head_start.begin, and which the parent does not need.
    bench_engine, device_log = (
        importlib.import_module(f"ridgeline.bench.{name}") for name in ("workload.bench_engine", "lab.device_log")
    )
    head_start.imported()
    start_phases.until_now("process and imports")
    engine = bench_engine.Engine(argv[0], **parse_options(argv[1:]))
    ready = start_phases.since_start()
    with start_phases.phase("first token"):
        engine.serve([([1, 2, 3], 1)])
    phases = start_phases.report()
    account = {"phases": phases, READY: ready, FIRST_TOKEN: sum(phases.values()), LATE: HAPPENED["kernel_compile"],
               "gpu": device_log.gpu_facts()}
    print(json.dumps(account | {"quality": bench_engine.quality_of(engine.config), "peak_memory": own_peak()}))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RidgelineError as error:
        print(one_line(error))
        sys.exit(REFUSED)
