"""What `ridgeline bench offline --preset h200` runs, and its options. Names only: bench/workload/presets measures."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from ridgeline.bench.workload.shapes import SHAPES
from ridgeline.bench.workload.workloads import GPU_PRESETS

TIME_LIMIT = 570.0                   # seconds: less than all of `--preset h200`; `--group` chooses
DIRECTORY = "benchmarks/h200"


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that one engine gives in one process; a record each."""

    shape: str
    presets: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


# Everything that `--preset h200` runs, by the names of the records.
SUITE: dict[str, Group] = {
    "llama-3.1-8b": Group("llama-3.1-8b", tuple(GPU_PRESETS)),
    "llama-3.1-8b-fp8-kv": Group("llama-3.1-8b", ("latency_b1", "batch128", "decode_16x8k"), {"kv_cache_dtype": "fp8"}),
    "llama-3.1-8b-int8-kv": Group("llama-3.1-8b", ("latency_b1", "batch128", "decode_16x8k"), {"kv_cache_dtype": "int8"}),
    "llama-3.1-8b-fp8": Group("llama-3.1-8b", ("latency_b1", "batch128", "throughput", "prefix"), {"quantization": "fp8"}),
    "llama-3.1-8b-fp8-all": Group(
        "llama-3.1-8b", ("latency_b1", "batch128", "throughput", "decode_16x8k"), {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    ),
    **{
        f"llama-3.1-8b-{name}": Group("llama-3.1-8b", ("latency_b1", "batch128"), {"quantization": name})
        for name in ("fp8-block", "int8", "int4", "mxfp4")
    },
    "llama-3.1-8b-int4-fp8-head": Group("llama-3.1-8b", ("latency_b1", "batch128"), {"quantization": "layers=int4,head=fp8"}),
    "llama-3.1-8b-nvfp4": Group("llama-3.1-8b-nvfp4", ("latency_b1", "batch128")),
    "llama-3.1-8b-q8_0": Group("llama-3.1-8b-q8_0", ("latency_b1", "batch128")),
    "llama-3.1-8b-q4_k_m": Group("llama-3.1-8b-q4_k_m", ("latency_b1", "batch128")),
    "llama-3.1-70b-fp8": Group("llama-3.1-70b", ("latency_b1", "prefill_8k"), {"quantization": "fp8"}),
    "llama-3.1-70b-int4": Group("llama-3.1-70b", ("latency_b1",), {"quantization": "int4"}),
    "llama-3.1-8b-deterministic": Group("llama-3.1-8b", ("latency_b1", "batch128"), {"deterministic": True}),
    "llama-3.2-1b": Group("llama-3.2-1b", ("latency_b1", "batch128", "throughput", "prefix")),
    **{
        f"llama-3.2-1b-{name}": Group("llama-3.2-1b", ("latency_b1", "batch128"), {"quantization": name})
        for name in ("fp8", "int8")
    },
    "qwen3-8b": Group("qwen3-8b", ("latency_b1", "batch128", "prefix")),
    "llama-3.1-70b": Group("llama-3.1-70b", ("latency_b1", "prefill_8k")),
    "gpt-oss-20b": Group("gpt-oss-20b", ("latency_b1", "batch128", "throughput")),
    **{
        name: Group(name, ("latency_b1", "batch128"))
        for name in ("gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v2-lite", "mixtral-8x7b")
    },
    **{
        f"qwen3-30b-a3b-{name}": Group(f"qwen3-30b-a3b-{name}", ("latency_b1", "batch128", "prefill_8k"))
        for name in ("fp8", "awq")
    },
    **{
        f"{name}-zipf": Group(f"{name}-zipf", ("latency_b1", "batch128"))
        for name in ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v2-lite", "mixtral-8x7b")
    },
}
# Further commands that it runs, each with a record of this name.
COMMANDS: dict[str, tuple[str, ...]] = {
    "startup-warm": ("startup", "--shape", "llama-3.1-8b"),
    "startup-checkpoint": ("startup", "--shape", "llama-3.1-8b", "--written"),
    "startup-cold": ("startup", "--shape", "llama-3.1-8b", "--cold", "--starts", "2"),
    "long-prompt": ("studies", "--study", "long-prompt", "--shape", "llama-3.1-8b"),
    "ops": ("ops",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPU workloads")
    group.add_argument("--preset", nargs="+", choices=[*GPU_PRESETS, "h200"],
                       help="fixed workloads; h200: all of them, for all shapes")
    group.add_argument("--shape", nargs="+", choices=sorted(SHAPES), help="use public models' shapes with dummy weights")
    group.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE",
                       help="engine options; repeat a name to measure each value")
    group.add_argument("--group", nargs="+", choices=[*SUITE, *COMMANDS], help="only these parts of h200")
    group.add_argument("--label", help="name of the record (default: the shape's name)")
    group.add_argument("--directory", help=f"directory for the records, one per model (--preset h200: {DIRECTORY})")
    group.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="start no further row after this number of seconds")
    group.add_argument("--no-quality", action="store_true", help="skip the comparison with the reference implementation")
