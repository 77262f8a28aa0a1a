"""As few_tokens.py, with packed 4-bit weights (ops/packed/packed_weight.py, one matrix for each expert): every pair of a token
and an expert is a GEMV with the products of ops/packed/packed_gemv.py.

    up      strips of a token's experts are assigned to CTAs round-robin; some warps share the inputs of a strip
    down    the inputs of a strip are those of all experts of the token, one after the other: a warp has 512 inputs of one of
            them at a time, whose sums are multiplied by its share

Down requests its first codes while up still runs. Written in Gluon, for Hopper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.few_tokens import MOST_TOKENS
from ridgeline.ops.hopper import gl, group_barrier, viewed
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.packed.packed_asm import restored, scale_words, sum_span
from ridgeline.ops.packed.packed_gemv import (
    NAMES,
    SCALE_NAMES,
    _load_line,
    _multiply_block,
    _plain_shared,
    _sum_layout,
    _word_layout,
    place_x,
    sum_shape,
    summed,
    widened,
)
from ridgeline.ops.packed.packed_sizes import RUN
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.registry import gluon_kernel


@gluon_kernel()
def _wait_first(DEPENDENT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before, then let the next one start: it may read what was complete before this one began."""
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon_kernel()
def _load_runs(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, run, there, layout: gl.constexpr, EACH: gl.constexpr, ZEROS: gl.constexpr,
):
    """Request 512 inputs for each warp, `run` [groups, warps, 1] of the matrix: eight tensors of codes, the words of their
    scales, and of their zeros. What is not `there` has scales of zero."""
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, :][:, None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, :][:, None, :][:, :, None, :]
    codes = code_ptr + ((run * 1024 + lane * 4)[:, :, :, None] + word)
    lines = run * (EACH * 32) + lane
    known = there & (lane >= 0)
    loaded = ()
    for tile in gl.static_range(8):
        loaded = loaded + (gl.load(codes + tile * 128, eviction_policy="evict_first"),)  # type: ignore[assignment]
    for part in gl.static_range(EACH):
        loaded = loaded + (_load_line(scale_ptr + lines + part * 32, known, True),)  # type: ignore[assignment]
    if ZEROS:
        for part in gl.static_range(EACH):
            loaded = loaded + (_load_line(zero_ptr + lines + part * 32, known, True),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _place_rows(  # type: ignore[no-untyped-def]
    x_ptr, memory, x_sums, inputs, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr,
    RUNS: gl.constexpr, ROUNDS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """x [ROWS, inputs] into shared memory, each row with RUNS times 512 inputs."""
    CHUNK: gl.constexpr = 512 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [GROUPS * WARPS], [0])
    for part in gl.static_range(ROUNDS):
        column = part * CHUNK + gl.arange(0, CHUNK, layout)
        row = column // (RUNS * 512)
        inside = column % (RUNS * 512)
        x = gl.load(x_ptr + row * inputs + inside, mask=(inside < inputs) & (row < ROWS), other=0.0)
        place_x(x, memory, x_sums, part, KIND, "", GROUP, DTYPE, WARPS)


@gluon_kernel()
def _added(  # type: ignore[no-untyped-def]
    sums, memory, KIND: gl.constexpr, DTYPE: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr
):
    """The warps' parts, added: (of outputs r, of outputs r + 8) [GROUPS, 64], each of eight outputs eight times."""
    memory.store(sums.reshape([GROUPS, WARPS, 32, 2, 2]).permute([3, 0, 1, 2, 4]))
    group_barrier()
    layout: gl.constexpr = _sum_layout(GROUPS, WARPS)
    halves = viewed(memory, gl.float32, [2, GROUPS, WARPS, 64], _plain_shared(3))
    low, high = gl.sum(halves.index(0).load(layout), axis=1), gl.sum(halves.index(1).load(layout), axis=1)
    return low * restored(KIND, DTYPE, False), high * restored(KIND, DTYPE, True)


@gluon_kernel()
def _visited(chosen_ptr, reads_ptr, pairs, PAIRS: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """As few_tokens.py's visited_experts, which Gluon cannot call: there every tensor needs a layout."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    row, column = gl.arange(0, PAIRS, gl.SliceLayout(1, layout)), gl.arange(0, PAIRS, gl.SliceLayout(0, layout))
    mine = gl.load(chosen_ptr + row, mask=row < pairs, other=-1)[:, None]
    other = gl.load(chosen_ptr + column, mask=column < pairs, other=-1)[None, :]
    again = gl.sum(((mine == other) & (row[:, None] > column[None, :])).to(gl.int32), axis=1)
    gl.store(reads_ptr, gl.sum(((again == 0) & (row < pairs)).to(gl.int32), axis=0))


@gluon_kernel()
def _up_unit(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, chosen_ptr, unit, strips, layout: gl.constexpr, USED: gl.constexpr,
    RUNS: gl.constexpr, EACH: gl.constexpr, ZEROS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """The codes of a unit: GROUPS strips, WARPS runs of each. `chosen_ptr`: of the token."""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, flat)))[:, None][:, :, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :][:, :, None]
    first = (gl.program_id(0) + unit // ROUNDS * gl.num_programs(0)) * GROUPS
    strip = gl.minimum(first + group, USED * strips - 1)
    expert = gl.load(chosen_ptr + strip // strips)
    run = unit % ROUNDS * WARPS + warp
    place = (expert * strips + strip % strips) * RUNS + gl.minimum(run, RUNS - 1)
    return _load_runs(code_ptr, scale_ptr, zero_ptr, place, run < RUNS, layout, EACH, ZEROS)


@gluon_kernel(do_not_specialize=["pairs", "outputs", "strips"])
def packed_few_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, chosen_ptr, reads_ptr, pairs, stride, inputs, outputs, strips, limit,
    alpha,
    RUNS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    ZEROS: gl.constexpr, USED: gl.constexpr, GATE: gl.constexpr, CLAMPED: gl.constexpr, BIAS: gl.constexpr, READS: gl.constexpr,
    PAIRS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [T, inputs] -> out [pairs, outputs]. CTA (some strips of the token's experts, token)."""
    layout: gl.constexpr = _word_layout(GROUPS, WARPS)
    EACH: gl.constexpr = scale_words(GROUP, SCALE_DTYPE)
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    token = gl.program_id(1)
    blocks = (USED * strips + GROUPS - 1) // GROUPS
    units = (blocks - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * ROUNDS
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROUNDS, 8, 2, WARPS, 4, 2, 2, 2], _plain_shared(7))
    SPAN: gl.constexpr = sum_span(KIND, GROUP)
    x_sums = gl.allocate_shared_memory(gl.float32, sum_shape(ROUNDS, WARPS, SPAN), _plain_shared(4))
    experts = chosen_ptr + token * USED
    _wait_first(DEPENDENT)
    following = _up_unit(
        code_ptr, scale_ptr, zero_ptr, experts, 0, strips, layout, USED, RUNS, EACH, ZEROS, GROUPS, WARPS
    )
    _place_rows(x_ptr + token.to(gl.int64) * stride, memory, x_sums, inputs, KIND, GROUP, DTYPE, 1, RUNS, ROUNDS, GROUPS, WARPS)
    if READS:
        if gl.program_id(0) + token == 0:
            _visited(chosen_ptr, reads_ptr, pairs, PAIRS, GROUPS * WARPS)
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 16, 1, WARPS, 1, 4, 4], _plain_shared(5))
    totals = summed(x_sums, ROUNDS, WARPS, SPAN)
    parts = gl.allocate_shared_memory(gl.float32, [2, GROUPS, WARPS, 32, 2], _plain_shared(5))
    for begin in range(0, units, ROUNDS):
        sums = gl.zeros([GROUPS, WARPS, 32, 4], gl.float32, layout)
        for unit in range(begin, begin + ROUNDS):
            loaded = following
            if unit + 1 < units:
                following = _up_unit(
                    code_ptr, scale_ptr, zero_ptr, experts, unit + 1, strips, layout, USED, RUNS, EACH, ZEROS, GROUPS, WARPS
                )
            loaded = widened(loaded, 8, EACH, SCALE_DTYPE)
            for block in gl.static_range(4):
                sums = _multiply_block(
                    sums, loaded, x_words, totals, (unit - begin) * 16 + block * 4, layout, block, KIND, GROUP, DTYPE,
                    SCALE_DTYPE, ZEROS, GROUPS, WARPS,
                )
        gate, up = _added(sums, parts, KIND, DTYPE, GROUPS, WARPS)
        flat: gl.constexpr = gl.SliceLayout(1, _sum_layout(GROUPS, WARPS))
        place = gl.arange(0, 64, gl.SliceLayout(0, flat))[None, :]
        number = (gl.program_id(0) + begin // ROUNDS * gl.num_programs(0)) * GROUPS
        strip = number + gl.arange(0, GROUPS, gl.SliceLayout(1, flat))[:, None]
        output = strip % strips * 8 + place // 8
        there = (strip < USED * strips) & (output < outputs) & (place % 8 == 0)
        if BIAS:
            expert = gl.load(experts + strip // strips, mask=strip < USED * strips, other=0)
            biases = bias_ptr + expert * 2 * outputs + output
            gate += gl.load(biases, mask=there, other=0.0).to(gl.float32)
            up += gl.load(biases + outputs, mask=there, other=0.0).to(gl.float32)
        result = gated_sums(gate, up, limit, alpha, GATE, CLAMPED)
        target = out_ptr + (token * USED + strip // strips).to(gl.int64) * outputs + output
        gl.store(target, result.to(out_ptr.dtype.element_ty), mask=there)


@gluon_kernel()
def _down_unit(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, chosen_ptr, unit, strips, layout: gl.constexpr, USED: gl.constexpr,
    RUNS: gl.constexpr, EACH: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):
    """The codes of a unit: WARPS of the USED RUNS runs of a strip."""
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :][:, :, None]
    run = unit * WARPS + warp
    known = gl.minimum(run, USED * RUNS - 1)
    expert = gl.load(chosen_ptr + known // RUNS, cache_modifier=".cg")
    place = (expert * strips + gl.program_id(0)) * RUNS + known % RUNS
    return _load_runs(code_ptr, scale_ptr, zero_ptr, place, run < USED * RUNS, layout, EACH, ZEROS)


@gluon_kernel(do_not_specialize=["outputs", "strips"])
def packed_few_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, zero_ptr, bias_ptr, share_ptr, out_ptr, chosen_ptr, inputs, outputs, strips,
    RUNS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    ZEROS: gl.constexpr, USED: gl.constexpr, BIAS: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [pairs, inputs], shares [pairs] -> out [T, outputs]. CTA (strip, token)."""
    layout: gl.constexpr = _word_layout(1, WARPS)
    EACH: gl.constexpr = scale_words(GROUP, SCALE_DTYPE)
    ROUNDS: gl.constexpr = (USED * RUNS + WARPS - 1) // WARPS
    token = gl.program_id(1)
    experts, shares = chosen_ptr + token * USED, share_ptr + token * USED
    following = _down_unit(code_ptr, scale_ptr, zero_ptr, experts, 0, strips, layout, USED, RUNS, EACH, ZEROS, WARPS)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROUNDS, 8, 2, WARPS, 4, 2, 2, 2], _plain_shared(7))
    SPAN: gl.constexpr = sum_span(KIND, GROUP)
    x_sums = gl.allocate_shared_memory(gl.float32, sum_shape(ROUNDS, WARPS, SPAN), _plain_shared(4))
    _wait_first(DEPENDENT)
    _place_rows(
        x_ptr + (token * USED).to(gl.int64) * inputs, memory, x_sums, inputs, KIND, GROUP, DTYPE, USED, RUNS, ROUNDS, 1, WARPS
    )
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 16, 1, WARPS, 1, 4, 4], _plain_shared(5))
    totals = summed(x_sums, ROUNDS, WARPS, SPAN)
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :][:, :, None]
    total = gl.zeros([1, WARPS, 32, 4], gl.float32, layout)
    for unit in range(ROUNDS):
        loaded = following
        if unit + 1 < ROUNDS:
            following = _down_unit(
                code_ptr, scale_ptr, zero_ptr, experts, unit + 1, strips, layout, USED, RUNS, EACH, ZEROS, WARPS
            )
        loaded = widened(loaded, 8, EACH, SCALE_DTYPE)
        sums = gl.zeros([1, WARPS, 32, 4], gl.float32, layout)
        for block in gl.static_range(4):
            sums = _multiply_block(
                sums, loaded, x_words, totals, unit * 16 + block * 4, layout, block, KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS, 1,
                WARPS,
            )
        run = unit * WARPS + warp
        share = gl.load(shares + gl.minimum(run, USED * RUNS - 1) // RUNS).to(gl.float32)
        total += share[:, :, :, None] * sums
    parts = gl.allocate_shared_memory(gl.float32, [2, 1, WARPS, 32, 2], _plain_shared(5))
    low, high = _added(total, parts, KIND, DTYPE, 1, WARPS)
    thin: gl.constexpr = gl.SliceLayout(1, _sum_layout(1, WARPS))
    place = gl.arange(0, 64, gl.SliceLayout(0, thin))[None, :]
    output = gl.program_id(0) * 16 + place // 8
    if BIAS:
        for number in gl.static_range(USED):
            biases = bias_ptr + gl.load(experts + number) * outputs + output
            share = gl.load(shares + number).to(gl.float32)
            low += share * gl.load(biases, mask=output < outputs, other=0.0).to(gl.float32)
            high += share * gl.load(biases + 8, mask=output + 8 < outputs, other=0.0).to(gl.float32)
    target = out_ptr + token.to(gl.int64) * outputs + output
    gl.store(target, low.to(out_ptr.dtype.element_ty), mask=(output < outputs) & (place % 8 == 0))
    gl.store(target + 8, high.to(out_ptr.dtype.element_ty), mask=(output + 8 < outputs) & (place % 8 == 0))


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────

DOWN_WARPS = 8
MOST_INPUTS = 48 * 1024              # of all experts of a token, which down holds in shared memory


def up_warps(runs: int) -> int:
    """Warps that share the inputs of a strip, of eight: as many as leave few of them without a run."""
    return min((8, 4, 2), key=lambda warps: (cdiv(runs, warps) * warps > 1.15 * runs, -warps))


def _constants(weight: PackedWeight, x: Tensor) -> dict[str, object]:
    return {
        "RUNS": weight.codes.shape[2] * 64 // RUN, "KIND": weight.kind, "GROUP": weight.group, "DTYPE": NAMES[x.dtype],
        "SCALE_DTYPE": SCALE_NAMES[weight.scale_dtype], "ZEROS": weight.zero is not None, **dependent_launch(x.device),
    }


def serves_packed(down: PackedWeight, used: int) -> bool:
    return used * down.codes.shape[2] * 64 <= MOST_INPUTS


def experts_few_packed(
    x: Tensor, gate_up: PackedWeight, down: PackedWeight, chosen: Tensor, weights: Tensor, out: Tensor, kind: str,
    biases: tuple[Tensor | None, Tensor | None], limit: float | None, alpha: float, reads: Tensor | None,
) -> Tensor:
    """As experts_triton, into `out`."""
    tokens, used = chosen.shape
    pairs, hidden, width = tokens * used, x.shape[1], down.inputs
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    strips, constants = gate_up.codes.shape[1], _constants(gate_up, x)
    warps = up_warps(constants["RUNS"])  # type: ignore[arg-type]
    groups = 8 // warps
    packed_few_up_kernel[min(cdiv(used * strips, groups), 2 * multiprocessors(x.device)), tokens](
        x, gate_up.codes, gate_up.scale, gate_up.scale if gate_up.zero is None else gate_up.zero,
        x if biases[0] is None else biases[0], inner, chosen, chosen if reads is None else reads, pairs, x.stride(0), hidden,
        width, strips, float(limit or 0.0), float(alpha), USED=used, GATE=GATES[kind], CLAMPED=limit is not None,
        BIAS=biases[0] is not None, READS=reads is not None, PAIRS=power_of_two(MOST_TOKENS * used), GROUPS=groups, WARPS=warps,
        num_warps=8, **constants,
    )
    strips = down.codes.shape[1]
    packed_few_down_kernel[strips, tokens](
        inner, down.codes, down.scale, down.scale if down.zero is None else down.zero, x if biases[1] is None else biases[1],
        weights, out, chosen, width, hidden, strips, USED=used, BIAS=biases[1] is not None, WARPS=DOWN_WARPS,
        num_warps=DOWN_WARPS, **_constants(down, x),
    )
    return out
