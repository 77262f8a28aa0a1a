"""The weight format of every linear of a model: the checkpoint's own, or what the option `quantization` makes. No torch: memory
is predicted from it, and the worker makes schemes of it.

A fused linear whose parts are stored differently keeps the one format that holds them all, or plain numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ridgeline.distributed.sharding import even_shard, head_shards
from ridgeline.errors import ConfigError
from ridgeline.quant.format import MXFP4, WeightFormat, common, made_format, quantization_rules

if TYPE_CHECKING:
    from ridgeline.models.model_config import ModelConfig

HEAD = "head"
EXPERTS = ".mlp.experts."            # in the path of what all experts of a layer have


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear on one rank."""

    path: str                        # in the decoder
    parts: Mapping[str, int]         # outputs by part
    inputs: int                      # of the whole matrix …
    share: int                       # … and of this rank
    count: int = 1                   # matrices of this shape: a layer's experts

    @property
    def outputs(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Chosen:
    format: WeightFormat | None      # None: the model's dtype
    made: bool = False               # while loading, from plain numbers
    differs: tuple[str, ...] = ()    # formats of parts that had to be brought to one


def linears(config: ModelConfig, ranks: int = 1) -> Iterator[LinearShape]:
    """Of the layers, and the head where it has a weight of its own."""
    heads, _ = head_shards(config.num_heads, config.num_kv_heads, 0, ranks)
    behind = heads.size * config.value_dim
    wide = even_shard(config.intermediate_size, 0, ranks).size
    hidden = config.hidden_size
    for layer in range(config.num_layers):
        for name, parts, inputs in _attention(config, ranks):
            yield LinearShape(f"layers.{layer}.attention.{name}", parts, inputs, inputs)
        yield LinearShape(f"layers.{layer}.attention.output", {"": hidden}, config.num_heads * config.value_dim, behind)
        if config.experts is not None and layer not in config.experts.dense:
            continue                                     # what is beside experts keeps the model's dtype
        if config.gated:
            yield LinearShape(f"layers.{layer}.mlp.gate_up", {"gate": wide, "up": wide}, hidden, hidden)
        else:
            yield LinearShape(f"layers.{layer}.mlp.up", {"": wide}, hidden, hidden)
        yield LinearShape(f"layers.{layer}.mlp.down", {"": hidden}, config.intermediate_size, wide)
    if not config.tied:
        yield LinearShape(HEAD, {"": even_shard(config.vocab_size, 0, ranks).size}, hidden, hidden)


def _attention(config: ModelConfig, ranks: int) -> list[tuple[str, dict[str, int], int]]:
    """(name, outputs by part, inputs) of the linears before attention. What widens a latent's keys and values is multiplied by in
    two parts: it is always plain numbers, and no linear of this list."""
    heads, kv_heads = head_shards(config.num_heads, config.num_kv_heads, 0, ranks)
    q, kv, latent = heads.size * config.head_dim, kv_heads.size * config.head_dim, config.latent
    if latent is None:
        return [("qkv", {"q": q, "k": kv, "v": kv}, config.hidden_size)]
    if not latent.query_rank:
        return [("qkv", {"q": q, "kv_down": latent.width}, config.hidden_size)]
    return [
        ("qkv", {"q_down": latent.query_rank, "kv_down": latent.width}, config.hidden_size),
        ("q_up", {"": q}, latent.query_rank),
    ]


def expert_matrices(config: ModelConfig, ranks: int = 1) -> Iterator[LinearShape]:
    """Of every layer with a mixture: gate and up of its experts, and down."""
    experts, hidden = config.experts, config.hidden_size
    if experts is None:
        return
    wide = even_shard(experts.width, 0, ranks).size
    for layer in (each for each in range(config.num_layers) if each not in experts.dense):
        inside = f"layers.{layer}{EXPERTS}"
        yield LinearShape(inside + "gate_up", {"gate": wide, "up": wide}, hidden, hidden, experts.count)
        yield LinearShape(inside + "down", {"": hidden}, experts.width, wide, experts.count)


def expert_bytes(
    config: ModelConfig, quantization: str, device: str, ranks: int = 1, dtype: str = "bfloat16"
) -> float | None:
    """Bytes of a weight of the experts, their scales included; None: they have the model's dtype."""
    found = [
        (format.nbytes(shape.outputs, shape.share), shape.outputs * shape.share)
        for shape, format in LinearFormats(config, quantization, device, ranks, dtype).experts()
    ]
    return sum(nbytes for nbytes, _ in found) / sum(size for _, size in found) if found else None


class LinearFormats:
    """By a linear's path. On a CPU a checkpoint's codes are expanded while they load: its kernels multiply numbers. So are
    those of experts unless x is bfloat16, which their kernels need."""

    def __init__(
        self, config: ModelConfig, quantization: str, device: str, ranks: int = 1, dtype: str = "bfloat16"
    ) -> None:
        self.config = config
        self.rules = quantization_rules(quantization, config.quantisation.method if config.quantisation else "")
        self.keeps = device == "cuda"
        self.keeps_experts = self.keeps and dtype == "bfloat16"
        self.ranks = ranks
        self._shapes = {linear.path: linear for linear in linears(config, ranks)}
        self._experts = {matrix.path: matrix for matrix in expert_matrices(config, ranks)}
        self._chosen: dict[str, Chosen] = {}
        self._modules = _modules(config)

    def __call__(self, path: str) -> Chosen:
        if path not in self._chosen:
            self._chosen[path] = self._choose(path)
        return self._chosen[path]

    def shapes(self) -> Iterator[tuple[LinearShape, WeightFormat]]:
        """Every linear that has a format, which is fitted to its parts and shards."""
        for path, shape in self._shapes.items():
            format = self(path).format
            if format is not None:
                yield shape, format.fitted(shape.parts.values(), shape.inputs, shape.share)

    def experts(self) -> Iterator[tuple[LinearShape, WeightFormat]]:
        """The matrices of experts that are kept as codes."""
        for path, shape in self._experts.items():
            format = self(path).format
            if format is not None:
                yield shape, format

    def _expert_format(self, path: str) -> Chosen:
        """A layer's experts are kept as codes where the kernels of ops/experts know both formats: they have MXFP4."""
        layer = path.partition(EXPERTS)[0]
        both = [self._format(shape) for name, shape in self._experts.items() if name.startswith(layer + EXPERTS)]
        whole = all(shape.share % 32 == 0 for shape in self._experts.values())
        known = all(chosen.format is not None and replace(chosen.format, activation=None) == MXFP4 for chosen in both)
        return Chosen(MXFP4, made=both[0].made) if self.keeps_experts and whole and known else Chosen(None)

    def _choose(self, path: str) -> Chosen:
        if path in self._experts:
            return self._expert_format(path)
        if path not in self._shapes:                     # a tied head is the embedding
            return Chosen(None)
        return self._format(self._shapes[path])

    def _format(self, shape: LinearShape) -> Chosen:
        path = shape.path
        if self.config.quantisation is not None and not self.rules:
            return self._stored(shape)
        name = next((name for pattern, name in self.rules.items() if re.search(pattern, path)), "none")
        if name == "none" or (path == HEAD and not any(re.search(rule, HEAD) for rule in self.rules if rule)):
            return Chosen(None)                          # the head only where a pattern names it
        return Chosen(made_format(name, shape.inputs, shape.share), made=True)

    def _stored(self, shape: LinearShape) -> Chosen:
        quantisation = self.config.quantisation
        assert quantisation is not None
        found = []
        for module in self._modules_of(shape):
            recipe = quantisation.recipe(*_spellings(self.config, module))
            found.append(None if recipe is None or recipe.format.scales is None else recipe.format)
        if not self.keeps or all(format is None for format in found):
            return Chosen(None)
        if any(format is not None and format.reordered for format in found) and self.ranks > 1:
            raise ConfigError(
                "tensor_parallel_size above 1 does not work with this checkpoint: its inputs are sorted by activation "
                "(desc_act), and every rank would need the inputs of the others; use tensor_parallel_size 1"
            )
        format = common(found)
        names = tuple("none" if each is None else each.name for each in found)
        return Chosen(format, differs=names if len(set(names)) > 1 else ())

    def _modules_of(self, shape: LinearShape) -> list[str]:
        """Of experts, the first one's: all are stored alike."""
        path = shape.path.replace(EXPERTS, EXPERTS + "0.")
        numbers = re.findall(r"\.(\d+)\.", path)
        base, own = re.sub(r"\.\d+\.", ".{}.", path), shape.parts
        return [
            name.format(*numbers) for parts, name in self._modules.get(base, []) if set(parts.split("+")) <= set(own)
        ]


def _modules(config: ModelConfig) -> dict[str, list[tuple[str, str]]]:
    """Our linear -> (parts, module) of the checkpoint's modules that hold it, `{}` for the layer: one for each part, or one for
    all. A family may have names for parts that a model of it lacks."""
    gguf = bool(config.quantisation is not None and config.quantisation.method == "gguf")
    found: dict[str, dict[str, str]] = {}
    for name, target in (config.family.gguf_names if gguf else config.family.names).items():
        base, _, parts = target.partition(":")
        found.setdefault(base, {})[parts] = name
    known = config.quantisation.by_name if config.quantisation is not None else {}
    chosen = {}
    for base, by_parts in found.items():
        fused = [(parts, name) for parts, name in by_parts.items() if "+" in parts]
        separate = [(parts, name) for parts, name in by_parts.items() if "+" not in parts]
        if gguf and fused and fused[0][1].format(0) not in known:
            fused = []                                   # a file has either names
        chosen[base] = fused or separate
    return chosen


def _spellings(config: ModelConfig, module: str) -> list[str]:
    """A module's name as the family has it, and as checkpoints with other modalities have it."""
    return [module] + [
        prefix + module.removeprefix(stands_for) for prefix, stands_for in config.family.prefixes.items()
        if module.startswith(stands_for)
    ]
