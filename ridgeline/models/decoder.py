"""The decoder: one stack of layers for every family.

The ModelConfig says what a model is; nothing here or below branches on a family's name. Activations pass through the
layers as (x, residual), so that the next norm adds the residual. No rank arithmetic and no names of weights: layers know
their shard, the mesh knows which layers are here, `weights.py` knows checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.distributed.comm import Communicator
from ridgeline.distributed.sharding import Shard
from ridgeline.layers.attention import Attention, AttentionSpec
from ridgeline.layers.batch import Batch
from ridgeline.layers.context_attention import ContextAttention, ContextLatentAttention
from ridgeline.layers.embedding import LMHead, PositionEmbedding, VocabEmbedding
from ridgeline.layers.expert_weights import ExpertWeights
from ridgeline.layers.kv import LayerKV
from ridgeline.layers.latent_layer import LatentAttention, LatentSizes
from ridgeline.layers.linear import Linear, Placement, normed_rows
from ridgeline.layers.mixture import Mixture, MixtureSpec
from ridgeline.layers.mlp import GatedMLP, PlainMLP
from ridgeline.layers.norm import BareLayerNorm, BareNorm, LayerNorm, NoNorm, RMSNorm, Times, TimesNorm
from ridgeline.models.latent_config import LATENT_EPS
from ridgeline.models.model_config import ModelConfig, layer_groups
from ridgeline.ops.vocabulary_ends import soft_cap
from ridgeline.quant.cpu_packed import plain_scheme
from ridgeline.quant.format import WeightFormat
from ridgeline.quant.quantised import TENSORS as QUANTISED_TENSORS
from ridgeline.quant.quantised import Quantised
from ridgeline.quant.scheme import Scheme


def make_norm(config: ModelConfig, size: int, place: Placement) -> RMSNorm | LayerNorm:
    """A norm of the residual stream."""
    if config.norm == "bare layer":
        return BareLayerNorm(size, config.rms_norm_eps, place.dtype, place.device)
    if config.norm == "rms":
        return RMSNorm(size, config.rms_norm_eps, config.norm_offset, place.dtype, place.device)
    return LayerNorm(
        size, config.rms_norm_eps, config.norm_offset, place.dtype, place.device, config.norm == "layer+bias"
    )


def post_norm(config: ModelConfig, place: Placement) -> nn.Module | None:
    """What comes behind attention and behind the MLP, before their result is added to the stream."""
    if config.post_norms and config.residual_scale != 1.0:
        return TimesNorm(config.hidden_size, config.rms_norm_eps, config.residual_scale, place.dtype, place.device)
    if config.post_norms:
        return make_norm(config, config.hidden_size, place)
    return None if config.residual_scale == 1.0 else Times(config.residual_scale)


def make_attention(config: ModelConfig, number: int, spec: AttentionSpec, place: Placement) -> Attention | LatentAttention:
    inside, latent = place.inside("attention"), config.latent
    if latent is not None:
        sizes = LatentSizes(
            latent.query_rank, latent.kv_rank, latent.nope, latent.rope, latent.value, latent.interleaved, LATENT_EPS
        )
        return (ContextLatentAttention if place.context.size > 1 else LatentAttention)(spec, sizes, inside)
    kind = ContextAttention if place.context.size > 1 else Attention
    if config.bare_qk_norm and config.ropes[number].turns:
        # Llama-4 norms behind the rotation, which changes no length: it is the same before it.
        bare = BareNorm(config.head_dim, config.rms_norm_eps, place.dtype, place.device)
        return kind(spec, (bare, bare), inside)
    if not config.qk_norm:
        return kind(spec, None, inside, wide_eps=config.rms_norm_eps if config.wide_qk_norm else None)
    norms = [RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset, place.dtype, place.device) for _ in range(2)]
    return kind(spec, (norms[0], norms[1]), inside)


def inner_eps(config: ModelConfig) -> float | None:
    """Of the norms before the output matrices of attention and MLP, where there are such norms."""
    return config.rms_norm_eps if config.inner_norms else None


def make_mlp(config: ModelConfig, number: int, place: Placement) -> GatedMLP | PlainMLP | Mixture:
    experts, inside = config.experts, place.inside("mlp")
    if experts is None or number in experts.dense:
        sizes = (config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias, inside)
        return GatedMLP(*sizes, inner_eps(config)) if config.gated else PlainMLP(*sizes)
    routing = experts.routing
    rule = {name: getattr(routing, name) for name in ("score", "normalise", "groups", "top_groups", "group_score", "scale")}
    if routing.jitter:
        rule["jitter"] = routing.jitter
    return Mixture(MixtureSpec(
        config.hidden_size, experts.count, experts.used, experts.width, experts.shared, experts.shared_gate, config.activation,
        experts.bias, experts.router_bias, routing.choice_bias, experts.zipf > 0, experts.limit,
        experts.alpha, experts.scales_input, rule,
    ), inside)


class DecoderLayer(nn.Module):
    """Attention and MLP, each between a norm and the residual stream."""

    def __init__(self, config: ModelConfig, number: int, attention: AttentionSpec, place: Placement) -> None:
        super().__init__()
        has_norms = config.pre_norms or config.parallel
        self.attention_norm = make_norm(config, config.hidden_size, place) if has_norms else NoNorm()
        self.attention = make_attention(config, number, attention, place)
        self.post_attention_norm = post_norm(config, place)
        self.mlp_norm = make_norm(config, config.hidden_size, place) if config.pre_norms else NoNorm()
        self.mlp = make_mlp(config, number, place)
        self.post_mlp_norm = post_norm(config, place)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, kv: LayerKV, sampled: Batch | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x is to be added to the residual; with residual None, x is the whole stream. The result has the same form.

        `sampled` (last layer): only the last tokens of these rows get logits, so only they attend and pass through the MLP.
        """
        qkv, residual = self.attention.qkv.normed(x, residual, self.attention_norm, batch)
        if sampled is None:
            out = self.attention(qkv, batch, kv)
        else:
            q = self.attention.write(qkv, batch, kv)
            q, residual = q.index_select(0, batch.logits_index), residual.index_select(0, batch.logits_index)
            if not len(q):
                return residual, None
            batch = sampled
            out = self.attention.read(q, batch, kv)
        x, stream = self.attention.output.behind(residual, out, self.post_attention_norm, batch)
        return self.mlp(x, stream, self.mlp_norm, self.post_mlp_norm, batch)


