"""The router of a mixture and its choice: from normed rows to the experts of each token and their weights.

Logits are float32 at least: two of them may be closer than a 16-bit number tells, and some checkpoints were made so.

For a few tokens one kernel does both: CTAs multiply some rows of the router's matrix each, and the last one of a token to arrive
chooses. The norm before the router is in the same kernel: each CTA norms the row for itself, and the first one writes it.
For more tokens it is a norm, a GEMM and the kernel of route.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.experts.route import MOST_GROUPS, choose_experts, route_reference, route_triton, routing_constants
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.linear.gemm_small import MOST_TILES, arrivals
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.ops.rms_norm import rms_norm, rms_norm_reference
from ridgeline.sizes.expert_costs import NORMED_ROUTER_CASES, ROUTER_CASES, normed_router_cost, router_cost

MOST_TOKENS = 8                      # of the one kernel
_OUTPUTS = 2                         # of one of its CTAs
_STEP = 2048                         # inputs that a CTA reads at once

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def route_rows_reference(
    x: Tensor, weight: Tensor, offset: Tensor | None, used: int, score: str = "softmax", normalise: bool = False,
    bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_score: str = "best", scale: float = 1.0,
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """x [T, hidden], weight [experts, hidden], offset [experts] of the logits -> as `route`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide), None if offset is None else offset.to(wide))
    return route_reference(logits, used, score, normalise, bias, groups, top_groups, group_score, scale, jitter)


