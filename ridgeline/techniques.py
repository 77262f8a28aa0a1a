"""Every technique, declared once: the option that switches it, the term of the iron law it attacks, what it may cost.

    T = max(compute / peak FLOP/s, bytes / bandwidth) + overhead

Laws, documentation, planning and diagnosis read this list. A technique is not here until it has an off version and a law.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Technique:
    name: str
    on: dict[str, Any]               # options that switch it on, and its off version
    off: dict[str, Any]
    term: str                        # of the iron law: compute, bytes, overhead, or capacity (more rows for the bytes)
    exact: bool                      # same greedy tokens on and off (in float64); otherwise a stated bound
    gain: str                        # what to expect, and when
    module: str
    requires: tuple[str, ...] = ()   # techniques without which it can do nothing
    excludes: tuple[str, ...] = ()   # techniques with which it cannot work
    adds_nothing_to: tuple[str, ...] = ()                # techniques that do its work already
    device: str = ""                 # the kind of device it is for; empty: any
    also_off: tuple[Any, ...] = ()   # other values of its options with which it is off

    def is_on(self, options: Mapping[str, Any]) -> bool:
        """None, an option that is still to be decided, counts as off."""
        return any(options[name] not in (value, None, *self.also_off) for name, value in self.off.items())


TECHNIQUES = (
    Technique(
        "paged KV", {"kv_layout": "paged"}, {"kv_layout": "contiguous"}, "capacity", True,
        "more rows: max_model_len divided by the average length of a request", "cache/block_pool.py",
    ),
    Technique(
        "continuous batching", {"batching": "continuous"}, {"batching": "static"}, "capacity", True,
        "rows that would stay empty until the longest answer of their batch ends", "scheduler/policy.py",
    ),
    Technique(
        "chunked prefill", {"enable_chunked_prefill": True}, {"enable_chunked_prefill": False}, "overhead", True,
        "a long prompt delays others by one chunk instead of its whole length", "scheduler/scheduler.py",
    ),
    Technique(
        "prefix caching", {"enable_prefix_caching": True}, {"enable_prefix_caching": False}, "compute", True,
        "the prefill of every token that was computed before", "cache/prefix_cache.py",
        requires=("paged KV",),
    ),
    Technique(
        "overlap", {"async_scheduling": True}, {"async_scheduling": False}, "overhead", True,
        "planning and collecting, hidden behind the device's work", "engine/core/core.py",
        adds_nothing_to=("pipeline parallelism",),       # which plans a step while others are in its stages
    ),
    Technique(
        "CUDA graphs", {"enforce_eager": False}, {"enforce_eager": True}, "overhead", True,
        "a decode step is one launch instead of hundreds", "runner/cuda_graphs.py",
        device="cuda", excludes=("context parallelism",),
    ),
    Technique(
        "shared-prefix attention", {"shared_prefix_attention": True}, {"shared_prefix_attention": False}, "bytes", True,
        "a prefix that many running requests share is read once a step, not once a request", "runner/shared_prefix.py",
        requires=("prefix caching",), device="cuda", excludes=("context parallelism",),
    ),
    Technique(
        "speculation", {"speculative_config": "auto"}, {"speculative_config": ""}, "bytes", True,
        "several tokens a step where drafts are right: the weights are read once for all of them",
        "scheduler/drafts/controller.py",
    ),
    Technique(
        "quantised weights", {"quantization": "fp8"}, {"quantization": "none"}, "bytes", False,
        "fp8: half the bytes of the layers' weights, and prompts multiplied at up to twice the rate; 4 bits: a quarter of them",
        "quant/quantised.py",
    ),
    Technique(
        "quantised KV", {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}, "bytes", False,
        "half the bytes per token: the KV cache holds twice as many, and attention reads half", "runner/kv_buffers.py",
        also_off=("float32",),
    ),
    Technique(
        "tensor parallelism", {"tensor_parallel_size": 2}, {"tensor_parallel_size": 1}, "bytes", False,
        "weights and KV divided by the ranks, for two all-reduces a layer", "distributed/comm.py",
    ),
    Technique(
        "pipeline parallelism", {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 1}, "capacity", True,
        "weights and KV divided by the stages, for one transfer a stage; as many steps at once as there are stages",
        "distributed/pipeline.py",
    ),
    Technique(
        "expert parallelism", {"enable_expert_parallel": True}, {"enable_expert_parallel": False}, "bytes", False,
        "a rank reads whole experts, and only those of its own that tokens have chosen", "layers/mixture.py",
        requires=("tensor parallelism",),
    ),
    Technique(
        "context parallelism", {"decode_context_parallel_size": 2}, {"decode_context_parallel_size": 1}, "capacity", False,
        "KV divided by the ranks also where they are more than KV heads, or where every rank would keep the whole latent",
        "layers/context_attention.py", requires=("tensor parallelism",),
    ),
)


def turned_off(
    options: Mapping[str, Any], device: str, techniques: tuple[Technique, ...] = TECHNIQUES
) -> dict[str, str]:
    """Techniques that are on and cannot work on this device or beside the others, and why.

    Of two that exclude each other, the one whose `excludes` or `adds_nothing_to` names the other is turned off.
    """
    on = {technique.name: technique for technique in techniques if technique.is_on(options)}
    off: dict[str, str] = {}
    for name, technique in on.items():
        if technique.device not in ("", device):
            off[name] = f"needs a {technique.device} device"
            continue
        missing = [other for other in technique.requires if other not in on or other in off]
        others = [f"does not work with {other}" for other in technique.excludes if other in on and other not in off]
        others += [f"adds nothing to {other}" for other in technique.adds_nothing_to if other in on and other not in off]
        if missing or others:
            off[name] = f"needs {missing[0]}" if missing else others[0]
    return off
