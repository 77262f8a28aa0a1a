"""The weight format of every linear of a model: the checkpoint's own, or what the option `quantization` makes. No torch: memory
is predicted from it, and the worker makes schemes of it.

A fused linear whose parts are stored differently keeps the one format that holds them all, or plain numbers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ridgeline.distributed.sharding import even_shard, head_shards
from ridgeline.errors import ConfigError
from ridgeline.models.model_config import ModelConfig
from ridgeline.ops.kernel_table import DeviceFacts
from ridgeline.quant.format import MXFP4, ORDER, WEIGHT, WeightFormat, common, made_format, quantization_rules
from ridgeline.quant.gpu_layout import gpu_bytes, gpu_layout
from ridgeline.quant.layout import NUMBER_KINDS, format_kind, matrix_bytes, plain_bytes
from ridgeline.sizes.op_costs import DTYPE_BYTES

HEAD = "head"
EMBEDDING = "embed"
EXPERTS = ".mlp.experts."            # in the path of what all experts of a layer have …
EXPERT_MATRICES = ("gate_up", "down")    # … which are these


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

    @property
    def paired(self) -> bool:
        return set(self.parts) == {"gate", "up"}

    def nbytes(self, format: WeightFormat, device: DeviceFacts, dtype: str = "bfloat16") -> int:
        """Of one matrix as a GPU holds it, in a format that is fitted to this shape, beside activations of this dtype."""
        return gpu_bytes(format, self.outputs, self.share, self.paired, device, dtype)

    def layout(self, format: WeightFormat, device: DeviceFacts) -> str:
        """How a GPU holds it: gpu_layout.py."""
        return gpu_layout(format, self.outputs, self.share, self.paired, device)


@dataclass(frozen=True, slots=True)
class Chosen:
    format: WeightFormat | None      # None: the model's dtype
    made: bool = False               # while loading, from plain numbers
    differs: tuple[str, ...] = ()    # formats of parts that had to be brought to one
    expands: tuple[str, ...] = ()    # of experts: formats in which they are stored, and not kept


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


def _multiplies(format: WeightFormat, shape: LinearShape) -> bool:
    """Whether the kernels of ops/experts have a format: MXFP4, groups of 4-bit integers, fp8 with scales of blocks or rows.
    Blocks end where a part of the matrix ends."""
    scales = format.scales
    if scales is None or format.reordered or format.sparse or scales.outer is not None or scales.zero == "offset":
        return False
    rows, group = scales.block
    whole = all(part % rows == 0 for part in shape.parts.values()) and (not group or shape.share % group == 0)
    if format.grid == "e4m3":
        return whole and scales.dtype == "float32" and scales.zero is None and group in (0, 128)
    integers = format.grid == "uint4" and rows == 1 and group in (32, 64, 128) and scales.dtype in ("float16", "bfloat16")
    return whole and (integers or (format.grid, scales) == (MXFP4.grid, MXFP4.scales))


class LinearFormats:
    """By a linear's path. On a CPU codes that its tiles do not hold are expanded while they load. So are those of experts unless
    x is bfloat16, which their kernels need."""

    def __init__(
        self, config: ModelConfig, quantization: str, device: str, ranks: int = 1, dtype: str = "bfloat16"
    ) -> None:
        self.config = config
        self.rules = quantization_rules(quantization, config.quantisation.method if config.quantisation else "")
        self.device = device
        self.computes_wide = dtype == "float32"
        self.keeps_experts = device == "cuda" and dtype == "bfloat16"
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

    def code_bytes(self, dtype: str, kernels: DeviceFacts) -> dict[str, int]:
        """By path: the bytes that codes on a GPU take beyond numbers of that dtype, fewer than none."""
        wide = DTYPE_BYTES[dtype]
        return {
            shape.path: shape.count * (shape.nbytes(format, kernels, dtype) - shape.outputs * shape.share * wide)
            for shape, format in itertools.chain(self.shapes(), self.experts())
        }

    def _expert_format(self, path: str) -> Chosen:
        """A layer's experts are kept as codes where the kernels of ops/experts know their format, one for all matrices."""
        inside = "".join(path.partition(EXPERTS)[:2])
        shapes = [self._experts[inside + name] for name in EXPERT_MATRICES]
        both = [self._format(shape) for shape in shapes]
        formats = [None if chosen.format is None else replace(chosen.format, activation=None) for chosen in both]
        format = formats[0]
        known = format is not None and all(other == format for other in formats)
        if format is None or not (self.keeps_experts and known and all(_multiplies(format, shape) for shape in shapes)):
            return Chosen(None, expands=self._stored_experts(shapes))
        return Chosen(format, made=both[0].made)

    def _stored_experts(self, shapes: list[LinearShape]) -> tuple[str, ...]:
        found = [each for shape in shapes for each in self.of_parts(shape) if each is not None] if not self.rules else []
        return tuple(sorted({format.name for format in found}))

    def _choose(self, path: str) -> Chosen:
        if path in self._experts:                        # both matrices of a layer have it
            inside, chosen = "".join(path.partition(EXPERTS)[:2]), self._expert_format(path)
            self._chosen |= {inside + name: chosen for name in EXPERT_MATRICES}
            return chosen
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

    def of_parts(self, shape: LinearShape) -> list[WeightFormat | None]:
        """What the checkpoint stores: of each part, or of the one tensor that holds all."""
        quantisation = self.config.quantisation
        if quantisation is None:
            return [None]
        recipes = [quantisation.recipe(*_spellings(self.config, self._held(names))) for names in self._modules_of(shape)]
        return [None if recipe is None or recipe.format.scales is None else recipe.format for recipe in recipes]

    def _held(self, names: list[str]) -> list[str]:
        """Those that the checkpoint's files hold: a list of modules to skip may match a name that only other checkpoints have.
        All, where there are no files, or where one tensor holds all experts."""
        held = self.config.quantisation.held if self.config.quantisation is not None else frozenset()
        if not held:
            return names
        return [name for name in names if not held.isdisjoint(_spellings(self.config, [name]))] or names

    def kinds(self, shape: LinearShape) -> list[str]:
        """In which a CPU keeps the numbers of each part, or of the one tensor that holds all: codes are expanded to float32."""
        modules, coded = self._modules_of(shape), self.of_parts(shape)
        if ".shared." not in shape.path and shape.path not in self._shapes:
            coded = [None]                               # rules for all linears match an embedding and a router, too
            if self.config.quantisation is not None and shape.path == EMBEDDING:
                names = [name for module in modules for name in _spellings(self.config, self._held(module))]
                coded = [self.config.quantisation.embedding_format(*names)]
        if len(coded) != len(modules):
            coded = coded[:1] * len(modules)
        found = []
        for names, format in zip(modules, coded, strict=True):
            weights = [f"{name}.{WEIGHT}" for name in _spellings(self.config, names)]
            dtype = next((self.config.stored[name] for name in weights if name in self.config.stored), self.config.dtype)
            found.append("F32" if format is not None else NUMBER_KINDS.get(dtype, "F32"))
        return found or [NUMBER_KINDS.get(self.config.dtype, "F32")]

    def _stored(self, shape: LinearShape) -> Chosen:
        found = self.of_parts(shape)
        if all(format is None for format in found):
            return Chosen(None)
        reordered = any(format is not None and format.reordered for format in found) and self.ranks > 1
        format = common(found)
        if self.device != "cuda" and (reordered or not self._tiles_hold(shape, format)):
            return Chosen(None)
        if reordered:
            raise ConfigError(
                "tensor_parallel_size above 1 does not work with this checkpoint: its inputs are sorted by activation "
                "(desc_act), and every rank would need the inputs of the others; use tensor_parallel_size 1"
            )
        names = tuple("none" if each is None else each.name for each in found)
        return Chosen(format, differs=names if len(set(names)) > 1 else ())

    def _tiles_hold(self, shape: LinearShape, format: WeightFormat | None) -> bool:
        """On a CPU. The blocks of a GGUF file stay as they are, and are no format of a linear."""
        assert self.config.quantisation is not None
        if format is None or self.config.quantisation.method == "gguf" or self.device != "cpu" or not self.computes_wide:
            return False
        return format_kind(format.fitted(shape.parts.values(), shape.inputs, shape.share), shape.share) is not None

    def _modules_of(self, shape: LinearShape) -> list[list[str]]:
        """The names of each part. Of experts, the first one's: all are stored alike."""
        path = shape.path.replace(EXPERTS, EXPERTS + "0.")
        numbers = re.findall(r"\.(\d+)\.", path)
        base, own = re.sub(r"\.\d+\.", ".{}.", path), shape.parts
        return [
            [name.format(*numbers) for name in names] for parts, names in self._modules.get(base, [])
            if set(parts.split("+")) <= set(own)
        ]


