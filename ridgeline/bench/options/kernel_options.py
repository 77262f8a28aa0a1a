"""Options of `ridgeline bench kernel`, without torch, so that a mistake is reported at once. kernel runs it."""

from __future__ import annotations

import argparse
from pathlib import Path

from ridgeline import interrupt
from ridgeline.bench.lab import table
from ridgeline.bench.options.ops_options import OP_NAMES, SAMPLES
from ridgeline.errors import ConfigError
from ridgeline.sizes.op_costs import DTYPE_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a Python file that defines a function named like the op, or `candidate`")
    parser.add_argument("--op", required=True, choices=OP_NAMES, help="the operation")
    parser.add_argument("--case", nargs="+", help="only cases whose name contains one of these words")
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPE_BYTES), help="default: all dtypes of the cases")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU, if there is one")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"timed runs of each case (default: {SAMPLES})")
    parser.add_argument("--seed", type=int, help="seed of the inputs; default: a new one each time, stored in the record")
    parser.add_argument("--check-only", action="store_true", help="check the results, without timing")
    table.add_format(parser)
    parser.add_argument("--out", help="also write the record to this file")


def run(args: argparse.Namespace) -> int:
    if not Path(args.file).is_file():
        raise ConfigError(f"there is no file {args.file}")
    code: int = interrupt.import_module("ridgeline.bench.kernel").run(args)
    return code
