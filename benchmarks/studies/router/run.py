"""Compares the router's policies on simulated replicas: conversations, and questions about shared documents.

    python benchmarks/studies/router/run.py > benchmarks/studies/router/result.json        # one core, minutes

A SIMULATION: no model, no sockets, no GPU. The router's own tree, learning and choice run; replicas are
ridgeline/route/simulation/simulated_fleet.py with the step times below, which are round numbers in the range of a small model on
CPU cores and of an 8B model on one GPU, not measurements. Several seeds; medians, and the range from the least to the greatest.
`cached_of_one`: cached prompt tokens, as a share of what one cache as large as all together had for the same requests.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

from ridgeline.engine.replicas.policies import POLICIES
from ridgeline.route.simulation.simulated_fleet import Machine, SimulatedFleet, SimulatedRequest
from ridgeline.route.simulation.simulated_traffic import conversations, shared_prefixes

CPU = Machine(fixed=0.01, row=0.0005, token=0.0005, budget=512, rows=32, blocks=4096)
GPU = Machine(fixed=0.006, row=0.00003, token=0.00003, budget=8192, rows=256, blocks=16_384)
SEEDS = range(1, 6)

Traffic = Callable[[int], list[SimulatedRequest]]
CASES: dict[str, tuple[list[Machine], Traffic]] = {
    "conversations, 4 CPU-like replicas": (
        [CPU] * 4, lambda seed: conversations(seed, 120, 8, system=400, question=150, answer=60, rate=2.0)),
    "conversations, 4 CPU-like replicas, twice the load": (
        [CPU] * 4, lambda seed: conversations(seed, 240, 8, system=400, question=150, answer=60, rate=4.0)),
    "shared documents, 4 CPU-like replicas": (
        [CPU] * 4, lambda seed: shared_prefixes(seed, 40, 600, document=2000, question=40, answer=40, rate=8.0)),
    "shared documents, all waiting at once": (
        [CPU] * 4, lambda seed: shared_prefixes(seed, 40, 600, document=2000, question=40, answer=40, rate=1000.0)),
    "one slow replica of 4, conversations": (
        [CPU] * 3 + [Machine(fixed=0.03, row=0.0015, token=0.0015, budget=512, rows=32, blocks=4096)],
        lambda seed: conversations(seed, 120, 8, system=400, question=150, answer=60, rate=2.0)),
    "conversations, 8 GPU-like replicas": (
        [GPU] * 8, lambda seed: conversations(seed, 240, 6, system=2000, question=1000, answer=100, rate=20.0, pause=3.0)),
}


def measured(machines: list[Machine], policy: str, requests: list[SimulatedRequest]) -> dict[str, float]:
    fleet = SimulatedFleet(policy, machines)
    done = fleet.run(requests)
    waits = sorted(each.first - each.arrives for each in done)
    begin, end = min(each.arrives for each in done), max(each.ended for each in done)
    return {
        "cached_share": sum(each.cached for each in done) / sum(each.tokens for each in done),
        "cached_of_one": sum(each.cached for each in done) / sum(each.cached_by_one for each in done),
        "first_token_p50_s": waits[len(waits) // 2],
        "first_token_p99_s": waits[int(len(waits) * 0.99)],
        "output_tokens_s": sum(each.produced for each in done) / (end - begin),
        "corrections": float(sum(load.corrections for load in fleet.loads)),
    }


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result: dict[str, object] = {
        "what": "simulation of ridgeline/route on simulated replicas; no figure is of a real machine",
        "commit": commit,
        "seeds": list(SEEDS), "machines": {"CPU-like": asdict(CPU), "GPU-like": asdict(GPU)},
    }
    cases: dict[str, dict[str, object]] = {}
    for name, (machines, traffic) in CASES.items():
        cases[name] = {}
        for policy in POLICIES:
            runs = [measured(machines, policy, traffic(seed)) for seed in SEEDS]
            summary = {key: [round(f([run[key] for run in runs]), 4) for f in (statistics.median, min, max)] for key in runs[0]}
            cases[name][policy] = summary
            print(f"{name}: {policy}: {summary}", file=sys.stderr)
    result["cases"] = cases
    result["columns"] = ["median", "least", "greatest"]
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
