"""Options of `ridgeline bench idle`, without torch, so that a mistake is reported at once. idle runs it."""

from __future__ import annotations

import argparse

from ridgeline import interrupt
from ridgeline.bench.lab.record import add_output
from ridgeline.bench.workload.shapes import SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="name in the HF cache, directory or .gguf file; see also --shape")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="use a public model's shapes with dummy weights")
    parser.add_argument("--layers", type=int, help="with --shape: number of layers (default: the model's)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256], help="batch sizes")
    parser.add_argument("--context", type=int, default=640, help="context length of each request at the first traced step")
    parser.add_argument("--steps", type=int, default=30, help="decode steps to trace")
    parser.add_argument("--dtype", default="auto", help="of weights and activations (default: the model's own)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="engine options")
    parser.add_argument("--top", type=int, default=25, help="number of kernels to list")
    parser.add_argument("--trace", help="read this Chrome trace instead of making one")
    parser.add_argument("--keep-trace", help="keep the traces in this directory, for a viewer")
    add_output(parser)


def run(args: argparse.Namespace) -> None:
    interrupt.import_module("ridgeline.bench.idle").run(args)
