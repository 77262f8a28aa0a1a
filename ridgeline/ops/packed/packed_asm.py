"""PTX that the kernels for packed 4-bit weights share: codes to 16-bit numbers, and products of 128 inputs on mma.sync.

Triton has no 4-bit type, and its casts are several times the instructions that memory speed leaves room for: at 4.4 TB/s an SM
has 3.4 issue slots for each weight.

One row (`products`, and block_asm.py's): the bits of a code, cut out of its word, are a number already, subnormal or just above
(the exponents 0 and 1 have the same steps): code * 2^-24 in fp16, code * 2^-133 in bf16, and e2m1 codes their value * 2^-126.
Tensor cores multiply subnormal numbers exactly.
So a word of eight uint4 codes takes five instructions. Every second code is left where it is, 16 times as large: it is that
of outputs r + 8, whose sums are divided at the end. What a code of zero means is subtracted from the sums of a group: it
multiplies the sum of the group's x. bf16 numbers that small would leave nothing of a product in float32, so x is multiplied by
2^64 before. `restored` undoes all of these powers of two.

Many rows (`operands`): weights are multiplied by their scales before the product, so codes become numbers of a usual size. The
numbers 128 + code (bf16; 1024 + code in fp16) are put together by bits, and the subtraction of 128 + zero is exact. e2m1 codes
are subnormal numbers first, and a multiplication by a power of two gives their value.
"""

from __future__ import annotations

from ridgeline.ops.hopper import compile_time

HIGH_PLACES = (4, 0, 6, 2)           # where the two upper bits of each of a word's four pairs lie in their byte (GGUF)

# ── codes as they are ────────────────────────────────────────────────────────────────────────────────────────────────


@compile_time
def in_place(kind: str, dtype: str) -> bool:
    """Every second code of a word stays where it is. bf16 numbers have the bits for 16 times a code of four bits, no more."""
    return kind == "uint4" or (kind in ("q5", "q6") and dtype == "f16")


@compile_time
def x_factor(dtype: str) -> float:
    """What x is multiplied by before the product."""
    return 1.0 if dtype == "f16" else 2.0**64


@compile_time
def code_step(kind: str, dtype: str) -> float:
    """A code of 1 in the product (a value of 1, of e2m1, whose bits are those of bf16), with `x_factor`."""
    assert kind != "e2m1" or dtype == "bf16"
    return 2.0**-24 if dtype == "f16" else 2.0**-62 if kind == "e2m1" else 2.0**-69


@compile_time
def restored(kind: str, dtype: str, upper: bool) -> float:
    """What the sums of outputs r (`upper`: r + 8) are multiplied by at the end."""
    return 1 / code_step(kind, dtype) / (16 if upper and in_place(kind, dtype) else 1)


@compile_time
def sum_span(kind: str, group: int) -> int:
    """Inputs whose x are summed, for what a code of zero means; 0: there is nothing to subtract."""
    return 0 if kind == "e2m1" else min(group, 32)


@compile_time
def literal(value: int) -> str:
    """0 or a power of two as PTX writes a float32 number."""
    assert value & (value - 1) == 0
    return f"0f{(126 + value.bit_length()) << 23:08x}" if value else "0f00000000"


@compile_time
def cut_codes(word: str, out: str, stay: bool, high: str, base: int) -> list[str]:
    """`out`0 to `out`3: the bits of the codes of a word, put into the number `base`. `stay`: every second code stays where it is.
    `high`: empty, or a register with the upper bits of the word's codes, those of even inputs in its byte 0 and those of odd ones
    in byte 2."""
    lines = [f"shr.u32 t1, {word}, 8;"] if stay else []
    for number in range(4):
        source, mask = word, 0x000F000F
        if stay:
            source, mask = ("t1" if number > 1 else word), (0x00F000F0 if number % 2 else 0x000F000F)
        elif number:
            lines.append(f"shr.u32 t1, {word}, {4 * number};")
            source = "t1"
        cut = f"{out}{number}, {source}, {mask}"
        lines.append(f"lop3.b32 {cut}, {base}, 0xea;" if base else f"and.b32 {cut};")
        if high:
            wanted = 8 if stay and number % 2 else 4
            shift, above = wanted - HIGH_PLACES[number], high
            if shift:
                lines.append(f"shl.b32 t2, {high}, {shift};" if shift > 0 else f"shr.u32 t2, {high}, {-shift};")
                above = "t2"
            lines.append(f"lop3.b32 {out}{number}, {above}, {0x00030003 << wanted}, {out}{number}, 0xea;")
    return lines


@compile_time
def raw_codes(word: str, out: str, kind: str, dtype: str, high: str) -> list[str]:
    """`out`0 to `out`3: the codes of a word, each as `code_step` says. `high`: as in `cut_codes`."""
    return _small_e2m1(word, out) if kind == "e2m1" else cut_codes(word, out, in_place(kind, dtype), high, 0)


