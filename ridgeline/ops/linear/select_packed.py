"""Chooses the kernel and its tiles for packed 4-bit weights by rows and shape, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedGemvPlan:
    """One to eight rows: ops/linear/packed_gemv.py."""

    rows: int                        # of x in shared memory: 1 or 8
    strips: int                      # of 16 outputs that a CTA multiplies at a time: 1 or 2
    warps: int
    stages: int                      # units of the ring: 512 inputs of each warp and strip
    programs: int                    # CTAs per SM

    def shared_bytes(self, inputs: int, group: int, zeros: bool) -> int:
        """Shared memory of one CTA."""
        runs = -(-inputs // 512)
        unit = self.warps * self.strips * (4096 + 128 // group * 128 * (2 if zeros else 1))
        rounds = -(-runs // self.warps)
        return self.stages * unit + rounds * self.warps * 512 * self.rows * 2


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
