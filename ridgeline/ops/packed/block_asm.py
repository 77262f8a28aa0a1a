"""PTX for packed weights whose numbers are code * scale + offset (GGUF): codes of 4 to 6 bits to 16-bit numbers.

Scales have two forms. `pair`: 16-bit numbers, as the other packed formats have them. `byte`: a signed byte, which the number of
256 inputs multiplies: the scales of K types, exactly as a file has them.

One row (mma.sync) multiplies the codes as they are (packed_asm.py). Scales multiply the sums of a group in float32, and offsets
the sums of its x, so nothing is rounded.

Many rows (wgmma): the product of both scales is rounded to 16 bits, and so is code * scale + offset: once, by one fma. In fp16
every second code is left where it is in its word, as 1024 + 16 code; the fma that subtracts the base also divides. A bf16 number
has too few bits for that.
"""

from __future__ import annotations

from ridgeline.ops.hopper import compile_time
from ridgeline.ops.packed.packed_asm import _floats, _from_lane, cut_codes, in_place, literal, raw_codes

MIDDLES = {"uint4": 8, "q5": 16, "q6": 32}   # kinds, and the code that means 0 where there is no offset
REGISTERS = (
    ".reg .b32 t<4>; .reg .b32 word; .reg .b32 high; .reg .b32 m<2>; .reg .b32 base<2>; .reg .b32 part; .reg .b32 q<4>; "
    ".reg .b32 p<4>; .reg .f32 f<4>; .reg .b16 h<2>;"
)


@compile_time
def has_high(kind: str) -> bool:
    return kind in ("q5", "q6")


@compile_time
def zero_words(form: str, group: int) -> bool:
    """Whether offsets have words of their own: bytes of groups of 32 share a word with their scales."""
    return form == "pair+offset" or (form == "byte+offset" and group == 16)


@compile_time
def bases(kind: str, dtype: str, offset: bool) -> list[str]:
    """What `code_numbers` subtracts: the base and the code that means 0."""
    middle = 0 if offset else MIDDLES[kind]
    if dtype == "bf16":
        return [f"mov.b32 base0, {0x10001 * (0x4300 + middle)};"]
    odd = 0xD400 + (middle << 4)                         # -(64 + middle)
    return [f"mov.b32 base0, {0x10001 * (0x6400 + middle)};", f"mov.b32 base1, {0x10001 * odd};", "mov.b32 part, 0x2c002c00;"]


@compile_time
def code_numbers(word: str, out: str, kind: str, dtype: str, high: str) -> list[str]:
    """`out`0 to `out`3: the codes of a word less what means 0, exactly. `high`: as in `cut_codes`."""
    half = dtype == "f16"
    lines = cut_codes(word, out, half, high if has_high(kind) else "", 0x64006400 if half else 0x43004300)
    for number in range(4):
        if half and number % 2:
            lines.append(f"fma.rn.f16x2 {out}{number}, {out}{number}, part, base1;")
        else:
            lines.append(f"sub.{dtype}x2 {out}{number}, {out}{number}, base0;")
    return lines


@compile_time
def _twice(word: str, low: str, high: str) -> list[str]:
    """Both halves of a word, each twice in a register. Written so that the assembler may read them as operands' halves."""
    return [f"mov.b32 {{h0, h1}}, {word};", f"mov.b32 {low}, {{h0, h0}};", f"mov.b32 {high}, {{h1, h1}};"]


@compile_time
def pair_factors(word: str, out: str, dtype: str, scale_dtype: str) -> list[str]:
    """The two numbers of a word, each twice in a register."""
    if dtype == scale_dtype:
        return _twice(word, f"{out}0", f"{out}1")
    lines = _floats(word, "f0", "f1", scale_dtype)
    return lines + [f"cvt.rn.{dtype}x2.f32 {out}{number}, f{number}, f{number};" for number in (0, 1)]


@compile_time
def byte_factors(word: str, out: str, dtype: str, multipliers: tuple[str, str]) -> list[str]:
    """The four bytes of a word (+ 128), the first two times the numbers of one multiplier, each product twice in a register."""
    lines = []
    for half, multiplier in enumerate(multipliers):
        lines += [f"prmt.b32 t0, {word}, 0x64646464, {0x4342 if half else 0x4140};", "sub.f16x2 t0, t0, t3;"]
        low, high = f"{out}{2 * half}", f"{out}{2 * half + 1}"
        if dtype == "f16":
            lines += [f"mul.f16x2 t0, t0, {multiplier};", *_twice("t0", low, high)]
            continue
        lines += ["mov.b32 {h0, h1}, t0;", "cvt.f32.f16 f0, h0;", "cvt.f32.f16 f1, h1;"]
        lines += [f"mov.b32 {{h0, h1}}, {multiplier};", "cvt.f32.f16 f2, h0;", "cvt.f32.f16 f3, h1;"]
        lines += ["mul.f32 f0, f0, f2;", "mul.f32 f1, f1, f3;"]
        lines += [f"cvt.rn.bf16x2.f32 {name}, f{number}, f{number};" for number, name in enumerate((low, high))]
    return lines


