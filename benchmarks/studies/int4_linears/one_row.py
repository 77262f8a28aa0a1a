"""One row with packed 4-bit weights: fewer registers for the codes on their way, and more warps.

    python benchmarks/studies/int4_linears/one_row.py --out one_row.json

packed_gemv.py holds two units of 512 inputs in registers: the one that is multiplied, and the next. So two CTAs of eight warps
fill an SM. Of an H200's 4.8 TB/s a 70B model in int4 reads about 3.5, and by a count of instructions no unit of an SM is busy for
half of the time: perhaps there are too few warps. Here a warp holds one unit. As soon as 128 inputs are multiplied, their
registers are requested again for the next unit:

    refill       two CTAs of eight warps, as today
    refill, 24   three CTAs of eight warps, 80 registers each

Two units of registers with a name each, and half of the warps, lost before (one_row_steps.json). PREDICTED was written before the
first run. Every variant must give the bits of packed_gemv.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.graph_times import graph_microseconds
from ridgeline.bench.lab.record import commit
from ridgeline.ops.hopper import gl, group_barrier, viewed, wait_for_kernel_before
from ridgeline.ops.launch import dependent_launch, multiprocessors
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.packed.packed_asm import restored, scale_words, sum_span
from ridgeline.ops.packed.packed_gemv import (
    NAMES,
    SCALE_NAMES,
    _finish,
    _load_line,
    _multiply_block,
    _place_rows,
    _plain_shared,
    _word_layout,
    packed_gemv,
    sum_shape,
    summed,
    widened,
)
from ridgeline.ops.packed.packed_sizes import RUN
from ridgeline.ops.packed.packed_weight import PackedWeight, byte_scales, pack, quantised
from ridgeline.ops.packed.select_packed import PackedGemvPlan, packed_plan
from ridgeline.ops.registry import gluon_kernel, triton

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMATS = {"int4": ("uint4", 128), "mxfp4": ("e2m1", 32), "nvfp4": ("e2m1", 16)}
LAYERS = 6
PREDICTED = {
    "refill": "as today: as many warps, and no more on its way (three quarters of a unit instead of one)",
    "refill, 24": "int4: 32 layers 1.21 -> 1.10 ms, by warps: eight take 1.61 ms in nested loops, sixteen 1.29",
}


# ── kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel()
def _pointers(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, unit, strips, layout: gl.constexpr, RUNS: gl.constexpr, EACH: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """As packed_gemv._load_unit, without the loads: codes, words of scales, and which scales are there."""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, flat)))[:, None][:, :, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :][:, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, :][:, None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, :][:, None, :][:, :, None, :]
    strip = (gl.program_id(0) + unit // ROUNDS * gl.num_programs(0)) * GROUPS
    before = unit % ROUNDS * WARPS
    start = strip.to(gl.int64) * RUNS + before
    if GROUPS > 1:
        group = gl.minimum(group, strips - 1 - strip)
    run = warp
    if RUNS % WARPS != 0:
        run = gl.minimum(warp, RUNS - 1 - before)
    run = group * RUNS + run
    codes = code_ptr + start * 1024 + ((run * 1024 + lane * 4)[:, :, :, None] + word)
    scales = scale_ptr + start * (EACH * 32) + (run * (EACH * 32) + lane)
    return codes, scales, (before + warp < RUNS) & (group + lane >= 0)


@gluon_kernel()
def _load_two(codes, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    first = gl.load(codes + 2 * BLOCK * 128, eviction_policy="evict_first")
    return first, gl.load(codes + (2 * BLOCK + 1) * 128, eviction_policy="evict_first")


@gluon_kernel()
def _load_scales(scales, there, EACH: gl.constexpr, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    words = ()
    for part in gl.static_range(EACH):
        words = words + (_load_line(scales + part * 32, there, MASKED),)  # type: ignore[assignment]
    return words


@gluon_kernel()
def _unit(  # type: ignore[no-untyped-def]
    sums, codes, scales, x_words, totals, code_ptr, scale_ptr, unit, units, strips, layout: gl.constexpr, RUNS: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Multiply a unit, and request the next one into its registers."""
    EACH: gl.constexpr = scale_words(GROUP, SCALE_DTYPE)
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    loaded = codes + widened(scales, 0, EACH, SCALE_DTYPE)
    source, lines, there = _pointers(code_ptr, scale_ptr, unit + 1, strips, layout, RUNS, EACH, GROUPS, WARPS)
    fresh = ()
    for block in gl.static_range(4):
        at = unit % ROUNDS * 16 + block * 4
        sums = _multiply_block(
            sums, loaded, x_words, totals, at, layout, block, KIND, GROUP, DTYPE, SCALE_DTYPE, False, GROUPS, WARPS
        )
        first, second = codes[2 * block], codes[2 * block + 1]
        if unit + 1 < units:
            first, second = _load_two(source, block)
        fresh = fresh + (first, second)  # type: ignore[assignment]
    if unit + 1 < units:
        scales = _load_scales(lines, there, EACH, RUNS % WARPS != 0)
    return sums, fresh, scales


