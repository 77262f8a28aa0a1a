"""The scheme of quantised weights in any format: it owns the format's tensors, fills them from a checkpoint or by rounding, and
multiplies by them.

On a GPU the codes stay packed, and each product expands its weight. On a CPU they are laid out for its kernels (cpu_packed.py);
formats that these do not know are expanded once, after loading, so that the same numbers are computed at the usual speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import Shard
from ridgeline.ops.quantised.expand import MIDDLE, QuantisedWeight, expand
from ridgeline.ops.quantised.quantised_linear import normed_quantised_linear, prepare, quantised_linear
from ridgeline.process.log import get_logger
from ridgeline.quant.format import (
    BYTES,
    HIGH,
    ORDER,
    SCALE,
    SPREAD,
    WEIGHT,
    TensorSpec,
    WeightFormat,
    per_row,
)
from ridgeline.quant.piece import Dummy, Piece
from ridgeline.quant.quantise import quantised
from ridgeline.quant.scheme import Composed, Norm, Scheme, bias_piece, plain_bias

logger = get_logger("quant")

ROWS_AT_ONCE = 2**24                 # elements that are quantised at a time: their float32 copies take some 200 MB
TENSORS = ("weight", "high", "scale", "zero", "offset", "outer", "offset_outer", "order")


def torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = torch.uint8 if name == "e8m0" else getattr(torch, name)
    return found


def quantised_weight(format: WeightFormat, inputs: int, tensors: Mapping[str, Tensor | None]) -> QuantisedWeight:
    """A format's tensors as ops take them."""
    scales = format.scales
    assert scales is not None
    found: dict[str, Any] = {name: tensors.get(name) for name in TENSORS}
    order = found["order"]
    found["order"] = order[0] if order is not None and order.dim() == 2 else order
    return QuantisedWeight(
        grid=format.grid, inputs=inputs, block=scales.block, outer_block=scales.outer.block if scales.outer else (1, 0),
        e8m0=scales.dtype == "e8m0", **found,
    )


