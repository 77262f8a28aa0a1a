"""The matrices of a layer's experts: what a rank holds of them, as numbers or as codes, and how they are loaded."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import even_shard, whole
from ridgeline.layers.linear import Placement
from ridgeline.ops.experts.expert_codes import fits
from ridgeline.ops.experts.matrices import Matrices, numbers
from ridgeline.ops.experts.packed_matrices import pack_experts, packed_bytes, packs_experts, placeholder
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.process.log import get_logger
from ridgeline.quant.format import SCALE, WEIGHT, ZERO, TensorSpec, WeightFormat, per_row
from ridgeline.quant.piece import Piece
from ridgeline.quant.quantise import quantised
from ridgeline.quant.quantised import Quantised, quantised_weight, torch_dtype

logger = get_logger("layers")

NAMES = ("gate_up", "down")
SUFFIXES = {WEIGHT: "", SCALE: "_scale", ZERO: "_zero"}
PACKED = {WEIGHT: "codes", SCALE: "scale", ZERO: "zero"}     # the names of the same in a PackedWeight


class ExpertWeights(nn.Module):
    """gate, up and down of this rank's experts, for its part of their width: [experts, 2 width, hidden] and [experts, hidden,
    width]. Either the experts are divided among the ranks or the width is. With a format the tensors are its codes, scales and
    zeros, with an expert as their first index. On a Hopper GPU 4-bit codes are packed after loading, in the order in which
    kernels take them (ops/experts/packed_matrices.py)."""

    def __init__(self, hidden: int, count: int, width: int, bias: bool, place: Placement) -> None:
        super().__init__()
        divided, axis = place.experts.size > 1, place.experts
        self.counts_bias = divided or place.comm.rank == 0       # the sum over ranks must count it once
        self.here = even_shard(count, axis.rank, axis.size)
        self.shard = whole(width) if divided else even_shard(width, place.comm.rank, place.comm.size)
        self.dtype, self.hidden = place.dtype, hidden
        scheme = place.schemes(f"{place.path}.gate_up")
        self.scheme = scheme if isinstance(scheme, Quantised) else None
        size, number = self.shard.size, self.here.filled
        self.shapes = {"gate_up": (2 * size, hidden), "down": (hidden, size)}
        new = torch.zeros if self.shard.filled < size else torch.empty

        def parameter(*shape: int, dtype: torch.dtype = place.dtype) -> nn.Parameter:
            return nn.Parameter(new((number, *shape), dtype=dtype, device=place.device), requires_grad=False)

        self.packed: dict[str, PackedWeight] = {}
        if self.scheme is not None and self._packs(place.device):
            # While kernels are collected, before the weights are loaded.
            format = self.scheme.format
            self.packed = {
                name: placeholder(
                    number, *shape, _group(format), format.grid, name == "gate_up", ZERO in self._specs(), place.device,
                    torch_dtype(self._specs()[SCALE].dtype),
                ) for name, shape in self.shapes.items()
            }
        for name, shape in self.shapes.items():
            if self.scheme is None:
                setattr(self, name, parameter(*shape))
                continue
            needed = packed_bytes(self.packed[name]) if name in self.packed else {}
            for spec in self._specs().values():
                stored, dtype = (number, *spec.shape(*shape)), torch_dtype(spec.dtype)
                size_here = math.prod(stored) * dtype.itemsize
                # Codes are packed where they lie. Packed into other memory they would leave theirs as a hole: a segment of the
                # allocator in whose last bytes a bias lies is not given back.
                memory = new(max(size_here, needed.get(PACKED[spec.name], 0)), dtype=torch.uint8, device=place.device)
                made = memory[:size_here].view(dtype).view(stored)
                setattr(self, name + SUFFIXES[spec.name], nn.Parameter(made, requires_grad=False))
        self.gate_up_bias = parameter(2 * size) if bias else None
        self.down_bias = parameter(hidden) if bias else None

    def _specs(self) -> dict[str, TensorSpec]:
        """The tensors of the format, by name."""
        return {} if self.scheme is None else {spec.name: spec for spec in self.scheme.format.tensors()}

    def _packs(self, device: torch.device) -> bool:
        assert self.scheme is not None
        format = self.scheme.format
        known = format.grid in ("e2m1", "uint4")
        return known and packs_experts(self.shapes["gate_up"], self.shapes["down"], _group(format), self.dtype, device)

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def pieces(self) -> dict[str, Piece]:
        """By "expert.linear.parameter:part"."""
        shard, hidden = self.shard, self.hidden
        kept = slice(shard.start, shard.stop)
        found: dict[str, Piece] = {}
        for expert, number in enumerate(range(self.here.start, self.here.stop)):
            for part, first in (("gate", 0), ("up", shard.size)):
                rows = slice(first, first + shard.filled)
                found |= self._matrix(
                    f"{number}.gate_up.{{}}:{part}", "gate_up", expert, rows, (shard.total, hidden), (kept, slice(0, hidden))
                )
                if self.gate_up_bias is not None:
                    found[f"{number}.gate_up.bias:{part}"] = Piece(
                        (shard.total,), (kept,), self.gate_up_bias.data[expert, rows], (0.0, 0.02)
                    )
            found |= self._matrix(
                f"{number}.down.{{}}:", "down", expert, slice(0, hidden), (hidden, shard.total), (slice(0, hidden), kept)
            )
            if self.down_bias is not None:
                found[f"{number}.down.bias:"] = Piece((hidden,), (slice(None),), self.down_bias.data[expert], (0.0, 0.02))
        return found

    def _matrix(
        self, name: str, own: str, expert: int, rows: slice, shape: tuple[int, int], kept: tuple[slice, slice]
    ) -> dict[str, Piece]:
        """The pieces of one matrix: rows of an expert's, of that whole shape, of which this rank keeps some."""
        outputs, columns = kept
        weight = getattr(self, own).data[expert]
        if self.scheme is None:
            target = weight[rows, : columns.stop - columns.start]
            return {name.format(WEIGHT): Piece(shape, kept, target, (0.0, shape[1] ** -0.5))}
        if self.scheme.made:
            def quantise(values: Tensor) -> None:
                for each, codes in quantised(values.to(weight.device), self.scheme.format).items():  # type: ignore[union-attr]
                    target = self._target(own, expert, rows, self._specs()[each])
                    (target if codes.dim() == 1 else target[:, : codes.shape[1]]).copy_(codes)

            return {name.format(WEIGHT): Piece(shape, kept, weight[rows], (0.0, shape[1] ** -0.5), store=quantise)}
        found, stored = {}, {spec.name: spec for spec in per_row(self.scheme.format).tensors()}
        for spec in self._specs().values():
            target, whole_shape = self._target(own, expert, rows, spec), stored[spec.name].shape(*shape)
            # Scales of every output are read; where outputs share one, the first of each is kept.
            mine: tuple[slice, ...] = (slice(outputs.start, outputs.stop, spec.outputs),)
            if spec.inputs:
                first, stop = columns.start // spec.inputs, -(-columns.stop // spec.inputs)
                mine, target = (*mine, slice(first, stop)), target[:, : stop - first]
            found[name.format(spec.name)] = Piece(
                whole_shape, mine, target, self.scheme.dummy(spec, shape[1], weight.device)
            )
        return found

    def _target(self, name: str, expert: int, rows: slice, spec: TensorSpec) -> Tensor:
        """What a format's tensor has of these rows of an expert's matrix."""
        tensor: Tensor = getattr(self, name + SUFFIXES[spec.name]).data[expert]
        return tensor[rows.start // spec.outputs : -(-rows.stop // spec.outputs)]

    def stored_formats(self) -> dict[str, WeightFormat]:
        """By matrix, where a checkpoint's codes are kept."""
        if self.scheme is None or self.scheme.made:
            return {}
        return {f"{expert}.{name}": self.scheme.format for expert in range(self.here.start, self.here.stop) for name in NAMES}

    def finish(self) -> None:
        if self.down_bias is not None and not self.counts_bias:
            self.down_bias.zero_()
        if self.scheme is None:
            return
        if self.packed and self._is_exact():
            self._pack()
            return
        # Decided by the values: before loading, experts were counted as codes. These fit where packed ones do.
        self.packed = {}
        if not self._has_kernels():
            more = self.dtype.itemsize * sum(math.prod(shape) for shape in self.shapes.values()) * self.here.filled
            less = sum(getattr(self, name + suffix).nbytes for name in NAMES for suffix in SUFFIXES.values()
                       if hasattr(self, name + suffix))
            logger.warning("experts of a layer are expanded to %s, %.0f MiB more than was planned: their scales do not fit the "
                           "kernels of %s", str(self.dtype)[6:], (more - less) / 2**20, self.scheme.format.name)
            for name in NAMES:
                made = numbers(self._matrices(name), self.dtype)
                for suffix in SUFFIXES.values():
                    if hasattr(self, name + suffix):
                        delattr(self, name + suffix)
                setattr(self, name, nn.Parameter(made, requires_grad=False))
            self.scheme = None

    def _has_kernels(self) -> bool:
        """Whether the kernels of tiles multiply by these codes."""
        if self.dtype != torch.bfloat16 or self.gate_up.device.type != "cuda":
            return False
        e8m0 = self._specs()[SCALE].dtype == "e8m0"
        return not e8m0 or all(fits(getattr(self, name + SUFFIXES[SCALE])) for name in NAMES)

    def _is_exact(self) -> bool:
        """Whether zeros, if there are any, are codes: the kernels of packed weights subtract whole numbers."""
        zeros = [getattr(self, name + SUFFIXES[ZERO]).float() for name in NAMES if hasattr(self, name + SUFFIXES[ZERO])]
        return all(torch.equal(zero, zero.round()) and bool((zero.abs() < 128).all()) for zero in zeros)

    def _pack(self) -> None:
        assert self.scheme is not None
        for name in NAMES:
            stored = {key: getattr(self, name + suffix).data for key, suffix in SUFFIXES.items() if hasattr(self, name + suffix)}
            packed = pack_experts(
                stored[WEIGHT], stored[SCALE], stored.get(ZERO), kind=self.scheme.format.grid, gated=name == "gate_up",
                rooms={PACKED[key]: _memory(tensor) for key, tensor in stored.items()},
            )
            self.packed[name] = packed
            for key, tensor in ((WEIGHT, packed.codes), (SCALE, packed.scale), (ZERO, packed.zero)):
                if tensor is not None:
                    setattr(self, name + SUFFIXES[key], nn.Parameter(tensor, requires_grad=False))

    # ── use ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def matrices(self) -> tuple[Matrices, Matrices]:
        """gate_up and down, as the op `experts` takes them."""
        return self._matrices("gate_up"), self._matrices("down")

    def _matrices(self, name: str) -> Matrices:
        if self.scheme is None:
            found: Tensor = getattr(self, name)
            return found
        if self.packed:
            return self.packed[name]
        tensors = {spec: getattr(self, name + SUFFIXES[spec]).data for spec in self._specs()}
        weight: QuantisedWeight = quantised_weight(self.scheme.format, self.shapes[name][1], tensors)
        return weight

    def numbers(self) -> dict[str, Tensor]:
        """gate_up and down, not as codes."""
        return {name: numbers(self._matrices(name), self.dtype) for name in NAMES}

    @property
    def codes(self) -> list[str]:
        """Names of the parameters beside the matrices themselves: scales and zeros."""
        return [name + SUFFIXES[spec] for name in NAMES for spec in self._specs() if spec != WEIGHT]

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
        return sum(parameter.nbytes for parameter in self.parameters()) // max(1, self.here.filled)


def _memory(tensor: Tensor) -> Tensor:
    """All bytes of the memory at whose beginning it lies."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _group(format: WeightFormat) -> int:
    """Inputs that share a scale; 0: all."""
    assert format.scales is not None
    return format.scales.block[1]
