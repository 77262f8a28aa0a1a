"""The mixture of experts in the place of an MLP: router, experts, and the shared expert that every token visits.

Every rank has all experts and a part of the width of each, as with a plain MLP, so the ranks stay in step whatever the tokens
choose. Or the ranks divide the experts among them: each has some of them whole, and adds nothing for the others. Either way every
rank has all tokens, and results are summed over the ranks: shapes do not depend on what tokens choose. The router is whole on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import Shard, whole
from ridgeline.layers.batch import Batch
from ridgeline.layers.expert_weights import ExpertWeights
from ridgeline.layers.linear import AnyNorm, GateUpLinear, Linear, Placement, normed_rows
from ridgeline.layers.norm import RMSNorm
from ridgeline.ops.activation import gated_activation
from ridgeline.ops.experts.experts_op import experts
from ridgeline.ops.experts.few_tokens import serves
from ridgeline.ops.experts.matrices import Matrices
from ridgeline.ops.experts.route import route
from ridgeline.ops.experts.router import normed_route_rows, route_rows
from ridgeline.quant.piece import Piece
from ridgeline.quant.scheme import Fused, Invariant, Unquantised


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """One layer's mixture, in numbers; the fields of models/expert_config.py mean the same."""

    hidden_size: int
    count: int
    used: int
    width: int
    shared: int
    shared_gate: bool
    activation: str
    bias: bool
    router_bias: bool
    choice_bias: bool
    zipf: bool
    limit: float | None
    alpha: float
    scales_input: bool
    rule: dict[str, object]          # further arguments of the op `route`


class Router(Linear):
    """x [T, hidden] → logits [T, experts], whole on every rank. A bias for the choice alone may belong to it."""

    def __init__(self, spec: MixtureSpec, place: Placement) -> None:
        super().__init__({"": whole(spec.count)}, whole(spec.hidden_size), spec.router_bias, place)
        self.zipf = spec.zipf
        self.e_score_correction_bias: nn.Parameter | None = None
        if spec.choice_bias:
            dtype = torch.promote_types(place.dtype, torch.float32)
            self.e_score_correction_bias = nn.Parameter(
                torch.empty(spec.count, dtype=dtype, device=place.device), requires_grad=False
            )

    def pieces(self) -> dict[str, Piece]:
        found = super().pieces()
        if self.zipf:
            found["bias:"] = replace(found["bias:"], dummy=_zipf)
        if self.e_score_correction_bias is not None:
            target = self.e_score_correction_bias.data
            found["e_score_correction_bias:"] = Piece(tuple(target.shape), (slice(None),), target, (0.0, 0.02))
        return found


