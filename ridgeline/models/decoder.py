"""The decoder: one stack of layers for every family.

What a model is comes from its ModelConfig; there is no branch on a family's name here or below. Every activation goes
through the layers as (x, residual), so that adding the residual belongs to the next norm. No rank arithmetic and no
names of weights: layers know their shard, `weights.py` knows checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.distributed.comm import Communicator
from ridgeline.layers.attention import Attention, AttentionSpec
from ridgeline.layers.batch import Batch
from ridgeline.layers.embedding import LMHead, VocabEmbedding
from ridgeline.layers.linear import Linear, Placement
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rotary import rotation_table
from ridgeline.models.config import ModelConfig, layer_groups
from ridgeline.quant.scheme import Scheme, unquantised_scheme


class DecoderLayer(nn.Module):
    """Attention and MLP, each between a norm and the residual stream."""

    def __init__(self, config: ModelConfig, attention: AttentionSpec, place: Placement) -> None:
        super().__init__()

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, config.norm_offset, place.dtype, place.device)

        qk_norms = (norm(config.head_dim), norm(config.head_dim)) if config.qk_norm else None
        self.attention_norm = norm(config.hidden_size)
        self.attention = Attention(attention, qk_norms, place)
        self.post_attention_norm = norm(config.hidden_size) if config.post_norms else None
        self.mlp_norm = norm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias, place)
        self.post_mlp_norm = norm(config.hidden_size) if config.post_norms else None

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, kv: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`residual` is None before the first layer: there x is the whole stream."""
        if residual is None:
            residual, x = x, self.attention_norm(x)
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, batch, kv)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x, batch)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(x)
        return x, residual


class Decoder(nn.Module):
    def __init__(
        self, config: ModelConfig, comm: Communicator, dtype: torch.dtype, device: torch.device | str,
        max_model_len: int, scheme: Scheme | None = None,
    ) -> None:
        """Parameters are allocated on `device`, to be filled by `load_weights`."""
        super().__init__()
        self.config = config
        device = torch.device(device)
        place = Placement(comm, scheme or unquantised_scheme(device, dtype), dtype, device)
        rotations = {
            rope: rotation_table(rope.frequencies(max_model_len), rope.scale, max_model_len, dtype, place.device)
            for rope in dict.fromkeys(config.ropes)
        }
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, config.embedding_scale, place)
        self.layers = nn.ModuleList(
            DecoderLayer(config, AttentionSpec(
                config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.qkv_bias,
                config.output_bias, config.attention_scale, config.attention_softcap, window, group, rotations[rope],
            ), place)
            for window, rope, group in zip(config.windows, config.ropes, layer_groups(config), strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset, dtype, place.device)
        self.head = LMHead(self.embed, config.tied, place)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states [T, hidden] after the last norm. `kv[layer]` is (K cache, V cache), written in place."""
        x, residual = self.embed(batch.tokens), None
        for layer, cache in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, batch, cache)
        return self.norm.add(x, residual)[0]

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits [S, vocabulary] of hidden states [S, hidden], in float32 or better, on every rank."""
        logits = self.head(rows, None)
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def finish(self) -> None:
        """After the last weight is filled: every linear takes the layout its product wants, one at a time."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finish()

    def bytes_per_weight(self, rows: int) -> float:
        """What a step with that many rows reads of the linears and the head, per weight."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        read = sum(linear.scheme.read_bytes(linear, rows) for linear in linears)
        return read / sum(linear.weight.numel() for linear in linears)

    @property
    def weight_bytes(self) -> int:
        """What the weights occupy on this rank, second layouts included."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        return sum(parameter.nbytes for parameter in self.parameters()) + sum(
            linear.scheme.extra_bytes(linear) for linear in linears)
