"""`ridgeline eval`: the quality of a model, measured offline. See docs/eval.md.

Exit code 0: done, and every gate passed; 3: a gate failed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline import interrupt
from ridgeline.bench.lab.record import record, write
from ridgeline.bench.lab.sweep import parse_options
from ridgeline.cli.config_options import add_engine_options, add_model, engine_config
from ridgeline.cli.terminal import require_model
from ridgeline.errors import ConfigError
from ridgeline.evaluate.eval_report import table
from ridgeline.evaluate.quality_gate import GATES, judge, parse_gate, require_gate
from ridgeline.evaluate.slices import SLICES
from ridgeline.evaluate.task import Task, check_inputs, check_save_path
from ridgeline.evaluate.texts import DEFAULT_TEXT
from ridgeline.process import embedded
from ridgeline.report.columns import fitted

FAILED_GATE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    group = parser.add_argument_group("evaluation")
    default = Task()
    group.add_argument("--text", default="", metavar="FILE", help="text to evaluate on (default: pydoc_data.topics)")
    group.add_argument("--slices", nargs="*", default=list(SLICES), metavar="NAME",
                       help=f"further slices: {', '.join(SLICES)} (default: all; none: only the text)")
    group.add_argument("--slice-file", action="append", default=[], metavar="NAME=FILE", help="your own slice")
    group.add_argument("--context", type=int, default=default.context, help="tokens per passage (default: %(default)s)")
    group.add_argument("--overlap", type=int, default=default.overlap,
                       help="tokens at the start of a passage that are read but not scored (default: 0)")
    group.add_argument("--tokens", type=int, default=default.tokens,
                       help="approximate number of scored tokens per slice (default: %(default)s)")
    group.add_argument("--reference", default="", metavar="MODEL|FILE",
                       help=f"compare with this model ({embedded.SHORT_NAME}: the embedded one), or with logits in a file")
    group.add_argument("--reference-set", nargs="+", default=[], metavar="NAME=VALUE",
                       help="engine options of the reference, such as dtype=float32 kernels=reference")
    group.add_argument("--save-reference", default="", metavar="FILE", help="save this model's logits, for a later --reference")
    group.add_argument("--needle", nargs="+", type=int, default=[], metavar="TOKENS",
                       help="long-context retrieval (needle in a haystack) at these context lengths")
    group.add_argument("--choices", default="", metavar="FILE.jsonl",
                       help='multiple choice by log-likelihood: {"question", "choices", "answer"} in each line')
    group.add_argument("--gate", default="", metavar="NAME:LIMIT,…",
                       help=f"exit with code {FAILED_GATE} if the worst slice is beyond a limit: {', '.join(GATES)}")
    group.add_argument("--json", action="store_true", help="print the record instead of the table")
    group.add_argument("--out", metavar="FILE", help="also write the record to this file")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    limits = parse_gate(args.gate) if args.gate else {}
    task = _task(args, config.model.seed)
    require_gate(limits, task, args.reference)
    check_save_path(args.save_reference)
    if args.reference_set and not args.reference:
        raise ConfigError("--reference-set belongs to a --reference")
    require_model(config)
    own = parse_options(args.reference_set)
    check_inputs(config.flat(), task, args.reference, own)
    # These import torch: errors in the command line are reported before.
    evaluation, engine, device_log = (
        interrupt.import_module(f"ridgeline.{name}")
        for name in ("evaluate.evaluation", "bench.workload.bench_engine", "bench.lab.device_log")
    )
    result: dict[str, Any] = evaluation.evaluate(
        config.flat(), task, args.reference, own, args.save_reference, show=not args.json
    )
    if limits:
        result["gate"] = judge(result, limits)
    options = config.flat()
    if "model" in options:                               # its name, not its path on this machine
        options["model"] = Path(options["model"]).name
    made = record("eval", {"options": options, "task": _plain(task)}, result, engine.quality_of(config),
                  device_log.gpu_facts() or None)
    if args.out:
        write(made, Path(args.out))
    print(json.dumps(made) if args.json else fitted(table(result)))
    return 0 if all(verdict["passed"] for verdict in result.get("gate", ())) else FAILED_GATE


def _task(args: argparse.Namespace, seed: int) -> Task:
    files: dict[str, str] = {}
    for word in args.slice_file:
        name, equals, path = word.partition("=")
        if not equals or not name or not path or name in (*SLICES, DEFAULT_TEXT, *files):
            raise ConfigError(f"{word!r}: your own slice is NAME=FILE, with a name that is not taken")
        files[name] = path
    for name in ("context", "tokens"):
        if getattr(args, name) < 2:
            raise ConfigError(f"--{name} must be at least 2, got {getattr(args, name)}")
    if not 0 <= args.overlap < args.context - 1:
        raise ConfigError(f"--overlap must be from 0 to --context - 2, {args.context - 2}; got {args.overlap}")
    if min(args.needle, default=1) < 1:
        raise ConfigError(f"--needle must be above 0, got {min(args.needle)}")
    return replace(
        Task(), text=args.text, slices=() if args.slices == ["none"] else tuple(dict.fromkeys(args.slices)),
        slice_files=files, context=args.context, overlap=args.overlap, tokens=args.tokens,
        needle=tuple(sorted(set(args.needle))), choices=args.choices, seed=seed,
    )


def _plain(task: Task) -> dict[str, object]:
    return {name: getattr(task, name) for name in Task.__slots__}
