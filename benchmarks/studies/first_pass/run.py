"""What the first pass of a fresh process loses, step by step.

Each preset runs in a process of its own, twice, right after the engine is ready. The study lists the steps of the first pass
that took longest beside the same steps of the second, with what happened in them: a capture, an eager launch of a shape that
has graphs, a garbage collection. Then it times the capture of every graph that the engine would capture while idle.

    python benchmarks/studies/first_pass/run.py [--shape llama-3.1-8b] [--out result.json] [--preset NAME …]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any

PRESETS = ("latency_b1", "batch128", "throughput", "prefix", "decode_16x8k")
LISTED = 12                          # slowest steps of the first pass


def passes(shape: str, name: str, captures: bool, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    from ridgeline.bench.workload import workloads
    from ridgeline.bench.workload.bench_engine import Engine
    from ridgeline.bench.workload.shapes import write_shape
    from ridgeline.runner.cuda_graphs import GraphForward

    events: list[str] = []
    note_captures(GraphForward, events)
    gc.callbacks.append(lambda phase, info: events.append(f"gc{info['generation']}") if phase == "stop" else None)
    preset = workloads.GPU_PRESETS[name]
    context = -(-preset.longest() // 16) * 16 + 16
    began = time.perf_counter()
    options = {"max_model_len": context} | options | {"load_format": "dummy", "skip_tokenizer_init": True}
    engine = Engine(str(write_shape(shape)), enable_prefix_caching=True, **options)
    ready = time.perf_counter() - began
    found: dict[str, Any] = {"preset": name, "engine_start_s": ready, "passes": []}
    steps = watch_steps(engine, events)
    for number in range(repeats):
        steps.clear()
        asked = preset.requests(workloads.TIMED + number, engine.config.model.vocab_size)
        run = engine.serve(asked, f"pass-{number}")
        found["passes"].append({
            "seconds": run.seconds, "output_tok_s": run.tokens / run.seconds, "first_token_ms": min(run.first) * 1e3,
            "last_first_token_ms": max(run.first) * 1e3, "longest_step_ms": run.longest_step * 1e3, "steps": list(steps),
            "events": dict(Counter(event.split(" ")[0] for step in steps for event in step["events"])),
        })
    if captures:
        found["captures"] = time_captures(engine)
    return found


def note_captures(owner: Any, events: list[str]) -> None:
    plain = owner._capture_shape

    def noted(*args: Any) -> Any:
        began = time.perf_counter()
        result = plain(*args)
        shape, greedy, prefixes = args[1]
        events.append(
            f"capture {1e3 * (time.perf_counter() - began):.1f} ms ({shape.decodes}+{shape.prompts} rows, {shape.prompt_tokens} "
            f"prompt tokens{', greedy' if greedy else ''}{', shared prefix' if any(prefixes) else ''})"
        )
        return result

    owner._capture_shape = noted


def watch_steps(engine: Any, events: list[str]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    step, submit, forward = engine.core.step, engine.core.executor.submit, engine.runner.forward
    latest: dict[str, Any] = {}

    def submitted(plan: Any) -> None:
        before = forward.replays
        began = time.perf_counter()
        submit(plan)
        latest.update(rows=len(plan.rows), tokens=plan.total_tokens, replayed=forward.replays > before,
                      submit_ms=1e3 * (time.perf_counter() - began))

    def stepped() -> Any:
        events.clear()
        latest.clear()
        began = time.perf_counter()
        deltas = step()
        steps.append({"ms": 1e3 * (time.perf_counter() - began), **latest, "events": list(events)})
        return deltas

    engine.core.executor.submit = submitted
    engine.core.step = stepped
    return steps


def time_captures(engine: Any) -> dict[str, Any]:
    """Seconds for each graph that is captured ahead of requests: its first eager step, and its capture."""
    seconds = []
    began = time.perf_counter()
    while True:
        before = time.perf_counter()
        if not engine.runner.prepare():
            break
        seconds.append(time.perf_counter() - before)
    return {"calls": len(seconds), "seconds": time.perf_counter() - began, "longest_ms": 1e3 * max(seconds, default=0.0),
            "median_ms": 1e3 * sorted(seconds)[len(seconds) // 2] if seconds else 0.0}


def report(found: dict[str, Any]) -> None:
    first, last = found["passes"][0], found["passes"][-1]
    print(f"\n{found['preset']}: ready after {found['engine_start_s']:.2f} s; first pass {first['seconds']:.3f} s, last "
          f"{last['seconds']:.3f} s ({last['seconds'] / first['seconds']:.1%}); first token {first['first_token_ms']:.1f} / "
          f"{last['first_token_ms']:.1f} ms; events {first['events']} / {last['events']}")
    again = last["steps"]
    excess = [
        (step["ms"] - again[place]["ms"] if place < len(again) else 0.0, place, step) for place, step in enumerate(first["steps"])
    ]
    print(f"  steps {len(first['steps'])} / {len(again)}; excess of all {sum(each[0] for each in excess):.1f} ms")
    for lost, place, step in sorted(excess, key=lambda each: -each[0])[:LISTED]:
        print(f"  step {place}: {step['ms']:.1f} ms, {lost:+.1f}; {step.get('rows')} rows, {step.get('tokens')} tokens, submit "
              f"{step.get('submit_ms', 0):.1f} ms, replayed {step.get('replayed')}; {' '.join(step['events'])}")
    if "captures" in found:
        print(f"  captures ahead: {found['captures']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--preset", nargs="+", default=list(PRESETS))
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--captures", action="store_true", help="also time every capture, after the last preset's passes")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out")
    parser.add_argument("--alone", action="store_true", help="run one preset in this process")
    args = parser.parse_args()
    if args.alone:
        from ridgeline.bench.lab.sweep import parse_options

        found = passes(args.shape, args.preset[0], args.captures, args.passes, parse_options(args.set))
        with open(args.out, "w") as out:
            json.dump(found, out)
        return
    results = []
    for place, name in enumerate(args.preset):
        part = f"{args.out or '/tmp/first_pass'}.part"
        words = ["--shape", args.shape, "--preset", name, "--passes", str(args.passes), "--out", part, "--alone"]
        words += ["--captures"] if args.captures and place + 1 == len(args.preset) else []
        words += ["--set", *args.set] if args.set else []
        if subprocess.run([sys.executable, __file__, *words], check=False).returncode:
            print(f"{name}: failed")
            continue
        with open(part) as made:
            results.append(json.load(made))
        report(results[-1])
    if args.out:
        from ridgeline.bench.lab.device_log import gpu_facts
        from ridgeline.bench.lab.record import record

        for found in results:
            for each in found["passes"]:
                each["steps"] = len(each["steps"])
        with open(args.out, "w") as out:
            json.dump(record("first_pass", {"shape": args.shape}, {"presets": results}, "exact", gpu_facts()), out, indent=1)


if __name__ == "__main__":
    main()
