"""The gated activation of experts, on float32 sums in registers; of all kernels of experts."""

from __future__ import annotations

from ridgeline.ops.linear.gemv import activated
from ridgeline.ops.registry import tl, triton_kernel


@triton_kernel()
def gated_sums(gate, up, limit, alpha, GATE: tl.constexpr, CLAMPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """CLAMPED: as gpt-oss has it, where the activation leaves the gate open."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate / (1.0 + tl.exp(-alpha * gate))
    else:
        gate = activated(gate, GATE)
    return gate * up