@gluon_kernel(do_not_specialize=["outputs", "strips"])
def one_row_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, code_ptr, scale_ptr, outer_ptr, bias_ptr, out_ptr, new_residual_ptr, inputs, outputs, strips,
    eps, norm_offset,
    RUNS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """As packed_gemv's."""
    layout: gl.constexpr = _word_layout(GROUPS, WARPS)
    EACH: gl.constexpr = scale_words(GROUP, SCALE_DTYPE)
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    MASKED: gl.constexpr = RUNS % WARPS != 0
    program = gl.program_id(0)
    blocks = (strips + GROUPS - 1) // GROUPS
    units = (blocks - program + gl.num_programs(0) - 1) // gl.num_programs(0) * ROUNDS
    source, lines, there = _pointers(code_ptr, scale_ptr, 0, strips, layout, RUNS, EACH, GROUPS, WARPS)
    codes = ()
    for block in gl.static_range(4):
        codes = codes + _load_two(source, block)
    scales = _load_scales(lines, there, EACH, MASKED)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROUNDS, 8, 2, WARPS, 4, 2, 2, 2], _plain_shared(7))
    SPAN: gl.constexpr = sum_span(KIND, GROUP)
    x_sums = gl.allocate_shared_memory(gl.float32, sum_shape(ROUNDS, WARPS, SPAN), _plain_shared(4))
    wait_for_kernel_before(DEPENDENT)
    factor = _place_rows(
        x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, x_sums, inputs, eps, norm_offset, ROUNDS, KIND, "", GROUP,
        DTYPE, NORM, RESIDUAL, GROUPS, WARPS,
    )
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 16, 1, WARPS, 1, 4, 4], _plain_shared(5))
    totals = summed(x_sums, ROUNDS, WARPS, SPAN)
    parts = gl.allocate_shared_memory(gl.float32, [2, GROUPS, WARPS, 32, 2], _plain_shared(5))
    sums = gl.zeros([GROUPS, WARPS, 32, 4], gl.float32, layout)
    for unit in range(units):
        sums, codes, scales = _unit(
            sums, codes, scales, x_words, totals, code_ptr, scale_ptr, unit, units, strips, layout, RUNS, KIND, GROUP, DTYPE,
            SCALE_DTYPE, GROUPS, WARPS,
        )
        if (unit + 1) % ROUNDS == 0:
            strip = (program + unit // ROUNDS * gl.num_programs(0)) * GROUPS
            _finish(
                sums, parts, factor * restored(KIND, DTYPE, False), factor * restored(KIND, DTYPE, True), outer_ptr, bias_ptr,
                out_ptr, strip, strips, outputs, GATE, BIAS, OUTER, GROUPS, WARPS,
            )
            sums = gl.zeros([GROUPS, WARPS, 32, 4], gl.float32, layout)


def one_row(
    variant: str, x: Tensor, weight: PackedWeight, plan: PackedGemvPlan, *, norm: Tensor | None = None, eps: float = 0.0,
    residual: Tensor | None = None, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """As packed_gemv."""
    if variant == "today":
        return packed_gemv(x, weight, None, plan, norm=norm, eps=eps, residual=residual, gate=gate)
    outputs = weight.outputs if gate is None else weight.outputs // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(x)
    strips = weight.codes.shape[0]
    one_row_kernel[(min(triton.cdiv(strips, plan.groups), plan.programs * multiprocessors(x.device)),)](
        x, x if residual is None else residual, x if norm is None else norm, weight.codes, weight.scale,
        weight.scale if weight.outer is None else weight.outer, x, out, new_residual, x.shape[1], outputs, strips, eps, 0.0,
        RUNS=weight.codes.shape[1] * 64 // RUN, KIND=weight.kind, GROUP=weight.group, DTYPE=NAMES[x.dtype],
        SCALE_DTYPE=SCALE_NAMES[weight.scale_dtype], NORM=norm is not None, RESIDUAL=residual is not None, GATE=GATES[gate],
        BIAS=False, OUTER=weight.outer is not None, GROUPS=plan.groups, WARPS=plan.warps, num_warps=plan.groups * plan.warps,
        maxnreg=plan.registers(), **dependent_launch(x.device),
    )
    return out, new_residual


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def made(format: str, name: str, generator: torch.Generator) -> PackedWeight:
    kind, group = FORMATS[format]
    outputs, inputs = MATRICES[name]
    weight = torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16).normal_(0, inputs**-0.5, generator=generator)
    codes, scale = quantised(weight, group, kind)
    return pack(codes, byte_scales(scale, group) if kind == "e2m1" else scale, kind=kind, gated=name == "gate_up")


def layer(variant: str, weights: dict[str, list[PackedWeight]], plans: dict[str, PackedGemvPlan]) -> Callable[[int], Any]:
    x, attended = (torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def run(i: int) -> Tensor:
        each = {name: tensors[i % LAYERS] for name, tensors in weights.items()}
        _, stream = one_row(variant, x, each["qkv"], plans["qkv"], norm=norm, eps=1e-5, residual=attended)
        out, _ = one_row(variant, attended, each["o"], plans["o"])
        out, _ = one_row(variant, out, each["gate_up"], plans["gate_up"], norm=norm, eps=1e-5, residual=stream, gate="silu")
        return one_row(variant, out, each["down"], plans["down"])[0]

    return run


def measured(format: str, turns: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(7)
    weights = {name: [made(format, name, generator) for _ in range(LAYERS)] for name in MATRICES}
    rules: dict[str, Any] = {name: packed_plan(1, *shape) for name, shape in MATRICES.items()}
    more = {name: PackedGemvPlan(each.groups, each.warps, each.programs * 3 // 2) for name, each in rules.items()}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "today": ("today", rules), "refill": ("refill", rules), "refill, 24": ("refill", more),
    }
    found: dict[str, Any] = {"same bits": {}, "ms of 32 layers": {}, "us": {}}
    for case in list(cases)[1:]:
        for name, (_, inputs) in MATRICES.items():
            x = torch.randn(1, inputs, device="cuda", dtype=torch.bfloat16)
            gate = "silu" if name == "gate_up" else None
            both = cases["today"], cases[case]
            outs = [one_row(variant, x, weights[name][0], plans[name], gate=gate)[0] for variant, plans in both]
            found["same bits"][f"{case} {name}"] = torch.equal(*outs)
    for _ in range(turns):                               # in turn, so that no variant has the cool card
        for case, (variant, plans) in cases.items():
            spent = graph_microseconds(layer(variant, weights, plans), LAYERS, warm_ups=2, runs=9) * 32e-3
            found["ms of 32 layers"].setdefault(case, []).append(spent)
    for name, (_, inputs) in MATRICES.items():
        x = torch.randn(1, inputs, device="cuda", dtype=torch.bfloat16)
        gate = "silu" if name == "gate_up" else None
        for case, (variant, plans) in cases.items():
            def work(
                i: int, variant: str = variant, plan: PackedGemvPlan = plans[name], x: Tensor = x, name: str = name,
                gate: str | None = gate,
            ) -> Any:
                return one_row(variant, x, weights[name][i % LAYERS], plan, gate=gate)

            found["us"][f"{case} {name}"] = graph_microseconds(work, LAYERS, warm_ups=2, runs=9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(Path(__file__).with_name("one_row.json")))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "gpu": gpu_facts(), "commit": commit(),
        "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__}, "predicted": PREDICTED,
    }
    for format in args.formats:
        result[format] = measured(format, args.turns)
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
        print(format, json.dumps(result[format]), flush=True)


if __name__ == "__main__":
    main()
