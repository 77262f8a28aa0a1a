"""PTX of the GEMV for codes as they are stored (codes_gemv.py): codes to 16-bit numbers, products on mma.sync, scales.

A lane has neighbouring codes of output r and of output r + 8: 16 of 8 bits, or 32 of 4 to 6 bits. Where inputs have scales in
groups, x is masked so that each of the product's eight columns has the inputs of one of the eight groups of 256 inputs: the
products of these inputs then leave the sum of each group in a column of its own, and its scale is multiplied once, by the lane
that has this column. Two chains of products take turns, because a product waits for the one whose sums it adds to.

Codes of 4 to 6 bits become 128 + code by bits (1024 + code in fp16). What is too much, and the group's offset, multiply the sum
of its inputs, which the kernel has computed once for all outputs.
"""

from __future__ import annotations

from ridgeline.ops.hopper import compile_time

NIBBLES = {"uint4": 8, "q5": 16, "q6": 32}   # kinds with four bits in a plane of their own, and the code that means 0


@compile_time
def _mma(sums: str, left: str, right: tuple[str, str], first: bool, dtype: str) -> str:
    names = ", ".join(f"{sums}{number}" for number in range(4))
    added = "0f00000000, 0f00000000, 0f00000000, 0f00000000" if first else names
    shape = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    return f"{shape} {{{names}}}, {{{left}}}, {{{right[0]}, {right[1]}}}, {{{added}}};"


# ── 8 bits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


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
def _halves(word: str, low: str, high: str, dtype: str) -> list[str]:
    """Two 16-bit numbers of a word as float32."""
    if dtype == "bf16":
        return [f"shl.b32 t0, {word}, 16;", f"mov.b32 {low}, t0;", f"and.b32 t0, {word}, 0xffff0000;", f"mov.b32 {high}, t0;"]
    return [f"mov.b32 {{h0, h1}}, {word};", f"cvt.f32.f16 {low}, h0;", f"cvt.f32.f16 {high}, h1;"]


# ── 4 to 6 bits ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Of how the scales of groups are stored: words that a lane has of its two groups, and of all 256 inputs.
#   half           16-bit numbers of groups of 32
#   half+offset    and an offset for each
#   super+offset   bytes of scales and of offsets, and a number for each of both for 256 inputs: Q4_K, Q5_K
#   super16        signed bytes of groups of 16, and a number for 256 inputs: Q6_K
#   super16+offset   and offsets, too: Q6_K beside Q4_K
NIBBLE_SCALES = {
    "half": (1, 0), "half+offset": (2, 0), "super+offset": (2, 2), "super16": (1, 1), "super16+offset": (2, 2),
}
BASES = {"bf16": 0x43004300, "f16": 0x64006400}          # 128 and 1024: a code in the lowest bits is added to them
HIGH_WORDS = {"uint4": 0, "q5": 1, "q6": 2}              # of the bits above four, of an output's 32 codes in a lane


@compile_time
def _nibble_word(low: str, high: str, out: str, place: int, kind: str, dtype: str) -> list[str]:
    """The base + code of the eight codes of a word: pair j in `out`j has inputs j and j + 4. `high`: the register with their
    upper bits; `place`: which word of four this is."""
    lines = []
    for number in range(4):
        source = low
        if number:
            lines.append(f"shr.u32 t0, {low}, {4 * number};")
            source = "t0"
        lines.append(f"lop3.b32 {out}{number}, {source}, 0x000f000f, {BASES[dtype]}, 0xea;")
    if kind == "q5":                                     # a byte has bits j and j + 4, which belong at 4 and 20
        lines += [f"bfe.u32 t1, {high}, {8 * place}, 8;", "mul.lo.u32 t1, t1, 4097;"]
        shifts, mask = (4, 3, 2, 1), 0x00100010
    elif kind == "q6":                                   # two bytes have two bits of four inputs each
        lines += [f"prmt.b32 t1, {high}, 0, {'0x4342' if place % 2 else '0x4140'};"]
        shifts, mask = (4, 2, 0, -2), 0x00300030
    else:
        return lines
    for number, shift in enumerate(shifts):
        source = "t0" if shift else "t1"
        if shift:
            lines.append(f"shl.b32 t0, t1, {shift};" if shift > 0 else f"shr.u32 t0, t1, {-shift};")
        lines.append(f"lop3.b32 {out}{number}, {source}, {mask}, {out}{number}, 0xea;")
    return lines


@compile_time
def _byte_floats(word: str, out: list[str], first: int, signed: bool, factor: str) -> list[str]:
    """Neighbouring bytes of a word times a number: 2^23 + byte by bits, less 2^23 (and less 128, which was added to a signed
    one)."""
    lines = [f"xor.b32 t2, {word}, 0x80808080;"] if signed else []
    for number, name in enumerate(out):
        lines += [
            f"prmt.b32 t0, {'t2' if signed else word}, 0x4B000000, {0x7440 + first + number};", f"mov.b32 {name}, t0;",
            f"sub.f32 {name}, {name}, {'0f4B000080' if signed else '0f4B000000'};", f"mul.f32 {name}, {name}, {factor};",
        ]
    return lines


