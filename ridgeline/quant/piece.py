"""Where one checkpoint tensor goes: the part that this rank keeps, and its place in a parameter.

A scheme's `pieces` returns these for its parameters; the loader matches them with a checkpoint's names and fills each once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Makes the whole tensor of dummy weights.
Dummy = Callable[[torch.Generator, tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    shape: tuple[int, ...]           # of the whole tensor in the checkpoint
    kept: tuple[slice, ...]          # what this rank keeps of it
    target: Tensor                   # a view of the parameter, of the kept part's shape
    # Dummy weights: mean and standard deviation of numbers that keep activations in range, or a function where they are codes.
    dummy: tuple[float, float] | Dummy
    # Takes the rows as a GGUF file packs them instead of numbers, and the packing's name; says whether all are finite.
    take_packed: Callable[[Tensor, str], bool] | None = None
    # Takes the kept part instead of the target, for parameters that do not hold the checkpoint's numbers.
    store: Callable[[Tensor], None] | None = None