def _modules(config: ModelConfig) -> dict[str, list[tuple[str, list[str]]]]:
    """Our linear -> (parts, names) of the checkpoint's modules that hold it, `{}` for the layer: one for each part, or one for
    all. A family may have names for parts that a model of it lacks."""
    gguf = bool(config.quantisation is not None and config.quantisation.method == "gguf")
    found: dict[str, dict[str, list[str]]] = {}
    for name, target in (config.family.gguf_names if gguf else config.family.names).items():
        base, _, parts = target.partition(":")
        found.setdefault(base, {}).setdefault(parts, []).append(name)
    known = config.quantisation.by_name if config.quantisation is not None else {}
    chosen = {}
    for base, by_parts in found.items():
        fused = [(parts, names) for parts, names in by_parts.items() if "+" in parts]
        separate = [(parts, names) for parts, names in by_parts.items() if "+" not in parts]
        if gguf:                                         # a file has either names, and says which
            chosen[base] = fused if fused and fused[0][1][0].format(0) in known else separate
        else:
            # A checkpoint has either names; its rules match those that it has. A name of all parts is one of each.
            inside = {part: [*names, *(each for parts, others in fused for each in others if part in parts.split("+"))]
                      for part, names in separate}
            chosen[base] = list(inside.items()) or fused
    return chosen


