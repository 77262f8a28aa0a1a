"""`ridgeline bench loop`: the loop that performance work is, done on settings that have something wrong with them.

    baseline → diagnosis → the first change it recommends that is an option → the same workload again

For each scenario the predicted gain stands beside the achieved one. Both engines are held at once and take turns, so that
whatever else the machine does is unfair to neither; the gain is the median of the pairs' ratios, by the clock and by the
seconds that this process computed. No scenario knows what its diagnosis will say.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.bench.diagnosis import WARM_UP, Run, diagnose, run_load, workload_of
from ridgeline.bench.engine import Engine
from ridgeline.bench.latency import figures
from ridgeline.bench.peaks import machine_peaks
from ridgeline.bench.record import finish, percentiles, record
from ridgeline.bench.sweep import check_runs
from ridgeline.bench.table import as_markdown
from ridgeline.bench.watched import Load, drive
from ridgeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    what: str                        # is wrong with it, in words
    load: Load
    options: dict[str, Any]


SCENARIOS = (
    Scenario("one at a time", "eight requests, one row", Load(8, 64, 48), {"max_num_seqs": 1, "max_model_len": 256}),
    Scenario("the same beginning", "prompts share 256 of 320 tokens, and each computes them",
             Load(8, 320, 8, shared=256), {"enable_prefix_caching": False, "max_model_len": 512}),
    Scenario("waiting for the longest", "answers of 4 to 96 tokens in static batches",
             Load(24, 16, 96, shortest=4, concurrency=8), {"max_num_seqs": 8, "batching": "static", "max_model_len": 256}),
    Scenario("too few blocks", "sixteen rows, KV blocks for two of them",
             Load(16, 96, 64), {"num_gpu_blocks_override": 25, "max_num_seqs": 16, "max_model_len": 256}),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="HF directory or .gguf file; default: the embedded model")
    parser.add_argument("--scenario", nargs="+", choices=[each.name for each in SCENARIOS], help="default: all of them")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs of runs; the median counts (default: 5)")
    parser.add_argument("--out", help="also write the record to this file")


def run(args: argparse.Namespace) -> None:
    check_runs(args.repeats, warm_ups=1)
    found: dict[str, Any] = {}
    for scenario in SCENARIOS:
        if not args.scenario or scenario.name in args.scenario:
            found[scenario.name] = follow(args.model, scenario, args.repeats)
    print(as_markdown([table_row(name, each) for name, each in found.items()]))
    workload = {"model": args.model or "embedded", "repeats": args.repeats, "threads": torch.get_num_threads(),
                "note": "the machine was shared: its load stands with each scenario"}  # fmt: skip
    finish(record("loop", workload, found), args.out)


def follow(model: str, scenario: Scenario, repeats: int) -> dict[str, Any]:
    """One scenario, all the way round."""
    options = {"enable_prefix_caching": True} | scenario.options
    base = Engine(model, **options)
    found = diagnose(base, scenario.load, None, lambda text: print(f"{scenario.name}: {text}", file=sys.stderr)).tree
    chosen = next((each for each in found["remedies"] if each["options"]), None)
    if chosen is None:
        raise ConfigError(f"nothing was recommended for {scenario.name!r} that is an option of the engine")
    changed = Engine(model, **options | chosen["options"])
    peaks = machine_peaks(base.config.device)
    drive(changed.core, WARM_UP.asked(base.config.model.vocab_size), WARM_UP.at_once, "warm")
    run_load(changed, scenario.load, peaks, "warm-")
    pairs: list[tuple[Run, Run]] = []
    for number in range(repeats):
        before, after = (run_load(each, scenario.load, peaks, f"pair{number}-") for each in (base, changed))
        pairs.append((before, after))
    workload = workload_of(base, scenario.load)
    base.close()
    changed.close()
    first, then = (_figures([pair[place] for pair in pairs]) for place in (0, 1))
    return {
        "what": scenario.what, "workload": workload, "verdict": found["verdict"], "patterns": found["patterns"],
        "recommended": found["remedies"], "change": chosen, "predicted_gain": chosen["gain"],
        "achieved_gain": percentiles([before.seconds / after.seconds for before, after in pairs]),
        "achieved_gain_processor": percentiles([before.processor / after.processor for before, after in pairs]),
        "before": first, "after": then, "model_of_time": found["model_of_time"], "profiler": found["profiler"],
        "machine": found["machine"], "steps": {name: found["steps"][name] for name in ("phases", "slowest")},
        "ops": found["ops"],
    }  # fmt: skip


def _figures(runs: list[Run]) -> dict[str, Any]:
    each = [figures(run.outcomes, None) for run in runs]
    return {
        "seconds": percentiles([run.seconds for run in runs]), "processor_s": percentiles([run.processor for run in runs]),
        "output_tok_s": percentiles([one["output_throughput"] for one in each]),
        "ttft_p50_ms": percentiles([one["ttft_ms"]["p50"] for one in each]),
        "tpot_p50_ms": percentiles([one["tpot_ms"]["p50"] for one in each if one["tpot_ms"]]),
        "steps": len(runs[-1].log.times),
    }  # fmt: skip


def table_row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "scenario": name, "bound by": found["verdict"]["term"], "change": found["change"]["what"],
        "tok/s before": found["before"]["output_tok_s"], "after": found["after"]["output_tok_s"],
        "predicted": f"{found['predicted_gain']:.2f}×", "achieved": found["achieved_gain"],
        "by processor time": found["achieved_gain_processor"], "model of time": f"{found['model_of_time']['error']:+.0%}",
    }  # fmt: skip