class ParallelLayer(DecoderLayer):
    """Attention and MLP read the same normed rows, and both results are added to the stream."""

    def __init__(self, config: ModelConfig, number: int, attention: AttentionSpec, place: Placement) -> None:
        super().__init__(config, number, attention, place)
        if not config.own_mlp_norm:
            del self.mlp_norm
        self.own_norm = config.own_mlp_norm

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, kv: LayerKV, sampled: Batch | None = None
    ) -> tuple[Tensor, Tensor | None]:
        rows, stream = normed_rows(x, residual, self.attention_norm)
        qkv = self.attention.qkv(rows, batch)
        if self.own_norm:
            rows = self.mlp_norm(stream)
        if sampled is None:
            out = self.attention(qkv, batch, kv)
        else:
            q = self.attention.write(qkv, batch, kv)
            q, rows, stream = (each.index_select(0, batch.logits_index) for each in (q, rows, stream))
            if not len(q):
                return stream, None
            batch = sampled
            out = self.attention.read(q, batch, kv)
        return self.attention.output(out, batch) + self.mlp.of_normed(rows, batch), stream


def seen_by(config: ModelConfig, number: int) -> int | None:
    """The window of a layer as the op takes it: chunks are negative."""
    window = config.windows[number]
    return -window if config.chunked and window is not None else window


def grows(config: ModelConfig, number: int) -> bool:
    """Whether a layer's queries grow with their position."""
    return config.temperature is not None and (config.temperature.turned or not config.ropes[number].turns)


