"""Where one checkpoint tensor goes: the part of it that this rank keeps, and its place in a parameter.

Layers answer `pieces()` with these; the loader matches them with a checkpoint's names and fills each once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    shape: tuple[int, ...]           # of the whole tensor in the checkpoint
    kept: tuple[slice, ...]          # what this rank keeps of it
    target: Tensor                   # a view of the parameter, of the kept part's shape
    dummy: tuple[float, float]       # mean and deviation of a random stand-in that keeps activations sane
    # Also takes the rows as the file packs them, and the name of the packing; None where a part of a row is kept.
    keep_packed: Callable[[Tensor, str], None] | None = None
    # Takes the kept part instead of the target, for parameters that do not hold the checkpoint's numbers.
    store: Callable[[Tensor], None] | None = None
