"""The names that NVML (gpus/) has for the GPUs that torch computes on."""

from __future__ import annotations

import torch

from ridgeline.config import ParallelOptions


def gpu_names(parallel: ParallelOptions | None = None) -> list[str]:
    """Of this process's GPU, or of those of all ranks: without Ray they are the first that this process sees. Ray chooses them,
    and this process sees GPUs of other programs, too. Empty without a GPU."""
    if not torch.cuda.is_available():
        return []
    ranks = 1 if parallel is None or parallel.distributed_executor_backend == "ray" else parallel.num_ranks
    places = [torch.cuda.current_device()] if ranks == 1 else range(min(ranks, torch.cuda.device_count()))
    return [_name(place) for place in places]


def _name(place: int) -> str:
    """By UUID: CUDA_VISIBLE_DEVICES changes the numbers."""
    return f"GPU-{str(torch.cuda.get_device_properties(place).uuid).removeprefix('GPU-')}"
