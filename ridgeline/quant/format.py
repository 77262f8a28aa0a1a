"""Weight formats as data: the bytes of a quantised matrix. No torch, so that memory is known before anything loads.

A format is named as the option `quantization` names it; `quant/fp8.py` makes and multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 4                      # float32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    code_bytes: float                # of one stored number; each output has one scale

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Of the codes and scales of one matrix."""
        return round(outputs * inputs * self.code_bytes) + outputs * SCALE_BYTES


FORMATS = {
    "fp8": WeightFormat(1.0),
}
