"""Packed weights of the CPU's kernels: a matrix in tiles (src/products/tiles.h), part by part as a checkpoint stores it.

Filled part by part: from the blocks of a GGUF file, from codes with scales for groups, or from numbers. `numbers` is what the
weights are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops.cpu import native

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "INT4", "INT8",  # as in tiles.h
         "E4M3", "E2M1", "NF4", "F16", "BF16", "F32")
BLOCKS = frozenset(KINDS[:8])        # that a GGUF file stores
INTEGERS = BLOCKS | {"INT4", "INT8"}                     # whose products may be with activations in 8 bits
NUMBERS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
_SPANS = {"Q4_K": 8, "Q5_K": 8, "Q6_K": 8}


class _Segment(ctypes.Structure):
    """As in tiles.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("data", "kind", "rows", "inputs", "span")]


class Part:
    """Outputs of one kind. `span`: tiles of 32 inputs that share a scale, of codes that are not blocks."""

    def __init__(self, kind: str, rows: int, inputs: int, span: int = 1) -> None:
        self.kind, self.rows, self.inputs = kind, rows, inputs
        self.c = _Segment(0, KINDS.index(kind), rows, inputs, _SPANS.get(kind, span))
        size = native.library().matrix_bytes(ctypes.byref(self.c))
        # Zeros: outputs and inputs that only fill a tile. numpy takes fresh pages, which need no zeros written; large ones, which
        # are faulted in at once. A multiple of 64 bytes is where registers are loaded from at once.
        self._kept = torch.from_numpy(np.zeros(size + 63, np.uint8))
        start = -self._kept.data_ptr() % 64
        self.data = self._kept[start : start + size]
        self.c.data = self.data.data_ptr()

    def put_blocks(self, rows: Tensor, first: int = 0) -> None:
        """Rows as a GGUF file stores them, uint8 [rows, bytes]; or numbers of the part's own dtype, as bytes."""
        rows = rows.contiguous()
        native.library().relay_blocks(ctypes.byref(self.c), rows.data_ptr(), first, rows.shape[0], rows.stride(0))

    def put_numbers(self, values: Tensor) -> None:
        """[rows, inputs] of the part's own dtype."""
        filled = torch.nn.functional.pad(values, (0, -values.shape[1] % 32))
        self.put_blocks(filled.contiguous().view(torch.uint8))

    def is_finite(self) -> bool:
        """Whether all scales are."""
        return bool(native.library().scales_finite(ctypes.byref(self.c)))

    def put_codes(self, codes: Tensor, scale: Tensor, offset: Tensor | None = None) -> None:
        """Codes, a byte each, [rows, inputs]; float32 scales and (INT4) offsets [rows, groups]."""
        codes, scale = codes.contiguous(), scale.float().contiguous()
        offset = None if offset is None else offset.float().contiguous()
        native.library().relay_codes(
            ctypes.byref(self.c), codes.data_ptr(), scale.data_ptr(), None if offset is None else offset.data_ptr()
        )


class Matrix:
    """[outputs, inputs]: the parts of a linear, one below the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.outputs, self.inputs = sum(part.rows for part in parts), parts[0].inputs
        self.segments = (_Segment * len(self.parts))(*(part.c for part in self.parts))
        self.address = ctypes.addressof(self.segments)
        self.nbytes = sum(part.data.nbytes for part in self.parts)

    def rows(self, numbers: Tensor, scale: float = 1.0) -> Tensor:
        """float32 [count, inputs]: the outputs of these numbers (int64), times `scale`."""
        numbers = numbers.contiguous()
        out = torch.empty((len(numbers), self.inputs), dtype=torch.float32)
        native.library().matrix_rows(self.address, numbers.data_ptr(), out.data_ptr(), len(numbers), scale)
        return out

    def numbers(self) -> Tensor:
        """float32 [outputs, inputs]"""
        return self.rows(torch.arange(self.outputs))
