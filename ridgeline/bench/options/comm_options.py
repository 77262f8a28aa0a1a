"""Options of `ridgeline bench comm`, without torch, so that a mistake is reported at once. collectives runs it."""

from __future__ import annotations

import argparse

from ridgeline import interrupt
from ridgeline.bench.lab.record import add_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure what ranks that share a model wait for: the time of each collective between them, by the size of the message, "
        "with its latency (µs) and bandwidth (GB/s). `ridgeline plan --comm RECORD` counts with it."
    )
    parser.add_argument("--ranks", type=int, default=2,
                        help="processes of this machine that talk to each other; on a GPU each (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cpu: sockets, over gloo; cuda: the links between this machine's GPUs, over NCCL (default: cpu)")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="BYTES",
                        help="message sizes, multiples of 4 times the ranks (default: 1 KiB to 64 MiB, rounded up to such)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each size; the median counts (default: 5)")
    parser.add_argument("--in-a-row", type=int, default=10, help="calls in one measurement (default: 10)")
    add_output(parser)


def run(args: argparse.Namespace) -> None:
    interrupt.import_module("ridgeline.bench.collectives").run(args)
