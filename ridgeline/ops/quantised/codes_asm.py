"""PTX of the GEMV for codes as they are stored (codes_gemv.py): codes to 16-bit numbers, products on mma.sync, scales.

A lane has 16 neighbouring codes of output r and of output r + 8.
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
def byte_products(kind: str, dtype: str, scales: str) -> str:
    """16 outputs x 64 inputs of one warp, added to `sums`.

    Operands, four registers each: out sums; in sums, codes of outputs r, codes of outputs r + 8, x of the first and of the last
    eight of a lane's 16 inputs; then for `block` the scales of outputs r and of outputs r + 8.
    """
    lines = [".reg .b32 t<3>; .reg .b32 scale; .reg .b32 a<4>; .reg .f32 d<4>;", "mov.b32 scale, 0x7b807b80;"]
    for step in range(4):
        for number in range(4):                          # outputs r, r + 8; then the upper two codes of both
            lines += _byte_pair(f"${8 + 4 * (number % 2) + step}", f"a{number}", number >= 2, kind, dtype)
        right = (f"${16 + 2 * step}", f"${17 + 2 * step}")
        lines.append(_mma("d", "a0, a1, a2, a3", right, step == 0, dtype))
    factors = {"row": ["0f3F800000"] * 4, "block": ["$24", "$24", "$28", "$28"]}[scales]
    lines += [f"fma.rn.f32 d{number}, d{number}, {factors[number]}, ${4 + number};" for number in range(4)]
    lines += [f"mov.f32 ${number}, d{number};" for number in range(4)]      # all operands are read by now
    return "{ " + " ".join(lines) + " }"


@compile_time
def byte_registers(scales: str) -> str:
    """The constraints of `byte_products`."""
    words = {"row": [], "block": ["f"] * 8}[scales]
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 16 + words)
