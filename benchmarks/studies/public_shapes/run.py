"""Public models' shapes on one GPU, each in a process of its own: agreement of two layers with the definitions, speed, memory.

    python benchmarks/studies/public_shapes/run.py --out result.json [--model NAME …] [--what agreement speed]
    python benchmarks/studies/public_shapes/run.py --compare result.json       # with `plan`, without a GPU

Shapes are those that `ridgeline plan` knows by name, and models.json: the defaults of transformers' config classes, where these
are a published model. Weights are random. One prompt of 512 tokens with 65 tokens of answer, 64 such prompts with 33, and one of
8,192.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPT, LONG, ROWS = 512, 8192, 64
LISTED = ("layer_types", "no_rope_layers")


def config_of(name: str) -> dict[str, Any]:
    from ridgeline.plan.public_models import CONFIGS

    own: dict[str, dict[str, Any]] = json.loads((HERE / "models.json").read_text())
    return dict(own[name] if name in own else CONFIGS[name])


def known() -> list[str]:
    """Where no model is named: those of models.json, and of plan's those that other records do not have."""
    own = list(json.loads((HERE / "models.json").read_text()))
    return [
        *own, "qwen2.5-0.5b", "qwen2.5-7b", "gemma-2-9b", "gemma-3-4b", "gemma-3-27b", "phi-4-14b", "mistral-nemo-12b",
        "mistral-small-24b", "llama-3.2-3b", "qwen3-32b", "gpt-oss-20b", "gpt-oss-120b",
    ]


def agreement(name: str) -> dict[str, Any]:
    from ridgeline.bench.workload import quality, shapes

    config = config_of(name)
    for key in LISTED:
        if config.get(key):                              # a layer of each kind
            config[key] = sorted(set(config[key]), reverse=True) if len(set(config[key])) == 2 else config[key][:2]
    config["max_position_embeddings"] = max(16_384, config["max_position_embeddings"])
    shapes.SHAPES[name] = config
    return {key: value for key, value in quality.check_quality(name).items() if key != "kernels"}


def speed(name: str) -> dict[str, Any]:
    from ridgeline.bench.lab.machine_log import Watch
    from ridgeline.bench.workload import presets, shapes
    from ridgeline.bench.workload.bench_engine import Engine
    from ridgeline.bench.workload.workloads import Preset
    from ridgeline.runner.start.gpu_names import gpu_names
    from ridgeline.runner.start.measure_peaks import machine_peaks

    config = config_of(name)
    config["max_position_embeddings"] = max(LONG + 256, config["max_position_embeddings"])
    shapes.SHAPES[name] = config
    peaks = machine_peaks("cuda")
    began = time.perf_counter()
    engine = Engine(str(shapes.write_shape(name)), max_model_len=LONG + 256, load_format="dummy", skip_tokenizer_init=True,
                    enable_prefix_caching=True)
    found: dict[str, Any] = {"ready_s": time.perf_counter() - began, "memory": presets.memory_ledger(engine)}
    with Watch(gpu_names()) as watch:
        for each in (Preset("l1", 1, PROMPT, 65), Preset("b64", ROWS, PROMPT, 33), Preset("p8k", 1, LONG, 1)):
            row = presets.measure_preset(engine, each, name, peaks, watch, 2)
            found[each.name] = {key: row[key] for key in ("median", "share_of_floor", "first_pass", "runs")}
    return found


def measure(names: list[str], what: list[str], out: Path) -> None:
    from ridgeline.bench.lab.device_log import gpu_facts
    from ridgeline.bench.lab.record import record

    models: dict[str, dict[str, Any]] = {}
    for name in names:
        for each in what:
            with tempfile.NamedTemporaryFile("r") as made:
                words = [sys.executable, __file__, "--model", name, "--what", each, "--out", made.name, "--alone"]
                if subprocess.run(words, check=False).returncode:
                    print(f"{name}: {each} failed", flush=True)
                    continue
                models.setdefault(name, {})[each] = json.load(made)
            made_of = record("public_shapes", {"weights": "dummy"}, {"models": models}, "exact", gpu_facts())
            out.write_text(json.dumps(made_of, indent=1))
    compare(out)


def compare(path: Path) -> None:
    """The table: measured, and predicted from the config alone."""
    for name, found in json.loads(path.read_text())["figures"]["models"].items():
        line = f"{name:20s}"
        if "agreement" in found:
            seen = found["agreement"]
            same = seen.get("same_dtype_agreement")
            line += f" {seen['top1_agreement']:7.2%}" + ("" if same is None else f" (definitions in bf16: {same:.2%})")
        if "speed" in found:
            row, plan = found["speed"], predicted(name)
            measured = {
                "TPOT": 1e3 / row["l1"]["median"]["decode_tok_s"], "TTFT": 1e3 * row["l1"]["median"]["first_tokens_s"],
                "step of 64": 1e3 * ROWS / row["b64"]["median"]["decode_tok_s"],
                "8k": 1e3 * row["p8k"]["median"]["first_tokens_s"],
            }
            line += "".join(f" | {key} {value:.2f} ms {plan[key] / value - 1:+.0%}" for key, value in measured.items())
        print(line)


def predicted(name: str) -> dict[str, float]:
    from ridgeline.plan.capacity import kernel_facts
    from ridgeline.plan.prediction import Setup, decode_seconds, prefill_seconds
    from ridgeline.plan.public_models import find_model, gpu_weights
    from ridgeline.sizes.hardware import find_device

    device = find_device("H200")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(name)))
        model = find_model(folder, as_stored=True)
    kept = gpu_weights(model, "bfloat16", 1, kernel_facts(device))
    setup = Setup(model=model, device=device, weights="bfloat16" if kept is None else kept.format, stored=kept)
    seconds = {
        "TPOT": decode_seconds(setup, 1, PROMPT + 32), "TTFT": prefill_seconds(setup, PROMPT),
        "step of 64": decode_seconds(setup, ROWS, PROMPT + 24), "8k": prefill_seconds(setup, LONG),
    }
    return {key: 1e3 * value for key, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=[])
    parser.add_argument("--what", nargs="+", choices=["agreement", "speed"], default=["agreement", "speed"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--alone", action="store_true", help="measure one figure of one model in this process")
    args = parser.parse_args()
    if args.compare:
        compare(args.compare)
    elif args.alone:
        args.out.write_text(json.dumps({"agreement": agreement, "speed": speed}[args.what[0]](args.model[0])))
    else:
        measure(args.model or known(), args.what, args.out)


if __name__ == "__main__":
    main()