@compile_time
def weighted(out: str, dtype: str, scales: tuple[str, str], offsets: tuple[str, str] | None) -> list[str]:
    """Codes times their scales, of outputs r and r + 8 by turns, and their offsets added."""
    lines = []
    for number in range(4):
        name, scale = f"{out}{number}", scales[number % 2]
        if offsets is None:
            lines.append(f"mul.{dtype}x2 {name}, {name}, {scale};")
        else:
            lines.append(f"fma.rn.{dtype}x2 {name}, {name}, {scale}, {offsets[number % 2]};")
    return lines


# ── one row ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@compile_time
def _bytes(word: str, out: str) -> list[str]:
    """The four bytes of a word (+ 128) as float32 numbers."""
    lines = []
    for half in (0, 1):
        lines += [f"prmt.b32 t0, {word}, 0x64646464, {0x4342 if half else 0x4140};", "sub.f16x2 t0, t0, t3;"]
        lines += _floats("t0", f"{out}{2 * half}", f"{out}{2 * half + 1}", "f16")
    return lines


@compile_time
def _group(form: str, group: int, scale_dtype: str, block: int, scale: str, zero: str) -> list[str]:
    """g0 to g3 and k0 to k3: scales and offsets of 32 inputs, without their multipliers."""
    byte = form.startswith("byte")
    lines = [_from_lane(scale, "word", block), *(_bytes("word", "g") if byte else _floats("word", "g0", "g1", scale_dtype))]
    if zero_words(form, group):
        lines += [_from_lane(zero, "word", block), *(_bytes("word", "k") if byte else _floats("word", "k0", "k1", scale_dtype))]
    return lines


@compile_time
def named(form: str, group: int, half: int) -> tuple[tuple[str, str], tuple[str, str] | None]:
    """The registers with the scales, and those with the offsets, of one half of 32 inputs."""
    scales, offsets = ("g0", "g1"), ("k0", "k1")
    if form.startswith("byte"):
        if group == 32:
            offsets = ("g2", "g3")
        elif half:
            scales, offsets = ("g2", "g3"), ("k2", "k3")
    return scales, (offsets if form.endswith("offset") else None)


@compile_time
def block_products(kind: str, form: str, group: int, dtype: str, scale_dtype: str, block: int) -> str:
    """16 outputs x 128 inputs of one warp, added to `sums`.

    Operands, four registers each: out sums; in sums, words of two tiles, x of these tiles (two registers for every 16 inputs),
    then, all four alike, four words of scales, four of offsets where they have their own, the word of the multipliers; then the
    upper bits; then the sums of x, of as many inputs as share a scale, times `code_step`, without offsets its negative. `block`:
    which 128 of 512 inputs. u: sums by scales, v: by offsets; the multipliers come last. Of outputs r + 8 u is 16 times as large
    where codes stay in place.
    """
    zero_at, blocks_at, high_at, total_at = _places(kind, form, group)
    lines = [REGISTERS, ".reg .b32 a<4>; .reg .f32 d<4>; .reg .f32 u<2>; .reg .f32 v<2>; .reg .f32 g<4>; .reg .f32 k<4>;"]
    lines += [".reg .f32 y<2>; .reg .f32 s<4>;", *(f"mov.f32 s{number}, ${4 + number};" for number in range(4))]
    lines += [f"mov.f32 {name}, {literal(0)};" for name in ("u0", "u1", "v0", "v1")]
    if form.startswith("byte"):
        lines += ["mov.b32 t3, 0x64806480;"]
        lines += [_from_lane(f"${blocks_at}", f"m{number}", block // 2 * 2 + number) for number in (0, 1)]
    for step in range(8):
        if step % 2 == 0:
            lines += _group(form, group, scale_dtype, block, f"${32 + 2 * step}", f"${zero_at + 2 * step}")
        if has_high(kind):
            lines.append(f"prmt.b32 high, ${high_at + step // 2}, 0, {'0x4342' if step % 2 else '0x4140'};")
        lines += raw_codes(f"${8 + step}", "a", kind, dtype, "high" if has_high(kind) else "")
        begins = group == 16 or step % 2 == 0
        added = ", ".join([literal(0)] * 4) if begins else "d0, d1, d2, d3"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{d0, d1, d2, d3}}, {{a0, a1, a2, a3}}, "
            f"{{${16 + 2 * step}, ${17 + 2 * step}}}, {{{added}}};"
        )
        if group == 16 or step % 2:
            total = f"${total_at + (step if group == 16 else step // 2)}"
            lines += _scaled(total, *named(form, group, step % 2), MIDDLES[kind], _larger(kind, dtype))
    lines += [*_multiplied(form, _larger(kind, dtype)), *(f"mov.f32 ${number}, s{number};" for number in range(4))]
    return "{ " + " ".join(lines) + " }"


