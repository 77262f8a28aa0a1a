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
    top_groups: int = 1, group_score: str = "best", scale: float = 1.0, jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> chosen int64 [T, used], best first, and weights [T, used], float32 at least.

    `bias` is added to the scores for the choice alone. With `groups`, only the experts of the `top_groups` best ones are chosen.
    `jitter`: see `mixer_reference`.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if jitter:
        return mixer_reference(wide, used, jitter)
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


def mixer_reference(logits: Tensor, used: int, jitter: float) -> tuple[Tensor, Tensor]:
    """The SparseMixer of Phi-3.5-MoE. The best expert's weight is its softmax among those whose logits lie within 2 · jitter of
    its own, relative to the larger magnitude; then the same among the others for the next one."""
    chosen: list[Tensor] = []
    weights: list[Tensor] = []
    left = logits
    for _ in range(used):
        top, expert = left.max(-1, keepdim=True)
        near = top - logits <= 2 * jitter * torch.maximum(logits.abs(), top)
        weights.append(1 / torch.where(near, (left - top).exp(), 0.0).sum(-1, keepdim=True))
        chosen.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(chosen, -1), torch.cat(weights, -1)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def _logits_at(  # type: ignore[no-untyped-def]
    logits_ptr, offset_ptr, expert, EXPERTS: tl.constexpr, OFFSET: tl.constexpr,
):
    inside = expert < EXPERTS
    logits = tl.load(logits_ptr + expert, mask=inside, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    if OFFSET:
        logits += tl.load(offset_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    return logits


@triton_kernel()
def _scored(  # type: ignore[no-untyped-def]
    logits, bias_ptr, expert, top, total, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr,
):
    """(scores, what the choice is made by)"""
    scores = tl.sigmoid(logits) if SIGMOID else tl.exp(logits - top) / total
    choice = logits                                      # in the same order
    if BIAS:
        choice = scores + tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, float("-inf"))   # NaN, which padded rows may hold: every slot is written
    return scores, tl.where(expert < EXPERTS, choice, float("-inf"))


@triton_kernel()
def _allowed_groups(  # type: ignore[no-untyped-def]
    logits_ptr, offset_ptr, bias_ptr, top, total, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, OFFSET: tl.constexpr,
    BIAS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, LINES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A bit for each of the best groups. LINES and SIZE: powers of two with room for the groups, and for the members of one."""
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, LINES), tl.arange(0, SIZE)
    inside = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    expert = tl.where(inside, group[:, None] * MEMBERS + member[None, :], EXPERTS)
    logits = _logits_at(logits_ptr, offset_ptr, expert, EXPERTS, OFFSET)
    scores, choice = _scored(logits, bias_ptr, expert, top, total, EXPERTS, SIGMOID, BIAS)
    if not BIAS:
        choice = tl.where(inside, scores, float("-inf"))
    score = tl.max(choice, 1)
    if BEST_TWO:
        first = tl.argmax(choice, 1)
        score += tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), 1)
    score = tl.where(group < GROUPS, score, float("-inf"))
    rival = tl.trans(tl.broadcast_to(score[:, None], (LINES, LINES)))
    equal = (rival == score[:, None]) & (group[None, :] < group[:, None])
    place = tl.sum(((rival > score[:, None]) | equal).to(tl.int32), 1)
    return tl.sum(tl.where((place < TOP_GROUPS) & (group < GROUPS), 1 << group, 0))


@triton_kernel()
def _in_groups(choice, expert, allowed, EXPERTS: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the choice is made by, without the experts of other groups."""
    if GROUPS > 1:
        known = (allowed >> tl.minimum(expert // (EXPERTS // GROUPS), GROUPS - 1)) & 1
        choice = tl.where(known == 1, choice, float("-inf"))
    return choice


@triton_kernel()
def choose_experts(  # type: ignore[no-untyped-def]
    logits_ptr, offset_ptr, bias_ptr, chosen_ptr, weight_ptr, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, USED: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    LINES: tl.constexpr, SIZE: tl.constexpr,
):
    """One CTA: one token, from its logits. An expert's place is the number of better ones; of equal ones the first is better.
    All experts are compared with all: taking the best USED times would be USED reductions, one after the other."""
    CHUNK: tl.constexpr = 16 if BLOCK > 16 else BLOCK     # 32 took a stack
    expert = tl.arange(0, BLOCK)
    logits = _logits_at(logits_ptr, offset_ptr, expert, EXPERTS, OFFSET)
    top, total = 0.0, 1.0
    if not SIGMOID:
        top = tl.max(logits)
        total = tl.sum(tl.exp(logits - top))
    allowed = 0
    if GROUPS > 1:
        allowed = _allowed_groups(
            logits_ptr, offset_ptr, bias_ptr, top, total, EXPERTS, SIGMOID, OFFSET, BIAS, GROUPS, TOP_GROUPS, BEST_TWO, LINES,
            SIZE,
        )
    scores, choice = _scored(logits, bias_ptr, expert, top, total, EXPERTS, SIGMOID, BIAS)
    choice = _in_groups(choice, expert, allowed, EXPERTS, GROUPS)
    better = tl.zeros((BLOCK, CHUNK), tl.int32)
    for start in tl.static_range(0, BLOCK, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = _logits_at(logits_ptr, offset_ptr, other, EXPERTS, OFFSET)
        _, rival = _scored(theirs, bias_ptr, other, top, total, EXPERTS, SIGMOID, BIAS)
        rival = _in_groups(rival, other, allowed, EXPERTS, GROUPS)
        equal = (rival[None, :] == choice[:, None]) & (other[None, :] < expert[:, None])
        better += ((rival[None, :] > choice[:, None]) | equal).to(tl.int32)
    place = tl.sum(better, 1)
    if NORMALISE:
        share = tl.sum(tl.where(place < USED, scores, 0.0))
        scores = scores / (share + 1e-20 if SIGMOID else share)
    kept = (place < USED) & (expert < EXPERTS)
    tl.store(chosen_ptr + place, expert.to(tl.int64), mask=kept)
    tl.store(weight_ptr + place, scores * scale, mask=kept)


@triton_kernel()
def _route_experts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, offset_ptr, bias_ptr, chosen_ptr, weight_ptr, stride, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, USED: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    LINES: tl.constexpr, SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    choose_experts(
        logits_ptr + token * stride, offset_ptr, bias_ptr, chosen_ptr + token * USED, weight_ptr + token * USED, scale,
        EXPERTS, BLOCK, USED, SIGMOID, NORMALISE, OFFSET, BIAS, GROUPS, TOP_GROUPS, BEST_TWO, LINES, SIZE,
    )


MOST_GROUPS = 31                     # which have a bit of an int32 each


def routing_constants(
    experts: int, used: int, score: str, normalise: bool, offset: Tensor | None, bias: Tensor | None, groups: int,
    top_groups: int, group_score: str,
) -> dict[str, Any]:
    """Of the kernels that call `choose_experts`."""
    return {
        "EXPERTS": experts, "BLOCK": power_of_two(experts), "USED": used, "SIGMOID": score == "sigmoid", "NORMALISE": normalise,
        "OFFSET": offset is not None, "BIAS": bias is not None, "GROUPS": groups, "TOP_GROUPS": top_groups,
        "BEST_TWO": group_score == "best two", "LINES": power_of_two(groups), "SIZE": power_of_two(experts // groups),
    }


def route_triton(
    logits: Tensor, used: int, score: str = "softmax", normalise: bool = False, bias: Tensor | None = None, groups: int = 1,
    top_groups: int = 1, group_score: str = "best", scale: float = 1.0, offset: Tensor | None = None,
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`offset` [experts] is added to the logits."""
    if groups > MOST_GROUPS or logits.stride(-1) != 1 or jitter:
        logits = logits if offset is None else logits + offset
        return route_reference(logits, used, score, normalise, bias, groups, top_groups, group_score, scale, jitter)
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, used), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, used), dtype=torch.float32, device=logits.device)
    if tokens:
        _route_experts_kernel[tokens,](
            logits, logits if offset is None else offset, logits if bias is None else bias, chosen, weights, logits.stride(0),
            float(scale), **routing_constants(experts, used, score, normalise, offset, bias, groups, top_groups, group_score),
            num_warps=4, **dependent_launch(logits.device),
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
