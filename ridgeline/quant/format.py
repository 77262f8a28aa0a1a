"""Weight formats as data: which codes a linear stores, which scales belong to them, and what that takes. No torch.

Resolve, ledger, plan and costs read these records; `quant/fp8.py` makes and multiplies them. A format is named as the option
`quantization` names it.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 4                      # float32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    name: str                        # of the option's value
    codes: str                       # the stored numbers: "e4m3"
    code_bytes: float
    scales: str                      # what has a scale of its own: "output"
    activations: str                 # what GEMMs of many rows quantise activations to; "": nothing

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Of the codes and scales of one matrix."""
        return round(outputs * inputs * self.code_bytes) + outputs * SCALE_BYTES


FORMATS = {
    "fp8": WeightFormat("fp8", "e4m3", 1.0, "output", "fp8 per token"),
}
