"""A quantised checkpoint as the loader sees every other one: names of parameters, their shapes, and their content one by one.

Wraps a source of tensors as stored. The tensors of a module become the canonical ones of the format that its linear keeps, or
plain numbers where the linear keeps none. Matching, sharding and fusing happen afterwards, on canonical tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.models.checkpoints.canonical import Canonical, canonical, matrix_shape
from ridgeline.models.checkpoints.recipe import Quantisation, Recipe
from ridgeline.ops.quantised.codes import e8m0_numbers, packed_codes, unpacked_codes
from ridgeline.ops.quantised.expand import MIDDLE, expand, spread
from ridgeline.process.log import get_logger
from ridgeline.quant.format import (
    HIGH,
    OFFSET,
    OFFSET_OUTER,
    ORDER,
    OUTER,
    SCALE,
    WEIGHT,
    ZERO,
    TensorSpec,
    WeightFormat,
    per_row,
)
from ridgeline.quant.quantised import quantised_weight

logger = get_logger("models")

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint, as its file's header describes it."""

    shape: tuple[int, ...]
    nbytes: int
    file: str
    dtype: str = "F32"               # as safetensors names it


class RawSource(Protocol):
    tensors: dict[str, Stored]

    def stored(self, name: str) -> Tensor:
        """As it lies in the file."""

    def read(self, name: str, into: Tensor | None) -> Tensor:
        """As numbers."""


@dataclass(slots=True)
class Module:
    """One quantised matrix of the checkpoint."""

    recipe: Recipe
    names: dict[str, str] = field(default_factory=dict)  # role -> tensor
    shape: tuple[int, int] = (0, 0)
    parts: int = 1                   # parts of a fused linear that it holds
    keeps: WeightFormat | None = None                    # of its linear; None: numbers