def _spellings(config: ModelConfig, names: list[str]) -> list[str]:
    """A module's names as the family has them, and as checkpoints with other modalities have them."""
    return names + [
        prefix + name.removeprefix(stands_for) for name in names for prefix, stands_for in config.family.prefixes.items()
        if name.startswith(stands_for)
    ]


# ── bytes on a CPU ───────────────────────────────────────────────────────────────────────────────────────────────────

_WIDE = 4                            # bytes of a number that is in no matrix


def cpu_weight_bytes(config: ModelConfig, ranks: int, quantization: str) -> int:
    """Of the weights on one rank, without the padding of uneven shards. Matrices are as wide as the checkpoint stores them, and
    taken to lie in tiles also where the native kernels cannot be built."""
    formats = LinearFormats(config, quantization, "cpu", ranks, "float32")
    given = {shape.path: format for shape, format in formats.shapes()}
    if ranks == 1 and config.packed and not given:       # a GGUF file
        weights, tiles = sum(matrix.weights for matrix in config.packed), sum(matrix.nbytes for matrix in config.packed)
        return _WIDE * (config.num_parameters - weights) + tiles
    weights = tiles = 0
    for shape in linears(config, ranks):
        weights += shape.outputs * shape.share
        tiles += _linear_bytes(formats, shape, given.get(shape.path), ranks)
    if ranks == 1:
        for shape in _others(config):
            weights += shape.outputs * shape.inputs
            tiles += _numbers_bytes(formats.kinds(shape), shape, shape.path != EMBEDDING or config.tied)
    elif config.tied:                                    # the head's second layout of its shard of the embedding
        share = config.vocab_size // ranks
        tiles += plain_bytes(share, config.hidden_size) - _WIDE * share * config.hidden_size
    return _WIDE * max(0, config.num_parameters // ranks - weights) + tiles


def _linear_bytes(formats: LinearFormats, shape: LinearShape, format: WeightFormat | None, ranks: int) -> int:
    if format is not None:
        found = format_kind(format, shape.share)         # what tiles do not hold is expanded
        if found is None:
            return plain_bytes(shape.outputs, shape.share)
        order = sum(spec.nbytes(shape.outputs, shape.share) for spec in format.tensors() if spec.name == ORDER)
        return matrix_bytes(found[0], shape.outputs, shape.share, found[1]) + order
    if ranks > 1:                                        # shards are expanded
        return plain_bytes(shape.outputs, shape.share)
    return _numbers_bytes(formats.kinds(shape), shape)


def _numbers_bytes(stored: list[str], shape: LinearShape, is_linear: bool = True) -> int:
    """Of one matrix, of parts with these kinds."""
    parts = list(shape.parts.values())
    kinds = stored if len(stored) == len(parts) else stored[:1] * len(parts)     # one tensor holds all parts
    if set(kinds) == {"F32"}:
        return plain_bytes(shape.outputs, shape.inputs, is_linear)
    return sum(matrix_bytes(kind, outputs, shape.inputs) for kind, outputs in zip(kinds, parts, strict=True))


def _others(config: ModelConfig) -> Iterator[LinearShape]:
    """The matrices that have no format of their own: the embedding, and what is beside experts."""
    experts, hidden = config.experts, config.hidden_size
    yield LinearShape(EMBEDDING, {"": config.vocab_size}, hidden, hidden)
    if experts is None:
        return
    for layer in (each for each in range(config.num_layers) if each not in experts.dense):
        inside = f"layers.{layer}.mlp."
        yield LinearShape(inside + "router", {"": experts.count}, hidden, hidden)
        if experts.shared_gate:
            yield LinearShape(inside + "shared_gate", {"": 1}, hidden, hidden)
        if experts.shared:
            yield LinearShape(inside + "shared.gate_up", {"gate": experts.shared, "up": experts.shared}, hidden, hidden)
            yield LinearShape(inside + "shared.down", {"": hidden}, experts.shared, experts.shared)
