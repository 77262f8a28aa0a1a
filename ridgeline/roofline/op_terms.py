"""FLOPs and bytes of one kind of op in a step, and of the ops that come several times in a layer or not in every one: norms,
activations, mixtures of experts. `step_cost.py` adds the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ridgeline.roofline.decoder_shape import DecoderShape, StepCounts
from ridgeline.sizes.expert_costs import KERNELS, experts_cost, route_cost
from ridgeline.sizes.op_costs import Cost, gated_activation_cost, rms_norm_cost


@dataclass(frozen=True, slots=True)
class OpCost:
    """One kind of op in a step."""

    calls: int = 0                   # how often the decoder calls it
    flops: int = 0
    weights: int = 0                 # bytes of weights read: linears, head, embedding rows, norms, biases …
    kv_read: int = 0                 # … of the cache read, scales included …
    kv_written: int = 0              # … written …
    activations: int = 0             # … and of everything else, in and out

    @property
    def bytes(self) -> int:
        return self.weights + self.kv_read + self.kv_written + self.activations

    @property
    def cost(self) -> Cost:
        return Cost(self.flops, self.bytes)

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            self.calls + other.calls, self.flops + other.flops, self.weights + other.weights,
            self.kv_read + other.kv_read, self.kv_written + other.kv_written, self.activations + other.activations,
        )


def in_layers(counts: StepCounts, count: int, has_last: bool) -> tuple[int, int]:
    """Calls, and tokens of all of them, of what this many layers have behind attention. Without logits the last layer ends once K
    and V are written."""
    last = counts.last_tokens
    return count - has_last + (has_last and bool(last)), (count - has_last) * counts.tokens + has_last * last


def activations(shape: DecoderShape, counts: StepCounts) -> OpCost:
    found = OpCost()
    for count, has_last, inputs, _, _ in shape.mlps("down"):
        one = gated_activation_cost(
            tokens=1, intermediate=inputs, kind=shape.activation, element_bytes=shape.activation_bytes
        )
        calls, times = in_layers(counts, count, has_last)
        found += OpCost(calls, times * one.flops, 0, 0, 0, times * one.bytes)
    return found


def mixtures(shape: DecoderShape, counts: StepCounts, read: float | None) -> OpCost:
    """Routing and experts; routers and shared experts are linears."""
    experts = shape.experts
    if experts is None:
        return OpCost()
    calls, times = in_layers(counts, shape.layers - experts.dense_layers, shape.layers - 1 not in experts.dense)
    one = experts_cost(
        tokens=1, hidden=shape.hidden, width=experts.width, experts=experts.count, used=experts.used, spread=0, visited=0,
        bias=experts.bias, kind=shape.activation, element_bytes=shape.activation_bytes,
    ) + route_cost(
        tokens=1, experts=experts.count, used=experts.used, bias=experts.routing.choice_bias, element_bytes=4,
        normalise=experts.routing.normalise, groups=experts.routing.groups,
    )
    if read is None:                                     # padding to a graph's shape is not counted
        read = shape.expected_reads(counts.full.queries, min(counts.last_tokens, counts.last.queries))
    return OpCost(KERNELS * calls, times * one.flops, round(read * shape.expert_size), 0, 0, times * one.bytes)


def each_token(calls: int, times: int, none: Cost, one: Cost, written: int = 0) -> OpCost:
    """An op over tokens: `none` is its cost without any, which is the weights that it reads."""
    moved = times * (one.bytes - none.bytes - written)
    return OpCost(calls, times * one.flops, calls * none.bytes, 0, times * written, moved)


@functools.lru_cache(maxsize=256)
def _norm_costs(width: int, residual: bool, element_bytes: int) -> tuple[Cost, Cost]:
    """Of no token, and of one."""
    none, one = (
        rms_norm_cost(tokens=count, width=width, residual=residual, element_bytes=element_bytes) for count in (0, 1)
    )
    return none, one


def norms(shape: DecoderShape, counts: StepCounts) -> OpCost:
    """The first norm has no residual to add; of the last layer's norms the one before attention sees every token, and the others,
    as the one behind the stack, those that go on. Norms behind a linear add nothing."""
    layers, tokens, last = shape.layers, counts.tokens, counts.last_tokens
    behind, each = bool(last), shape.norms

    def norm(calls: int, times: int, residual: bool) -> OpCost:
        return each_token(calls, times, *_norm_costs(shape.hidden, residual, shape.activation_bytes))

    if each:
        found = norm(1, tokens, False) + norm(each * (layers - 1 + behind), each * ((layers - 1) * tokens + last), True)
    else:
        found = norm(behind, last, True)                 # behind the stack
    if shape.post_norms:
        found += norm(2 * (layers - 1 + behind), 2 * ((layers - 1) * tokens + last), False)
    return found
