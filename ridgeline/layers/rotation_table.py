"""The rotation table of a rope: cosine and sine of every position this engine serves, made once."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_table(
    frequencies: list[float], scale: float, positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[positions, 2, pairs]: cosine, sine. Angles are taken in float64: in float32 they are off by a hundredth of a
    radian at position 100,000.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * scale
    return table.to(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
