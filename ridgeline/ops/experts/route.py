"""Routing of a mixture of experts: from the router's logits to the experts of each token and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.launch import dependent_launch, power_of_two
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.sizes.expert_costs import ROUTE_CASES, route_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def route_reference(
    logits: Tensor, used: int, score: str = "softmax", normalise: bool = False, bias: Tensor | None = None, groups: int = 1,
    top_groups: int = 1, group_score: str = "best", scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> chosen int64 [T, used], best first, and weights [T, used], float32 at least.

    `bias` is added to the scores for the choice alone. With `groups`, only the experts of the `top_groups` best ones are chosen.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if score == "sigmoid" else wide.softmax(-1)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        members = choice.unflatten(1, (groups, -1))
        best = members.topk(2, dim=-1).values.sum(-1) if group_score == "best two" else members.amax(-1)
        allowed = torch.zeros_like(best).scatter_(1, best.topk(top_groups, dim=-1).indices, 1.0)
        choice = members.masked_fill(allowed.unsqueeze(-1) == 0, -torch.inf).flatten(1)
    chosen = choice.topk(used, dim=-1).indices
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if score == "sigmoid" else 0.0))
    return chosen, weights if scale == 1.0 else weights * scale


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def _route_experts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, chosen_ptr, weight_ptr, stride, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, USED: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One CTA: one token. The best expert is taken USED times; of equal ones the first."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits = tl.load(logits_ptr + token * stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        powers = tl.exp(logits - tl.max(logits))
        scores = powers / tl.sum(powers)
    choice = scores
    if BIAS:
        choice += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int64)
    weights = tl.zeros((SLOTS,), tl.float32)
    for place in tl.static_range(USED):
        best = tl.argmax(choice, 0)
        chosen = tl.where(slot == place, best.to(tl.int64), chosen)
        weights = tl.where(slot == place, tl.sum(tl.where(expert == best, scores, 0.0)), weights)
        choice = tl.where(expert == best, float("-inf"), choice)
    if NORMALISE:
        total = tl.sum(weights)
        weights = weights / (total + 1e-20 if SIGMOID else total)
    tl.store(chosen_ptr + token * USED + slot, chosen, mask=slot < USED)
    tl.store(weight_ptr + token * USED + slot, weights * scale, mask=slot < USED)


def route_triton(
    logits: Tensor, used: int, score: str = "softmax", normalise: bool = False, bias: Tensor | None = None, groups: int = 1,
    top_groups: int = 1, group_score: str = "best", scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    if groups > 1 or logits.stride(-1) != 1:
        return route_reference(logits, used, score, normalise, bias, groups, top_groups, group_score, scale)
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, used), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, used), dtype=torch.float32, device=logits.device)
    if tokens:
        _route_experts_kernel[tokens,](
            logits, logits if bias is None else bias, chosen, weights, logits.stride(0), float(scale),
            EXPERTS=experts, BLOCK=power_of_two(experts), USED=used, SLOTS=power_of_two(used), SIGMOID=score == "sigmoid",
            NORMALISE=normalise, BIAS=bias is not None, num_warps=1 if experts <= 128 else 4, **dependent_launch(logits.device),
        )
    return chosen, weights


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, experts: int, used: int, bias: bool, **rule: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Logits far enough apart that no dtype orders them differently.
    logits = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)]) / 8
    choice = torch.randint(-8, 9, (experts,), generator=generator) / 64 if bias else None
    kwargs = {"bias": None if choice is None else choice.to(device, torch.promote_types(dtype, torch.float32)), **rule}
    return (logits.to(device, dtype), used), kwargs


route = Op(
    "route_experts",
    route_reference,
    kernels=[Implementation("triton", route_triton, _triton_supports)],
    cases=ROUTE_CASES,
    cost=route_cost,
    inputs=_inputs,
    tolerance={
        "float32": Tolerance(4e-6, 1e-7), "bfloat16": Tolerance(2**-7, 2**-14), "float16": Tolerance(2**-10, 2**-14),
    },
)
