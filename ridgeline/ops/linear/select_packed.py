"""Chooses the kernel and its tiles for packed 4-bit weights by rows and shape, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedGemvPlan:
    """One to eight rows: ops/linear/packed_gemv.py."""

    rows: int                        # of x in shared memory: 1 or 8
    warps: int                       # that share the inputs of a strip of 16 outputs
    programs: int                    # CTAs per SM

    def shared_bytes(self, inputs: int) -> int:
        """Shared memory that x takes in one CTA."""
        return -(-inputs // (512 * self.warps)) * 512 * self.warps * self.rows * 2


@dataclass(frozen=True, slots=True)
class PackedGemmPlan:
    """More rows: ops/linear/packed_gemm.py."""

    block_rows: int                  # rows of x in a tile
    halves: int                      # times 64 outputs for each of two warpgroups: 1 or 2
    block: int                       # inputs of one stage of either ring
    stages: int                      # of the codes' ring
    x_stages: int                    # of the rows' ring
    splits: int                      # split-K
    step: int                        # strips of 16 outputs in a tile, at most 8 halves

    def shared_bytes(self) -> int:
        """Shared memory that the rings take."""
        return self.block * (self.stages * self.halves * 64 + self.x_stages * self.block_rows * 2)
