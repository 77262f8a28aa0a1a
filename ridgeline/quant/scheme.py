"""How a linear stores its weight and multiplies by it. Each linear has a scheme object.

    create        registers the parameters on the linear: zeros where `padded`, else empty
    pieces        where the checkpoint's tensors of one part of the linear go: by parameter
    numbers       the weight as numbers, whatever is stored
    finish        after loading: convert to the layout that the kernels read
    apply         the GEMM; `batch` is for schemes that depend on the step's rows
    apply_normed  the norm, the GEMM and, with a gate, the gated activation; `following` is the linear that takes the result,
                  which may then have the form that its scheme takes
    take_codes    of a plain scheme: keep codes instead of numbers, where it has a layout for them
    apply_onto    the GEMM added to a residual in place, where `adds` says that this is faster than adding in the next norm
    extra_bytes   memory of the linear after `finish`, beside its parameters
    read_bytes    weight bytes that a GEMM of that many rows reads

A scheme knows one matrix on one device. It knows neither shards nor checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import Shard
from ridgeline.errors import ConfigError
from ridgeline.ops.activation import gated_activation
from ridgeline.ops.kernel_table import CPU, MANY_ROWS, choose
from ridgeline.ops.linear import gemm_small, gemm_wide
from ridgeline.ops.linear.gemm_invariant import invariant_linear
from ridgeline.ops.linear.linear_op import linear as product
from ridgeline.ops.linear.linear_op import linear_onto, normed_linear
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.quant.layout import fewest_outputs
from ridgeline.quant.piece import Piece


class Norm(Protocol):
    """The norm before a GEMM: layers/norm.py's."""

    weight: Tensor
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...


class Scheme(Protocol):
    keeps_blocks: bool               # takes the blocks of a GGUF file as they are (the native CPU kernels alone)

    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None: ...

    def pieces(self, linear: nn.Module, part: str, rows: Shard, first: int) -> dict[str, Piece]: ...

    def numbers(self, linear: nn.Module) -> Tensor: ...

    def finish(self, linear: nn.Module) -> None: ...

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor: ...

    def apply_normed(
        self, linear: nn.Module, x: Tensor, residual: Tensor | None, norm: Norm, batch: object, gate: str | None = None,
        following: nn.Module | None = None,
    ) -> tuple[Any, Tensor]: ...

    def take_codes(self, linear: nn.Module, weight: QuantisedWeight) -> bool: ...

    def adds(self, linear: nn.Module, x: Tensor) -> bool: ...

    def apply_onto(self, linear: nn.Module, residual: Tensor, x: Tensor, batch: object = None) -> Tensor: ...

    def extra_bytes(self, linear: nn.Module) -> int: ...

    def read_bytes(self, linear: nn.Module, rows: int) -> int: ...


