"""Where a decode step on a CPU spends its time: every native kernel of the recorded step, and the host around it.

    python benchmarks/studies/cpu_step/run.py [FILE.gguf] --rows 1 8 --out result.json

The engine answers until the step of so many rows is recorded (ops/cpu/recording.py). Then the calls of its program are made one
after the other, each with a clock around it, WALKS times: caches see what they see in a step. Of each call the least time counts,
which a busy machine disturbs little, unless it takes memory bandwidth. The host's time is what the engine's steps take beside
their program: scheduling, packing, taking in the result. The median counts there, and text is the cost of one token's
detokenisation. Half a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import pydoc_data.topics
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from ridgeline.bench.lab.record import record, write  # noqa: E402
from ridgeline.bench.workload.bench_engine import Engine, quality_of  # noqa: E402
from ridgeline.ops.cpu import native  # noqa: E402
from ridgeline.ops.cpu.recording import Program  # noqa: E402
from ridgeline.process import embedded  # noqa: E402
from ridgeline.text.detokenizer import TextStream  # noqa: E402
from ridgeline.text.tokenizer import Tokenizer  # noqa: E402

WALKS, PROMPT, STEPS = 60, 128, 120
PRODUCTS = ("packed_linear", "linear_row")


def names() -> dict[int, str]:
    """Kernels by their address."""
    return {ctypes.cast(function, ctypes.c_void_p).value or 0: name for name, function in vars(native.library()).items()}


def calls_of(program: Program) -> dict[str, dict[str, float]]:
    """Seconds of a step and number of calls, by kernel."""
    calls, run = program._calls, program._run
    least = [float("inf")] * len(calls)
    nothing = min(_timed(lambda: run(calls, 0)) for _ in range(1000))
    places = [ctypes.byref(calls, place * ctypes.sizeof(calls[0])) for place in range(len(calls))]
    for _ in range(WALKS):
        for place, call in enumerate(places):
            began = time.perf_counter_ns()
            run(call, 1)
            least[place] = min(least[place], (time.perf_counter_ns() - began) / 1e9)
    known = names()
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "calls": 0})
    for call, seconds in zip(calls, least, strict=True):
        each = found[known.get(call.function, "?")]
        each["seconds"] += max(0.0, seconds - nothing)
        each["calls"] += 1
    return dict(found)


def _timed(call: Any) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1e9


def host_of(engine: Engine, rows: int) -> dict[str, float]:
    """Medians over decode steps: the whole step, its program, and the difference, which is the host's."""
    inner, spent = Program.run, [0.0]

    def timed(program: Program) -> None:
        began = time.perf_counter()
        inner(program)
        spent[0] += time.perf_counter() - began

    Program.run = timed                                  # type: ignore[method-assign]
    try:
        for number in range(rows):
            engine.submit([100 + number] * PROMPT, STEPS)
        steps, programs, hosts = [], [], []
        while engine.core.has_work:
            spent[0] = 0.0
            began = time.perf_counter()
            engine.core.step()
            taken = time.perf_counter() - began
            if spent[0]:
                steps.append(taken)
                programs.append(spent[0])
                hosts.append(taken - spent[0])
    finally:
        Program.run = inner                              # type: ignore[method-assign]
    return {
        "steps": len(steps), "step_s": statistics.median(steps), "program_s": statistics.median(programs),
        "host_s": statistics.median(hosts), "least_step_s": min(steps), "least_program_s": min(programs),
        "least_host_s": min(hosts),
    }


def text_of(path: Path) -> float:
    """Seconds to turn one more token into text."""
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(pydoc_data.topics.topics["assignment"])
    best = float("inf")
    for _ in range(5):
        stream = TextStream(tokenizer)
        best = min(best, _timed(lambda stream=stream: [stream.feed([token]) for token in ids]))   # type: ignore[misc]
    return best / len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    path = Path(args.model) if args.model else embedded.require()
    engine = Engine(str(path), device="cpu", max_model_len=1024)
    figures: dict[str, Any] = {"text_s_per_token": text_of(path)}
    for rows in args.rows:
        engine.run([[200 + number] * PROMPT for number in range(rows)], 8)
        found = host_of(engine, rows)
        program = engine.runner.forward._recorded[(rows, True)].program      # type: ignore[attr-defined]
        kernels = calls_of(program)
        products = sum(each["seconds"] for name, each in kernels.items() if name in PRODUCTS)
        others = sum(each["seconds"] for name, each in kernels.items() if name not in PRODUCTS)
        figures[f"rows_{rows}"] = found | {
            "kernels": kernels, "products_s": products, "outside_products_s": others,
            "host_share": (found["host_s"] + rows * figures["text_s_per_token"]) / found["step_s"],
        }
        print(f"{rows} rows: products {products * 1e3:.2f} ms, other kernels {others * 1e3:.2f} ms, program "
              f"{found['least_program_s'] * 1e3:.2f} (least), host {found['host_s'] * 1e3:.3f} ms of {found['step_s'] * 1e3:.2f}")
        for name, each in sorted(kernels.items(), key=lambda pair: -pair[1]["seconds"]):
            print(f"   {name:20s} {each['calls']:4.0f} calls {each['seconds'] * 1e3:8.3f} ms")
    setting = {"model": path.name, "prompt": PROMPT, "steps": STEPS, "walks": WALKS}
    write(record("cpu_step", setting, figures, quality_of(engine.config)), Path(args.out))


if __name__ == "__main__":
    main()
