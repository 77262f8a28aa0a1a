"""Triton kernels for weights in any format: one expands a weight, one multiplies few rows by codes that it expands on the way.

Both call `_numbers`, which has a branch for every grid and every kind of scale, chosen at compile time. Codes of fewer than 8
bits are read number by number, so these kernels are simple and not the fastest possible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.quantised.codes import BITS, TABLES, table
from ridgeline.ops.quantised.expand import MIDDLE, QuantisedWeight
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton, triton_kernel

TILE_OUTPUTS = 16                    # larger tiles spill registers: every number has addresses of its own
_ZEROS = {"none": 0, "code": 1, "offset": 2}


@triton_kernel()
def _scales(  # type: ignore[no-untyped-def]
    ptr, output, column, mask, row, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, E8M0: tl.constexpr
):
    """Scales of blocks [OUTPUTS, INPUTS] for these outputs [O, 1] and inputs [1, I]; 0 inputs: one for a row."""
    if INPUTS == 0:
        place = output // OUTPUTS
        inside = mask & (column == column)
    else:
        place = (output // OUTPUTS) * row + column // INPUTS
        inside = mask
    stored = tl.load(ptr + place, mask=inside, other=0.0)
    if E8M0:
        bits = stored.to(tl.int32)
        found = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    else:
        found = stored.to(tl.float32)
    return found


@triton_kernel()
def _numbers(  # type: ignore[no-untyped-def]
    weight_ptr, high_ptr, table_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, output, column, mask,
    weight_row, high_row, scale_row, outer_row,
    BITS: tl.constexpr, TABLE: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, OUTER: tl.constexpr, OUTER_O: tl.constexpr, OUTER_I: tl.constexpr,
):
    """The weight's numbers in float32 at these outputs [O, 1] and inputs [1, I]"""
    if BITS == 8:
        code = tl.load(weight_ptr + output * weight_row + column, mask=mask, other=0.0).to(tl.float32)
    else:
        EACH: tl.constexpr = 4 if BITS == 2 else 2
        SHIFT: tl.constexpr = 2 if BITS == 2 else 4
        byte = tl.load(weight_ptr + output * weight_row + column // EACH, mask=mask, other=0.0).to(tl.int32)
        number = (byte >> (column % EACH * SHIFT)) & ((1 << SHIFT) - 1)
        if BITS > 4:
            MORE: tl.constexpr = BITS - 4
            EACH_HIGH: tl.constexpr = 8 // MORE
            above = tl.load(high_ptr + output * high_row + column // EACH_HIGH, mask=mask, other=0.0).to(tl.int32)
            number = number | (((above >> (column % EACH_HIGH * MORE)) & ((1 << MORE) - 1)) << 4)
        if TABLE:
            code = tl.load(table_ptr + number)
        else:
            code = number.to(tl.float32)
    scale = _scales(scale_ptr, output, column, mask, scale_row, BLOCK_O, BLOCK_I, E8M0)
    if OUTER:
        scale = scale * _scales(outer_ptr, output, column, mask, outer_row, OUTER_O, OUTER_I, False)
    if ZERO == 2:
        offset = _scales(zero_ptr, output, column, mask, scale_row, BLOCK_O, BLOCK_I, E8M0)
        if OUTER:
            offset = offset * _scales(offset_outer_ptr, output, column, mask, outer_row, OUTER_O, OUTER_I, False)
        return code * scale + offset
    if ZERO == 1:
        code = code - _scales(zero_ptr, output, column, mask, scale_row, BLOCK_O, BLOCK_I, False)
    else:
        code = code - MIDDLE
    return code * scale


@triton_kernel()
def _expand_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, high_ptr, table_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, out_ptr,
    outputs, inputs, weight_row, high_row, scale_row, outer_row,
    BITS: tl.constexpr, TABLE: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, OUTER: tl.constexpr, OUTER_O: tl.constexpr, OUTER_I: tl.constexpr,
    TILE_O: tl.constexpr, TILE_I: tl.constexpr,
):
    output = (tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * TILE_I + tl.arange(0, TILE_I))[None, :]
    mask = (output < outputs) & (column < inputs)
    found = _numbers(
        weight_ptr, high_ptr, table_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, output, column, mask,
        weight_row, high_row, scale_row, outer_row, BITS, TABLE, MIDDLE, ZERO, E8M0, BLOCK_O, BLOCK_I, OUTER, OUTER_O, OUTER_I,
    )
    tl.store(out_ptr + output * inputs + column, found.to(out_ptr.dtype.element_ty), mask=mask)


@triton_kernel(do_not_specialize=["rows"])
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, high_ptr, table_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, bias_ptr, out_ptr,
    rows, outputs, inputs, x_row, weight_row, high_row, scale_row, outer_row,
    BITS: tl.constexpr, TABLE: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, OUTER: tl.constexpr, OUTER_O: tl.constexpr, OUTER_I: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):
    """CTA (tile of outputs): all rows of x by a tile of the weight at a time, which becomes numbers in registers."""
    output = (tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)).to(tl.int64)[:, None]
    row = tl.arange(0, TILE_ROWS)[:, None]
    sums = tl.zeros((TILE_O, TILE_ROWS), tl.float32)
    for first in range(0, inputs, TILE_I):
        column = (first + tl.arange(0, TILE_I))[None, :]
        mask = (output < outputs) & (column < inputs)
        weight = _numbers(
            weight_ptr, high_ptr, table_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, output, column, mask,
            weight_row, high_row, scale_row, outer_row, BITS, TABLE, MIDDLE, ZERO, E8M0, BLOCK_O, BLOCK_I, OUTER, OUTER_O,
            OUTER_I,
        )
        weight = tl.where(mask, weight, 0.0)             # beyond the inputs the middle code is not zero
        x = tl.load(x_ptr + row.to(tl.int64) * x_row + column, mask=(row < rows) & (column < inputs), other=0.0)
        weight = weight.to(x_ptr.dtype.element_ty)
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        sums = tl.dot(weight, x.T, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)
    row_ = tl.arange(0, TILE_ROWS)[None, :]
    wanted = (output < outputs) & (row_ < rows)
    tl.store(out_ptr + row_.to(tl.int64) * outputs + output, sums.to(out_ptr.dtype.element_ty), mask=wanted)


