"""Costs and cases of the linears with packed 4-bit weights. Conventions as in op_costs.py."""

from __future__ import annotations

from ridgeline.sizes.op_costs import Case, Cost, gated_activation_cost, linear_cost, rms_norm_cost


def packed_bytes(
    outputs: int, inputs: int, group: int, zero: bool = False, outer: bool = False, scale_bytes: int = 2
) -> int:
    """Of the codes, the scales, 16-bit zeros, and of a float32 factor for each output."""
    each = scale_bytes + (2 if zero else 0)
    return outputs * inputs // 2 + outputs * (inputs // group) * each + (4 * outputs if outer else 0)


def packed_linear_cost(
    *, tokens: int, inputs: int, outputs: int, group: int, kind: str, zero: bool, bias: bool, element_bytes: int
) -> Cost:
    """The weight's codes and scales are read once; those of e2m1 are bytes."""
    product = linear_cost(tokens=tokens, inputs=inputs, outputs=outputs, weight_bytes=0, element_bytes=element_bytes, bias=bias)
    return Cost(product.flops, product.bytes + packed_bytes(outputs, inputs, group, zero, scale_bytes=1 if kind == "e2m1" else 2))


def normed_packed_linear_cost(
    *, tokens: int, inputs: int, outputs: int, group: int, residual: bool, gate: str | None, element_bytes: int
) -> Cost:
    """What lies between norm, GEMM and activation is not moved. With a gate, `outputs` counts the pairs."""
    rows = outputs if gate is None else 2 * outputs
    norm = rms_norm_cost(tokens=tokens, width=inputs, residual=residual, element_bytes=element_bytes)
    product = packed_linear_cost(
        tokens=tokens, inputs=inputs, outputs=rows, group=group, kind="uint4", zero=False, bias=False,
        element_bytes=element_bytes,
    )
    total, inner = norm + product, 2 * tokens * inputs
    if gate is not None:
        total += gated_activation_cost(tokens=tokens, intermediate=outputs, kind=gate, element_bytes=element_bytes)
        inner += 2 * tokens * rows
    return Cost(total.flops, total.bytes - inner * element_bytes)


def _case(name: str, tokens: int, inputs: int, outputs: int, group: int, kind: str = "uint4", zero: bool = False) -> Case:
    return Case(name, {
        "tokens": tokens, "inputs": inputs, "outputs": outputs, "group": group, "kind": kind, "zero": zero, "bias": zero,
    })


PACKED_LINEAR_CASES = (
    _case("one", 1, 128, 32, 128), _case("odd-zeros", 1, 192, 48, 64, zero=True), _case("few-e2m1", 5, 96, 24, 32, "e2m1"),
    _case("few-16", 3, 48, 16, 16, "e2m1"), _case("many", 70, 640, 40, 128),
    Case("decode-1", {"tokens": 1, "inputs": 640, "outputs": 3072, "group": 128, "kind": "uint4", "zero": False, "bias": False},
         timed=True),
)
NORMED_PACKED_LINEAR_CASES = (
    Case("one", {"tokens": 1, "inputs": 128, "outputs": 32, "group": 64, "residual": True, "gate": None}),
    Case("one-gate", {"tokens": 1, "inputs": 128, "outputs": 16, "group": 32, "residual": True, "gate": "silu"}),
    Case("odd-gate", {"tokens": 3, "inputs": 256, "outputs": 24, "group": 128, "residual": False, "gate": "gelu_tanh"}),
)
