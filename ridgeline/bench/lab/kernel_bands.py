"""The kernel table as text: which kernel multiplies which rows, for each weight format and each matrix of an 8B model."""

from __future__ import annotations

from ridgeline.ops.kernel_table import KERNELS, MANY_ROWS, DeviceFacts, bands

MATRICES = {                         # of Llama-3.1-8B: (outputs, inputs, gated); with a gate, outputs are pairs
    "qkv": (6144, 4096, False), "o": (4096, 4096, False), "gate and up": (14336, 4096, True), "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}


def rows_text(first: int, last: int) -> str:
    if last == MANY_ROWS:
        return f"{first}+"
    return str(first) if first == last else f"{first}–{last}"


def kernel_rows(facts: DeviceFacts) -> list[dict[str, str]]:
    """A row for each format and matrix; formats of a CPU have no matrices of their own."""
    found = []
    for format in KERNELS:
        for name, (outputs, inputs, gated) in MATRICES.items():
            served = bands(format, outputs, inputs, gated, facts)
            text = ", ".join(f"{rows_text(first, last)} {kernel}" for first, last, kernel in served)
            found.append({"format": format, "matrix": name, "rows and kernel": text})
    return found
