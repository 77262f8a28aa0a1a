"""Seconds from the start of a process to its first token, for this engine and for llama.cpp in turn, with the file in memory.

Each start is a process of its own (`python -m` this module): it loads the model, answers one short prompt with one token and
prints a line. The parent takes the time from before the process exists to that line.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline.bench.lab.sweep import figure
from ridgeline.errors import EngineDead
from ridgeline.process import head_start
from ridgeline.process.children import child_environment, start_child

ENGINES = ("ridgeline", "llama.cpp")
PROMPT = [1, 50, 100, 150, 200, 250]
_SAID = "first token"


def compare(path: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Both engines' seconds. The first start of each is not counted: it reads the file from the disk."""
    times: dict[str, list[float]] = {name: [] for name in ENGINES}
    for repeat in range(-1, repeats):
        for name in ENGINES:
            seconds = _start(name, path, threads)
            if repeat >= 0:
                times[name].append(seconds)
    found: dict[str, Any] = {name: {"first_token_s": figure(values, warm_ups=1)} for name, values in times.items()}
    ours, theirs = (found[name]["first_token_s"]["median"] for name in ENGINES)
    return found | {"ratio": theirs / ours}


def line(found: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {found[name]['first_token_s']['median']:.2f} s" for name in ENGINES)
    return f"start to first token: {times}"


def _start(name: str, path: Path, threads: int) -> float:
    start = time.perf_counter()
    # The number of threads is the parent's; everything else is as in the parent, or the starts would not be comparable.
    environment = child_environment() | {"OMP_NUM_THREADS": str(threads)}
    child = start_child(__name__, name, str(path), environment=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    with child:
        said = any(_SAID.encode() in each for each in child.stdout)
        seconds = time.perf_counter() - start
    if not said:
        raise EngineDead(f"{name} gave no first token from {path.name}")
    return seconds


def main(name: str, path: str) -> None:
    threads = int(os.environ["OMP_NUM_THREADS"])
    # Each process imports one of the two: importing is part of a start.
    if name == "ridgeline":
        head_start.begin(gpu=False)                      # as the engine's own process begins
        bench_engine = importlib.import_module("ridgeline.bench.workload.bench_engine")
        head_start.imported()
        bench_engine.Engine(path).run([PROMPT], 1)
    else:
        importlib.import_module("ridgeline.bench.peers.peer_llama_cpp").LlamaCppPeer(Path(path), threads).run([PROMPT], 1)
    print(_SAID, flush=True)
    os._exit(0)                                          # what is left is not part of a start


if __name__ == "__main__":
    main(*sys.argv[1:])