class QuantisedSource:
    def __init__(
        self, source: RawSource, quantisation: Quantisation, pieces_of: Callable[[str], list[str] | None],
        prefixes: Mapping[str, str], known: Collection[str], formats: Mapping[str, WeightFormat], dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`pieces_of`: the loader's names of what a tensor holds; `known`: those that the model has; `formats`: of its linears,
        by path. Codes are unpacked on `device`; numbers are computed for `dtype`."""
        self.source, self.quantisation, self.prefixes = source, quantisation, prefixes
        self.dtype, self.device = torch.promote_types(dtype, torch.float32), device
        self.modules: dict[str, Module] = {}
        self.tensors: dict[str, Stored] = {}
        self._last: tuple[str, Canonical] = ("", {})
        plain = self._sort(source.tensors)
        for name, module in self.modules.items():
            self._declare(name, module, pieces_of, formats)
        self.tensors |= {name: stored for name, stored in plain.items() if not self._is_no_bias(name, pieces_of, known)}

    # ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _sort(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Tensors of quantised modules into `modules`; returns the others."""
        recipes = {recipe for _, recipe in self.quantisation.rules if recipe is not None}
        recipes |= set(self.quantisation.by_name.values())
        endings = sorted({ending for recipe in recipes for ending in recipe.endings}, key=len, reverse=True)
        scales = [re.compile(pattern) for pattern in self.quantisation.kv_scales]
        plain: dict[str, Stored] = {}
        for name, stored in tensors.items():
            found = self._module_of(name, endings)
            if found is not None:
                module, role, recipe = found
                if role:
                    self.modules.setdefault(module, Module(recipe)).names[role] = name
            elif not any(pattern.fullmatch(name) for pattern in scales):     # those are read by quantisation.py
                plain[name] = stored
        for name in [name for name, module in self.modules.items() if self._is_plain(module, tensors)]:
            only = self.modules.pop(name).names["codes"]
            plain[only] = tensors[only]
        for name, stored in plain.items():
            if stored.dtype not in FLOATS:
                raise ModelError(f"{stored.file}: tensor {name} has dtype {stored.dtype}, which {self.quantisation.method} does "
                                 f"not say how to read; supported: {', '.join(FLOATS)}")
        return plain

    def _module_of(self, name: str, endings: list[str]) -> tuple[str, str, Recipe] | None:
        for ending in endings:
            if name.endswith(ending):
                module = name.removesuffix(ending)
                recipe = self.quantisation.recipe(module, *self._renamed(module))
                if recipe is not None and ending in recipe.endings:
                    return module, recipe.endings[ending], recipe
        return None

    def _renamed(self, module: str) -> list[str]:
        return [new + module.removeprefix(old) for old, new in self.prefixes.items() if module.startswith(old)]

    @staticmethod
    def _is_plain(module: Module, tensors: Mapping[str, Stored]) -> bool:
        """A weight and nothing else that its recipe asks for: norms and embeddings, which rules for all linears match."""
        alone = set(module.names) == {"codes"} and len(module.recipe.tensors) > 1
        return alone and tensors[module.names["codes"]].dtype in FLOATS

    def _is_no_bias(self, name: str, pieces_of: Callable[[str], list[str] | None], known: Collection[str]) -> bool:
        """Some tools give every quantised linear a bias, of zeros where the model has none."""
        module, _, parameter = name.rpartition(".")
        if parameter != "bias" or module not in self.modules or any(target in known for target in pieces_of(name) or ()):
            return False
        return not bool(self.source.stored(name).any())

    def _declare(
        self, name: str, module: Module, pieces_of: Callable[[str], list[str] | None], formats: Mapping[str, WeightFormat]
    ) -> None:
        """The tensors that the loader finds in place of the stored ones."""
        recipe, stored = module.recipe, self.source.tensors
        missing = [role for role, _ in recipe.tensors if role not in module.names and role not in recipe.optional]
        some = stored[next(iter(module.names.values()))]
        if missing:
            ending = dict(recipe.tensors)[missing[0]][0]
            raise ModelError(f"{some.file}: there is no tensor {name}{ending}, which {self.quantisation.method} needs")
        targets = pieces_of(f"{name}.{WEIGHT}")
        if targets == []:                                # a second copy of a tied head
            return
        shapes = {role: stored[tensor].shape for role, tensor in module.names.items()}
        with _naming(some.file, name):
            module.shape = matrix_shape(recipe, shapes, lambda role: self.source.stored(module.names[role]))
        module.parts = len(targets or ("",))
        path = (targets or [""])[0].partition(f".{WEIGHT}:")[0]
        module.keeps = formats.get(path)
        nbytes = sum(stored[tensor].nbytes for tensor in module.names.values())
        specs = (TensorSpec(WEIGHT, "float32"),) if module.keeps is None else per_row(module.keeps).tensors()
        for number, spec in enumerate(specs):
            shape = (module.parts, module.shape[1]) if spec.name == ORDER else spec.shape(*module.shape)
            self.tensors[f"{name}.{spec.name}"] = Stored(shape, nbytes if number == 0 else 0, some.file)

    # ── content ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, name: str, into: Tensor | None) -> Tensor:
        module_name, _, parameter = name.rpartition(".")
        if module_name not in self.modules or parameter == "bias":
            return self.source.read(name, into)
        module = self.modules[module_name]
        if self._last[0] != module_name:
            with _naming(self.tensors[f"{module_name}.{WEIGHT}"].file, module_name):
                self._last = (module_name, self._canonical(module))
        return self._last[1][parameter]

    def _canonical(self, module: Module) -> Canonical:
        tensors = {role: self.source.stored(name).to(self.device) for role, name in module.names.items()}
        recipe = module.recipe
        found = canonical(recipe, tensors)
        if recipe.format.scales is None:
            return found
        written = per_row(recipe.format)
        if module.keeps is None:
            return {WEIGHT: expand(quantised_weight(written, module.shape[1], found), self.dtype)}
        if module.keeps.grid != recipe.format.grid or module.keeps.scales != recipe.format.scales:
            found = widened(found, written, module.keeps, module.shape)
        if ORDER in found:
            found[ORDER] = found[ORDER].expand(module.parts, -1)
        for spec in per_row(module.keeps).tensors():
            if spec.name != ORDER and tuple(found[spec.name].shape) != spec.shape(*module.shape):
                raise ModelError(f"{spec.name} has shape {list(found[spec.name].shape)}, a matrix of {list(module.shape)} needs "
                                 f"{list(spec.shape(*module.shape))}")
        return found


def widened(tensors: Canonical, format: WeightFormat, wider: WeightFormat, shape: tuple[int, int]) -> Canonical:
    """The same numbers in the format that common() found for several: more bits, smaller groups, offsets for zero points."""
    assert format.scales is not None and wider.scales is not None
    codes = unpacked_codes(format.grid, tensors[WEIGHT], tensors.get(HIGH))
    group = wider.scales.block[1]

    def fine(values: Tensor, scales_block: tuple[int, int]) -> Tensor:
        if not group:
            return values
        whole = spread(values, scales_block, shape).expand(shape)
        return whole[:, ::group]

    def product(inner: str, outer: str) -> Tensor:
        assert format.scales is not None
        values = tensors[inner]
        values = e8m0_numbers(values, torch.float32) if format.scales.dtype == "e8m0" else values.float()
        values = fine(values, format.scales.block)
        if outer in tensors and format.scales.outer is not None:
            values = values * fine(tensors[outer].float(), format.scales.outer.block)
        return values

    if wider.grid == "int8" and format.grid != "int8":
        codes = codes.to(torch.int8)                     # at most 63
    weight, high = packed_codes(wider.grid, codes)
    found = {WEIGHT: weight} | ({} if high is None else {HIGH: high})
    if wider.scales.outer is not None:                   # two levels, as before
        outer, small = tensors[OUTER], getattr(torch, wider.scales.dtype)
        scale = fine(tensors[SCALE], format.scales.block).to(small)
        offset = fine(tensors[OFFSET], format.scales.block).to(small) if OFFSET in tensors else scale
        less = tensors.get(OFFSET_OUTER, -MIDDLE.get(format.grid, 0.0) * outer)
        return found | {SCALE: scale, OFFSET: offset, OUTER: outer, OFFSET_OUTER: less}
    scale = product(SCALE, OUTER)
    if OFFSET in tensors:
        offset = product(OFFSET, OFFSET_OUTER)
    elif ZERO in tensors:
        offset = -fine(tensors[ZERO].float(), format.scales.block) * scale
    else:
        offset = -MIDDLE.get(format.grid, 0.0) * scale
    return found | {SCALE: scale, OFFSET: offset}


class _naming:
    """Puts file and module before the message of a ModelError."""

    def __init__(self, file: str, module: str) -> None:
        self.where = f"{file}: {module}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if isinstance(value, ModelError):
            raise ModelError(f"{self.where}: {value}") from None
        if isinstance(value, (RuntimeError, ValueError, IndexError, KeyError, TypeError, OverflowError)):
            said = " ".join(str(value).split())[:200]    # torch's have several lines
            raise ModelError(f"{self.where}: the tensors do not fit its format: {said}") from None
