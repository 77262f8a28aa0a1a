"""One request on one GPU: the kernels of a decode step by layer, for several choices of kernels. Fewer layers, dummy weights.

    python benchmarks/studies/experts/one_request.py --out one-request-h200.json [--shape SHAPE ...] [--layers N]

First the experts of one token are checked at the models' true sizes against their definition in float32. Then an engine is made
for every variant. Times are those of `bench idle`: a step without a trace, and the own time of every kernel in a trace, divided
by the layers.

PREDICTED has microseconds of a layer, written down before the first run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from ridgeline.bench.idle import profile_decode
from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import commit
from ridgeline.bench.workload.bench_engine import Engine
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.ops import kernel_table
from ridgeline.ops.experts import few_tokens
from ridgeline.ops.experts.experts_op import experts
from ridgeline.ops.experts.few_tokens import Few
from ridgeline.ops.linear import select
from ridgeline.ops.registry import TRITON_INTERPRETED, triton

Patch = tuple[Any, str, Any]
VARIANTS: dict[str, dict[str, list[Patch]]] = {          # what is replaced, by shape and variant; the chosen kernels first
    "qwen3-30b-a3b": {
        "chosen": [], "no ring for O": [(select, "FEWEST_RING_OUTPUTS_OF_4096", 2560)],
        "down of 4 outputs": [(few_tokens, "few_down", lambda *_: Few(4, 1024, 4))],
    },
    "deepseek-v2-lite": {
        "chosen": [], "down of 2,048 inputs": [(few_tokens, "few_down", lambda *_: Few(4, 2048, 8))],
        "down, 4 warps": [(few_tokens, "few_down", lambda *_: Few(8, 512, 4))],
    },
}
PREDICTED = {                        # us of a layer by kernel, beside those of the record before
    "qwen3-30b-a3b": {"_experts_few_down_kernel": (9.97, 7.2)},
    "deepseek-v2-lite": {"_experts_few_down_kernel": (15.46, 12.0)},
}


def checks() -> Iterator[tuple[str, float]]:
    """(what, error relative to the definition in float32)"""
    generator = torch.Generator().manual_seed(0)
    for hidden, width, count, used, shared in ((2048, 768, 128, 8, 0), (2048, 1408, 64, 6, 2816)):
        if TRITON_INTERPRETED:
            hidden, width, count, shared = hidden // 32, width // 32, count // 4, shared // 32
        case = {"tokens": 1, "hidden": hidden, "width": width, "experts": count, "used": used, "spread": 0, "bias": False,
                "kind": "silu", "limit": None, "shared": shared}
        args, kwargs = experts.inputs(generator, torch.bfloat16, DEVICE, **case)
        by_name = {each.name: each.function for each in experts.implementations}
        wide = [each.float() if isinstance(each, torch.Tensor) and each.dtype == torch.bfloat16 else each for each in args]
        more = kwargs | {"shared": tuple(each.float() for each in kwargs["shared"]) if shared else None}
        yield f"experts, {width} wide", error(by_name["triton"](*args, **kwargs).float(), by_name["reference"](*wide, **more))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST_ERROR = 0.02                    # bfloat16 rounds weights, x and what lies between the products


def measure(name: str, layers: int, context: int, steps: int) -> Iterator[dict[str, Any]]:
    for variant, patches in VARIANTS[name].items():
        found: dict[str, Any] = {"shape": name, "layers": layers, "variant": variant}
        forget(kernel_table._chosen, select.ring_plan, select.plan)
        try:
            for target, attribute, value in patches:
                mock.patch.object(target, attribute, value).start()
            engine = Engine(
                str(write_shape(name, layers)), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=8,
                max_model_len=2 * context + 2 * steps + 128, gpu_memory_utilization=0.6,
            )
            traced = profile_decode(engine, 1, context, steps)
            engine.close()
        except Exception as failure:
            found["error"] = f"{type(failure).__name__}: {failure}"[:300]
        else:
            found["step_us"] = traced["step_ms"] * 1e3
            found["launches"] = traced["launches_per_step"]
            found["kernels"] = [
                {"name": each["name"][:60], "per_step": each["per_step"], "own_us": each["median_own_us"],
                 "layer_us": each["own_us"] / steps / layers}
                for each in traced["kernels"] if each["own_us"] / steps / layers > 0.05
            ]
        finally:
            mock.patch.stopall()
        yield found


def forget(*cached: Callable[..., Any]) -> None:
    for each in cached:
        each.cache_clear()  # type: ignore[attr-defined]


def show(found: dict[str, Any]) -> None:
    title = f"{found['shape']}, {found['layers']} layers, {found['variant']}"
    if "error" in found:
        print(f"{title}: {found['error']}", flush=True)
        return
    print(f"{title}: {found['step_us']:.0f} us a step, {found['launches']:.0f} launches")
    for each in found["kernels"]:
        before, then = PREDICTED.get(found["shape"], {}).get(each["name"], (None, None))
        said = "" if then is None else f"   before {before}, predicted {then}"
        times = f"{each['per_step']:6.1f} x {each['own_us']:7.2f} us = {each['layer_us']:6.2f} us a layer"
        print(f"    {times}  {each['name']}{said}")
    print(f"    {sum(each['layer_us'] for each in found['kernels']):6.2f} us a layer together, vocabulary included", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(VARIANTS), choices=sorted(VARIANTS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "what": "decode steps of one request by kernel, for several choices of kernels", "commit": commit(),
        "when": date.today().isoformat(), "gpu": gpu_facts() if DEVICE == "cuda" else {}, "torch": torch.__version__,
        "triton": triton.__version__, "context": args.context, "predicted": PREDICTED, "checks": {}, "runs": [],
    }
    for what, relative in checks():
        record["checks"][what] = relative
        print(f"{what}: error {relative:.1e}", flush=True)
        if not relative < MOST_ERROR:
            raise SystemExit("the kernel is wrong: nothing is timed")
    for name in args.shape if DEVICE == "cuda" else ():
        for found in measure(name, args.layers, args.context, args.steps):
            record["runs"].append(found)
            show(found)
            if args.out is not None:
                args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
