"""The largest prompts that are captured as CUDA graphs, for a model on a GPU: those that the device computes faster than the host
launches them kernel by kernel. No torch.

Up to FEWEST tokens every model's prompts are captured: the host has other work, too. Beyond that a graph gains nothing once the
device computes for longer than the launches take, and its activations need memory. That point follows from the model: prompts
of an 8B model reach it before FEWEST tokens on an H200, those of a 1.5B model at about twice as many. Both times are estimates:
a graph must be GAIN times as fast by them, which also pays for the padding to a captured size.
"""

from __future__ import annotations

from bisect import bisect_right

from ridgeline.config import EngineConfig
from ridgeline.models.model_config import ModelConfig
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.roofline.step_cost import Peaks, StepCost, step_cost
from ridgeline.sizes.graph_shapes import PROMPT_TOKENS, USUAL_PROMPT
from ridgeline.sizes.hardware import Device

FEWEST = USUAL_PROMPT                # also of GPUs without a data sheet
# Of an op by the host, Python and torch included: prompts of a 1.5B model that were launched kernel by kernel, and for which the
# host took longer than the GPU, took 38 to 43 µs for each op that step_cost counts (benchmarks/studies/prompt_graphs/result.json,
# a host with 16 cores).
OP_SECONDS = 41e-6
# By the estimate. Small products are slower than their share of a data sheet: where the estimate is 1.6 the study measured 1.15,
# and 1.02 where it is 1.2.
GAIN = 1.5
UNKNOWN_BOUND = 512                  # see launch_bound; that of an 8B model on an H200, nearly
# Shares of a data sheet's rates that our kernels reach, as fitted for `plan` (plan/fitted.json; a test compares them).
READ, COMPUTED = 0.947, 0.729


def largest_captured(
    config: EngineConfig, model: ModelConfig, device: Device | None, dtype: str, linear_dtype: str,
    reasons: dict[str, str] | None = None,
) -> int:
    """Tokens of prompts in the largest graph. `device`: None where it has no data sheet. `linear_dtype`: of most products."""
    asked = config.execution.max_cudagraph_capture_size
    if asked is not None:
        return max((size for size in PROMPT_TOKENS if size <= asked), default=0)
    if device is None:
        return FEWEST
    ranks, stages = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    if ranks * stages > 1:               # what ranks say to each other is not in this model of a step's time
        return FEWEST
    larger = [size for size in PROMPT_TOKENS if size > FEWEST]
    shape, peaks = decoder_shape(model, dtype), peaks_of(device, linear_dtype)

    def spared(tokens: int) -> float:
        """Seconds by which a graph gains too little."""
        cost = step_cost(shape, [(tokens, tokens)])
        return GAIN * device_seconds(cost, peaks) - launch_seconds(cost)

    count = bisect_right(larger, 0.0, key=spared)
    found = larger[count - 1] if count else FEWEST
    if reasons is not None:
        why = f"a longer prompt would gain less than {GAIN} x from a graph on the {device.name}"
        reasons["max_cudagraph_capture_size"] = f"{found}: {why if found < PROMPT_TOKENS[-1] else 'the longest that is captured'}"
    return found


def launch_bound(model: ModelConfig, device: Device | None, dtype: str, linear_dtype: str) -> int:
    """Tokens up to which the host takes longer to launch a prompt kernel by kernel than the device to compute it: so a larger
    graph, of at most as many, is never slower. `device`: None where it has no data sheet."""
    if device is None:
        return UNKNOWN_BOUND
    shape, peaks = decoder_shape(model, dtype), peaks_of(device, linear_dtype)
    sizes = range(PROMPT_TOKENS[0], PROMPT_TOKENS[-1] + 1, PROMPT_TOKENS[0])

    def spare(tokens: int) -> float:
        cost = step_cost(shape, [(tokens, tokens)])
        return device_seconds(cost, peaks) - launch_seconds(cost)

    count = bisect_right(sizes, 0.0, key=spare)
    return sizes[count - 1] if count else 0


def launch_seconds(cost: StepCost) -> float:
    """Of a step that the host launches kernel by kernel."""
    return OP_SECONDS * sum(op.calls for op in cost.ops.values())


def device_seconds(cost: StepCost, peaks: Peaks) -> float:
    return sum(peaks.floor(cost).values())


def peaks_of(device: Device, linear_dtype: str) -> Peaks:
    return Peaks(device.bandwidth * READ, device.rate(linear_dtype) * COMPUTED)