@compile_time
def _small_e2m1(word: str, out: str) -> list[str]:
    lines = [f"and.b32 {out}0, {word}, 0x81c081c0;"]
    for number in (1, 2):
        lines += [f"shl.b32 t{number}, {word}, {3 * number};", f"and.b32 {out}{number}, t{number}, 0x81c081c0;"]
    return lines + [
        f"shl.b32 t1, {word}, 1;", f"shr.u32 t2, {word}, 5;", f"shr.u32 t3, {word}, 4;",
        f"and.b32 {out}3, t1, 0x80008000;", f"lop3.b32 {out}3, t2, 0x01000100, {out}3, 0xea;",
        f"lop3.b32 {out}3, t3, 0x00c000c0, {out}3, 0xea;",
    ]


# ── numbers of a usual size ──────────────────────────────────────────────────────────────────────────────────────────


@compile_time
def _numbers(word: str, out: str, kind: str, dtype: str, zero: str | None) -> list[str]:
    """Instructions that make the four operands `out`0 to `out`3 of a word. `zero`: the base + zero, of outputs r and r + 8."""
    lines = []
    if kind == "uint4":
        # 128 or 1024 twice, and the same with 8 added
        magic, eight = (0x43004300, 0x43084308) if dtype == "bf16" else (0x64006400, 0x64086408)
        for number in range(4):
            source = word
            if number:
                lines.append(f"shr.u32 t{number}, {word}, {4 * number};")
                source = f"t{number}"
            lines.append(f"lop3.b32 {out}{number}, {source}, 0x000f000f, {magic}, 0xea;")
        if zero is None:
            lines.append(f"mov.b32 t0, {eight};")
        less = ("t0", "t0") if zero is None else (f"{zero}0", f"{zero}1")
        return lines + [f"sub.{dtype}x2 {out}{number}, {out}{number}, {less[number % 2]};" for number in range(4)]
    lines += [*_small_e2m1(word, out), "mov.b32 t0, 0x7e807e80;"]
    return lines + [f"mul.bf16x2 {out}{number}, {out}{number}, t0;" for number in range(4)]


@compile_time
def _from_lane(word: str, out: str, block: int | str) -> str:
    """The word of lane `block` of every four."""
    return f"shfl.sync.idx.b32 {out}, {word}, {block}, 0x1c03, 0xffffffff;"


@compile_time
def is_byte_scale(scale_dtype: str) -> bool:
    return scale_dtype in ("e8m0", "e4m3")


@compile_time
def scale_words(group: int, scale_dtype: str) -> int:
    """Words of a lane with the scales of 128 inputs."""
    return 128 // group // (2 if is_byte_scale(scale_dtype) else 1)


@compile_time
def scale_pairs(scale_dtype: str) -> str:
    """A word of four bytes, scales of two groups, as the two words of 16-bit numbers that 16-bit scales would have: bf16 of e8m0,
    fp16 of e4m3, all exactly. Operands: out the word of the first group, that of the second; in the bytes."""
    lines = [".reg .b32 t<2>; .reg .b32 least; .reg .b16 h<2>;"]
    if scale_dtype == "e4m3":
        lines += ["mov.b32 {h0, h1}, $2;", *(f"cvt.rn.f16x2.e4m3x2 t{number}, h{number};" for number in (0, 1))]
    else:
        lines += ["mov.b32 least, 0x00400040;"]          # an exponent of 0 is 2^-127, a subnormal number with one bit
        for number, places in enumerate(("0x4140", "0x4342")):
            lines += [f"prmt.b32 t{number}, $2, 0, {places};", f"shl.b32 t{number}, t{number}, 7;"]
            lines += [f"max.u16x2 t{number}, t{number}, least;"]
    return "{ " + " ".join([*lines, "mov.b32 $0, t0; mov.b32 $1, t1;"]) + " }"


@compile_time
def _floats(word: str, low: str, high: str, dtype: str) -> list[str]:
    """The two numbers of a word; of scales that were bytes, as `scale_pairs` makes it."""
    if dtype in ("bf16", "e8m0"):
        return [f"shl.b32 t0, {word}, 16;", f"mov.b32 {low}, t0;", f"and.b32 t0, {word}, 0xffff0000;", f"mov.b32 {high}, t0;"]
    return [f"mov.b32 {{h0, h1}}, {word};", f"cvt.f32.f16 {low}, h0;", f"cvt.f32.f16 {high}, h1;"]


@compile_time
def _zeros(word: str, out: str, dtype: str) -> list[str]:
    """The base + zero of outputs r and r + 8 as pairs of equal numbers; the word has two fp16 numbers."""
    base = 128.0 if dtype == "bf16" else 1024.0
    lines = _floats(word, "f0", "f1", "f16")
    for number in (0, 1):
        lines += [f"add.f32 f{number}, f{number}, {base};", f"cvt.rn.{dtype}x2.f32 {out}{number}, f{number}, f{number};"]
    return lines


@compile_time
def _registers() -> str:
    return ".reg .b32 t<4>; .reg .b32 z<2>; .reg .b32 word; .reg .f32 f<2>; .reg .b16 h<2>;"