def temperatures(config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """[positions]: what multiplies the queries; None: 1 for every position that there is."""
    rule = config.temperature
    if rule is None or max_model_len - 1 + rule.first < rule.every:
        return None
    positions = torch.arange(max_model_len, dtype=torch.float64, device=device) + rule.first
    found = torch.log1p(torch.floor(positions / rule.every)) * rule.scale + 1.0
    return found.to(torch.promote_types(dtype, torch.float32))


class Layers(nn.ModuleList):
    """The layers that this stage has, under the numbers that they have in the model."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, place: int) -> nn.Module:      # type: ignore[override]
        """By place among those that are here."""
        return list(self._modules.values())[place]       # type: ignore[return-value]


class Decoder(nn.Module):
    def __init__(
        self, config: ModelConfig, comm: Communicator, dtype: torch.dtype, device: torch.device | str,
        max_model_len: int, schemes: Callable[[str], Scheme] | None = None,
    ) -> None:
        """Parameters are allocated on `device`, to be filled by `load_weights`. `schemes`: of linears, by path."""
        super().__init__()
        self.config, self.stage = config, comm.stages
        self.numbers_here = comm.stages.layers(config.num_layers)    # of the layers
        device = torch.device(device)
        plain = plain_scheme(device, dtype, stored=config.dtype)
        place = Placement(comm.tensor, schemes or (lambda path: plain), dtype, device, experts=comm.experts, context=comm.context)
        rotations = {
            rope: _rotation_table(rope.frequencies(max_model_len), rope.scale, max_model_len, dtype, place.device)
            for rope in dict.fromkeys(config.ropes)
        }
        temperature = temperatures(config, max_model_len, dtype, place.device)
        self.embed: VocabEmbedding | None = None         # here on the first stage, and where the head shares it
        if self.stage.first or (self.stage.last and config.tied):
            self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, config.embedding_scale, place)
        self.positions: PositionEmbedding | None = None
        if self.stage.first and config.learned_positions:
            self.positions = PositionEmbedding(
                config.max_position_embeddings, config.first_position, config.hidden_size, place)
        groups = layer_groups(config)
        self.layers = Layers({
            number: (ParallelLayer if config.parallel else DecoderLayer)(config, number, AttentionSpec(
                config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.qkv_bias,
                config.output_bias, config.attention_scale, config.attention_softcap, seen_by(config, number), groups[number],
                rotations[config.ropes[number]], config.sinks, temperature if grows(config, number) else None,
                config.late_qk_norm, config.qkv_clip, inner_eps(config),
            ), place.inside(f"layers.{number}"))
            for number in self.numbers_here
        })
        self.norm = make_norm(config, config.hidden_size, place)
        # How many experts each layer has read in the newest step, in the first of four numbers: kernels have other variants for
        # pointers that are not aligned to 16 bytes. None: the model is no mixture.
        self.expert_reads: Tensor | None = None
        self.experts_here: Shard | None = None
        mixtures = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Mixture)]
        if mixtures:
            self.experts_here = mixtures[0].experts.here
            self.expert_reads = torch.zeros((len(mixtures), 4), dtype=torch.int32, device=device)
            for mixture, counter in zip(mixtures, self.expert_reads, strict=True):
                mixture.reads = counter[:1]
        self.head: LMHead | None = None                  # on the last stage
        if self.stage.last:
            tied = self.embed if config.tied else None
            self.head = LMHead(config.vocab_size, config.hidden_size, tied, place.inside("head"), config.head_bias)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: list[LayerKV]) -> Tensor:
        """Hidden states after the last norm: of every token, or with `batch.sampled` only of those that get logits. Of a stage
        that is not the last: the stream that it has sent on."""
        x, residual = self._first_rows(batch), None
        *layers, last = zip(self.layers, kv, strict=True)
        for layer, cache in layers:
            x, residual = layer(x, residual, batch, cache)
        layer, cache = last
        x, residual = layer(x, residual, batch, cache, batch.sampled if self.stage.last else None)
        if self.stage.last:
            return self.norm(x) if residual is None else self.norm.add(x, residual)[0]
        stream = x if residual is None else x + residual
        self.stage.send(stream)
        return stream

    def _first_rows(self, batch: Batch) -> Tensor:
        """What the first layer here reads."""
        if self.stage.first and self.embed is not None:
            x = self.embed(batch.tokens)
            return x if self.positions is None else self.positions(x, batch.positions)
        weight = self.norm.weight
        return self.stage.receive(torch.empty((len(batch.tokens), len(weight)), dtype=weight.dtype, device=weight.device))

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits [S, vocabulary] of hidden states [S, hidden], on every rank: float32 or better on a CPU; on a GPU in the
        GEMM's output dtype, because the sampling kernels convert them as they read."""
        assert self.head is not None
        return self._finished(self.head(rows, None))

    @torch.inference_mode()
    def logits_here(self, rows: Tensor) -> Tensor:
        """The same of this rank's ids alone."""
        assert self.head is not None
        return self._finished(self.head.here(rows))

    def _finished(self, logits: Tensor) -> Tensor:
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_softcap
        if logits.dtype not in (torch.float32, torch.float64) and (logits.is_cpu or cap is not None):
            logits = logits.float()
        return logits if cap is None else soft_cap(logits, cap)

    def with_layers(self, places: list[int]) -> Decoder:
        """The same decoder with only these of its layers; the parameters are shared."""
        few = copy.copy(self)
        few._modules = {**self._modules, "layers": nn.ModuleList(self.layers[place] for place in places)}
        return few

    def finish(self) -> None:
        """After loading: convert every linear to the layout that its GEMM needs, one at a time."""
        if self.embed is not None:
            self.embed.finish()
        for module in self.modules():
            if isinstance(module, (Linear, ExpertWeights)):
                module.finish()

    def numbers(self) -> dict[str, Tensor]:
        """Every parameter by name, quantised weights as numbers; what a decoder without quantisation would hold."""
        found = {name: parameter.data for name, parameter in self.named_parameters()}
        if self.embed is not None and self.embed.matrix is not None:
            found["embed.weight"] = self.embed.matrix.numbers()
        for name, module in self.named_modules():
            if isinstance(module, Linear) and not module.shares:
                found[f"{name}.weight"] = module.scheme.numbers(module)
                for parameter in QUANTISED_TENSORS[1:]:
                    found.pop(f"{name}.{parameter}", None)
            elif isinstance(module, ExpertWeights):
                found |= {f"{name}.{each}": numbers for each, numbers in module.numbers().items()}
                for each in module.codes:
                    found.pop(f"{name}.{each}", None)
        return found

    def is_elsewhere(self, path: str) -> bool:
        """Is that a part of the model which another rank has?"""
        first, _, rest = path.partition(".")
        if first == "layers":
            number, _, inside = rest.partition(".")
            if int(number) not in self.numbers_here:
                return int(number) < self.config.num_layers
            here = self.experts_here
            if here is None or not inside.startswith("mlp.experts."):
                return False
            expert = int(inside.split(".")[2])
            return expert < here.total and not here.start <= expert < here.stop
        return getattr(self, first, self) is None

    def stored_formats(self) -> dict[str, WeightFormat]:
        """By path, of linears that keep a checkpoint's codes."""
        return {
            name: module.scheme.format for name, module in self.named_modules()
            if isinstance(module, Linear) and isinstance(module.scheme, Quantised) and not module.scheme.made
        } | {
            f"{name}.{each}": format for name, module in self.named_modules() if isinstance(module, ExpertWeights)
            for each, format in module.stored_formats().items()
        }

    def bytes_per_weight(self, rows: int) -> float:
        """Bytes that a step with this many rows reads per weight of the linears and the head."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        read = sum(linear.scheme.read_bytes(linear, rows) for linear in linears)
        return read / sum(linear.size for linear in linears)

    def weight_reads(self, rows: int) -> tuple[int, int]:
        """Bytes that a step with this many rows reads: (linears of all layers, head)."""
        linears = [module for module in self.layers.modules() if isinstance(module, Linear)]
        read = sum(linear.scheme.read_bytes(linear, rows) for linear in linears)
        return read, 0 if self.head is None else self.head.scheme.read_bytes(self.head, rows)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on this rank, second layouts included."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        packed = 0 if self.embed is None else self.embed.extra_bytes
        return sum(parameter.nbytes for parameter in self.parameters()) + packed + sum(
            linear.scheme.extra_bytes(linear) for linear in linears)


def _rotation_table(
    frequencies: list[float], scale: float, positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Cosine and sine of every position, [positions, 2, pairs], made once. Angles are in float64: in float32 they are off by a
    hundredth of a radian at position 100,000."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * scale
    return table.to(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
