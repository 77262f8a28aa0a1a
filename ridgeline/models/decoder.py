"""The decoder: one stack of layers for every family.

The ModelConfig says what a model is; nothing here or below branches on a family's name. Activations pass through the
layers as (x, residual), so that the next norm adds the residual. No rank arithmetic and no names of weights: layers know
their shard, `weights.py` knows checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.distributed.comm import Communicator
from ridgeline.layers.attention import Attention, AttentionSpec
from ridgeline.layers.batch import Batch
from ridgeline.layers.embedding import LMHead, VocabEmbedding
from ridgeline.layers.kv import LayerKV
from ridgeline.layers.linear import Linear, Placement, RowLinear
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rotation_table import rotation_table
from ridgeline.models.model_config import ModelConfig, layer_groups
from ridgeline.ops.vocabulary import soft_cap
from ridgeline.quant.cpu_packed import plain_scheme
from ridgeline.quant.format import WeightFormat
from ridgeline.quant.quantised import TENSORS as QUANTISED_TENSORS
from ridgeline.quant.quantised import Quantised
from ridgeline.quant.scheme import Scheme


class DecoderLayer(nn.Module):
    """Attention and MLP, each between a norm and the residual stream."""

    def __init__(self, config: ModelConfig, attention: AttentionSpec, place: Placement) -> None:
        super().__init__()

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, config.norm_offset, place.dtype, place.device)

        qk_norms = (norm(config.head_dim), norm(config.head_dim)) if config.qk_norm else None
        self.attention_norm = norm(config.hidden_size)
        self.attention = Attention(attention, qk_norms, place.inside("attention"))
        self.post_attention_norm = norm(config.hidden_size) if config.post_norms else None
        self.mlp_norm = norm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias,
                            place.inside("mlp"))
        self.post_mlp_norm = norm(config.hidden_size) if config.post_norms else None

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
        x, stream = self._onto(residual, self.attention.output, out, self.post_attention_norm, batch)
        out, stream = self.mlp(x, stream, self.mlp_norm, batch)
        return self._onto(stream, self.mlp.down, out, self.post_mlp_norm, batch)

    @staticmethod
    def _onto(
        residual: Tensor, linear: RowLinear, x: Tensor, post_norm: RMSNorm | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """(x, residual) after a linear; (stream, None) where the linear has added its output to the residual already."""
        if post_norm is None:
            return linear.onto(residual, x, batch)
        return post_norm(linear(x, batch)), residual


class Decoder(nn.Module):
    def __init__(
        self, config: ModelConfig, comm: Communicator, dtype: torch.dtype, device: torch.device | str,
        max_model_len: int, schemes: Callable[[str], Scheme] | None = None,
    ) -> None:
        """Parameters are allocated on `device`, to be filled by `load_weights`. `schemes`: of linears, by path."""
        super().__init__()
        self.config = config
        device = torch.device(device)
        plain = plain_scheme(device, dtype)
        place = Placement(comm, schemes or (lambda path: plain), dtype, device)
        rotations = {
            rope: rotation_table(rope.frequencies(max_model_len), rope.scale, max_model_len, dtype, place.device)
            for rope in dict.fromkeys(config.ropes)
        }
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, config.embedding_scale, place)
        self.layers = nn.ModuleList(
            DecoderLayer(config, AttentionSpec(
                config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.qkv_bias,
                config.output_bias, config.attention_scale, config.attention_softcap, window, group, rotations[rope],
            ), place.inside(f"layers.{number}"))
            for number, (window, rope, group) in enumerate(
                zip(config.windows, config.ropes, layer_groups(config), strict=True)
            )
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset, dtype, place.device)
        self.head = LMHead(self.embed, config.tied, place.inside("head"))

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: list[LayerKV]) -> Tensor:
        """Hidden states after the last norm: of every token, or with `batch.sampled` only of those that get logits."""
        x, residual = self.embed(batch.tokens), None
        *layers, last = zip(self.layers, kv, strict=True)
        for layer, cache in layers:
            x, residual = layer(x, residual, batch, cache)
        layer, cache = last
        x, residual = layer(x, residual, batch, cache, batch.sampled)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits [S, vocabulary] of hidden states [S, hidden], on every rank: float32 or better on a CPU; on a GPU in the
        GEMM's output dtype, because the sampling kernels convert them as they read."""
        logits = self.head(rows, None)
        cap = self.config.final_softcap
        if logits.dtype not in (torch.float32, torch.float64) and (logits.is_cpu or cap is not None):
            logits = logits.float()
        return logits if cap is None else soft_cap(logits, cap)

    def with_layers(self, numbers: list[int]) -> Decoder:
        """The same decoder with only these layers; the parameters are shared."""
        few = copy.copy(self)
        few._modules = {**self._modules, "layers": nn.ModuleList(self.layers[number] for number in numbers)}
        return few

    def finish(self) -> None:
        """After loading: convert every linear to the layout that its GEMM needs, one at a time."""
        self.embed.finish()
        for module in self.modules():
            if isinstance(module, Linear):
                module.finish()

    def numbers(self) -> dict[str, Tensor]:
        """Every parameter by name, quantised weights as numbers; what a decoder without quantisation would hold."""
        found = {name: parameter.data for name, parameter in self.named_parameters()}
        if self.embed.matrix is not None:
            found["embed.weight"] = self.embed.matrix.numbers()
        for name, module in self.named_modules():
            if isinstance(module, Linear) and not module.shares:
                found[f"{name}.weight"] = module.scheme.numbers(module)
                for parameter in QUANTISED_TENSORS[1:]:
                    found.pop(f"{name}.{parameter}", None)
        return found

    def stored_formats(self) -> dict[str, WeightFormat]:
        """By path, of linears that keep a checkpoint's codes."""
        return {
            name: module.scheme.format for name, module in self.named_modules()
            if isinstance(module, Linear) and isinstance(module.scheme, Quantised) and not module.scheme.made
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
        return read, self.head.scheme.read_bytes(self.head, rows)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on this rank, second layouts included."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        return sum(parameter.nbytes for parameter in self.parameters()) + self.embed.extra_bytes + sum(
            linear.scheme.extra_bytes(linear) for linear in linears)