class Quantised(Composed):
    keeps_blocks = False

    def __init__(self, format: WeightFormat, plain: Scheme, made: bool = False, keeps: bool | None = None) -> None:
        """`made`: from a checkpoint's plain numbers, while they load; otherwise the checkpoint holds the format. `plain` serves
        the expanded weight; `keeps`: whether codes stay, by default on a GPU."""
        self.format, self.plain, self.made, self.keeps = format, plain, made, keeps

    # ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────

    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        borders = [border for shard in linear.rows.values() for border in (shard.start, shard.size)]
        linear.format = self.format.fitted(borders, linear.columns.total, linear.columns.size)
        linear.dtype = dtype
        for spec in linear.format.tensors():
            shape = (len(linear.rows), columns) if spec.name == ORDER else spec.shape(rows, columns)
            setattr(linear, spec.name, nn.Parameter(self._empty(spec, shape, padded, device), requires_grad=False))
        linear.bias = plain_bias(rows, bias, padded, dtype, device)
        linear.quantised = self._weight(linear)

    def _empty(self, spec: TensorSpec, shape: tuple[int, ...], padded: bool, device: torch.device) -> Tensor:
        """Padding must be zero: its scale is, or where a scale cannot be, its code."""
        dtype = torch_dtype(spec.dtype)
        if spec.name == SCALE and self.format.grid in ("e4m3", "e2m1"):
            return torch.full(shape, 127 if spec.dtype == "e8m0" else 1, dtype=torch.float32, device=device).to(dtype)
        made = torch.zeros if padded else torch.empty
        return made((*shape[:-1], shape[-1] * BYTES[spec.dtype]), dtype=torch.uint8, device=device).view(dtype)

    def _weight(self, linear: nn.Module) -> QuantisedWeight:
        return quantised_weight(linear.format, linear.columns.size, {
            name: None if getattr(linear, name, None) is None else getattr(linear, name).data for name in TENSORS
        })

    def pieces(self, linear: nn.Module, part: str, rows: Shard, first: int) -> dict[str, Piece]:
        found = bias_piece(linear, rows, first)
        if self.made:
            columns, here = linear.columns, slice(first, first + rows.filled)
            found[WEIGHT] = Piece(
                (rows.total, columns.total), (slice(rows.start, rows.stop), slice(columns.start, columns.stop)),
                linear.weight.data[here], (0.0, columns.total**-0.5), store=self._quantise_into(linear, here),
            )
            return found
        stored = {spec.name: spec for spec in per_row(self.format).tensors()}
        for spec in linear.format.tensors():
            found[spec.name] = self._piece(linear, part, rows, first, spec, stored[spec.name])
        return found

    def _piece(
        self, linear: nn.Module, part: str, rows: Shard, first: int, spec: TensorSpec, stored: TensorSpec
    ) -> Piece:
        columns, parameter = linear.columns, getattr(linear, spec.name).data
        dummy = self.dummy(spec, columns.total, parameter.device)
        if spec.name == ORDER:
            number = list(linear.rows).index(part)
            return Piece((1, columns.total), (slice(0, 1), slice(None)), parameter[number : number + 1], dummy)
        # Scales of every output are read; a linear with blocks of several outputs keeps the first of each.
        kept = slice(rows.start, rows.stop, spec.outputs)
        target = parameter[first // spec.outputs : first // spec.outputs + -(-rows.filled // spec.outputs)]
        shape = stored.shape(rows.total, columns.total)
        if not spec.inputs:
            return Piece(shape, (kept,), target, dummy)
        start, stop = columns.start // spec.inputs, -(-columns.stop // spec.inputs)
        target = target[:, : stop - start]
        if spec.inputs == stored.inputs:
            return Piece(shape, (kept, slice(start, stop)), target, dummy)
        # A shard ends inside a block: its scale is repeated for smaller blocks before the shard is cut out.
        times = stored.inputs // spec.inputs

        def cut(whole: Tensor) -> None:
            target.copy_(whole.repeat_interleave(times, dim=1)[:, start:stop])

        return Piece(shape, (kept, slice(None)), target, dummy, store=cut)

    def _quantise_into(self, linear: nn.Module, rows: slice) -> Callable[[Tensor], None]:
        format, device = linear.format, linear.weight.device
        scales = format.scales
        assert scales is not None

        def quantise(values: Tensor) -> None:
            if not values.numel():                       # a rank that holds padding alone
                return
            step = max(1, ROWS_AT_ONCE // values.shape[1] // scales.block[0]) * scales.block[0]
            for first in range(0, len(values), step):
                part = values[first : first + step].to(device)
                for name, tensor in quantised(part, format).items():
                    each = scales.block[0] if name == SCALE else 1
                    start = (rows.start + first) // each
                    target = getattr(linear, name).data[start : start + len(tensor)]
                    (target if tensor.dim() == 1 else target[:, : tensor.shape[1]]).copy_(tensor)

        return quantise

    def dummy(self, spec: TensorSpec, inputs: int, device: torch.device) -> Dummy:
        """Codes of all values, and one scale that gives them the spread of a usual weight. But for the lowest of uint4, where 8
        means 0: weights whose mean is not 0 give every token the same hidden state after some layers, and with it the same
        experts."""
        dtype, size = torch_dtype(spec.dtype), inputs**-0.5 / SPREAD[self.format.grid]
        scales = self.format.scales
        assert scales is not None

        def make(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
            if spec.name in (WEIGHT, HIGH):
                if dtype == torch.float8_e4m3fn:
                    return torch.randn(shape, generator=generator, device=device).mul_(SPREAD["e4m3"]).clamp_(-448, 448).to(dtype)
                if self.format.grid == "uint4" and scales.zero != "offset":
                    low, high = torch.randint(1, 16, (2, *shape), generator=generator, device=device, dtype=torch.uint8)
                    return (low | (high << 4)).view(dtype)
                return torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8).view(dtype)
            if spec.name == ORDER:
                return torch.arange(shape[-1], device=device, dtype=dtype).expand(shape)
            # With an outer scale the inner ones are small whole numbers, and the outer one has the size. Offsets lie between two
            # codes, as those of real files do: 4-bit codes whose zero is a code have kernels of their own.
            zero = MIDDLE.get(self.format.grid, 0.0) - 0.625
            values = {
                SCALE: size if scales.outer is None else 8.0, "outer": size / 8.0,
                "offset": -zero * size if scales.outer is None else 59.0, "offset_outer": -zero * size / 59.0,
            }.get(spec.name, 0.0)
            if spec.dtype == "e8m0":
                values = 127.0 + round(torch.tensor(size).log2().item())
            if spec.name == "zero":
                values = {"uint4": 8.0, "q5": 16.0, "q6": 32.0, "ternary": 1.0}.get(self.format.grid, 0.0)
            return torch.full(shape, values, dtype=torch.float32, device=device).to(dtype)

        return make

    # ── after loading ────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, linear: nn.Module) -> None:
        apart = not self._one_order(linear)
        if apart:
            logger.warning("a linear's parts have their inputs in different orders: it is stored in %s", str(linear.dtype)[6:])
        keeps = linear.weight.device.type == "cuda" if self.keeps is None else self.keeps
        if keeps and not apart:
            linear.quantised = self._weight(linear)
            prepare(linear.quantised)
        elif not apart and self.plain.take_codes(linear, self._weight(linear)):
            linear.scheme = self.plain
            self._forget(linear, keep=(ORDER,))
        else:
            self.expand_once(linear)

    def expand_once(self, linear: nn.Module) -> None:
        """The plain scheme takes over, with the same numbers."""
        linear.weight = nn.Parameter(self.numbers(linear).to(linear.dtype), requires_grad=False)
        self._forget(linear)
        linear.scheme = self.plain
        self.plain.finish(linear)

    @staticmethod
    def _forget(linear: nn.Module, keep: tuple[str, ...] = ()) -> None:
        linear.quantised = None
        for name in TENSORS[1:]:
            if hasattr(linear, name) and name not in keep:
                delattr(linear, name)

    @staticmethod
    def _one_order(linear: nn.Module) -> bool:
        """Fused parts read x in one order. The plain order needs no permutation."""
        order = getattr(linear, ORDER, None)
        if order is None or order.dim() == 1:
            return True
        if not bool((order == order[:1]).all()):
            return False
        if torch.equal(order[0].long(), torch.arange(order.shape[1], device=order.device)):
            del linear.order
        else:
            linear.order = nn.Parameter(order.data[0].clone(), requires_grad=False)
        return True

    def numbers(self, linear: nn.Module) -> Tensor:
        wide = torch.promote_types(linear.dtype, torch.float32)
        order = getattr(linear, ORDER, None)
        if order is None or order.dim() == 1 or len(order) == 1:
            return expand(self._weight(linear), wide)
        found, first = [], 0                             # before finish, or with an order for each part
        for number, rows in enumerate(linear.rows.values()):
            part = self._rows(linear, first, rows.size)
            found.append(expand(part._replace(order=order[number]), wide))
            first += rows.size
        return torch.cat(found)

    def _rows(self, linear: nn.Module, first: int, count: int) -> QuantisedWeight:
        return quantised_weight(linear.format, linear.columns.size, {
            spec.name: None if spec.name == ORDER else getattr(linear, spec.name).data[first : first + count]
            for spec in linear.format.tensors()
        })

    # ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        return quantised_linear(x, linear.quantised, linear.bias)

    def apply_normed(
        self, linear: nn.Module, x: Tensor, residual: Tensor | None, norm: Norm, batch: object, gate: str | None = None,
        following: nn.Module | None = None,
    ) -> tuple[Any, Tensor]:
        return normed_quantised_linear(
            x, residual, norm.weight, norm.eps, linear.quantised, linear.bias, norm_offset=norm.offset, gate=gate
        )

    def extra_bytes(self, linear: nn.Module) -> int:
        return 0

    def read_bytes(self, linear: nn.Module, rows: int) -> int:
        return sum(getattr(linear, name).nbytes for name in TENSORS if getattr(linear, name, None) is not None)
