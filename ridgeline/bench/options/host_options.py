"""Options of `ridgeline bench host`, without torch, so that a mistake is reported at once. host runs it."""

from __future__ import annotations

import argparse

from ridgeline import interrupt
from ridgeline.bench.lab.record import add_output
from ridgeline.bench.workload.shapes import SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=int, nargs="+",
                        help="numbers of running requests (default: 256 1024; with --shape 1 128)")
    parser.add_argument("--steps", type=int, help="decode steps to time (default: 600; with --shape 200)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="time a real engine with this model's shapes and dummy weights")
    parser.add_argument("--drafts", nargs="*", default=["256:1", "64:3"], metavar="ROWS:EACH",
                        help="numbers of running requests, and drafts of each in a step (default: 256:1 64:3)")
    parser.add_argument("--layers", type=int, metavar="N", help="with --shape: number of layers (default: the model's)")
    add_output(parser)


def run(args: argparse.Namespace) -> None:
    interrupt.import_module("ridgeline.bench.host").run(args)
