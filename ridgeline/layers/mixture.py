"""The mixture of experts in the place of an MLP: router, experts, and the shared expert that every token visits.

Every rank has all experts and a part of the width of each, as with a plain MLP, so the ranks stay in step whatever the tokens
choose. Or the ranks divide the experts among them: each has some of them whole, and adds nothing for the others. Either way every
rank has all tokens, and results are summed over the ranks: shapes do not depend on what tokens choose. The router is whole on
every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import Shard, even_shard, whole
from ridgeline.layers.batch import Batch
from ridgeline.layers.linear import AnyNorm, GateUpLinear, Linear, Placement, normed_rows
from ridgeline.ops.activation import gated_activation
from ridgeline.ops.experts.experts_op import experts
from ridgeline.ops.experts.mxfp4 import GROUP, expanded, fits
from ridgeline.ops.experts.route import route
from ridgeline.ops.experts.router import route_rows
from ridgeline.quant.format import MXFP4, WeightFormat
from ridgeline.quant.piece import Piece
from ridgeline.quant.quantise import quantised
from ridgeline.quant.quantised import Quantised
from ridgeline.quant.scheme import Fused, Unquantised


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


class ExpertWeights(nn.Module):
    """gate, up and down of this rank's experts, for its part of their width: [experts, 2 width, hidden] and [experts, hidden,
    width]. Either the experts are divided among the ranks or the width is. With a format they are MXFP4 codes, two in a byte,
    with scales beside them (ops/experts/mxfp4.py)."""

    def __init__(self, spec: MixtureSpec, place: Placement) -> None:
        super().__init__()
        divided, axis = place.experts.size > 1, place.experts
        self.counts_bias = divided or place.comm.rank == 0       # the sum over ranks must count it once
        self.here = even_shard(spec.count, axis.rank, axis.size)
        self.shard = whole(spec.width) if divided else even_shard(spec.width, place.comm.rank, place.comm.size)
        new = torch.zeros if self.shard.filled < self.shard.size else torch.empty
        size, hidden = self.shard.size, spec.hidden_size

        scheme = place.schemes(f"{place.path}.gate_up")
        self.scheme = scheme if isinstance(scheme, Quantised) else None
        self.dtype = place.dtype

        def parameter(*shape: int, dtype: torch.dtype = place.dtype) -> nn.Parameter:
            return nn.Parameter(new(shape, dtype=dtype, device=place.device), requires_grad=False)

        count = self.here.filled
        self.gate_up_scale: nn.Parameter | None = None
        self.down_scale: nn.Parameter | None = None
        if self.scheme is None:
            self.gate_up = parameter(count, 2 * size, hidden)
            self.down = parameter(count, hidden, size)
        else:
            self.gate_up = parameter(count, 2 * size, hidden // 2, dtype=torch.uint8)
            self.down = parameter(count, hidden, size // 2, dtype=torch.uint8)
            self.gate_up_scale = parameter(count, 2 * size, hidden // GROUP, dtype=torch.uint8)
            self.down_scale = parameter(count, hidden, size // GROUP, dtype=torch.uint8)
        self.gate_up_bias = parameter(count, 2 * size) if spec.bias else None
        self.down_bias = parameter(count, hidden) if spec.bias else None

    def pieces(self) -> dict[str, Piece]:
        """By "expert.linear.parameter:part"."""
        shard, hidden = self.shard, self.down.shape[1]
        kept = slice(shard.start, shard.stop)
        found: dict[str, Piece] = {}
        for expert, number in enumerate(range(self.here.start, self.here.stop)):
            for part, first in (("gate", 0), ("up", shard.size)):
                rows = slice(first, first + shard.filled)
                found |= self._matrix(
                    f"{number}.gate_up.{{}}:{part}", self.gate_up, self.gate_up_scale, (expert, rows), (shard.total, hidden),
                    (kept, slice(0, hidden)),
                )
                if self.gate_up_bias is not None:
                    found[f"{number}.gate_up.bias:{part}"] = Piece(
                        (shard.total,), (kept,), self.gate_up_bias.data[expert, rows], (0.0, 0.02)
                    )
            found |= self._matrix(
                f"{number}.down.{{}}:", self.down, self.down_scale, (expert, slice(None)), (hidden, shard.total),
                (slice(0, hidden), kept),
            )
            if self.down_bias is not None:
                found[f"{number}.down.bias:"] = Piece((hidden,), (slice(None),), self.down_bias.data[expert], (0.0, 0.02))
        return found

    def _matrix(
        self, name: str, weight: Tensor, scale: Tensor | None, at: tuple[int, slice], shape: tuple[int, int],
        kept: tuple[slice, slice],
    ) -> dict[str, Piece]:
        """The pieces of one matrix: a part of an expert's, of that whole shape, of which this rank keeps some."""
        rows, columns = kept
        filled = columns.stop - columns.start
        if self.scheme is None or scale is None:
            return {name.format("weight"): Piece(shape, kept, weight.data[at][:, :filled], (0.0, shape[1] ** -0.5))}
        targets = {"weight": (weight.data[at], 2), "scale": (scale.data[at], GROUP)}
        if self.scheme.made:
            def quantise(values: Tensor) -> None:
                for each, codes in quantised(values.to(weight.device), MXFP4).items():
                    targets[each][0][:, : codes.shape[1]].copy_(codes)

            return {name.format("weight"): Piece(shape, kept, weight.data[at], (0.0, shape[1] ** -0.5), store=quantise)}
        specs = {spec.name: spec for spec in MXFP4.tensors()}
        return {
            name.format(each): Piece(
                specs[each].shape(*shape), (rows, slice(columns.start // inputs, columns.stop // inputs)),
                target[:, : filled // inputs], self.scheme.dummy(specs[each], shape[1], weight.device),
            )
            for each, (target, inputs) in targets.items()
        }

    def stored_formats(self) -> dict[str, WeightFormat]:
        """By matrix, where a checkpoint's codes are kept."""
        if self.scheme is None or self.scheme.made:
            return {}
        return {f"{expert}.{name}": MXFP4 for expert in range(self.here.start, self.here.stop) for name in ("gate_up", "down")}

    def finish(self) -> None:
        if self.down_bias is not None and not self.counts_bias:
            self.down_bias.zero_()
        scales = self.scales
        if scales is None:
            return
        if self.dtype != torch.bfloat16 or self.gate_up.device.type != "cuda" or not all(fits(scale) for scale in scales):
            numbers = self.numbers()
            self.gate_up, self.down = (nn.Parameter(numbers[name], requires_grad=False) for name in ("gate_up", "down"))
            self.gate_up_scale = self.down_scale = None

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        if self.gate_up_scale is None or self.down_scale is None:
            return None
        return self.gate_up_scale, self.down_scale

    def numbers(self) -> dict[str, Tensor]:
        """gate_up and down, not as codes."""
        scales = self.scales
        if scales is None:
            return {"gate_up": self.gate_up.data, "down": self.down.data}
        gate_up, down = expanded(self.gate_up, scales[0], self.dtype), expanded(self.down, scales[1], self.dtype)
        return {"gate_up": gate_up, "down": down}

    @property
    def divided(self) -> bool:
        return self.here.filled < self.here.total

    def local(self, chosen: Tensor) -> Tensor:
        """Numbers of experts as this rank counts them; those of other ranks get the number behind the last."""
        mine = chosen - self.here.start
        return torch.where((mine >= 0) & (mine < self.here.filled), mine, self.here.filled)

    @property
    def expert_bytes(self) -> int:
        """Of one expert on this rank: what a step reads if a token has chosen it."""
        return sum(parameter.nbytes for parameter in self.parameters()) // max(1, len(self.gate_up))


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
        self.experts = ExpertWeights(spec, place.inside("experts"))
        self.shared = SharedExpert(spec.hidden_size, spec.shared, place.inside("shared")) if spec.shared else None
        self.reads: Tensor | None = None                 # int32 [1]: the experts that the newest step has read
        self.shared_gate: Linear | None = None
        if spec.shared_gate:
            self.shared_gate = Linear({"": whole(1)}, whole(spec.hidden_size), False, place.inside("shared_gate"))

    def forward(
        self, x: Tensor, residual: Tensor | None, norm: AnyNorm, post_norm: nn.Module | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        rows, stream = normed_rows(x, residual, norm)
        out = self.of_normed(rows, batch, (stream, norm))
        return (out if post_norm is None else post_norm(out)), stream

    def _routed(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Experts of each token, and their weights."""
        router, spec = self.router, self.spec
        bias = router.e_score_correction_bias
        if type(router.scheme) in (Unquantised, Fused):
            return route_rows(x, router.weight, router.bias, spec.used, bias=bias, **spec.rule)  # type: ignore[arg-type]
        return route(router(x, batch), spec.used, bias=bias, **spec.rule)  # type: ignore[arg-type]

    def of_normed(self, x: Tensor, batch: Batch, source: tuple[Tensor, AnyNorm] | None = None) -> Tensor:
        """`source`: the stream and the norm that x was made with, where they are known."""
        spec, weights = self.spec, self.experts
        chosen, shares = self._routed(x, batch)
        chosen = weights.local(chosen) if weights.divided else chosen
        out = experts(
            x, weights.gate_up, weights.down, chosen, shares, spec.activation, gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias, limit=spec.limit, alpha=spec.alpha,
            reads=self.reads, scales=weights.scales, elsewhere=weights.divided,
        )
        if self.shared is not None and self.shared_gate is None:
            out = self.shared.onto(out, x, spec.activation, batch, source)
        elif self.shared is not None and self.shared_gate is not None:
            out = out + self.shared(x, spec.activation, batch) * torch.sigmoid(self.shared_gate(x, batch))
        return self.comm.all_reduce(out)
