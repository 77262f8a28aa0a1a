"""Options of `ridgeline bench loop`, without torch, so that a mistake is reported at once. tuning_loop runs it."""

from __future__ import annotations

import argparse

from ridgeline import interrupt
from ridgeline.bench.lab.record import add_output
from ridgeline.bench.lab.sweep import check_runs
from ridgeline.bench.workload.shapes import SHAPES
from ridgeline.config import EngineConfig
from ridgeline.early_check import checked_model
from ridgeline.errors import ConfigError

SCENARIO_NAMES = ("one at a time", "the same beginning", "waiting for the longest", "too few blocks", "kernel by kernel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="",
                        help="name in the HF cache, directory or .gguf file; default: the embedded model")
    parser.add_argument("--shape", choices=sorted(SHAPES),
                        help="use a public model's shapes with dummy weights, instead of MODEL")
    parser.add_argument("--layers", type=int, metavar="N", help="with --shape: number of layers (default: the model's)")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIO_NAMES, metavar="NAME",
                        help=f"only these (default: all of this device): {', '.join(SCENARIO_NAMES)}")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs of runs, reported as a median (default: 5)")
    add_output(parser)


def run(args: argparse.Namespace) -> None:
    check_runs(args.repeats, warm_ups=1)
    if args.shape and args.model:
        raise ConfigError("--shape names a model: leave MODEL out")
    if not args.shape:
        checked_model(EngineConfig.of(model=args.model))
    interrupt.import_module("ridgeline.diagnose.tuning_loop").run(args)
