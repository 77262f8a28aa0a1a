"""Chooses the kernel and its tiles for packed 4-bit weights by rows and shape, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedGemvPlan:
    """One to eight rows: ops/linear/packed_gemv.py."""

    rows: int                        # of x in shared memory: 1 or 8
    groups: int                      # strips of 16 outputs that a CTA multiplies at a time
    warps: int                       # that share the inputs of a strip
    programs: int                    # CTAs per SM
    registers: int | None = None     # most of a thread, to have room for the CTAs

    def shared_bytes(self, inputs: int) -> int:
        """Shared memory that x takes in one CTA."""
        return -(-inputs // (512 * self.warps)) * 512 * self.warps * self.rows * 2


@dataclass(frozen=True, slots=True)
class PackedGemmPlan:
    """More rows: ops/linear/packed_gemm.py."""

    block_rows: int                  # rows of x in a tile
    parts: int                       # groups of warps with a program of their own: 1 or 2
    warps: int                       # of each part, with 16 outputs each
    halves: int                      # how often a warp has 16 outputs: 1 or 2
    tiles: int                       # times 64 inputs in a block: 2, 4 or 8
    stages: int                      # blocks of x in the ring
    splits: int                      # split-K
    step: int                        # strips of 16 outputs in a tile, at most parts * warps * halves

    def shared_bytes(self) -> int:
        """Shared memory that the ring takes."""
        return self.tiles * 64 * self.block_rows * 2 * self.stages

    def registers(self) -> int:
        """Of each thread, before the loading warp gives most of its own away. Its warp counts as four."""
        return 65536 // (32 * (self.parts * self.warps + 4)) // 8 * 8
