"""The names that NVML (gpus/) has for the GPUs that torch computes on."""

from __future__ import annotations

import torch


def gpu_names(ranks: int = 1) -> list[str]:
    """Of this process's GPU, or with several ranks of the first GPUs that it sees, one for each. Empty without a GPU."""
    if not torch.cuda.is_available():
        return []
    places = [torch.cuda.current_device()] if ranks == 1 else range(min(ranks, torch.cuda.device_count()))
    return [_name(place) for place in places]


def _name(place: int) -> str:
    """By UUID: CUDA_VISIBLE_DEVICES changes the numbers. Older versions of torch do not tell it."""
    uuid = str(getattr(torch.cuda.get_device_properties(place), "uuid", ""))
    return f"GPU-{uuid.removeprefix('GPU-')}" if uuid else str(place)
