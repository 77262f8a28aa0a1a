"""Costs and cases of the ops of a mixture of experts; conventions as in op_costs.py. Weights count for the experts that some
token has chosen, once each."""

from __future__ import annotations

from ridgeline.sizes.op_costs import INDEX_BYTES, SCALE_BYTES, Case, Cost, gated_activation_cost, rms_norm_cost

KERNELS = 5                          # of a mixture: choose, sort, up, down, sum


def chosen_experts(tokens: int, experts: int, used: int, spread: int) -> list[list[int]]:
    """The experts of each token in a case: neighbours, `spread` further for each token."""
    return [[(token * spread + place) % experts for place in range(used)] for token in range(tokens)]


def route_cost(
    *, tokens: int, experts: int, used: int, bias: bool, element_bytes: int, score: str = "softmax", normalise: bool = False,
    groups: int = 1, **rule: object,
) -> Cost:
    """Scores, and `used` times the best of them."""
    per_token = 4 * experts + used * experts + (2 * used if normalise else 0) + experts * (bias + (groups > 1))
    moved = tokens * (experts * element_bytes + used * (INDEX_BYTES + SCALE_BYTES)) + experts * SCALE_BYTES * bias
    return Cost(tokens * per_token, moved)


ROUTE_CASES = tuple(
    Case(name, {"tokens": tokens, "experts": experts, "used": used, "bias": bias, **rule}, dtypes=("float64", "float32"),
         timed=timed)
    for name, tokens, experts, used, bias, timed, rule in (
        ("one", 1, 8, 2, False, False, {"normalise": True}),
        ("odd", 5, 13, 3, False, False, {}),
        ("all", 3, 4, 4, False, False, {"normalise": True}),
        ("sigmoid", 4, 16, 4, True, False, {"score": "sigmoid", "normalise": True, "scale": 2.5}),
        ("groups", 6, 16, 4, True, False,
         {"score": "sigmoid", "normalise": True, "groups": 4, "top_groups": 2, "group_score": "best two", "scale": 2.5}),
        ("groups-best", 6, 12, 2, False, False, {"groups": 3, "top_groups": 2, "scale": 16.0}),
        ("mixer", 5, 16, 2, False, False, {"jitter": 0.2}),
        ("qwen3-30b", 128, 128, 8, False, True, {"normalise": True}),
    )
)


def router_cost(*, tokens: int, hidden: int, experts: int, element_bytes: int, offset: bool, **rule: object) -> Cost:
    """The router's matrix, and the choice from its float32 logits."""
    choice = route_cost(tokens=tokens, experts=experts, element_bytes=SCALE_BYTES, **rule)  # type: ignore[arg-type]
    moved = (tokens * hidden + experts * (hidden + offset)) * element_bytes - tokens * experts * SCALE_BYTES
    return Cost(choice.flops + 2 * tokens * hidden * experts, choice.bytes + moved)


ROUTER_CASES = tuple(
    Case(name, {"tokens": tokens, "hidden": hidden, "experts": experts, "used": used, "offset": offset, "bias": bias, **rule},
         dtypes=("float64", "float32"), timed=timed)
    for name, tokens, hidden, experts, used, offset, bias, timed, rule in (
        ("one", 1, 40, 8, 2, False, False, False, {"normalise": True}),
        ("odd", 3, 37, 13, 3, True, False, False, {}),
        ("sigmoid", 2, 64, 40, 4, False, True, False, {"score": "sigmoid", "normalise": True, "scale": 2.5}),
        ("many", 20, 48, 16, 4, True, False, False, {"normalise": True}),
        ("groups", 2, 16, 16, 4, True, True, False,
         {"score": "sigmoid", "normalise": True, "groups": 4, "top_groups": 2, "group_score": "best two", "scale": 2.5}),
        ("qwen3-30b", 1, 2048, 128, 8, False, False, True, {"normalise": True}),
    )
)


def normed_router_cost(*, residual: bool, tokens: int, hidden: int, element_bytes: int, **sizes: object) -> Cost:
    norm = rms_norm_cost(tokens=tokens, width=hidden, residual=residual, element_bytes=element_bytes)
    routed = router_cost(tokens=tokens, hidden=hidden, element_bytes=element_bytes, **sizes)  # type: ignore[arg-type]
    return Cost(norm.flops + routed.flops, norm.bytes + routed.bytes - tokens * hidden * element_bytes)


NORMED_ROUTER_CASES = tuple(
    Case(name, {"tokens": tokens, "hidden": hidden, "experts": experts, "used": used, "offset": False, "bias": False,
                "residual": residual, "normalise": True}, dtypes=("float64", "float32"), timed=timed)
    for name, tokens, hidden, experts, used, residual, timed in (
        ("one", 1, 40, 8, 2, True, False), ("odd", 3, 37, 13, 3, False, False), ("long", 2, 2112, 16, 4, True, False),
        ("many", 20, 48, 16, 4, True, False), ("qwen3-30b", 1, 2048, 128, 8, True, True),
    )
)


def _code_bytes(codes: str, group: int, inputs: int) -> float:
    """Of a weight in a case: its code, and its share of the scale (and zero) of its group."""
    if codes == "e4m3":
        return 1 + 4 / (group**2 or inputs)
    return 0.5 + (1 if codes.endswith("e2m1") else 4 if codes.endswith("zeros") else 2) / group


