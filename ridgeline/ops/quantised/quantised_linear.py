"""The linear with a quantised weight: expand and multiply by the library. Works for every format; kernels come before it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.quantised.expand import QuantisedWeight, expand


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs] -> x expand(weight)^T + bias, [T, outputs]"""
    return F.linear(x, expand(weight, x.dtype), bias)
