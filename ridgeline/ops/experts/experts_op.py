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
from ridgeline.ops.experts.matrices import Matrices, numbers
from ridgeline.ops.experts.packed_matrices import pack_experts
from ridgeline.ops.packed.packed_weight import PackedWeight, byte_scales, quantised
from ridgeline.ops.quantised.expand import QuantisedWeight
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


def _with_shared(
    total: Tensor, x: Tensor, shared: tuple[Tensor, Tensor] | None, kind: str, limit: float | None, alpha: float
) -> Tensor:
    if shared is not None:
        total = total + F.linear(gated(F.linear(x, shared[0]), kind, limit, alpha), shared[1]).to(total.dtype)
    return total.to(x.dtype)


def experts_reference(
    x: Tensor, gate_up: Matrices, down: Matrices, chosen: Tensor, weights: Tensor, kind: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float | None = None, alpha: float = 1.702,
    reads: Tensor | None = None, elsewhere: bool = False, shared: tuple[Tensor, Tensor] | None = None, invariant: bool = False,
) -> Tensor:
    """x [T, hidden], gate_up [experts, 2 width, hidden], down [experts, hidden, width], chosen and weights [T, used]
    -> [T, hidden]: the sum over the chosen experts, in their order, in float32 at least. `reads` int32 [1] gets the number of
    experts that some token has chosen. The matrices may be codes (matrices.py).
    `elsewhere`: numbers behind the last expert may be among the chosen, which add nothing. `shared`: gate and up [2 wide, hidden]
    and down [hidden, wide] of an expert that every token visits, with weight 1. `invariant`: on a GPU a token's result does not
    depend on the others."""
    gate_up, down = numbers(gate_up, x.dtype), numbers(down, x.dtype)
    if reads is not None:
        reads.fill_(int((chosen.unique() < len(gate_up)).sum()))
    wide = torch.promote_types(x.dtype, torch.float32)
    results = torch.zeros((*chosen.shape, x.shape[1]), dtype=wide, device=x.device)
    for expert in range(gate_up.shape[0]):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        out = _through(x[token], expert, gate_up, down, kind, gate_up_bias, down_bias, limit, alpha)
        results[token, place] = out.to(wide) * weights[token, place, None].to(wide)
    return _with_shared(results.sum(1), x, shared, kind, limit, alpha)


# ── CPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def experts_visited(
    x: Tensor, gate_up: Matrices, down: Matrices, chosen: Tensor, weights: Tensor, kind: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float | None = None, alpha: float = 1.702,
    reads: Tensor | None = None, elsewhere: bool = False, shared: tuple[Tensor, Tensor] | None = None, invariant: bool = False,
) -> Tensor:
    """The same, sorted by expert on the host: only the chosen ones are touched, each once, and its rows lie together."""
    gate_up, down = numbers(gate_up, x.dtype), numbers(down, x.dtype)
    tokens, used = chosen.shape
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    if elsewhere:
        order = order[: int((flat < len(gate_up)).sum())]        # those that are not here come last
    visited, counts = torch.unique_consecutive(flat[order], return_counts=True)
    if reads is not None:
        reads.fill_(len(visited))
    rows = x.index_select(0, order // used)
    parts = [
        _through(part, expert, gate_up, down, kind, gate_up_bias, down_bias, limit, alpha)
        for expert, part in zip(visited.tolist(), rows.split(counts.tolist()), strict=True)
    ]
    wide = torch.promote_types(x.dtype, torch.float32)
    results = (torch.zeros if elsewhere else torch.empty)((tokens * used, x.shape[1]), dtype=wide)
    if parts:
        results[order] = torch.cat(parts).to(wide)
    total = (results.view(tokens, used, -1) * weights.unsqueeze(-1).to(wide)).sum(1)
    return _with_shared(total, x, shared, kind, limit, alpha)


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, hidden: int, width: int, experts: int, used: int,
    spread: int, bias: bool, kind: str, limit: float | None, codes: str = "", group: int = 32, shared: int = 0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(device, dtype)

    chosen = torch.tensor(chosen_experts(tokens, experts, used, spread), device=device)
    weights = torch.rand((tokens, used), generator=generator).to(device)
    biases = {"gate_up_bias": draw(experts, 2 * width), "down_bias": draw(experts, hidden)} if bias else {}
    matrices: tuple[Any, ...] = (
        draw(experts, 2 * width, hidden, scale=hidden**-0.5), draw(experts, hidden, width, scale=width**-0.5)
    )
    weights = weights.double() if dtype == torch.float64 else weights
    if codes:
        made = _packed if codes.startswith("packed ") else _codes
        matrices = tuple(made(generator, each, codes.removeprefix("packed "), group, not at) for at, each in enumerate(matrices))
    given: dict[str, Any] = {"limit": limit, **biases}
    if shared:
        given["shared"] = draw(2 * shared, hidden, scale=hidden**-0.5), draw(hidden, shared, scale=shared**-0.5)
    return (draw(tokens, hidden), *matrices, chosen, weights, kind), given


def _codes(generator: torch.Generator, like: Tensor, grid: str, group: int, gated: bool) -> QuantisedWeight:
    """Random codes, with scales that make numbers of the size of a matrix's. `grid`: uint4 with zeros is "uint4 zeros"."""
    count, outputs, inputs = like.shape
    grid, _, zeros = grid.partition(" ")
    size, device = inputs**-0.5 / {"e2m1": 2.9, "uint4": 4.6, "e4m3": 100.0}[grid], like.device
    rows, columns = (group, group) if grid == "e4m3" and group else (1, group)
    shape = (count, outputs // rows, -(-inputs // columns) if columns else 1)[: 3 if columns else 2]
    if grid == "e2m1":
        scale = (127 + round(math.log2(size)) + torch.randint(-1, 2, shape, generator=generator)).to(torch.uint8)
    else:
        factors = 0.4 + 0.6 * torch.rand(shape, generator=generator)
        scale = factors.mul_(size).to(torch.float32 if grid == "e4m3" else torch.float16)
    if grid == "e4m3":
        weight = torch.randn(like.shape, generator=generator).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    else:
        weight = torch.randint(0, 256, (count, outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    zero = torch.randint(6, 11, shape, generator=generator).to(device, scale.dtype) if zeros else None
    return QuantisedWeight(
        grid, inputs, weight.to(device), scale.to(device), (rows, columns), zero=zero, e8m0=grid == "e2m1"
    )


def _packed(generator: torch.Generator, like: Tensor, kind: str, group: int, gated: bool) -> PackedWeight:
    rounded = [quantised(each, group, kind) for each in like]
    codes, scale = (torch.stack(parts) for parts in zip(*rounded, strict=True))
    if kind == "e2m1":
        scale = byte_scales(scale, group)
    return pack_experts(codes, scale, kind=kind, gated=gated)


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