def experts_cost(
    *, tokens: int, hidden: int, width: int, experts: int, used: int, spread: int, element_bytes: int, bias: bool = False,
    kind: str = "silu", limit: float | None = None, visited: float | None = None, weight_bytes: float | None = None,
    codes: str = "", group: int = 32, shared: int = 0,
) -> Cost:
    """`visited`: experts that are read, where the case does not say it by its routing."""
    if visited is None:
        visited = len({expert for token in chosen_experts(tokens, experts, used, spread) for expert in token})
    pairs = tokens * used
    activation = gated_activation_cost(tokens=pairs, intermediate=width, kind=kind, element_bytes=element_bytes).flops
    flops = pairs * (6 * hidden * width + 2 * hidden) + activation
    if codes:
        weight_bytes = _code_bytes(codes, group, hidden)
    each = element_bytes if weight_bytes is None else weight_bytes
    weights = 3 * hidden * width * each
    if bias:
        flops += pairs * (2 * width + hidden)
        weights += (2 * width + hidden) * element_bytes
    if shared:
        flops += tokens * (6 * hidden * shared + hidden)
        flops += gated_activation_cost(tokens=tokens, intermediate=shared, kind=kind, element_bytes=element_bytes).flops
    moved = 2 * tokens * hidden * element_bytes + pairs * (INDEX_BYTES + SCALE_BYTES) + 3 * hidden * shared * element_bytes
    return Cost(flops, round(visited * weights) + moved)


EXPERTS_CASES = tuple(
    Case(name, {
        "tokens": tokens, "hidden": hidden, "width": width, "experts": experts, "used": used, "spread": spread, "bias": bias,
        "kind": kind, "limit": limit,
    }, timed=timed)
    for name, tokens, hidden, width, experts, used, spread, bias, kind, limit, timed in (
        ("one", 1, 32, 16, 8, 2, 0, False, "silu", None, False),
        ("one-odd", 1, 37, 19, 5, 3, 0, True, "silu", None, False),
        ("two", 2, 48, 40, 32, 3, 2, True, "silu", None, False),
        ("two-long", 2, 1030, 18, 16, 2, 1, False, "silu", None, False),
        ("one-wide", 1, 20, 1030, 16, 1, 0, True, "silu", 1.0, False),
        ("few", 5, 48, 40, 8, 2, 3, False, "silu", None, False),
        ("few-alike", 7, 40, 24, 16, 4, 0, False, "gelu_tanh", None, False),
        ("clamped", 6, 40, 24, 4, 2, 1, True, "silu", 1.0, False),
        ("many", 70, 48, 33, 4, 2, 1, False, "silu", None, False),
        ("all", 9, 16, 16, 3, 3, 1, True, "silu", None, False),
        ("decode-8", 8, 512, 192, 32, 4, 4, False, "silu", None, True),
    )
) + tuple(
    Case(f"{'codes' if number < 9 else 'packed'}-{name}", {
        "tokens": tokens, "hidden": hidden, "width": width, "experts": experts, "used": used, "spread": spread, "bias": bias,
        "kind": "silu", "limit": 1.0 if bias else None, "codes": codes, "group": group,
    }, dtypes=("float64", "bfloat16"))
    for number, (name, tokens, hidden, width, experts, used, spread, bias, codes, group) in enumerate((
        ("one", 1, 64, 32, 8, 2, 0, False, "e2m1", 32),
        ("two", 2, 96, 160, 32, 3, 2, True, "e2m1", 32),
        ("few", 5, 160, 96, 8, 2, 3, True, "e2m1", 32),
        ("many", 70, 64, 64, 4, 2, 1, False, "e2m1", 32),
        ("int4", 5, 160, 96, 8, 2, 3, False, "uint4 zeros", 32),
        ("int4-many", 70, 128, 256, 4, 2, 1, True, "uint4", 128),
        ("fp8-one", 1, 256, 128, 8, 2, 0, False, "e4m3", 128),
        ("fp8-many", 70, 128, 256, 4, 2, 1, True, "e4m3", 128),
        ("fp8-rows", 2, 48, 40, 32, 3, 2, True, "e4m3", 0),
        ("one", 1, 64, 32, 8, 2, 0, False, "packed e2m1", 32),
        ("two", 2, 608, 160, 8, 3, 2, True, "packed e2m1", 32),
        ("two-int4", 2, 640, 1152, 5, 2, 2, False, "packed uint4", 128),
        ("few", 5, 160, 96, 8, 2, 3, True, "packed e2m1", 32),
        ("some", 70, 576, 96, 4, 2, 1, False, "packed uint4", 32),
        ("many", 130, 160, 608, 4, 2, 1, True, "packed e2m1", 32),
        ("most", 300, 160, 640, 3, 2, 1, True, "packed e2m1", 32),
    ))
) + tuple(
    Case(f"shared-{name}", {
        "tokens": tokens, "hidden": hidden, "width": width, "experts": experts, "used": used, "spread": spread, "bias": False,
        "kind": "silu", "limit": None, "shared": shared,
    })
    for name, tokens, hidden, width, experts, used, spread, shared in (
        ("one", 1, 32, 16, 8, 2, 0, 32), ("two", 2, 48, 40, 32, 3, 2, 40), ("odd", 2, 48, 40, 32, 3, 2, 60),
        ("many", 20, 48, 40, 8, 2, 1, 80),
    )
)
