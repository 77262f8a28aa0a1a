"""Options of `ridgeline bench offline`, without torch, so that a mistake is reported at once. offline runs it."""

from __future__ import annotations

import argparse

from ridgeline import interrupt
from ridgeline.bench.lab import price, sustain, table
from ridgeline.bench.options import suite
from ridgeline.bench.workload.workloads import BESIDE_LLAMA_CPP, PRESETS

NAMED = PRESETS | BESIDE_LLAMA_CPP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="",
                        help="name in the HF cache, directory or .gguf file; default: the embedded model")
    parser.add_argument("--workload", nargs="+", choices=sorted(NAMED),
                        help="default: batch, latency and prefill")
    parser.add_argument("--requests", type=int, nargs="+", help="numbers of concurrent requests, instead of a named workload")
    parser.add_argument("--input-len", type=int, nargs="+", default=[128], help="with --requests: prompt length")
    parser.add_argument("--output-len", type=int, nargs="+", default=[128], help="with --requests: answer length")
    parser.add_argument("--against", choices=["transformers", "llama.cpp"],
                        help="also measure another engine in the same run, and with llama.cpp both starts")
    parser.add_argument("--repeats", type=int, help="timed runs of each workload, reported as a median (default: 3; presets: 2)")
    parser.add_argument("--dtype", nargs="+", default=["auto"],
                        help="of weights and activations; several are measured in turn (default: the model's own)")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"],
                        help="dummy: random weights; only config.json is read (default: auto)")
    sustain.add_arguments(parser)
    price.add_arguments(parser)
    table.add_format(parser)
    parser.add_argument("--out", help="also write the record to this file")
    suite.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    interrupt.import_module("ridgeline.bench.offline").run(args)
