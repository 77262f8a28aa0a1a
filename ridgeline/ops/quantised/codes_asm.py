"""PTX of the GEMV for codes as they are stored (codes_gemv.py): codes to 16-bit numbers, products on mma.sync, scales.

A lane has 16 neighbouring codes of output r and of output r + 8. Where inputs have scales in groups, x is masked so that each of
the product's eight columns has the inputs of one of the eight groups of 256 inputs: the products of these inputs then leave the
sum of each group in a column of its own, and its scale is multiplied once, by the lane that has this column. Two
chains of products take turns, because a product waits for the one whose sums it adds to.
"""

from __future__ import annotations

from ridgeline.ops.hopper import compile_time


@compile_time
def _mma(sums: str, left: str, right: tuple[str, str], first: bool, dtype: str) -> str:
    names = ", ".join(f"{sums}{number}" for number in range(4))
    added = "0f00000000, 0f00000000, 0f00000000, 0f00000000" if first else names
    shape = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    return f"{shape} {{{names}}}, {{{left}}}, {{{right[0]}, {right[1]}}}, {{{added}}};"


@compile_time
def _byte_pair(word: str, out: str, upper: bool, kind: str, dtype: str) -> list[str]:
    """Two neighbouring codes of a word as 16-bit numbers. int8: 128 + its low seven bits less 128 + its sign bit, both put
    together by bits (1024 in fp16). e4m3: a bf16 number whose exponent is 120 too small."""
    if kind == "int8":
        base = 0x43004300 if dtype == "bf16" else 0x64006400
        return [
            f"prmt.b32 t0, {word}, 0, {'0x4342' if upper else '0x4140'};",
            f"lop3.b32 t1, t0, 0x007f007f, {base}, 0xea;", f"lop3.b32 t2, t0, 0x00800080, {base}, 0xea;",
            f"sub.{dtype}x2 {out}, t1, t2;",
        ]
    return [
        f"prmt.b32 t0, {word}, 0, {'0x3424' if upper else '0x1404'};", "shr.u32 t1, t0, 4;", "and.b32 t1, t1, 0x07f007f0;",
        "lop3.b32 t1, t0, 0x80008000, t1, 0xea;", f"mul.bf16x2 {out}, t1, scale;",
    ]


@compile_time
def byte_products(kind: str, dtype: str, scales: str, first: bool) -> str:
    """16 outputs x 64 inputs of one warp, added to `sums`; the `first` of a chain begins at zero.

    Operands, four registers each: out sums; in sums, codes of outputs r, codes of outputs r + 8, x of the first and of the last
    eight of a lane's 16 inputs; then for `block` the scales of outputs r and of outputs r + 8, for `group` the mask of x.
    `group_scaled` multiplies the sums of groups.
    """
    lines = [
        ".reg .b32 t<3>; .reg .b32 scale; .reg .b32 a<4>; .reg .b32 b<2>; .reg .f32 d<4>;", "mov.b32 scale, 0x7b807b80;",
    ]
    if scales == "group" and not first:
        lines += [f"mov.f32 d{number}, ${4 + number};" for number in range(4)]
    for step in range(4):
        for number in range(4):                          # outputs r, r + 8; then the upper two codes of both
            lines += _byte_pair(f"${8 + 4 * (number % 2) + step}", f"a{number}", number >= 2, kind, dtype)
        right = (f"${16 + 2 * step}", f"${17 + 2 * step}")
        if scales == "group":
            lines += [f"and.b32 b{number}, {right[number]}, $24;" for number in (0, 1)]
            right = ("b0", "b1")
        lines.append(_mma("d", "a0, a1, a2, a3", right, step == 0 and (first or scales != "group"), dtype))
    if scales != "group":
        factors = {"row": ["0f3F800000"] * 4, "block": ["$24", "$24", "$28", "$28"]}[scales]
        lines += [f"fma.rn.f32 d{number}, d{number}, {factors[number]}, ${4 + number};" for number in range(4)]
    lines += [f"mov.f32 ${number}, d{number};" for number in range(4)]      # all operands are read by now
    return "{ " + " ".join(lines) + " }"


@compile_time
def byte_registers(scales: str) -> str:
    """The constraints of `byte_products`."""
    words = {"row": [], "block": ["f"] * 8, "group": ["r"] * 4}[scales]
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 16 + words)


@compile_time
def group_scaled(scale_dtype: str) -> str:
    """256 inputs of 8 bits in groups of 32, added to `sums`. Operands, four registers each: out sums; in sums, the sums of the
    groups by two chains, then the words of two scales of outputs r and of outputs r + 8."""
    lines = [".reg .b32 t0; .reg .b16 h<2>; .reg .f32 d<4>; .reg .f32 y<4>;"]
    lines += [*_halves("$16", "y0", "y1", scale_dtype), *_halves("$20", "y2", "y3", scale_dtype)]
    for number in range(4):
        lines += [
            f"add.f32 d{number}, ${8 + number}, ${12 + number};", f"fma.rn.f32 d{number}, d{number}, y{number}, ${4 + number};",
        ]
    lines += [f"mov.f32 ${number}, d{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def scaled_registers() -> str:
    """The constraints of `group_scaled`."""
    return ",".join(["=f"] * 4 + ["f"] * 12 + ["r"] * 8)


@compile_time
def _halves(word: str, low: str, high: str, dtype: str) -> list[str]:
    """Two 16-bit numbers of a word as float32."""
    if dtype == "bf16":
        return [f"shl.b32 t0, {word}, 16;", f"mov.b32 {low}, t0;", f"and.b32 t0, {word}, 0xffff0000;", f"mov.b32 {high}, t0;"]
    return [f"mov.b32 {{h0, h1}}, {word};", f"cvt.f32.f16 {low}, h0;", f"cvt.f32.f16 {high}, h1;"]


@compile_time
def collected() -> str:
    """The sum of all columns, in each of them. Operands: out and in the sums."""
    lines = [".reg .f32 f<2>; .reg .f32 g; .reg .b32 t<2>;", "add.f32 f0, $4, $5;", "add.f32 f1, $6, $7;"]
    for distance in (1, 2):
        for number in (0, 1):
            lines += [
                f"mov.b32 t0, f{number};", f"shfl.sync.bfly.b32 t1, t0, {distance}, 0x1f, 0xffffffff;", "mov.b32 g, t1;",
                f"add.f32 f{number}, f{number}, g;",
            ]
    return "{ " + " ".join([*lines, "mov.f32 $0, f0; mov.f32 $1, f0; mov.f32 $2, f1; mov.f32 $3, f1;"]) + " }"