@triton_kernel()
def _tile_numbers(  # type: ignore[no-untyped-def]
    weight_ptr, high_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, output, first, mask,
    weight_row, high_row, scale_row, outer_row,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, OUTER: tl.constexpr,
    TILE_O: tl.constexpr, TILE_I: tl.constexpr,
):
    """`_numbers` of TILE_I inputs from `first` on, which are whole groups; outputs [O, 1]. Every byte is read once: `_numbers`
    reads each as often as it has codes, and a scale for every code, and took 18 times as long as cuBLAS with 16-bit weights."""
    if BITS == 8:
        column = tl.arange(0, TILE_I)[None, :]
        code = tl.load(weight_ptr + output * weight_row + (first + column), mask=mask, other=0).to(tl.float32)
    else:
        column = tl.arange(0, TILE_I // 2)[None, :]
        byte = tl.load(weight_ptr + output * weight_row + (first // 2 + column), mask=mask, other=0).to(tl.int32)
        low = byte & 15
        top = byte >> 4
        if BITS > 4:
            EACH: tl.constexpr = 8 // (BITS - 4)
            column = tl.arange(0, TILE_I // EACH)[None, :]
            above = tl.load(high_ptr + output * high_row + (first // EACH + column), mask=mask, other=0).to(tl.int32)
            above = tl.reshape(tl.join(above & 15, above >> 4), (TILE_O, 2 * TILE_I // EACH))
            if BITS == 5:
                above = tl.reshape(tl.join(above & 3, above >> 2), (TILE_O, TILE_I // 2))
                low = low | ((above & 1) << 4)
                top = top | ((above >> 1) << 4)
            else:
                low = low | ((above & 3) << 4)
                top = top | ((above >> 2) << 4)
        code = tl.reshape(tl.join(low, top), (TILE_O, TILE_I)).to(tl.float32)
    column = tl.arange(0, TILE_I // GROUP)[None, :]
    place = output * scale_row + (first // GROUP + column)
    scale = tl.load(scale_ptr + place, mask=mask, other=0).to(tl.float32)
    if OUTER:
        scale = scale * tl.load(outer_ptr + output * outer_row + first // 256, mask=mask, other=0.0).to(tl.float32)
    code = tl.reshape(code, (TILE_O, TILE_I // GROUP, GROUP))
    if ZERO == 2:
        offset = tl.load(zero_ptr + place, mask=mask, other=0).to(tl.float32)
        if OUTER:
            offset = offset * tl.load(offset_outer_ptr + output * outer_row + first // 256, mask=mask, other=0.0).to(tl.float32)
        numbers = code * scale[:, :, None] + offset[:, :, None]
    elif ZERO == 1:
        zero = tl.load(zero_ptr + place, mask=mask, other=0).to(tl.float32)
        numbers = (code - zero[:, :, None]) * scale[:, :, None]
    else:
        numbers = (code - MIDDLE) * scale[:, :, None]
    return tl.reshape(numbers, (TILE_O, TILE_I))


@triton_kernel()
def _expand_groups_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, high_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, out_ptr, outputs, inputs,
    weight_row, high_row, scale_row, outer_row,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, OUTER: tl.constexpr,
    TILE_O: tl.constexpr, TILE_I: tl.constexpr,
):
    output = (tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)).to(tl.int64)[:, None]
    first = tl.program_id(1) * TILE_I
    mask = output < outputs
    found = _tile_numbers(
        weight_ptr, high_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, output, first, mask, weight_row, high_row,
        scale_row, outer_row, BITS, MIDDLE, ZERO, GROUP, OUTER, TILE_O, TILE_I,
    )
    column = (first + tl.arange(0, TILE_I))[None, :]
    tl.store(out_ptr + output * inputs + column, found.to(out_ptr.dtype.element_ty), mask=mask)


@triton_kernel(do_not_specialize=["rows"])
def _few_rows_groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, high_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, bias_ptr, out_ptr,
    rows, outputs, inputs, x_row, weight_row, high_row, scale_row, outer_row,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, OUTER: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):
    """As `_few_rows_kernel`, of whole groups."""
    output = (tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)).to(tl.int64)[:, None]
    row = tl.arange(0, TILE_ROWS)[:, None]
    mask = output < outputs
    sums = tl.zeros((TILE_O, TILE_ROWS), tl.float32)
    for first in range(0, inputs, TILE_I):
        weight = _tile_numbers(
            weight_ptr, high_ptr, scale_ptr, zero_ptr, outer_ptr, offset_outer_ptr, output, first, mask, weight_row, high_row,
            scale_row, outer_row, BITS, MIDDLE, ZERO, GROUP, OUTER, TILE_O, TILE_I,
        )
        column = (first + tl.arange(0, TILE_I))[None, :]
        x = tl.load(x_ptr + row.to(tl.int64) * x_row + column, mask=row < rows, other=0.0)
        weight = weight.to(x_ptr.dtype.element_ty)
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        sums = tl.dot(weight, x.T, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias_ptr + output, mask=mask, other=0.0).to(tl.float32)
    row_ = tl.arange(0, TILE_ROWS)[None, :]
    tl.store(out_ptr + row_.to(tl.int64) * outputs + output, sums.to(out_ptr.dtype.element_ty), mask=mask & (row_ < rows))


def _plain(tensor: Tensor) -> Tensor:
    """The interpreter has no 8-bit floats."""
    return tensor.float() if TRITON_INTERPRETED and tensor.dtype == torch.float8_e4m3fn else tensor


def _arguments(weight: QuantisedWeight) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """(pointers, row lengths, constants) of `_numbers`; what a format lacks is replaced by its codes and not read."""
    codes = weight.weight
    offset = weight.zero if weight.offset is None else weight.offset
    numbers = table(weight.grid, codes.device, torch.float32) if weight.grid in TABLES else codes
    pointers = [codes, weight.high, numbers, weight.scale, offset, weight.outer, weight.offset_outer]
    rows = [0 if each is None or each.dim() < 2 else each.stride(0) for each in (codes, weight.high, weight.scale, weight.outer)]
    zero = "offset" if weight.offset is not None else "code" if weight.zero is not None else "none"
    constants = {
        "BITS": BITS.get(weight.grid, 8), "TABLE": weight.grid in TABLES, "MIDDLE": MIDDLE.get(weight.grid, 0.0),
        "ZERO": _ZEROS[zero], "E8M0": weight.e8m0, "BLOCK_O": weight.block[0], "BLOCK_I": weight.block[1],
        "OUTER": weight.outer is not None, "OUTER_O": weight.outer_block[0], "OUTER_I": weight.outer_block[1],
    }
    return tuple(_plain(codes if each is None else each) for each in pointers), tuple(rows), constants


def whole_groups(weight: QuantisedWeight) -> bool:
    """Whether the kernels for whole groups read this weight: integers, groups of some inputs of one output, none cut."""
    (rows, group), outer = weight.block, weight.outer
    tile = tile_inputs(16)
    known = weight.grid in ("uint4", "q5", "q6", "int8") and not weight.e8m0 and rows == 1
    fits = group in (16, 32, 64) and weight.inputs % tile == 0
    return known and fits and (outer is None or weight.outer_block == (1, 256))


def _group_arguments(weight: QuantisedWeight) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Those of `_tile_numbers`."""
    pointers, lengths, constants = _arguments(weight)
    kept = {name: constants[name] for name in ("BITS", "MIDDLE", "ZERO", "OUTER")}
    return (*pointers[:2], *pointers[3:]), lengths, kept | {"GROUP": weight.block[1]}


def expand_triton(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """`expand` without an order of inputs, [outputs, inputs]"""
    outputs = len(weight.weight)
    out = torch.empty((outputs, weight.inputs), dtype=dtype, device=weight.weight.device)
    if whole_groups(weight):
        pointers, lengths, constants = _group_arguments(weight)
        tile_o, tile_i = 16, tile_inputs(16)
        _expand_groups_kernel[triton.cdiv(outputs, tile_o), weight.inputs // tile_i](
            *pointers, out, outputs, weight.inputs, *lengths, TILE_O=tile_o, TILE_I=tile_i, num_warps=4, **constants,
        )
        return out
    pointers, lengths, constants = _arguments(weight)
    tile_o, tile_i = 8, 256
    _expand_kernel[triton.cdiv(outputs, tile_o), triton.cdiv(weight.inputs, tile_i)](
        *pointers, out, outputs, weight.inputs, *lengths, TILE_O=tile_o, TILE_I=tile_i, num_warps=4, **constants,
    )
    return out


def tile_inputs(rows: int) -> int:
    return 128 if rows <= 16 else 64


def few_rows_triton(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """x [rows, inputs], at most MOST_CODE_ROWS, without an order of inputs -> [rows, outputs]"""
    rows, outputs = len(x), len(weight.weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if whole_groups(weight):
        pointers, lengths, constants = _group_arguments(weight)
        tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
        _few_rows_groups_kernel[(triton.cdiv(outputs, tile),)](
            x, *pointers, out if bias is None else bias, out, rows, outputs, weight.inputs, x.stride(0), *lengths,
            TILE_ROWS=tile, TILE_O=tile, TILE_I=tile_inputs(rows), BIAS=bias is not None, UPCAST=TRITON_INTERPRETED,
            num_warps=4, num_stages=3, **constants,
        )
        return out
    pointers, lengths, constants = _arguments(weight)
    _few_rows_kernel[(triton.cdiv(outputs, TILE_OUTPUTS),)](
        x, *pointers, out if bias is None else bias, out, rows, outputs, weight.inputs, x.stride(0), *lengths,
        TILE_ROWS=16 if rows <= 16 else 32 if rows <= 32 else 64, TILE_O=TILE_OUTPUTS, TILE_I=tile_inputs(rows),
        BIAS=bias is not None, UPCAST=TRITON_INTERPRETED,       # the interpreter's narrow dot products are wrong
        num_warps=4, num_stages=2, **constants,
    )
    return out
