"""Cost and cases of the linear with quantised weights. Conventions as in op_costs.py."""

from __future__ import annotations

from typing import Any

from ridgeline.sizes.op_costs import Case, Cost, gated_activation_cost, linear_cost, rms_norm_cost

GRID_BITS = {"e4m3": 8, "int8": 8, "uint4": 4, "e2m1": 4, "nf4": 4, "ternary": 2, "q5": 5, "q6": 6}


def quantised_linear_cost(
    *, tokens: int, inputs: int, outputs: int, bias: bool, grid: str, block: tuple[int, int], element_bytes: int,
    zero: str | None = None, outer: bool = False, reordered: bool = False,
) -> Cost:
    """Codes and scales are read once."""
    product = linear_cost(tokens=tokens, inputs=inputs, outputs=outputs, weight_bytes=0, element_bytes=element_bytes, bias=bias)
    scales = -(-outputs // block[0]) * (-(-inputs // block[1]) if block[1] else 1)
    others = scales * (2 if zero else 1) + outputs * outer + inputs * reordered
    return Cost(product.flops, product.bytes + outputs * inputs * GRID_BITS[grid] // 8 + 4 * others)


def normed_quantised_linear_cost(
    *, tokens: int, inputs: int, outputs: int, grid: str, block: tuple[int, int], residual: bool, gate: str | None,
    element_bytes: int, zero: str | None = None, outer: bool = False,
) -> Cost:
    """What lies between norm, GEMM and activation is not moved. With a gate, `outputs` counts the pairs."""
    rows = outputs if gate is None else 2 * outputs
    total = rms_norm_cost(tokens=tokens, width=inputs, residual=residual, element_bytes=element_bytes) + quantised_linear_cost(
        tokens=tokens, inputs=inputs, outputs=rows, bias=False, grid=grid, block=block, element_bytes=element_bytes, zero=zero,
        outer=outer,
    )
    inner = 2 * tokens * inputs
    if gate is not None:
        total += gated_activation_cost(tokens=tokens, intermediate=outputs, kind=gate, element_bytes=element_bytes)
        inner += 2 * tokens * rows
    return Cost(total.flops, total.bytes - inner * element_bytes)


def _case(name: str, tokens: int, inputs: int, outputs: int, grid: str, block: tuple[int, int], **more: Any) -> Case:
    timed = more.pop("timed", False)
    sizes = {"tokens": tokens, "inputs": inputs, "outputs": outputs, "bias": tokens == 3, "grid": grid, "block": block, **more}
    return Case(name, sizes, timed=timed)


QUANTISED_LINEAR_CASES = (
    _case("odd-fp8-block", 3, 300, 70, "e4m3", (32, 128)),
    _case("int8-row", 1, 80, 40, "int8", (1, 0)),
    _case("int8-zero", 5, 96, 24, "int8", (1, 32), zero="code"),
    _case("uint4", 1, 128, 40, "uint4", (1, 32)),
    _case("uint4-zero", 3, 192, 33, "uint4", (1, 64), zero="code"),
    _case("uint4-offset", 2, 256, 24, "uint4", (1, 32), zero="offset", outer=True),
    _case("uint4-ordered", 5, 128, 24, "uint4", (1, 32), zero="code", reordered=True),
    _case("nvfp4", 3, 160, 24, "e2m1", (1, 16), outer=True),
    _case("nf4", 1, 128, 24, "nf4", (1, 64)),
    _case("ternary", 17, 256, 24, "ternary", (1, 0)),
    _case("q5", 1, 64, 24, "q5", (1, 32), zero="offset"),
    _case("q6", 3, 256, 24, "q6", (1, 16), outer=True),
    _case("many", 70, 128, 40, "uint4", (1, 128)),
    _case("decode-1", 1, 576, 3072, "uint4", (1, 64), timed=True),
)


def _normed(name: str, tokens: int, inputs: int, outputs: int, grid: str, block: tuple[int, int], **more: Any) -> Case:
    sizes = {"tokens": tokens, "inputs": inputs, "outputs": outputs, "grid": grid, "block": block}
    return Case(name, sizes | {"residual": True, "gate": None} | more)


NORMED_QUANTISED_LINEAR_CASES = (
    _normed("int8", 1, 256, 48, "int8", (1, 32)), _normed("int8-gate", 1, 256, 24, "int8", (1, 32), gate="silu"),
    _normed("q5", 1, 256, 32, "q5", (1, 32), residual=False),
    _normed("uint4-gate", 3, 256, 16, "uint4", (1, 32), gate="gelu_tanh"),
    _normed("odd", 3, 96, 37, "int8", (1, 0), residual=False),
)
