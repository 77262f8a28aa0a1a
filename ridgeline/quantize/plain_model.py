"""The model to quantise, as plain tensors under Hugging Face names: block by block, one layer in memory at a time.

A block is a layer, or what is outside of all layers. A GGUF file is expanded, renamed, and its rotated rows are put back into
the usual order. A checkpoint that is quantised already is refused: rounding twice hides what the first rounding cost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.errors import ConfigError, ModelError
from ridgeline.models.checkpoints.linear_formats import HEAD
from ridgeline.models.model_config import load_model_config
from ridgeline.models.regrouped import known_as
from ridgeline.models.weights import GGUFSource, Renamer, SafetensorsSource, deinterleaved, open_checkpoint
from ridgeline.quantize.ct_writer import Linear
from ridgeline.quantize.recipes import HEAD as LM_HEAD
from ridgeline.quantize.recipes import MOVES_SCALES, Choice, QuantizeRecipe, stored_scales
from ridgeline.sizes.op_costs import DTYPE_BYTES

OUTSIDE = -1                         # the block of everything that belongs to no layer
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")
_LINEARS = re.compile(r"layers\.\d+\.(attention\.(qkv|output)|mlp\.((experts\.\d+|shared)\.)?(gate_up|up|down))\.weight:\w*")
_ROUTERS = re.compile(r"layers\.\d+\.mlp\.(router|shared_gate)\.weight:")
_EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts)\.\d+\.")
ROUTER = Choice(None, reason="it chooses experts")
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")


class PlainModel:
    def __init__(self, path: Path) -> None:
        self.path, self.config = path, load_model_config(path)
        self.gguf = path.suffix == ".gguf"
        stored = self.config.quantisation
        if stored is not None and not self.gguf:
            raise ModelError(
                f"{path.name} is quantised already ({stored.method}): give the checkpoint that it was made from, in 16 or 32 bits"
            )
        family = self.config.family
        if not self.gguf and (family.transposed or family.by_head):
            raise ModelError(f"{path.name}: checkpoints of {family.name} store matrices in another order and cannot be quantised "
                             "by this command yet; serve with --quantization instead")
        if self.config.headless:
            raise ModelError(f"{path.name} has no head of a language model, whose answers this command would compare; serve with "
                             "--quantization instead")
        if self.config.latent is not None:
            raise ModelError(f"{path.name}: models with latent attention cannot be quantised by this command yet; serve with "
                             "--quantization instead")
        if self.gguf and self.config.family.name not in GGUF_FAMILIES:
            raise ModelError(
                f"{path.name}: GGUF files of {self.config.family.name} cannot be written as a Hugging Face directory yet "
                f"(only {', '.join(GGUF_FAMILIES)}): give the model's directory with config.json"
            )
        self.source: SafetensorsSource | GGUFSource = open_checkpoint(path)
        if self.config.experts is not None:
            self._check_experts()
        self.dtype: torch.dtype = getattr(torch, self.config.dtype)
        self._renamer = Renamer(self.config, self.gguf)
        if isinstance(self.source, SafetensorsSource):
            self.source.check_dtypes(self._renamer.pieces_of)
        self._names = self._hf_names()                   # HF name -> as stored
        self.others = any(name.startswith(tuple(self.config.family.prefixes)) for name in self._names) or any(
            self._renamer.pieces_of(stored) is None for stored in self._names.values())

    def _check_experts(self) -> None:
        """Other engines want codes under the name of each expert."""
        family = self.config.family
        for name in self.source.tensors:
            known, _ = known_as(name, family.prefixes)
            if any(re.fullmatch(rule.pattern, known) for rule in family.fused_experts):
                raise ModelError(f"{self.path.name}: tensor {name} holds all experts of a layer, which this command cannot "
                                 "quantise yet; serve with --quantization instead")

    def _hf_names(self) -> dict[str, str]:
        if not self.gguf:
            return {name: name for name in self.source.tensors}
        back = {target: name for name, target in self.config.family.names.items()}
        found = {}
        for name in self.source.tensors:
            pieces = self._renamer.pieces_of(name)
            if pieces is None:
                raise ModelError(f"{self.path.name}: tensor {name} is not known")
            if len(pieces) == 1:                         # none: rope tensors, which config.json replaces
                found[self._renamed(pieces[0], back)] = name
        return found

    def _renamed(self, piece: str, back: dict[str, str]) -> str:
        path, _, part = piece.partition(":")
        module, _, parameter = path.rpartition(".")
        layer = re.search(r"\.(\d+)\.", module)
        if layer is not None:
            module = module[: layer.start()] + ".{}." + module[layer.end() :]
        name = back[f"{module}:{part}" if part else module]
        return f"{name.format(layer[1]) if layer else name}.{parameter}"

    @property
    def blocks(self) -> list[int]:
        return [OUTSIDE, *range(self.config.num_layers)]

    def names(self, block: int) -> list[str]:
        return [name for name in self._names if self._layer(name) == block]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.tensors[self._names[name]].shape

    @staticmethod
    def _layer(name: str) -> int:
        found = _LAYER.search(name)
        return OUTSIDE if found is None else int(found[1])

    def read(self, name: str) -> Tensor:
        """In the model's dtype. A value that is not finite is an error."""
        stored = self._names[name]
        tensor = self.source.read(stored, None)
        if self.gguf:
            if self.config.family.gguf_permuted and re.search(r"\.[qk]_proj\.", name):
                tensor = deinterleaved(tensor, self.config.head_dim)
            tensor = tensor.to(self.dtype)
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ModelError(f"{self.source.tensors[stored].file}: tensor {stored} holds values that are not finite (NaN or "
                             "infinite): the checkpoint is damaged")
        return tensor.contiguous()

    def linears(self, recipe: QuantizeRecipe) -> list[Linear]:
        """All linears of the decoder with what the recipe makes of them, in order."""
        found = list(self._linears(recipe))
        names = (*(linear.module for linear in found), LM_HEAD)          # a head that is tied to the embedding is no linear
        given = [("--keep", pattern) for pattern in recipe.keep] + [(recipe.name, rule.pattern) for rule in recipe.rules]
        for where, pattern in given:                     # a typing error would leave weights as they are, or change them
            if not any(re.search(pattern, name) for name in names):
                raise ConfigError(f"{where} {pattern!r} matches none of the {len(found)} linears, such as {found[-1].module}")
        _check_alike(found)
        return found

    def _linears(self, recipe: QuantizeRecipe) -> Iterator[Linear]:
        for name, stored in self._names.items():
            pieces = self._renamer.pieces_of(stored) or [""]
            head = pieces[0].startswith(f"{HEAD}.weight")
            routes = _ROUTERS.fullmatch(pieces[0]) is not None
            if not head and not routes and not _LINEARS.fullmatch(pieces[0]):
                continue
            outputs, inputs = self.shape(name)
            module, layer = name.removesuffix(".weight"), None if head else self._layer(name)
            divided = self._expert_inputs() if _EXPERT.match(pieces[0]) else inputs
            choice = ROUTER if routes else recipe.choose(module, divided, layer, self.config.num_layers)
            format = None if choice.format is None else stored_scales(choice.format, self._scale_dtype())
            yield Linear(module, outputs, inputs, layer, format, choice.method, choice.reason,
                         pieces[0].partition(":")[0], self._scale_dtype())

    def _expert_inputs(self) -> int:
        """What a group must divide: gate_up and down of experts get one format, as kernels want it."""
        assert self.config.experts is not None
        return math.gcd(self.config.hidden_size, self.config.experts.width)

    def _scale_dtype(self) -> str:
        return self.config.dtype if self.config.dtype in ("bfloat16", "float16", "float32") else "float32"

    def plain_bytes(self, names: list[str]) -> int:
        """In the output, of tensors that are not quantised."""
        each = DTYPE_BYTES[self.config.dtype]
        return sum(
            torch.Size(self.shape(name)).numel() * each if self.gguf else self.source.tensors[name].nbytes for name in names
        )

    def files(self) -> list[Path]:
        """The input's weight files."""
        if isinstance(self.source, GGUFSource):
            return self.source.files
        return sorted({self.path / stored.file for stored in self.source.tensors.values()})

    def stamps(self) -> list[list[str | int]]:
        """Of these files, what changes with their content; to read them all takes too long."""
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in self.files()]

    def close(self) -> None:
        self.source.__exit__()


def _check_alike(linears: list[Linear]) -> None:
    """The experts of a layer are one set of matrices in the engine, and its norm writes for the router, too."""
    kinds: dict[str, tuple[str, object]] = {}
    for linear in linears:
        found = _EXPERT.match(linear.fused)
        if found is None:
            continue
        if linear.method in MOVES_SCALES and linear.format is not None:
            raise ConfigError(f"{linear.method} cannot move scales into experts, whose router reads the same inputs: use gptq")
        module, format = kinds.setdefault(found[1], (linear.module, linear.format))
        if format != linear.format:
            raise ConfigError(f"the experts of a layer must have one format: {module} and {linear.module} have two")
