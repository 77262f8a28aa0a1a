"""Options of `ridgeline bench studies`, without torch, so that a mistake is reported at once. studies runs it."""

from __future__ import annotations

import argparse

from ridgeline import interrupt
from ridgeline.bench.lab.record import add_output
from ridgeline.bench.lab.sweep import parse_options
from ridgeline.bench.workload.shapes import SHAPES
from ridgeline.config import EngineConfig
from ridgeline.early_check import checked_model
from ridgeline.errors import ConfigError

STUDIES = ("batching", "paging", "cliff")
CASCADE = "cascade"                  # about the kernels of a GPU, not about the engine
LONG_PROMPT = "long-prompt"
PROMPT = 16_384                      # tokens of the long prompt
DECODES = 32                         # requests beside it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="",
                        help="name in the HF cache, directory or .gguf file; default: the embedded model")
    parser.add_argument("--study", nargs="+", choices=(*STUDIES, CASCADE, LONG_PROMPT), default=list(STUDIES),
                        help=f"default: all but {CASCADE} and {LONG_PROMPT}")
    parser.add_argument("--requests", type=int, default=24, help="of each run (default: 24)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="long-prompt: use a public model's shapes with dummy weights")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="long-prompt: length of the long prompt")
    parser.add_argument("--decodes", type=int, default=DECODES, help="long-prompt: requests that decode at the same time")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="long-prompt: engine options")
    add_output(parser)


def run(args: argparse.Namespace) -> None:
    if min(args.prompt, args.decodes) < 1:
        raise ConfigError("--prompt and --decodes must be above 0")
    if args.requests < 1:
        raise ConfigError(f"--requests must be above 0, got {args.requests}")
    if args.shape and args.model:
        raise ConfigError("--shape names a model: leave MODEL out")
    options = parse_options(args.set)
    if not args.shape and set(args.study) != {CASCADE}:
        checked_model(EngineConfig.of(**options | {"model": args.model}))
    interrupt.import_module("ridgeline.bench.studies").run(args)
