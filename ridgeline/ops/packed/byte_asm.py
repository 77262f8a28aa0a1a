"""PTX for packed 8-bit codes (byte_weight.py): two words, of outputs r and r + 8, are a lane's left operand of 16 inputs.

One row: a byte in the low half of a 16-bit number is code * 2^-24 in fp16 and code * 2^-133 in bf16, as packed_asm.py says of
four bits: the exponents 0 and 1 have the same steps, so eight bits fit into bf16, too. A `prmt` makes two of them. 128, which
means 0, is subtracted from the sums of a group, and scales multiply these.

Many rows: weights are multiplied by their scales first. fp16: the byte goes into the mantissa of 1024, 1152 is subtracted,
exactly, and the scale multiplies: three instructions for two weights. bf16 has too few bits for that: one fma multiplies the
small number by the scale and subtracts 128 scales, and rounds once: two instructions for two weights. A factor that restored the
size as well would leave bf16's range, so weights stay 2^-24 times as large, and sums are multiplied at the end.
"""

from __future__ import annotations

from ridgeline.ops.hopper import compile_time
from ridgeline.ops.packed.packed_asm import _floats, _from_lane, _registers, literal, sum_span

LOW, UPPER = "0x4140", "0x4342"      # selectors of prmt: the first or last two bytes of a word, each below one of another
_SMALLER = 24                        # powers of two by which bf16 weights are too small
_RAISED = 1 << (133 - _SMALLER)      # what that leaves of the factor 2^133


@compile_time
def _raw_pairs(words: tuple[str, str], out: str, above: str) -> list[str]:
    """`out`0 to `out`3: bytes below those of `above`; outputs r and r + 8 by turns, the first two inputs of a lane, then the
    others."""
    return [f"prmt.b32 {out}{number}, {words[number % 2]}, {above}, {UPPER if number > 1 else LOW};" for number in range(4)]


@compile_time
def byte_products(group: int, dtype: str, scale_dtype: str, tile: int) -> str:
    """One row: 16 outputs x 64 inputs of one warp, added to `sums`. More inputs at a time would need more registers for x.

    Operands, four registers each: out sums; in sums, words of a tile of outputs r, then of outputs r + 8, x of this tile (two
    registers for every 16 inputs), the words of the scales of its groups, the sums of x of 128 inputs, `sum_span` inputs each,
    times -`code_step`. `tile`: which 64 of 512 inputs. All columns are the same: the sums of one (0 and 2) are kept up.
    """
    chain = min(group, 64) // 16                         # products with one scale
    span, total_at = sum_span("int8", group), 24 + 4 * tile_scales(group)
    lines = [_registers(), ".reg .b32 a<4>; .reg .f32 d<4>; .reg .f32 s<4>; .reg .f32 y<2>; .reg .f32 total;"]
    lines += [f"mov.f32 s{number}, ${4 + number};" for number in range(4)]
    for first in range(0, 4, chain):
        lines += [_from_lane(f"${24 + 4 * (first // chain)}", "word", tile // 2), *_floats("word", "y0", "y1", scale_dtype)]
        for step in range(first, first + chain):
            lines += _raw_pairs((f"${8 + step}", f"${12 + step}"), "a", "0")
            added = ", ".join([literal(0)] * 4) if step == first else "d0, d1, d2, d3"
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{d0, d1, d2, d3}}, {{a0, a1, a2, a3}}, "
                f"{{${16 + 2 * step}, ${17 + 2 * step}}}, {{{added}}};"
            )
        begin = (tile % 2 * 4 + first) * 16 // span
        totals = [f"${total_at + number}" for number in range(begin, begin + chain * 16 // span)]
        lines.append(f"mov.f32 total, {totals[0]};" if len(totals) == 1 else f"add.f32 total, {totals[0]}, {totals[1]};")
        lines += [f"fma.rn.f32 d{number}, total, {literal(128)}, d{number};" for number in (0, 2)]
        lines += ["fma.rn.f32 s0, d0, y0, s0;", "fma.rn.f32 s2, d2, y1, s2;"]
    lines += [f"mov.f32 ${number}, s{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def tile_scales(group: int) -> int:
    """Words of scales that 64 inputs have."""
    return max(1, 64 // group)


@compile_time
def byte_product_registers(group: int) -> str:
    """The constraints of `byte_products`."""
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * (16 + 4 * tile_scales(group)) + ["f"] * (128 // sum_span("int8", group)))


# ── many rows ────────────────────────────────────────────────────────────────────────────────────────────────────────


@compile_time
def enlarged(kind: str, dtype: str) -> float:
    """What sums of many rows are multiplied by at the end."""
    return 2.0**_SMALLER if kind == "int8" and dtype == "bf16" else 1.0


@compile_time
def byte_factors(dtype: str, scale_dtype: str) -> str:
    """The scales of outputs r and r + 8, each twice in a register; for bf16 with what makes the small numbers larger. Operands:
    out both; in the scales' word, and which 128 of 512 inputs."""
    lines = [_registers(), _from_lane("$2", "word", "$3")]
    if dtype == scale_dtype == "f16":
        lines += ["mov.b32 {h0, h1}, word;", *(f"mov.b32 ${number}, {{h{number}, h{number}}};" for number in (0, 1))]
        return "{ " + " ".join(lines) + " }"
    lines += _floats("word", "f0", "f1", scale_dtype)
    for number in (0, 1):
        lines += [f"mul.f32 f{number}, f{number}, {literal(_RAISED)};"] if dtype == "bf16" else []
        lines.append(f"cvt.rn.{dtype}x2.f32 ${number}, f{number}, f{number};")
    return "{ " + " ".join(lines) + " }"


@compile_time
def byte_operands(dtype: str) -> str:
    """Two words as wgmma's left operand. Operands: out the eight numbers, pair by pair; in the words of outputs r and r + 8, and
    the factors of both."""
    lines = [".reg .b32 n<4>; .reg .b32 z<2>;"]
    if dtype == "f16":
        lines += [*_raw_pairs(("$8", "$9"), "n", "0x64646464"), "mov.b32 z0, 0x64806480;"]
        for number in range(4):
            lines += [f"sub.f16x2 n{number}, n{number}, z0;", f"mul.f16x2 n{number}, n{number}, ${10 + number % 2};"]
    else:
        # 128 scales are the factor times -2^(7 - 133).
        lines += [*_raw_pairs(("$8", "$9"), "n", "0"), "mov.b32 z1, 0x80808080;"]
        lines += ["mul.bf16x2 z0, $10, z1;", "mul.bf16x2 z1, $11, z1;"]
        lines += [f"fma.rn.bf16x2 n{number}, n{number}, ${10 + number % 2}, z{number % 2};" for number in range(4)]
    lines += [f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, n{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def byte_operand_registers() -> str:
    """The constraints of `byte_operands`."""
    return ",".join(["=h"] * 8 + ["r"] * 4)
