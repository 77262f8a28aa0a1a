"""Tensors that hold the same parameter of all experts, [experts, …], as one tensor for each expert.

So matching, sharding and dequantising see every checkpoint alike: one matrix for each linear of each expert.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.models.checkpoints.quantised_source import RawSource, Stored
from ridgeline.models.family import FusedExperts


class SplitExperts:
    def __init__(self, source: RawSource, rules: tuple[FusedExperts, ...]) -> None:
        self.source = source
        self.tensors: dict[str, Stored] = {}
        self._parts: dict[str, tuple[str, int, FusedExperts]] = {}       # our name -> the tensor, the expert, and how it lies
        self._last: tuple[str, bool, Tensor] | None = None       # all experts of a tensor are read one after the other
        for name, stored in source.tensors.items():
            self._add(name, stored, rules)

    def _add(self, name: str, stored: Stored, rules: tuple[FusedExperts, ...]) -> None:
        for rule in rules:
            found = re.fullmatch(rule.pattern, name)
            if found is None:
                continue
            if len(stored.shape) < 2:
                raise ModelError(f"{stored.file}: tensor {name} has shape {list(stored.shape)}: no room for several experts")
            count, *shape = stored.shape
            if rule.transposed:
                shape[:2] = shape[1::-1]
            each = replace(stored, shape=tuple(shape), nbytes=stored.nbytes // max(1, count))
            for expert in range(count):
                single = found.expand(rule.name).format(expert)
                self.tensors[single], self._parts[single] = each, (name, expert, rule)
            return
        self.tensors[name] = stored

    def read(self, name: str, into: Tensor | None) -> Tensor:
        """As numbers."""
        if name not in self._parts:
            return self.source.read(name, into)
        return self._part(name, as_stored=False)

    def stored(self, name: str) -> Tensor:
        """As it lies in the file."""
        return self.source.stored(name) if name not in self._parts else self._part(name, as_stored=True)

    def _part(self, name: str, as_stored: bool) -> Tensor:
        fused, expert, rule = self._parts[name]
        if self._last is None or self._last[:2] != (fused, as_stored):
            whole = self.source.stored(fused) if as_stored else self.source.read(fused, None)
            self._last = (fused, as_stored, whole)
        part = self._last[2][expert]
        if rule.transposed:
            part = part.transpose(0, 1)
        return torch.cat((part[0::2], part[1::2])) if rule.paired else part
