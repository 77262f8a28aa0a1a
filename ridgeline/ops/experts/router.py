"""The router of a mixture and its choice: from normed rows to the experts of each token and their weights.

Logits are float32 at least: two of them may be closer than a 16-bit number tells, and some checkpoints were made so.

For a few tokens one kernel does both: CTAs multiply some rows of the router's matrix each, and the last one of a token to arrive
chooses. For more it is a GEMM and the kernel of route.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.experts.route import choose_experts, route_reference, route_triton, routing_constants
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.linear.gemm_small import arrivals
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.sizes.expert_costs import ROUTER_CASES, router_cost

MOST_TOKENS = 8                      # of the one kernel
_OUTPUTS = 2                         # of one of its CTAs
_STEP = 2048                         # inputs that a CTA reads at once

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def route_rows_reference(
    x: Tensor, weight: Tensor, offset: Tensor | None, used: int, score: str = "softmax", normalise: bool = False,
    bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_score: str = "best", scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x [T, hidden], weight [experts, hidden], offset [experts] of the logits -> as `route`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide), None if offset is None else offset.to(wide))
    return route_reference(logits, used, score, normalise, bias, groups, top_groups, group_score, scale)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def _router_experts_kernel(  # type: ignore[no-untyped-def]
    x_ptr, router_ptr, logits_ptr, arrived_ptr, offset_ptr, bias_ptr, chosen_ptr, weight_ptr, stride, scale,
    INPUTS: tl.constexpr, STEP: tl.constexpr, OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    USED: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """CTA (block of experts, token)."""
    token = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, STEP)
    inside = (expert < EXPERTS)[:, None]
    place = router_ptr + expert[:, None] * INPUTS + column[None, :]
    weights = tl.load(place, mask=inside & (column < INPUTS)[None, :], other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = x_ptr + token * stride + column
    x = tl.load(row, mask=column < INPUTS, other=0.0).to(tl.float32)
    sums = tl.sum(weights.to(tl.float32) * x[None, :], 1)
    for start in range(STEP, INPUTS, STEP):
        x = tl.load(row + start, mask=start + column < INPUTS, other=0.0).to(tl.float32)
        weights = tl.load(place + start, mask=inside & (start + column < INPUTS)[None, :], other=0.0)
        sums += tl.sum(weights.to(tl.float32) * x[None, :], 1)
    logits = logits_ptr + token * EXPERTS
    tl.store(logits + expert, sums, mask=expert < EXPERTS)
    tl.debug_barrier()                                   # every thread's logits are written before the arrival is
    arrived = tl.atomic_add(arrived_ptr + token, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrived_ptr + token, 0)
        choose_experts(
            logits, offset_ptr, bias_ptr, chosen_ptr + token * USED, weight_ptr + token * USED, scale,
            EXPERTS, BLOCK, USED, SIGMOID, NORMALISE, OFFSET, BIAS,
        )


def route_rows_triton(
    x: Tensor, weight: Tensor, offset: Tensor | None, used: int, score: str = "softmax", normalise: bool = False,
    bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_score: str = "best", scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    tokens, experts = len(x), len(weight)
    if tokens > MOST_TOKENS or groups > 1 or x.stride(-1) != 1 or not tokens:
        logits = _logits(x, weight)
        return route_triton(logits, used, score, normalise, bias, groups, top_groups, group_score, scale, offset)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    chosen = torch.empty((tokens, used), dtype=torch.int64, device=x.device)
    weights = torch.empty((tokens, used), dtype=torch.float32, device=x.device)
    _router_experts_kernel[cdiv(experts, _OUTPUTS), tokens](
        x, weight, logits, arrivals(x.device), logits if offset is None else offset, logits if bias is None else bias, chosen,
        weights, x.stride(0), float(scale), INPUTS=x.shape[1], STEP=min(_STEP, power_of_two(x.shape[1])), OUTPUTS=_OUTPUTS,
        **routing_constants(experts, used, score, normalise, offset, bias), num_warps=4, **dependent_launch(x.device),
    )
    return chosen, weights


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, hidden: int, experts: int, used: int,
    offset: bool, bias: bool, **rule: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Whole numbers and eighths, so that logits are exact and far enough apart that no sum orders them differently.
    x = torch.zeros(tokens, hidden)
    x[:, 0], x[:, -1] = 1.0, 0.5
    weight = torch.zeros(experts, hidden)
    weight[:, 0], weight[:, -1] = torch.randperm(experts, generator=generator) / 8, 0.25
    added = torch.randperm(experts, generator=generator) / 4 if offset else None
    choice = torch.randint(-8, 9, (experts,), generator=generator) / 64 if bias else None
    wide = torch.promote_types(dtype, torch.float32)
    arguments = x.to(device, dtype), weight.to(device, dtype), None if added is None else added.to(device, dtype), used
    return arguments, {"bias": None if choice is None else choice.to(device, wide), **rule}


route_rows = Op(
    "route_rows",
    route_rows_reference,
    kernels=[Implementation("triton", route_rows_triton, _triton_supports)],
    cases=ROUTER_CASES,
    cost=router_cost,
    inputs=_inputs,
    tolerance={"float32": Tolerance(4e-6, 1e-7)},
)