@compile_time
def products(kind: str, group: int, dtype: str, scale_dtype: str, zeros: bool, block: int) -> str:
    """16 outputs x 128 inputs of one warp, added to `sums`.

    Operands, four registers each: out sums; in sums, words of two tiles, x of these tiles (two registers for every 16
    inputs), then the words of the scales of the groups, then those of the zeros, then the sums of x, `sum_span` inputs each,
    times -`code_step`. `block`: which 128 of 512 inputs. All columns are the same: the sums of one (0 and 2) are kept up.
    """
    each = 128 // group
    chain = min(group, 64) // 16                         # products that follow each other; more would wait for their sums
    scale_at = 4 + 4 + 8 + 16
    total_at = scale_at + 4 * each * (2 if zeros else 1)
    lines = [_registers(), ".reg .b32 a<4>; .reg .f32 d<4>; .reg .f32 s<4>; .reg .f32 y<2>; .reg .f32 o<2>; .reg .f32 total;"]
    lines += [f"mov.f32 s{number}, ${4 + number};" for number in range(4)]
    lines += [f"mov.f32 o0, {literal(8)};", f"mov.f32 o1, {literal(128)};"]
    for first in range(0, 8, chain):
        number = first * 16 // group
        if first * 16 % group == 0:
            lines += [_from_lane(f"${scale_at + 4 * number}", "word", block), *_floats("word", "y0", "y1", scale_dtype)]
            if zeros:
                lines += [_from_lane(f"${scale_at + 4 * each + 4 * number}", "word", block), *_floats("word", "o0", "o1", "f16")]
                lines += [f"mul.f32 o1, o1, {literal(16)};"]
        for step in range(first, first + chain):
            tile, word = divmod(step, 4)
            lines += raw_codes(f"${8 + step}", "a", kind, dtype, "")
            right = (f"${16 + 8 * tile + 2 * word}", f"${16 + 8 * tile + 2 * word + 1}")
            added = "{0f00000000, 0f00000000, 0f00000000, 0f00000000}" if step == first else "{d0, d1, d2, d3}"
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{d0, d1, d2, d3}}, {{a0, a1, a2, a3}}, "
                f"{{{right[0]}, {right[1]}}}, {added};"
            )
        span = sum_span(kind, group)
        if span:
            totals = [f"${total_at + number}" for number in range(first * 16 // span, (first + chain) * 16 // span)]
            lines.append(f"mov.f32 total, {totals[0]};" if len(totals) == 1 else f"add.f32 total, {totals[0]}, {totals[1]};")
            lines += ["fma.rn.f32 d0, total, o0, d0;", "fma.rn.f32 d2, total, o1, d2;"]
        lines += ["fma.rn.f32 s0, d0, y0, s0;", "fma.rn.f32 s2, d2, y1, s2;"]
    lines += [f"mov.f32 ${number}, s{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def product_registers(kind: str, group: int, zeros: bool) -> str:
    """The constraints of `products`."""
    words = 8 + 16 + 4 * (128 // group) * (2 if zeros else 1)
    span = sum_span(kind, group)
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * words + ["f"] * (128 // span if span else 0))


@compile_time
def factors(dtype: str, scale_dtype: str) -> str:
    """The scales of outputs r and r + 8, each twice in a register. Operands: out both; in the scales' word, and which 128 of
    512 inputs."""
    lines = [_registers(), _from_lane("$2", "word", "$3"), *_floats("word", "f0", "f1", scale_dtype)]
    return "{ " + " ".join(lines + [f"cvt.rn.{dtype}x2.f32 ${number}, f{number}, f{number};" for number in (0, 1)]) + " }"


@compile_time
def subtrahends(dtype: str) -> str:
    """As `factors`, of the zeros: the base + zero."""
    lines = [_registers(), _from_lane("$2", "word", "$3"), *_zeros("word", "z", dtype)]
    return "{ " + " ".join(lines + ["mov.b32 $0, z0; mov.b32 $1, z1;"]) + " }"


@compile_time
def operands(kind: str, dtype: str, zeros: bool) -> str:
    """A word as wgmma's left operand, multiplied by its scales.

    Operands: out the word's eight numbers, pair by pair; in the word, the factors of outputs r and r + 8, and the subtrahends.
    """
    lines = [_registers(), ".reg .b32 n<4>;"]
    if zeros:
        lines += ["mov.b32 z0, $11; mov.b32 z1, $12;"]
    lines += _numbers("$8", "n", kind, dtype, "z" if zeros else None)
    for number in range(4):
        lines += [f"mul.{dtype}x2 n{number}, n{number}, ${9 + number % 2};"]
        lines += [f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, n{number};"]
    return "{ " + " ".join(lines) + " }"


@compile_time
def operand_registers(zeros: bool) -> str:
    """The constraints of `operands`."""
    return ",".join(["=h"] * 8 + ["r"] * (5 if zeros else 3))