@compile_time
def _group_scales(scales: str, scale_dtype: str, at: int, half: int) -> list[str]:
    """y0 to y3: the scales of a lane's two columns for output r, then for output r + 8; o0 to o3 their offsets."""
    lines = []
    for output in range(2):
        y = [f"y{2 * output}", f"y{2 * output + 1}"]
        o = [f"o{2 * output}", f"o{2 * output + 1}"]
        word = [f"${at + 8 * number + 4 * output}" for number in range(4)]   # operands of outputs r and r + 8 by turns
        if scales.startswith("half"):
            lines += _halves(word[0], *y, scale_dtype)
            if scales == "half+offset":
                lines += _halves(word[1], *o, scale_dtype)
        else:
            small = NIBBLE_SCALES[scales][0]
            for number, names in enumerate((y, o)[:small]):
                lines += [f"mov.b32 {{h0, h1}}, {word[small + number]};", "cvt.f32.f16 f0, h0;"]
                if scales == "super+offset":
                    lines += _byte_floats(word[number], names, 0, False, "f0")
                else:                                    # four groups of 16: two of each column
                    lines += _byte_floats(word[number], names[:1], half, True, "f0")
                    lines += _byte_floats(word[number], names[1:], 2 + half, True, "f0")
    return lines


@compile_time
def nibble_products(kind: str, dtype: str, begin: int, words: int) -> str:
    """16 outputs x 32 inputs of one warp for each of these words of a tile.

    Operands, four registers each: out sums; in anything, codes of outputs r, codes of outputs r + 8, the mask of x, x of eight
    inputs for each word; then, of outputs r and r + 8 by turns, HIGH_WORDS, all four alike. In fp16 the base is subtracted from
    the numbers: it is 1024, of which the sum of x would keep three bits less.
    """
    high_at = 20 + 4 * words
    lines = [
        ".reg .b32 t<3>; .reg .b32 a<4>; .reg .b32 c<4>; .reg .b32 b<2>; .reg .b32 base; .reg .f32 d<4>;",
        f"mov.b32 base, {BASES[dtype]};",
    ]
    for place in range(words):
        word = begin + place
        for output, name in enumerate("ac"):
            high = word // 2 if kind == "q6" else 0
            lines += _nibble_word(f"${8 + 4 * output + word}", f"${high_at + 8 * high + 4 * output}", name, word, kind, dtype)
            if dtype == "f16":
                lines += [f"sub.f16x2 {name}{number}, {name}{number}, base;" for number in range(4)]
        for part in range(2):
            lines += [f"and.b32 b{number}, ${20 + 4 * place + 2 * part + number}, $16;" for number in (0, 1)]
            left = f"a{2 * part}, c{2 * part}, a{2 * part + 1}, c{2 * part + 1}"
            lines.append(_mma("d", left, ("b0", "b1"), place == part == 0, dtype))
    lines += [f"mov.f32 ${number}, d{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def nibble_scaled(kind: str, dtype: str, scales: str, scale_dtype: str, half: int) -> str:
    """256 inputs in groups of 32, or one half of each group of 32, added to `sums`.

    Operands, four registers each: out sums; in sums, the sums of the groups by two chains, the sums of their inputs, then, for
    outputs r and r + 8 by turns, the words of NIBBLE_SCALES, all four alike.
    """
    offset = scales.endswith("offset")
    too_much = (0 if dtype == "f16" else 128) + (0 if offset else NIBBLES[kind])
    lines = [
        ".reg .b32 t<3>; .reg .b16 h<2>; .reg .f32 d<4>; .reg .f32 y<4>; .reg .f32 o<4>; .reg .f32 s<4>; .reg .f32 f0;",
        *_group_scales(scales, scale_dtype, 20, half),
    ]
    for number in range(4):
        lines += [f"add.f32 d{number}, ${8 + number}, ${12 + number};"]
        if too_much:
            lines += [f"fma.rn.f32 d{number}, ${16 + number}, {_minus(too_much)}, d{number};"]
        lines += [f"fma.rn.f32 s{number}, d{number}, y{number}, ${4 + number};"]
        if offset:
            lines += [f"fma.rn.f32 s{number}, ${16 + number}, o{number}, s{number};"]
    lines += [f"mov.f32 ${number}, s{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def _minus(whole: int) -> str:
    """-whole as a float32 of PTX."""
    bits = whole.bit_length()
    return f"0f{0x80000000 + (126 + bits << 23) + (whole << 24 - bits) - (1 << 23):08X}"


@compile_time
def nibble_registers(kind: str, words: int) -> str:
    """The constraints of `nibble_products`."""
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * (8 + 4 + 4 * words + 8 * HIGH_WORDS[kind]))


@compile_time
def scaled_registers(words: int, x_sums: bool = False) -> str:
    """The constraints of `group_scaled` and, with sums of inputs, of `nibble_scaled`, for this number of words of an output."""
    return ",".join(["=f"] * 4 + ["f"] * (16 if x_sums else 12) + ["r"] * (8 * words))


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