@compile_time
def _places(kind: str, form: str, group: int) -> tuple[int, int, int, int]:
    """Where the operands of offsets, multipliers, upper bits and the sums of x begin."""
    zero_at = 4 + 4 + 8 + 16 + 16
    blocks_at = zero_at + (16 if zero_words(form, group) else 0)
    high_at = blocks_at + (4 if form.startswith("byte") else 0)
    return zero_at, blocks_at, high_at, high_at + (4 if has_high(kind) else 0)


@compile_time
def _larger(kind: str, dtype: str) -> int:
    """How much larger the codes of outputs r + 8 are."""
    return 16 if in_place(kind, dtype) else 1


@compile_time
def _scaled(total: str, scales: tuple[str, str], offsets: tuple[str, str] | None, middle: int, larger: int) -> list[str]:
    """The sums of a group's products, d0 and d2, times its scales; `total` is that of its x."""
    if offsets is None:
        less = ((0, literal(middle)), (2, literal(middle * larger)))
        lines = [f"fma.rn.f32 d{name}, {total}, {number}, d{name};" for name, number in less]
    else:
        lines = [f"fma.rn.f32 v{half}, {total}, {name}, v{half};" for half, name in enumerate(offsets)]
    return lines + [f"fma.rn.f32 u{half}, d{2 * half}, {name}, u{half};" for half, name in enumerate(scales)]


@compile_time
def _multiplied(form: str, larger: int) -> list[str]:
    """u and v times their multipliers, added to the sums."""
    lines = []
    if form.endswith("offset") and larger != 1:
        lines += [f"mul.f32 v1, v1, {literal(larger)};"]
    for letter, multiplier in [("u", "m0"), ("v", "m1")][: 2 if form.endswith("offset") else 1]:
        if form.startswith("pair"):
            lines += [f"add.f32 s{2 * half}, s{2 * half}, {letter}{half};" for half in (0, 1)]
            continue
        lines += _floats(multiplier, "y0", "y1", "f16")
        lines += [f"fma.rn.f32 s{2 * half}, {letter}{half}, y{half}, s{2 * half};" for half in (0, 1)]
    return lines


@compile_time
def block_product_registers(kind: str, form: str, group: int) -> str:
    """The constraints of `block_products`."""
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * (_places(kind, form, group)[3] - 8) + ["f"] * (128 // group))


# ── many rows ────────────────────────────────────────────────────────────────────────────────────────────────────────


@compile_time
def pair_text(dtype: str, scale_dtype: str) -> str:
    """Operands: out two factors; in the word, and which 128 of 512 inputs."""
    lines = [REGISTERS, _from_lane("$2", "word", "$3"), *pair_factors("word", "q", dtype, scale_dtype)]
    return "{ " + " ".join(lines + ["mov.b32 $0, q0; mov.b32 $1, q1;"]) + " }"


@compile_time
def byte_text(dtype: str, first: int, second: int) -> str:
    """Operands: out four factors; in the word, the word of the multipliers, and which 128 of 512 inputs. `first` and `second`:
    which multiplier, that of scales or that of offsets."""
    lines = [REGISTERS, "mov.b32 t3, 0x64806480;", _from_lane("$4", "word", "$6"), "and.b32 t0, $6, 2;", "mov.b32 t1, t0;"]
    if first or second:
        lines += ["add.u32 t2, t0, 1;"]
    lines += [_from_lane("$5", f"m{number}", "t2" if number else "t1") for number in sorted({first, second})]
    lines += byte_factors("word", "q", dtype, (f"m{first}", f"m{second}"))
    return "{ " + " ".join(lines + [f"mov.b32 ${number}, q{number};" for number in range(4)]) + " }"


@compile_time
def block_operands(kind: str, dtype: str, offset: bool) -> str:
    """A word as wgmma's left operand.

    Operands: out the word's eight numbers, pair by pair; in the word, the scales of outputs r and r + 8, their offsets, then the
    word with the upper bits and the selector of the word's part of it.
    """
    high_at = 13 if offset else 11
    lines = [REGISTERS, ".reg .b32 n<4>;", *bases(kind, dtype, offset)]
    if has_high(kind):
        lines.append(f"prmt.b32 high, ${high_at}, 0, ${high_at + 1};")
    lines += code_numbers("$8", "n", kind, dtype, "high")
    lines += weighted("n", dtype, ("$9", "$10"), ("$11", "$12") if offset else None)
    lines += [f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, n{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def block_operand_registers(kind: str, offset: bool) -> str:
    """The constraints of `block_operands`."""
    return ",".join(["=h"] * 8 + ["r"] * (3 + (2 if offset else 0) + (2 if has_high(kind) else 0)))
