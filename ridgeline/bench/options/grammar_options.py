"""Options of `ridgeline bench grammar`, without torch, so that a mistake is reported at once. grammar runs it."""

from __future__ import annotations

import argparse

from ridgeline import interrupt
from ridgeline.bench.lab.record import add_output
from ridgeline.bench.workload.shapes import SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="",
                        help="name in the HF cache, directory or .gguf file; default: the embedded model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="use a public model's shapes with dummy weights")
    parser.add_argument("--layers", type=int, help="with --shape: number of layers (default: the model's)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128], help="batch sizes to fill masks for")
    parser.add_argument("--requests", type=int, default=8, help="concurrent requests; 0: measure only masks")
    parser.add_argument("--tokens", type=int, default=32, help="answer length")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0],
                        help="of the requests; several are measured in turn (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind; the median counts (default: 3)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="engine options")
    add_output(parser)


def run(args: argparse.Namespace) -> None:
    interrupt.import_module("ridgeline.bench.grammar").run(args)
