"""PTX that the kernels for packed 4-bit weights share: codes to 16-bit numbers, and products of 128 inputs on mma.sync.

Triton has no 4-bit type, and its casts are several times the instructions that memory speed leaves room for: at 4.4 TB/s an SM
has 3.4 issue slots for each weight. Here are 1.4 to unpack a uint4 weight. The numbers 128 + code (bf16; 1024 + code in fp16)
are put together by bits, and the subtraction of 128 + zero is exact. e2m1 codes become subnormal numbers by bits, and a
multiplication by a power of two gives their value.
"""

from __future__ import annotations

from ridgeline.ops.hopper import compile_time


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
    lines += [f"and.b32 {out}0, {word}, 0x81c081c0;"]
    for number in (1, 2):
        lines += [f"shl.b32 t{number}, {word}, {3 * number};", f"and.b32 {out}{number}, t{number}, 0x81c081c0;"]
    lines += [
        f"shl.b32 t1, {word}, 1;", f"shr.u32 t2, {word}, 5;", f"shr.u32 t3, {word}, 4;",
        f"and.b32 {out}3, t1, 0x80008000;", f"lop3.b32 {out}3, t2, 0x01000100, {out}3, 0xea;",
        f"lop3.b32 {out}3, t3, 0x00c000c0, {out}3, 0xea;", "mov.b32 t0, 0x7e807e80;",
    ]
    return lines + [f"mul.bf16x2 {out}{number}, {out}{number}, t0;" for number in range(4)]


@compile_time
def _from_lane(word: str, out: str, block: int | str) -> str:
    """The word of lane `block` of every four."""
    return f"shfl.sync.idx.b32 {out}, {word}, {block}, 0x1c03, 0xffffffff;"


@compile_time
def _floats(word: str, low: str, high: str, dtype: str) -> list[str]:
    if dtype == "bf16":
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
    inputs), then the words of the scales of the groups, then those of the zeros. `block`: which 128 of 512 inputs.
    """
    each = 128 // group
    chain = min(group, 64) // 16                         # products that follow each other; more would wait for their sums
    scale_at = 4 + 4 + 8 + 16
    lines = [_registers(), ".reg .b32 a<4>; .reg .f32 d<4>; .reg .f32 s<4>; .reg .f32 y<2>;"]
    lines += [f"mov.f32 s{number}, ${4 + number};" for number in range(4)]
    for first in range(0, 8, chain):
        number = first * 16 // group
        if first * 16 % group == 0:
            lines += [_from_lane(f"${scale_at + 4 * number}", "word", block), *_floats("word", "y0", "y1", scale_dtype)]
            if zeros:
                lines += [_from_lane(f"${scale_at + 4 * each + 4 * number}", "word", block), *_zeros("word", "z", dtype)]
        for step in range(first, first + chain):
            tile, word = divmod(step, 4)
            lines += _numbers(f"${8 + step}", "a", kind, dtype, "z" if zeros else None)
            right = (f"${16 + 8 * tile + 2 * word}", f"${16 + 8 * tile + 2 * word + 1}")
            added = "{0f00000000, 0f00000000, 0f00000000, 0f00000000}" if step == first else "{d0, d1, d2, d3}"
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{d0, d1, d2, d3}}, {{a0, a1, a2, a3}}, "
                f"{{{right[0]}, {right[1]}}}, {added};"
            )
        lines += [f"fma.rn.f32 s{out}, d{out}, y{out // 2}, s{out};" for out in range(4)]
    lines += [f"mov.f32 ${number}, s{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def product_registers(group: int, zeros: bool) -> str:
    """The constraints of `products`."""
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * (8 + 16 + 4 * (128 // group) * (2 if zeros else 1)))


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
