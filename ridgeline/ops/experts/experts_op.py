"""The experts of a mixture: each token's row through the experts that it has chosen, and their weighted sum.

The definition loops over all experts. Results are combined in a fixed order, without atomics, so that an answer does not depend
on timing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.activation import gated_activation_reference
from ridgeline.ops.experts.expert_products import experts_triton
from ridgeline.ops.experts.mxfp4 import GROUP, expanded
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.sizes.expert_costs import EXPERTS_CASES, chosen_experts, experts_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def gated(x: Tensor, kind: str, limit: float | None, alpha: float) -> Tensor:
    """activation(gate) * up of [..., gate and up]; with a limit as gpt-oss has it, where the activation leaves the gate open."""
    if limit is None:
        return gated_activation_reference(x, kind)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _through(
    rows: Tensor, expert: int, gate_up: Tensor, down: Tensor, kind: str, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    limit: float | None, alpha: float,
) -> Tensor:
    inner = F.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
    return F.linear(gated(inner, kind, limit, alpha), down[expert], None if down_bias is None else down_bias[expert])


def _numbers(
    gate_up: Tensor, down: Tensor, scales: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return (gate_up, down) if scales is None else (expanded(gate_up, scales[0], dtype), expanded(down, scales[1], dtype))


def experts_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, kind: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float | None = None, alpha: float = 1.702,
    reads: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None, elsewhere: bool = False,
) -> Tensor:
    """x [T, hidden], gate_up [experts, 2 width, hidden], down [experts, hidden, width], chosen and weights [T, used]
    -> [T, hidden]: the sum over the chosen experts, in their order, in float32 at least. `reads` int32 [1] gets the number of
    experts that some token has chosen. With `scales` of gate_up and down these are MXFP4 codes (mxfp4.py).
    `elsewhere`: numbers behind the last expert may be among the chosen, which add nothing."""
    gate_up, down = _numbers(gate_up, down, scales, x.dtype)
    if reads is not None:
        reads.fill_(int((chosen.unique() < len(gate_up)).sum()))
    wide = torch.promote_types(x.dtype, torch.float32)
    results = torch.zeros((*chosen.shape, x.shape[1]), dtype=wide, device=x.device)
    for expert in range(gate_up.shape[0]):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        out = _through(x[token], expert, gate_up, down, kind, gate_up_bias, down_bias, limit, alpha)
        results[token, place] = out.to(wide) * weights[token, place, None].to(wide)
    return results.sum(1).to(x.dtype)


# ── CPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def experts_visited(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, kind: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float | None = None, alpha: float = 1.702,
    reads: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None, elsewhere: bool = False,
) -> Tensor:
    """The same, sorted by expert on the host: only the chosen ones are touched, each once, and its rows lie together."""
    gate_up, down = _numbers(gate_up, down, scales, x.dtype)
    tokens, used = chosen.shape
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    if elsewhere:
        order = order[: int((flat < len(gate_up)).sum())]        # those that are not here come last
    numbers, counts = torch.unique_consecutive(flat[order], return_counts=True)
    if reads is not None:
        reads.fill_(len(numbers))
    rows = x.index_select(0, order // used)
    parts = [
        _through(part, expert, gate_up, down, kind, gate_up_bias, down_bias, limit, alpha)
        for expert, part in zip(numbers.tolist(), rows.split(counts.tolist()), strict=True)
    ]
    wide = torch.promote_types(x.dtype, torch.float32)
    results = (torch.zeros if elsewhere else torch.empty)((tokens * used, x.shape[1]), dtype=wide)
    if parts:
        results[order] = torch.cat(parts).to(wide)
    return (results.view(tokens, used, -1) * weights.unsqueeze(-1).to(wide)).sum(1).to(x.dtype)


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, hidden: int, width: int, experts: int, used: int,
    spread: int, bias: bool, kind: str, limit: float | None, codes: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(device, dtype)

    chosen = torch.tensor(chosen_experts(tokens, experts, used, spread), device=device)
    weights = torch.rand((tokens, used), generator=generator).to(device)
    biases = {"gate_up_bias": draw(experts, 2 * width), "down_bias": draw(experts, hidden)} if bias else {}
    matrices = draw(experts, 2 * width, hidden, scale=hidden**-0.5), draw(experts, hidden, width, scale=width**-0.5)
    weights = weights.double() if dtype == torch.float64 else weights
    if codes:
        drawn = [_codes(generator, device, each) for each in matrices]
        matrices = drawn[0][0], drawn[1][0]
        biases["scales"] = drawn[0][1], drawn[1][1]
    return (draw(tokens, hidden), *matrices, chosen, weights, kind), {"limit": limit, **biases}


def _codes(generator: torch.Generator, device: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Random MXFP4 codes and scales about the size of a matrix's numbers."""
    *others, inputs = like.shape
    codes = torch.randint(0, 256, (*others, inputs // 2), generator=generator, dtype=torch.uint8)
    size = 127 + round(math.log2(inputs**-0.5 / 2.9))
    scale = torch.randint(size - 1, size + 2, (*others, inputs // GROUP), generator=generator).to(torch.uint8)
    return codes.to(device), scale.to(device)


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


experts = Op(
    "experts",
    experts_reference,
    kernels=[
        Implementation("triton", experts_triton, _triton_supports),
        Implementation("visited", experts_visited, lambda site: site.device == "cpu"),
    ],
    cases=EXPERTS_CASES,
    cost=experts_cost,
    inputs=_inputs,
    # The activated rows and each expert's result are rounded once; a sum of some of them, each below about 8.
    tolerance={
        "float32": Tolerance(1e-5, 2e-5), "bfloat16": Tolerance(2**-6, 2**-4), "float16": Tolerance(2**-9, 2**-7),
    },
)