def plain_bias(rows: int, bias: bool, padded: bool, dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
    if not bias:
        return None
    return nn.Parameter((torch.zeros if padded else torch.empty)(rows, dtype=dtype, device=device), requires_grad=False)


def bias_piece(linear: nn.Module, rows: Shard, first: int) -> dict[str, Piece]:
    if linear.bias is None:
        return {}
    target = linear.bias.data[first : first + rows.filled]
    return {"bias": Piece((rows.total,), (slice(rows.start, rows.stop),), target, (0.0, 0.02))}


class Composed(ABC):
    """For schemes without fused kernels: norm, GEMM and activation are separate ops."""

    @abstractmethod
    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor: ...

    def apply_normed(
        self, linear: nn.Module, x: Tensor, residual: Tensor | None, norm: Norm, batch: object, gate: str | None = None,
        following: nn.Module | None = None,
    ) -> tuple[Any, Tensor]:
        """The linear of norm(x + residual), and x + residual. Without a residual, x is the whole residual stream."""
        if residual is None:
            normed, stream = norm(x), x
        else:
            normed, stream = norm.add(x, residual)
        out = self.apply(linear, normed, batch)
        return (out if gate is None else gated_activation(out, gate)), stream

    def take_codes(self, linear: nn.Module, weight: QuantisedWeight) -> bool:
        return False

    def adds(self, linear: nn.Module, x: Tensor) -> bool:
        return False

    def apply_onto(self, linear: nn.Module, residual: Tensor, x: Tensor, batch: object = None) -> Tensor:
        return residual.add_(self.apply(linear, x, batch))


class Unquantised(Composed):
    """The weight as it is, [rows, columns]."""

    keeps_blocks = False

    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        new = torch.zeros if padded else torch.empty
        linear.weight = nn.Parameter(new(rows, columns, dtype=dtype, device=device), requires_grad=False)
        linear.bias = plain_bias(rows, bias, padded, dtype, device)

    def pieces(self, linear: nn.Module, part: str, rows: Shard, first: int) -> dict[str, Piece]:
        columns = linear.columns
        found = bias_piece(linear, rows, first)
        found["weight"] = Piece(
            (rows.total, columns.total), (slice(rows.start, rows.stop), slice(columns.start, columns.stop)),
            linear.weight.data[first : first + rows.filled, : columns.filled], (0.0, columns.total**-0.5),
        )
        return found

    def numbers(self, linear: nn.Module) -> Tensor:
        return linear.weight.data

    def finish(self, linear: nn.Module) -> None:
        pass

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        return product(x, linear.weight, linear.bias)

    def extra_bytes(self, linear: nn.Module) -> int:
        return 0

    def read_bytes(self, linear: nn.Module, rows: int) -> int:
        return linear.weight.nbytes


class Fused(Unquantised):
    """GPU. Few rows: one kernel for norm, GEMM and activation. Many rows: cuBLAS adds the residual in its epilogue, so that the
    next norm reads and writes half as much."""

    def adds(self, linear: nn.Module, x: Tensor) -> bool:
        return x.shape[0] >= MANY_ROWS and linear.bias is None

    def apply_onto(self, linear: nn.Module, residual: Tensor, x: Tensor, batch: object = None) -> Tensor:
        return linear_onto(residual, x, linear.weight)

    def finish(self, linear: nn.Module) -> None:
        gemm_small.prepare(linear.weight.device)
        gemm_wide.prepare(linear.weight.device)

    def apply_normed(
        self, linear: nn.Module, x: Tensor, residual: Tensor | None, norm: Norm, batch: object, gate: str | None = None,
        following: nn.Module | None = None,
    ) -> tuple[Any, Tensor]:
        return normed_linear(
            x, residual, norm.weight, norm.eps, linear.weight, linear.bias, norm_offset=norm.offset, gate=gate
        )


class Invariant(Unquantised):
    """GPU, deterministic mode: one order of additions for any number of rows. cuBLAS is not used: it chooses its algorithm by the
    number of rows."""

    def finish(self, linear: nn.Module) -> None:
        if linear.weight.shape[1] % 8:
            raise ConfigError(
                f"deterministic needs linears whose inputs are a multiple of 8, here are {linear.weight.shape[1]}"
            )
        gemm_small.prepare(linear.weight.device)

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        return invariant_linear(x, linear.weight, linear.bias)


class PackedFloat32(Unquantised):
    """float32 on a CPU: the plain weight for few rows, and for more rows a second copy in oneDNN's blocked layout, kept by
    linears that gain from it (`layout.py`). Either alone would be slow for some number of rows.
    """

    TYPICAL_ROWS = 16                # that the blocked layout is chosen for; it serves any number

    def __init__(self, fewest_outputs: int) -> None:
        self.fewest_outputs = fewest_outputs

    @staticmethod
    def available() -> bool:
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")

    def finish(self, linear: nn.Module) -> None:
        linear.packed = None
        if linear.weight.shape[0] >= self.fewest_outputs:
            linear.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), self.TYPICAL_ROWS)

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        outputs, inputs = linear.weight.shape
        chosen = choose("cpu-float32", x.shape[0], outputs, inputs, False, CPU).kernel
        if chosen != "blocked" or linear.packed is None:
            return product(x, linear.weight, linear.bias)
        return torch.ops.mkldnn._linear_pointwise(x, linear.packed, linear.bias, "none", [], "")

    def extra_bytes(self, linear: nn.Module) -> int:
        return 0 if linear.packed is None else linear.packed.numel() * linear.packed.element_size()


def unquantised_scheme(device: torch.device, dtype: torch.dtype, deterministic: bool = False) -> Scheme:
    """The scheme for weights that keep their dtype, by what the device is good at."""
    if deterministic and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return Invariant()
    if device.type == "cpu" and dtype == torch.float32 and PackedFloat32.available():
        return PackedFloat32(fewest_outputs())
    return Fused() if device.type == "cuda" else Unquantised()