def normed_route_rows_reference(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, offset: Tensor | None, used: int,
    *, norm_offset: float = 0.0, invariant: bool = False, **rule: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual, and for these rows the experts and their weights). `invariant`: on a GPU a token's
    result does not depend on the others."""
    given = torch.zeros_like(x) if residual is None else residual
    rows, stream = rms_norm_reference(x, norm, eps, residual=given, weight_offset=norm_offset)
    return rows, stream, *route_rows_reference(rows, weight, offset, used, **rule)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def _stream_at(x_ptr, residual_ptr, column, INPUTS: tl.constexpr, RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, or x + residual rounded as it is kept: the norm is that of what later layers will read."""
    inside = column < INPUTS
    x = tl.load(x_ptr + column, mask=inside, other=0.0)
    if RESIDUAL:
        total = x.to(tl.float32) + tl.load(residual_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = total.to(x_ptr.dtype.element_ty)
    return x


@triton_kernel()
def _router_experts_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, row_ptr, stream_ptr, router_ptr, logits_ptr, arrived_ptr, offset_ptr, bias_ptr, chosen_ptr,
    weight_ptr, stride, residual_stride, eps, norm_offset, scale,
    INPUTS: tl.constexpr, STEP: tl.constexpr, OUTPUTS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    USED: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, LINES: tl.constexpr, SIZE: tl.constexpr,
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
    source, residual = x_ptr + token * stride, residual_ptr + token * residual_stride
    factor = 1.0
    if NORM:
        squares = 0.0
        for start in tl.static_range(0, INPUTS, STEP):
            wide = _stream_at(source, residual, start + column, INPUTS, RESIDUAL).to(tl.float32)
            squares += tl.sum(wide * wide)
        factor = tl.rsqrt(squares / INPUTS + eps)
    sums = tl.zeros((OUTPUTS,), tl.float32)
    for start in tl.static_range(0, INPUTS, STEP):
        at = start + column
        x = _stream_at(source, residual, at, INPUTS, RESIDUAL)
        if NORM:
            kept = x
            norm = tl.load(norm_ptr + at, mask=at < INPUTS, other=0.0).to(tl.float32) + norm_offset
            x = (x.to(tl.float32) * factor * norm).to(x_ptr.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(row_ptr + token * INPUTS + at, x, mask=at < INPUTS)
                if RESIDUAL:
                    tl.store(stream_ptr + token * INPUTS + at, kept, mask=at < INPUTS)
        if start > 0:
            weights = tl.load(place + start, mask=inside & (at < INPUTS)[None, :], other=0.0)
        sums += tl.sum(weights.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    logits = logits_ptr + token * EXPERTS
    tl.store(logits + expert, sums, mask=expert < EXPERTS)
    tl.debug_barrier()                                   # every thread's logits are written before the arrival is
    arrived = tl.atomic_add(arrived_ptr + token, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrived_ptr + token, 0)
        choose_experts(
            logits, offset_ptr, bias_ptr, chosen_ptr + token * USED, weight_ptr + token * USED, scale,
            EXPERTS, BLOCK, USED, SIGMOID, NORMALISE, OFFSET, BIAS, GROUPS, TOP_GROUPS, BEST_TWO, LINES, SIZE,
        )


class _Norm(NamedTuple):
    """The norm in the router's kernel, and what it writes."""

    weight: Tensor
    eps: float
    offset: float
    residual: Tensor | None
    rows: Tensor
    stream: Tensor


def _few_routed(
    x: Tensor, weight: Tensor, offset: Tensor | None, norm: _Norm | None, used: int, score: str, normalise: bool,
    bias: Tensor | None, groups: int, top_groups: int, group_score: str, scale: float,
) -> tuple[Tensor, Tensor]:
    tokens, experts = len(x), len(weight)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    chosen = torch.empty((tokens, used), dtype=torch.int64, device=x.device)
    weights = torch.empty((tokens, used), dtype=torch.float32, device=x.device)
    residual = None if norm is None else norm.residual
    normed = (x, x, x) if norm is None else (norm.weight, norm.rows, norm.stream)
    _router_experts_kernel[cdiv(experts, _OUTPUTS), tokens](
        x, x if residual is None else residual, *normed, weight, logits, arrivals(x.device),
        logits if offset is None else offset, logits if bias is None else bias, chosen, weights, x.stride(0),
        0 if residual is None else residual.stride(0), 0.0 if norm is None else float(norm.eps),
        0.0 if norm is None else float(norm.offset), float(scale), INPUTS=x.shape[1],
        STEP=min(_STEP, power_of_two(x.shape[1])), OUTPUTS=_OUTPUTS, NORM=norm is not None, RESIDUAL=residual is not None,
        **routing_constants(experts, used, score, normalise, offset, bias, groups, top_groups, group_score), num_warps=4,
        **dependent_launch(x.device),
    )
    return chosen, weights


def route_rows_triton(
    x: Tensor, weight: Tensor, offset: Tensor | None, used: int, score: str = "softmax", normalise: bool = False,
    bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_score: str = "best", scale: float = 1.0,
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if len(x) > MOST_TOKENS or groups > MOST_GROUPS or x.stride(-1) != 1 or not len(x) or jitter:
        logits = _logits(x, weight)
        return route_triton(logits, used, score, normalise, bias, groups, top_groups, group_score, scale, offset, jitter)
    return _few_routed(x, weight, offset, None, used, score, normalise, bias, groups, top_groups, group_score, scale)


def normed_route_rows_triton(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, offset: Tensor | None, used: int,
    *, norm_offset: float = 0.0, invariant: bool = False, score: str = "softmax", normalise: bool = False,
    bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_score: str = "best", scale: float = 1.0,
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if invariant and len(x) > MOST_TILES:
        first, second = (
            normed_route_rows_triton(
                x[part], None if residual is None else residual[part], norm, eps, weight, offset, used, norm_offset=norm_offset,
                invariant=True, score=score, normalise=normalise, bias=bias, groups=groups, top_groups=top_groups,
                group_score=group_score, scale=scale, jitter=jitter,
            ) for part in (slice(0, MOST_TILES), slice(MOST_TILES, None))
        )
        rows, stream, chosen, weights = (torch.cat(parts) for parts in zip(first, second, strict=True))
        return rows, stream, chosen, weights
    plain = x.stride(-1) == 1 and (residual is None or residual.stride(-1) == 1)
    few = 0 < len(x) <= (MOST_TILES if invariant else MOST_TOKENS)
    if not few or groups > MOST_GROUPS or not plain or jitter:
        return normed_route_rows_apart(
            x, residual, norm, eps, weight, offset, used, norm_offset=norm_offset, score=score, normalise=normalise, bias=bias,
            groups=groups, top_groups=top_groups, group_score=group_score, scale=scale, jitter=jitter,
        )
    rows = torch.empty_like(x, memory_format=torch.contiguous_format)
    stream = x if residual is None else torch.empty_like(rows)
    given = _Norm(norm, eps, norm_offset, residual, rows, stream)
    return rows, stream, *_few_routed(
        x, weight, offset, given, used, score, normalise, bias, groups, top_groups, group_score, scale
    )


def normed_route_rows_apart(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, offset: Tensor | None, used: int,
    *, norm_offset: float = 0.0, invariant: bool = False, **rule: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By the ops of its parts."""
    if residual is None:
        rows, stream = rms_norm(x, norm, eps, weight_offset=norm_offset), x
    else:
        rows, stream = rms_norm(x, norm, eps, residual=residual, weight_offset=norm_offset)
    return rows, stream, *route_rows(rows, weight, offset, used, **rule)


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


def _normed_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, residual: bool, **sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x, weight, offset, used), rule = _inputs(generator, dtype, device, **sizes)
    added = torch.randint(-8, 9, x.shape, generator=generator).to(device, dtype) / 8
    added[:, 0], added[:, -1] = 0.5, 0.0                 # what the router reads stays as far apart
    norm = torch.full((x.shape[1],), 0.5, dtype=dtype, device=device)
    return (x, added if residual else None, norm, 1e-5, weight, offset, used), rule


normed_route_rows = Op(
    "normed_route_rows",
    normed_route_rows_reference,
    kernels=[
        Implementation("triton", normed_route_rows_triton, _triton_supports),
        Implementation("apart", normed_route_rows_apart, lambda site: True),
    ],
    cases=NORMED_ROUTER_CASES,
    cost=normed_router_cost,
    inputs=_normed_inputs,
    tolerance={"float32": Tolerance(1e-5, 1e-6)},
)
