"""A warp that runs the PTX of inline assembly on a CPU, for texts of a few instructions: 32 lanes, registers of 32 bits.

    ptx_warp.run(text, {4: sums, 8: words, ...})     # operands by number, uint32 [32] each; returns the operands afterwards

What an instruction does is written down here once more, from its description. Products add in float64: the order in which a
tensor core adds is not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

Lanes = np.ndarray


def _floats(words: Lanes) -> Lanes:
    return words.astype(np.uint32).view(np.float32)


def _words(values: Lanes) -> Lanes:
    return np.asarray(values, np.float32).view(np.uint32)


def _bf16(words: Lanes) -> tuple[Lanes, Lanes]:
    """The two numbers of each word."""
    return _floats(words << 16).astype(np.float64), _floats(words & 0xFFFF0000).astype(np.float64)


def _bf16_words(low: Lanes, high: Lanes) -> Lanes:
    def rounded(values: Lanes) -> Lanes:
        bits = _words(values).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)

    return rounded(low) | rounded(high) << 16


def _permuted(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    """prmt: four bytes of the eight."""
    eight = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros(32, np.uint64)
    for place in range(4):
        which = (selector >> (4 * place) & 7).astype(np.uint64)
        out |= (eight >> (which * np.uint64(8)) & np.uint64(0xFF)) << np.uint64(8 * place)
    return out.astype(np.uint32)


def _f16(words: Lanes) -> tuple[Lanes, Lanes]:
    low, high = ((words >> shift & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64) for shift in (0, 16))
    return low, high


def _f16_words(low: Lanes, high: Lanes) -> Lanes:
    first, second = (each.astype(np.float16).view(np.uint16).astype(np.uint32) for each in (low, high))
    return first | second << 16


def _e4m3(bytes_: Lanes) -> Lanes:
    sign, exponent, mantissa = bytes_ >> 7, (bytes_ >> 3 & 15).astype(np.int64), bytes_ & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(bytes_ & 127 == 127, np.nan, np.where(sign == 1, -size, size))


def _greater(a: Lanes, b: Lanes) -> Lanes:
    """max.u16x2"""
    return np.maximum(a & 0xFFFF, b & 0xFFFF) | np.maximum(a >> 16, b >> 16) << 16


def _product(a: list[Lanes], b: list[Lanes], c: list[Lanes], pairs: Callable[[Lanes], tuple[Lanes, Lanes]]) -> list[Lanes]:
    """mma.sync m16n8k16 of 16-bit numbers; lane 4 r + t."""
    left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    a_pairs, b_pairs = [pairs(each) for each in a], [pairs(each) for each in b]
    for lane in range(32):
        r, t = divmod(lane, 4)
        for number, pair in enumerate(a_pairs):
            for half in (0, 1):
                left[r + 8 * (number % 2), 2 * t + half + 8 * (number // 2)] = pair[half][lane]
        for number, pair in enumerate(b_pairs):
            for half in (0, 1):
                right[2 * t + half + 8 * number, r] = pair[half][lane]
        for number in range(4):
            sums[r + 8 * (number // 2), 2 * t + number % 2] = _floats(c[number])[lane]
    sums += left @ right
    rows, columns = np.arange(32) // 4, np.arange(32) % 4 * 2
    return [_words(sums[rows + 8 * (number // 2), columns + number % 2]) for number in range(4)]


_INTEGER: dict[str, Callable[..., Lanes]] = {
    "mov.b32": lambda a: a, "mov.f32": lambda a: a, "and.b32": lambda a, b: a & b, "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, n: a >> n, "shl.b32": lambda a, n: a << n, "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b, "prmt.b32": _permuted, "max.u16x2": _greater,
    "bfe.u32": lambda a, first, count: a >> first & ((np.uint32(1) << count) - np.uint32(1)),
}
_FLOAT: dict[str, Callable[..., Lanes]] = {
    "add.f32": lambda a, b: a + b, "sub.f32": lambda a, b: a - b, "mul.f32": lambda a, b: a * b,
    "fma.rn.f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
}
_PAIRS: dict[str, Callable[..., Lanes]] = {
    "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c,
}


class _Warp:
    def __init__(self, operands: dict[int, Lanes]) -> None:
        self.registers = {f"${number}": words.astype(np.uint32) for number, words in operands.items()}

    def read(self, name: str) -> Lanes:
        if name.startswith("0f"):
            return np.full(32, int(name[2:], 16), np.uint32)
        if name[0].isdigit():
            return np.full(32, int(name, 0), np.uint32)
        return self.registers[name]

    def run(self, operation: str, words: list[str]) -> None:
        out, *rest = words
        if operation.startswith("mma.sync"):
            names = [each.strip() for word in words for each in word.strip("{}").split(",")]
            values = [self.read(each) for each in names[4:]]
            sums = _product(values[:4], values[4:6], values[6:], _bf16 if "bf16" in operation else _f16)
            self.registers |= dict(zip(names[:4], sums, strict=True))
        elif out.startswith("{"):                        # mov.b32 {h0, h1}, word
            low, high = (each.strip() for each in out.strip("{}").split(","))
            self.registers |= {low: self.read(rest[0]) & 0xFFFF, high: self.read(rest[0]) >> 16}
        elif rest[0].startswith("{"):                    # mov.b32 word, {h0, h1}
            low, high = (self.read(each.strip()) for each in rest[0].strip("{}").split(","))
            self.registers[out] = low & 0xFFFF | high << 16
        elif operation == "cvt.f32.f16":
            self.registers[out] = _words(self.read(rest[0]).astype(np.uint16).view(np.float16))
        elif operation == "cvt.rn.f16x2.e4m3x2":
            self.registers[out] = _f16_words(*(_e4m3(self.read(rest[0]) >> shift & 0xFF) for shift in (0, 8)))
        elif operation == "lop3.b32":
            a, b, c = (self.read(each) for each in rest[:3])
            assert int(rest[3], 0) == 0xEA               # (a & b) | c
            self.registers[out] = a & b | c
        elif operation == "shfl.sync.bfly.b32":
            self.registers[out] = self.read(rest[0])[np.arange(32) ^ int(rest[1])]
        elif operation == "shfl.sync.idx.b32":
            assert rest[2] == "0x1c03"                   # among four lanes
            self.registers[out] = self.read(rest[0])[np.arange(32) & 28 | self.read(rest[1]) & 3]
        elif operation.startswith("cvt.rn."):            # the second source goes into the lower half
            write = _bf16_words if "bf16x2" in operation else _f16_words
            self.registers[out] = write(*(_floats(self.read(each)) for each in reversed(rest)))
        elif operation in _INTEGER:
            self.registers[out] = _INTEGER[operation](*map(self.read, rest)).astype(np.uint32)
        elif operation in _FLOAT:
            self.registers[out] = _words(_FLOAT[operation](*(_floats(self.read(each)) for each in rest)))
        else:
            name, *_, dtype = operation.split(".")
            read, write = (_bf16, _bf16_words) if dtype == "bf16x2" else (_f16, _f16_words)
            pairs = [read(self.read(each)) for each in rest]
            self.registers[out] = write(*(_PAIRS[name](*(pair[half] for pair in pairs)) for half in (0, 1)))


def run(text: str, operands: dict[int, Lanes]) -> dict[int, Lanes]:
    warp = _Warp(operands)
    for line in text.strip()[1:-1].split(";"):
        found = re.match(r"\s*(\S+)\s+(.*)", line)
        if found is None or found[1] == ".reg":
            continue
        words = [each.strip() for each in re.findall(r"\{[^}]*\}|[^,{}]+", found[2]) if each.strip()]
        warp.run(found[1], words)
    return {int(name[1:]): words for name, words in warp.registers.items() if name.startswith("$")}
