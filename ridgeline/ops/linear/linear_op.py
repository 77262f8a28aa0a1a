"""The linear: x W^T with W [outputs, inputs] in 16 bits or wider, alone or fused with the norm before and the gate behind it.

Kernels: gemv_ring.py and gemv.py (one row), gemm_ring.py and gemm_small.py (a few rows), gemm_wide.py (81 to 128 rows),
gemm_gated.py (many rows, with a gate), else cuBLAS. ops/kernel_table.py chooses by rows, shape and device. Quantised weights have
ops of their own (fp8_linear.py, gguf_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.activation import gated_activation, gated_activation_reference
from ridgeline.ops.cpu import native
from ridgeline.ops.hopper import device_facts
from ridgeline.ops.kernel_table import CPU, LIBRARY, Choice, choose
from ridgeline.ops.linear.gemm_gated import gated_gemm, suits
from ridgeline.ops.linear.gemm_ring import ring_gemm
from ridgeline.ops.linear.gemm_small import small_gemm
from ridgeline.ops.linear.gemm_wide import wide_gemm
from ridgeline.ops.linear.gemv import gemv
from ridgeline.ops.linear.gemv_ring import ring_gemv
from ridgeline.ops.registry import Implementation, Op, Site, Tolerance
from ridgeline.ops.rms_norm import rms_norm, rms_norm_reference
from ridgeline.sizes.op_costs import LINEAR_CASES, NORMED_LINEAR_CASES, linear_cost, normed_linear_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs], weight [outputs, inputs], bias [outputs] -> x weight^T + bias, [T, outputs]"""
    return F.linear(x, weight, bias)


def normed_linear_reference(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None,
    *, norm_offset: float = 0.0, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(the linear of rms_norm(x + residual), x + residual); with a gate, its gated activation. x [T, inputs].

    Without a residual, x is the whole residual stream. Rounding the norm before the GEMM is not part of the definition.
    """
    normed, stream = rms_norm_reference(
        x, norm, eps, residual=torch.zeros_like(x) if residual is None else residual, weight_offset=norm_offset
    )
    out = linear_reference(normed, weight, bias)
    return (out if gate is None else gated_activation_reference(out, gate)), stream


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _aligned(x: Tensor, weight: Tensor) -> bool:
    """TMA and 16-byte loads need rows at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and weight.is_contiguous()


def _choice(x: Tensor, weight: Tensor, gated: bool) -> Choice:
    rows, inputs = x.shape
    if rows == 0 or not _aligned(x, weight):
        return LIBRARY
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    return choose("16-bit", rows, outputs, inputs, gated, device_facts(x.device, weight.data_ptr() % 16 == 0))


ONE_ROW: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"gemv": gemv, "ring_gemv": ring_gemv}
SEVERAL: dict[str, Callable[..., Tensor]] = {"small_gemm": small_gemm, "ring_gemm": ring_gemm, "wide_gemm": wide_gemm}


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    name, plan, fuses_norm = _choice(x, weight, False)
    if fuses_norm:
        return ONE_ROW[name](x, weight, bias, plan)[0]
    kernel = SEVERAL.get(name)
    return F.linear(x, weight, bias) if kernel is None else kernel(x, weight, bias, plan)


def linear_onto(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """out + x weight^T, written over `out`; on a GPU, by the kernel that multiplies where one can."""
    name, plan, _ = _choice(x, weight, False) if x.dtype in NARROW else LIBRARY
    if name == "gemv" and out.is_contiguous():
        return gemv(x, weight, None, plan, onto=out)[0]
    if name in ONE_ROW or name in SEVERAL:
        return out.add_(linear(x, weight))
    return out.addmm_(x, weight.t())


def normed_linear_triton(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None,
    *, norm_offset: float = 0.0, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    name, plan, fuses_norm = _choice(x, weight, gate is not None) if x.dtype in NARROW else LIBRARY
    if fuses_norm:
        return ONE_ROW[name](
            x, weight, bias, plan, gate=gate, norm=norm, eps=eps, norm_offset=norm_offset, residual=residual
        )
    if residual is None:
        normed, stream = rms_norm(x, norm, eps, weight_offset=norm_offset), x
    else:
        normed, stream = rms_norm(x, norm, eps, residual=residual, weight_offset=norm_offset)
    if gate is None:
        return linear(normed, weight, bias), stream
    kernel = SEVERAL.get(name)
    if kernel is not None:
        return kernel(normed, weight, bias, plan, gate=gate), stream
    if name == "gated_gemm" and suits(normed, weight, bias):
        return gated_gemm(normed, weight, gate), stream
    return gated_activation(linear(normed, weight, bias), gate), stream


NARROW = (torch.bfloat16, torch.float16)


def _narrow(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in NARROW


def _on_a_gpu(site: Site) -> bool:
    return site.device == "cuda"


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def linear_native(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One row only streams the weight: native code. More rows go to torch."""
    outputs, inputs = weight.shape
    chosen = choose("cpu-float32", x.shape[0], outputs, inputs, False, CPU).kernel
    if chosen != "linear_row" or x.stride(1) != 1 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    out = torch.empty((1, outputs), dtype=x.dtype)
    native.library().linear_row(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), inputs, outputs
    )
    return out


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, inputs: int, outputs: int, bias: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight = random(outputs, inputs) * inputs**-0.5
    return (random(tokens, inputs), weight.to(dtype), random(outputs) if bias else None), {}


linear = Op(
    "linear",
    linear_reference,
    kernels=[
        Implementation("triton", linear_triton, _narrow),
        Implementation("native", linear_native, native.supports),
    ],
    cases=LINEAR_CASES,
    cost=lambda *, bias, element_bytes, **sizes: linear_cost(
        weight_bytes=element_bytes, element_bytes=element_bytes, **sizes
    ),
    inputs=_inputs,
    # A sum of up to 1,536 products with a standard deviation of 1: its rounding grows with the root of the length.
    tolerance={
        "float32": Tolerance(1e-6, 5e-6),
        "bfloat16": Tolerance(2**-7, 2**-7),
        "float16": Tolerance(2**-10, 2**-10),
    },
)


def _normed_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, inputs: int, outputs: int, residual: bool, bias: bool, gate: str | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows = outputs if gate is None else 2 * outputs
    weight = (random(rows, inputs) * inputs**-0.5).to(dtype)
    stream = random(tokens, inputs) if residual else None
    args = (random(tokens, inputs), stream, random(inputs), 1e-5, weight, random(rows) if bias else None)
    return args, {"gate": gate, "norm_offset": 1.0 if bias else 0.0}


normed_linear = Op(
    "normed_linear",
    normed_linear_reference,
    kernels=[Implementation("triton", normed_linear_triton, _on_a_gpu)],
    cases=NORMED_LINEAR_CASES,
    cost=normed_linear_cost,
    inputs=_normed_inputs,
    # The norm of a rounded sum, a product as above, and with a gate the product of two such.
    tolerance={
        "float32": Tolerance(4e-6, 2e-5),
        "bfloat16": Tolerance(2**-6, 2**-5),
        "float16": Tolerance(2**-9, 2**-8),
    },
)
