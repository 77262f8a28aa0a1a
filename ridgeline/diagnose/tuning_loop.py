"""`ridgeline bench loop`: tests the diagnosis on deliberately bad settings, by applying its first recommendation.

    baseline → diagnosis → the first recommended change that is an engine option → the same workload again

Each scenario reports the predicted and the achieved gain. Both engines stay loaded and take turns, so other load on the
machine affects both alike; the gain is the median of the pairs' ratios, by wall-clock and by CPU time. Scenarios do not name
an expected diagnosis.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeline.bench.lab.device_log import device_kind, gpu_facts
from ridgeline.bench.lab.record import finish, percentiles, record
from ridgeline.bench.lab.table import as_markdown
from ridgeline.bench.load.latency import figures
from ridgeline.bench.workload.bench_engine import EXACT, Engine, quality_of
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.diagnose.diagnosis import Run, diagnose, run_load, warm_up, workload_of
from ridgeline.diagnose.driven_run import Load
from ridgeline.errors import ConfigError
from ridgeline.runner.start.measure_peaks import machine_peaks


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    what: str                        # the fault, in words
    load: Load
    options: dict[str, Any]


# For a CPU.
SCENARIOS = (
    Scenario("one at a time", "eight requests, one row", Load(8, 64, 48), {"max_num_seqs": 1, "max_model_len": 256}),
    Scenario("the same beginning", "prompts share 256 of 320 tokens, and each computes them",
             Load(8, 320, 8, shared=256), {"enable_prefix_caching": False, "max_model_len": 512}),
    Scenario("waiting for the longest", "answers of 4 to 96 tokens in static batches",
             Load(24, 16, 96, shortest=4, concurrency=8), {"max_num_seqs": 8, "batching": "static", "max_model_len": 256}),
    Scenario("too few blocks", "sixteen rows, KV blocks for two of them",
             Load(16, 96, 64), {"num_gpu_blocks_override": 25, "max_num_seqs": 16, "max_model_len": 256}),
)
# The same faults in GPU sizes, and one that only a GPU has.
GPU_SCENARIOS = (
    Scenario("kernel by kernel", "one request, every kernel launched by the host", Load(1, 256, 32),
             {"enforce_eager": True, "max_model_len": 512}),
    Scenario("one at a time", "eight requests, one row", Load(8, 256, 32), {"max_num_seqs": 1, "max_model_len": 512}),
    Scenario("the same beginning", "prompts share 1,792 of 2,048 tokens, and each computes them",
             Load(16, 2048, 16, shared=1792), {"enable_prefix_caching": False, "max_model_len": 2176}),
    Scenario("too few blocks", "sixty-four rows, KV blocks for sixteen of them",
             Load(64, 512, 96), {"num_gpu_blocks_override": 16 * 38 + 1, "max_num_seqs": 64, "max_model_len": 640}),
)
# Two engines share the GPU.
_HALF = {"gpu_memory_utilization": 0.42}


def run(args: argparse.Namespace) -> None:
    on_gpu = device_kind({}) == "cuda"
    options: dict[str, Any] = dict(_HALF) if on_gpu else {}
    model = args.model
    if args.shape:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        model = str(write_shape(args.shape, args.layers))
    known = GPU_SCENARIOS if on_gpu else SCENARIOS
    chosen = [each for each in known if not args.scenario or each.name in args.scenario]
    if not chosen:
        raise ConfigError(f"the scenarios of this machine are {', '.join(each.name for each in known)}")
    found: dict[str, Any] = {}
    for scenario in chosen:
        found[scenario.name] = follow(model, replace(scenario, options=options | scenario.options), args.repeats)
    print(as_markdown([table_row(name, each) for name, each in found.items()]))
    workload = {"model": args.shape or args.model or "embedded", "repeats": args.repeats, "threads": torch.get_num_threads()}
    finish(record("loop", workload, found, quality_of_all(found), gpu_facts() or None), args)


def quality_of_all(found: dict[str, Any]) -> str:
    """The lossy techniques of all engines in the record."""
    words = [word for each in found.values() for word in each["quality"].split(", ") if word != EXACT]
    return ", ".join(dict.fromkeys(words)) or EXACT


def follow(model: str, scenario: Scenario, repeats: int) -> dict[str, Any]:
    """One scenario, all the way round."""
    options = {"enable_prefix_caching": True} | scenario.options
    base = Engine(model, **options)
    found = diagnose(base, scenario.load, None, lambda text: print(f"{scenario.name}: {text}", file=sys.stderr)).tree
    chosen = next((each for each in found["remedies"] if each["options"]), None)
    told = {
        "what": scenario.what, "workload": workload_of(base, scenario.load), "verdict": found["verdict"],
        "patterns": found["patterns"], "recommended": found["remedies"], "change": chosen, "quality": quality_of(base.config),
        "model_of_time": found["model_of_time"], "profiler": found["profiler"], "machine": found["machine"],
        "steps": {name: found["steps"][name] for name in ("phases", "slowest")}, "ops": found["ops"],
    }
    if chosen is None:                                   # a valid result: no engine option is worth changing
        base.close()
        return told
    changed = Engine(model, **options | chosen["options"])
    peaks = machine_peaks(base.config.device)
    warm_up(changed, scenario.load)
    run_load(changed, scenario.load, peaks, "warm-")
    for engine in (base, changed):
        engine.settle()
    pairs: list[tuple[Run, Run]] = []
    for number in range(repeats):
        before, after = (run_load(each, scenario.load, peaks, f"pair{number}-") for each in (base, changed))
        pairs.append((before, after))
    lossy = [word for each in (base, changed) if (word := quality_of(each.config)) != EXACT]
    base.close()
    changed.close()
    first, then = (_figures([pair[place] for pair in pairs]) for place in (0, 1))
    return told | {
        "quality": ", ".join(dict.fromkeys(lossy)) or EXACT, "predicted_gain": chosen["gain"],
        "achieved_gain": percentiles([before.seconds / after.seconds for before, after in pairs]),
        "achieved_gain_processor": percentiles([before.processor / after.processor for before, after in pairs]),
        "before": first, "after": then,
    }


def _figures(runs: list[Run]) -> dict[str, Any]:
    each = [figures(run.outcomes, None) for run in runs]
    return {
        "seconds": percentiles([run.seconds for run in runs]), "processor_s": percentiles([run.processor for run in runs]),
        "output_tok_s": percentiles([one["output_throughput"] for one in each]),
        "ttft_p50_ms": percentiles([one["ttft_ms"]["p50"] for one in each]),
        "tpot_p50_ms": percentiles([one["tpot_ms"]["p50"] for one in each if one["tpot_ms"]]),
        "steps": len(runs[-1].log.times),
    }


def table_row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    changed = found["change"] is not None
    return {
        "scenario": name, "bound by": found["verdict"]["term"],
        "change": found["change"]["what"] if changed else "none (no engine option)",
        "tok/s before": found["before"]["output_tok_s"] if changed else None,
        "after": found["after"]["output_tok_s"] if changed else None,
        "predicted": f"{found['predicted_gain']:.2f}×" if changed else None,
        "achieved": found["achieved_gain"] if changed else None,
        "by CPU time": found["achieved_gain_processor"] if changed else None,
        "time model error": f"{found['model_of_time']['error']:+.0%}",
    }
