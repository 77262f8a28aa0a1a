"""What a CUDA graph gains for one prompt alone, by model and prompt length, and what the host takes to launch one op of a step.

    python benchmarks/studies/prompt_graphs/run.py [--models qwen2.5-1.5b …] [--tokens 1536 …] [--out result.json]

Public models' sizes with dummy weights. Every model runs in two processes, without graphs of prompts and with those of up to
8,192 tokens. A figure is the median time to the first token of prompts that share nothing, in milliseconds. `ops`: those that
choices/graph_sizes.py counts; `us_an_op`: the time without a graph for each of them, the host's where the GPU is faster.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-3b", "llama-3.1-8b")
TOKENS = (512, 1024, 1280, 1536, 2048, 2816, 4096)
WARM, TIMED = 3, 9                   # a larger shape is captured when it comes again


def times(model: str, lengths: list[int], most: int) -> dict[int, float]:
    """Milliseconds to the first token by length, with graphs of prompts up to `most` tokens."""
    from ridgeline.bench.workload.bench_engine import Engine
    from ridgeline.plan.public_models import CONFIGS

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[model]))
        engine = Engine(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16, max_model_len=8192,
                        max_num_batched_tokens=8192, gpu_memory_utilization=0.5, max_cudagraph_capture_size=most)
    rng, found = random.Random(0), {}
    for length in lengths:
        runs = []
        for number in range(WARM + TIMED):
            prompt = [rng.randrange(1000, engine.config.model.vocab_size) for _ in range(length)]
            before = engine.runner.forward.replays
            runs.append(1e3 * engine.serve([(prompt, 1)]).first[0])
            engine.settle()
            replayed = engine.runner.forward.replays > before
            if number >= WARM and replayed != (length <= most):
                raise SystemExit(f"{model}, {length} tokens: replayed {replayed} with graphs up to {most}")
        found[length] = statistics.median(runs[WARM:])
    engine.close()
    return found


def compare(model: str, lengths: list[int]) -> list[dict[str, Any]]:
    from ridgeline.choices.graph_sizes import device_seconds, launch_seconds, peaks_of
    from ridgeline.plan.public_models import find_model
    from ridgeline.roofline.decoder_shape import decoder_shape
    from ridgeline.roofline.step_cost import step_cost
    from ridgeline.sizes.hardware import find_device

    sides: dict[int, dict[str, float]] = {}
    for most in (0, 8192):
        words = [sys.executable, __file__, "--models", model, "--tokens", *map(str, lengths), "--most", str(most)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        sides[most] = json.loads(done.stdout.splitlines()[-1])
    rows, shape = [], decoder_shape(find_model(model).config, "bfloat16")
    for length in lengths:
        cost = step_cost(shape, [(length, length)])
        ops = sum(op.calls for op in cost.ops.values())
        eager, graph = sides[0][str(length)], sides[8192][str(length)]
        predicted = max(1.0, launch_seconds(cost) / device_seconds(cost, peaks_of(find_device("H200"), "bfloat16")))
        rows.append({"model": model, "tokens": length, "eager_ms": eager, "graph_ms": graph, "gain": eager / graph, "ops": ops,
                     "us_an_op": 1e3 * eager / ops, "predicted_gain": predicted})
        print(f"{model:14} {length:5} tokens: {eager:7.2f} ms without, {graph:7.2f} with a graph: {eager / graph:5.2f} x "
              f"(predicted {predicted:.2f}); {1e3 * eager / ops:5.1f} us an op", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--out", help="the record")
    parser.add_argument("--most", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.most is not None:
        print(json.dumps(times(args.models[0], args.tokens, args.most)))
        return
    rows: list[dict[str, Any]] = []
    for model in args.models:
        rows += compare(model, args.tokens)
    if args.out:
        from ridgeline.bench.lab.device_log import gpu_facts
        from ridgeline.bench.lab.record import command, record, write

        write(record("prompt-graphs", {"command": command(args.out)}, {"rows": rows}, gpu=gpu_facts() or None), Path(args.out))


if __name__ == "__main__":
    main()