def _zipf(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """A dummy bias: chances of the experts, but for the noise of the logits, like 1, 1/2, 1/3 …, each layer in its own order."""
    order = torch.randperm(shape[0], generator=generator, device=generator.device)
    return -torch.log1p(order.float())


class SharedExpert(nn.Module):
    """A gated MLP whose output is not summed over the ranks yet."""

    def __init__(self, hidden_size: int, width: int, place: Placement) -> None:
        super().__init__()
        self.gate_up = GateUpLinear(hidden_size, width, False, place.inside("gate_up"))
        shard: Shard = self.gate_up.rows["gate"]
        self.down = Linear({"": whole(hidden_size)}, shard, False, place.inside("down"))

    def forward(self, x: Tensor, activation: str, batch: Batch) -> Tensor:
        return self.down(gated_activation(self.gate_up(x, batch), activation), batch)

    def onto(
        self, out: Tensor, x: Tensor, activation: str, batch: Batch, source: tuple[Tensor, AnyNorm] | None = None
    ) -> Tensor:
        """out + the expert of x, written over `out`. `source`: the stream and the norm that x was made with. One row is normed
        again by the kernel that multiplies it, which then activates as well."""
        if source is not None and len(x) == 1:
            wide, _ = self.gate_up.normed_gated(source[0], None, source[1], activation, batch, self.down)
        else:
            wide = gated_activation(self.gate_up(x, batch), activation)
        return self.down.scheme.apply_onto(self.down, out, wide, batch)


class Mixture(nn.Module):
    def __init__(self, spec: MixtureSpec, place: Placement) -> None:
        super().__init__()
        self.spec = spec
        self.comm = place.comm
        self.router = Router(spec, place.inside("router"))
        self.experts = ExpertWeights(spec.hidden_size, spec.count, spec.width, spec.bias, place.inside("experts"))
        self.shared = SharedExpert(spec.hidden_size, spec.shared, place.inside("shared")) if spec.shared else None
        self.invariant = type(self.router.scheme) is Invariant
        self.reads: Tensor | None = None                 # int32 [1]: the experts that the newest step has read
        self.tap: Callable[[Tensor, Tensor], None] | None = None     # sees tokens and their experts: calibration (quantize/)
        self.shared_gate: Linear | None = None
        if spec.shared_gate:
            self.shared_gate = Linear({"": whole(1)}, whole(spec.hidden_size), False, place.inside("shared_gate"))

    def forward(
        self, x: Tensor, residual: Tensor | None, norm: AnyNorm, post_norm: nn.Module | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        router, spec = self.router, self.spec
        if type(router.scheme) in (Unquantised, Fused, Invariant) and isinstance(norm, RMSNorm):
            rows, stream, chosen, shares = normed_route_rows(
                x, residual, norm.weight, norm.eps, router.weight, router.bias, spec.used, norm_offset=norm.offset,
                invariant=self.invariant, bias=router.e_score_correction_bias, **spec.rule,  # type: ignore[arg-type]
            )
        else:
            rows, stream = normed_rows(x, residual, norm)
            chosen, shares = self._routed(rows, batch)
        out = self._through_experts(rows, chosen, shares, batch, (stream, norm))
        return (out if post_norm is None else post_norm(out)), stream

    def _routed(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Experts of each token, and their weights."""
        router, spec = self.router, self.spec
        bias = router.e_score_correction_bias
        if type(router.scheme) in (Unquantised, Fused):
            return route_rows(x, router.weight, router.bias, spec.used, bias=bias, **spec.rule)  # type: ignore[arg-type]
        return route(router(x, batch), spec.used, bias=bias, **spec.rule)  # type: ignore[arg-type]

    def of_normed(self, x: Tensor, batch: Batch) -> Tensor:
        return self._through_experts(x, *self._routed(x, batch), batch)

    def _through_experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, batch: Batch, source: tuple[Tensor, AnyNorm] | None = None
    ) -> Tensor:
        """`source`: the stream and the norm that x was made with, where they are known."""
        spec, weights = self.spec, self.experts
        if self.tap is not None:
            self.tap(x, chosen)
        chosen = weights.local(chosen) if weights.divided else chosen
        gate_up, down = weights.matrices
        beside = self._beside(x, gate_up)
        rows = x
        if spec.scales_input:                            # of the one expert that each token has
            rows, shares = (x * shares).to(x.dtype), torch.ones_like(shares)
        out = experts(
            rows, gate_up, down, chosen, shares, spec.activation, gate_up_bias=weights.gate_up_bias, down_bias=weights.down_bias,
            limit=spec.limit, alpha=spec.alpha, reads=self.reads, elsewhere=weights.divided, shared=beside,
            invariant=self.invariant,
        )
        if self.shared is not None and self.shared_gate is not None:
            out = out + self.shared(x, spec.activation, batch) * torch.sigmoid(self.shared_gate(x, batch))
        elif self.shared is not None and beside is None:
            out = self.shared.onto(out, x, spec.activation, batch, source)
        return self.comm.all_reduce(out)

    def _beside(self, x: Tensor, gate_up: Matrices) -> tuple[Tensor, Tensor] | None:
        """The shared expert, where the kernels of a few tokens multiply by it as by the others."""
        shared, spec, weights = self.shared, self.spec, self.experts
        if shared is None or self.shared_gate is not None or not x.is_cuda or not isinstance(gate_up, Tensor):
            return None
        if spec.scales_input:                            # it reads other rows than the experts do
            return None
        plain = all(type(linear.scheme) is Fused for linear in (shared.gate_up, shared.down))
        alike = shared.gate_up.rows["gate"].size % weights.shard.size == 0 and not weights.divided and not spec.bias
        if not (plain and alike and spec.limit is None and serves(len(x), spec.used, spec.count)):
            return None
        assert shared.gate_up.weight is not None and shared.down.weight is not None
        return shared.gate_up.weight.data, shared.down.weight.data
