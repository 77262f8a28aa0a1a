"""Costs and cases of the fp8 ops: rows quantised to e4m3 codes, and linears with e4m3 weights. Conventions as in op_costs.py."""

from __future__ import annotations

from ridgeline.sizes.op_costs import SCALE_BYTES, Case, Cost, gated_activation_cost, linear_cost, rms_norm_cost

_NARROW = ("float32", "bfloat16")


def row_fp8_cost(*, tokens: int, width: int, element_bytes: int, paired: bool = False) -> Cost:
    """Magnitude, comparison, division; with fine codes a difference and a multiplication more."""
    codes = 2 if paired else 1
    return Cost((1 + 2 * codes) * tokens * width, tokens * (width * (element_bytes + codes) + codes * SCALE_BYTES))


def normed_fp8_cost(*, tokens: int, width: int, residual: bool, element_bytes: int) -> Cost:
    """The norm writes codes instead of numbers."""
    norm = rms_norm_cost(tokens=tokens, width=width, residual=residual, element_bytes=element_bytes)
    codes = row_fp8_cost(tokens=tokens, width=width, element_bytes=element_bytes)
    return Cost(norm.flops + codes.flops, norm.bytes + codes.bytes - 2 * tokens * width * element_bytes)


def gated_fp8_cost(*, tokens: int, intermediate: int, kind: str, element_bytes: int) -> Cost:
    gated = gated_activation_cost(tokens=tokens, intermediate=intermediate, kind=kind, element_bytes=element_bytes)
    codes = row_fp8_cost(tokens=tokens, width=intermediate, element_bytes=element_bytes)
    return Cost(gated.flops + codes.flops, gated.bytes + codes.bytes - 2 * tokens * intermediate * element_bytes)


def fp8_linear_cost(*, tokens: int, inputs: int, outputs: int, bias: bool, element_bytes: int) -> Cost:
    """The weight's codes and scales are read once; x is read as it comes."""
    product = linear_cost(tokens=tokens, inputs=inputs, outputs=outputs, weight_bytes=1, element_bytes=element_bytes, bias=bias)
    return Cost(product.flops, product.bytes + outputs * SCALE_BYTES)


ROW_FP8_CASES = (
    Case("one", {"tokens": 1, "width": 64, "paired": False}, _NARROW),
    Case("odd", {"tokens": 3, "width": 77, "paired": False}, _NARROW),
    Case("paired", {"tokens": 3, "width": 64, "paired": True}, _NARROW),
    Case("decode-32", {"tokens": 32, "width": 576, "paired": False}, _NARROW, timed=True),
)
NORMED_FP8_CASES = (
    Case("one", {"tokens": 1, "width": 64, "residual": False}, _NARROW),
    Case("odd", {"tokens": 3, "width": 77, "residual": True}, _NARROW),
    Case("decode-32", {"tokens": 32, "width": 576, "residual": True}, _NARROW, timed=True),
)
GATED_FP8_CASES = (
    Case("silu", {"tokens": 1, "intermediate": 64, "kind": "silu"}, _NARROW),
    Case("gelu-odd", {"tokens": 3, "intermediate": 77, "kind": "gelu_tanh"}, _NARROW),
    Case("decode-32", {"tokens": 32, "intermediate": 1536, "kind": "silu"}, _NARROW, timed=True),
)


def normed_fp8_linear_cost(*, tokens: int, inputs: int, outputs: int, residual: bool, element_bytes: int) -> Cost:
    """What lies between norm and GEMM is not moved."""
    norm = rms_norm_cost(tokens=tokens, width=inputs, residual=residual, element_bytes=element_bytes)
    product = fp8_linear_cost(tokens=tokens, inputs=inputs, outputs=outputs, bias=False, element_bytes=element_bytes)
    return Cost(norm.flops + product.flops, norm.bytes + product.bytes - 2 * tokens * inputs * element_bytes)


FP8_LINEAR_CASES = (
    Case("one", {"tokens": 1, "inputs": 64, "outputs": 32, "bias": False}),
    Case("one-odd", {"tokens": 1, "inputs": 37, "outputs": 7, "bias": True}),
    Case("few", {"tokens": 5, "inputs": 96, "outputs": 80, "bias": True}),
    Case("many", {"tokens": 130, "inputs": 80, "outputs": 64, "bias": False}),
    Case("decode-1", {"tokens": 1, "inputs": 576, "outputs": 3072, "bias": False}, timed=True),
)
NORMED_FP8_LINEAR_CASES = (
    Case("one", {"tokens": 1, "inputs": 64, "outputs": 64, "residual": True}),
    Case("one-first", {"tokens": 1, "inputs": 80, "outputs": 48, "residual": False}),
    Case("few", {"tokens": 5, "inputs": 80, "outputs": 48, "residual": True}),
    Case("decode-32", {"tokens": 32, "inputs": 576, "outputs": 3072, "residual": True}, timed=True),
)
