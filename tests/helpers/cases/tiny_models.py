"""Tiny random checkpoints of every family, made with transformers, and a bare driver that runs our decoder on them.

The weights are drawn so that nothing hides: logits spread by more than 1, norm weights differ from 1, biases from 0, and
attention scores are large enough for caps, windows and rotations to matter.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_configs import (
    BASE,
    CHECKPOINTS,
    EAGER_EXPERTS,
    LEFT_OUT,
    LISTED,
    MAX_POSITION,
    SEEDS,
    VOCAB,
)
from torch import Tensor

from ridgeline.distributed.comm import Communicator
from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.layers.kv import LayerKV
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import ModelConfig, kv_groups, load_model_config
from ridgeline.models.weights import load_weights
from ridgeline.process.cold.temporary_folder import temporary_folder

# ---- families that transformers does not have ------------------------------------------------------------------------
#
# Checkpoints of a class that computes the same, under the names of the family's own: the config.json and the tensors of a tiny
# checkpoint that is saved already are changed, and the model that made it stays the oracle.

Config = dict[str, Any]


@dataclass(frozen=True)
class Renamed:
    architecture: str
    config: Callable[[Config], Config]
    tensors: Callable[[dict[str, Tensor], Config], dict[str, Tensor]]


def renamed(path: Path, rule: Renamed) -> None:
    raw = json.loads((path / "config.json").read_text())
    tensors = rule.tensors(load_file(path / "model.safetensors"), raw)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    renamed_config(path, rule)


def renamed_config(path: Path, rule: Renamed) -> None:
    raw = json.loads((path / "config.json").read_text())
    kind = rule.architecture.removesuffix("ForCausalLM").lower()
    changed = rule.config(raw) | {"architectures": [rule.architecture], "model_type": kind}
    (path / "config.json").write_text(json.dumps(changed))


def _with_names(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def _without(raw: Config, *names: str) -> Config:
    return {name: value for name, value in raw.items() if name not in names}


def _internlm2(tensors: dict[str, Tensor], raw: Config) -> dict[str, Tensor]:
    """Of each KV head: its queries, its key, its value."""
    dim, kv_heads = raw["head_dim"], raw["num_key_value_heads"]
    found = dict(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        q, k, v = (found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv")
        heads = [each.unflatten(0, (kv_heads, -1, dim)) for each in (q, k, v)]
        found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(heads, dim=1).flatten(0, 2)
    return _with_names(found, {
        "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "lm_head": "output",
    })


def _exaone(tensors: dict[str, Tensor], raw: Config) -> dict[str, Tensor]:
    return _with_names(tensors, {
        "model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "model.norm": "transformer.ln_f",
        "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "down_proj": "c_proj",
    })


def _exaone_config(raw: Config) -> Config:
    more = {"num_layers": raw["num_hidden_layers"], "layer_norm_epsilon": raw["rms_norm_eps"], "activation_function": "silu"}
    return _without(raw, "num_hidden_layers", "rms_norm_eps", "hidden_act") | more


def _minicpm_config(raw: Config) -> Config:
    """Granite's multipliers as depth and width say them."""
    more = {"scale_emb": raw["embedding_multiplier"], "scale_depth": raw["residual_multiplier"] * raw["num_hidden_layers"] ** 0.5,
            "dim_model_base": raw["hidden_size"] / raw["logits_scaling"]}
    multipliers = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
    return _without(raw, *multipliers, "tie_word_embeddings") | more


RENAMED = {
    "internlm2": Renamed("InternLM2ForCausalLM", lambda raw: raw | {"bias": False}, _internlm2),
    "exaone": Renamed("ExaoneForCausalLM", _exaone_config, _exaone),
    "minicpm": Renamed("MiniCPMForCausalLM", _minicpm_config, lambda tensors, raw: tensors),
}


# ---- making and loading ----------------------------------------------------------------------------------------------


def save_checkpoint(name: str, path: Path, *, spelling: int = 5, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write checkpoint `name` into the directory `path`, with config.json as transformers 4 or 5 spells it. Made once by a
    process, and copied for each test, which may change its files."""
    key = repr((name, spelling, dtype, sorted(overrides.items())))
    if key not in _saved:
        made = _folder() / str(len(_saved))
        build_model(name, dtype, **overrides).save_pretrained(made)
        _saved[key] = spelled(name, made, spelling)
    return Path(shutil.copytree(_saved[key], path, dirs_exist_ok=True))


_saved: dict[str, Path] = {}         # by what was asked for
_folder = functools.cache(functools.partial(temporary_folder, "ridgeline-tiny-"))


def spelled(name: str, path: Path, spelling: int) -> Path:
    """Change what transformers has saved there into checkpoint `name`, with config.json as transformers 4 or 5 spells it."""
    if spelling == 4:
        config_file = path / "config.json"
        config_file.write_text(json.dumps(as_version_4(json.loads(config_file.read_text()))))
    if name in RENAMED:
        renamed(path, RENAMED[name])
    return path


def declared(name: str) -> str:
    """`architectures` of a checkpoint."""
    return RENAMED[name].architecture if name in RENAMED else architecture(CHECKPOINTS[name][0])


def architecture(kind: str) -> str:
    """The class of transformers, of a kind in CHECKPOINTS."""
    return "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"


def is_known(name: str) -> bool:
    """Whether this version of transformers has the class of a checkpoint."""
    import transformers

    return hasattr(transformers, architecture(CHECKPOINTS[name][0]))


def save_config(name: str, path: Path) -> Path:
    """Only the config.json of checkpoint `name`."""
    config = build_config(name)
    config.architectures = [architecture(CHECKPOINTS[name][0])]
    config.save_pretrained(path)
    if name in RENAMED:
        renamed_config(path, RENAMED[name])
    return path


def build_config(name: str, **overrides: Any) -> Any:
    import transformers  # takes seconds: only for the tests that need it

    kind, differences = CHECKPOINTS[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Llama4") else f"{kind}Config")
    eager = EAGER_EXPERTS if any("expert" in name for name in differences) else {}
    return config_class(**copy.deepcopy(BASE | eager | differences | overrides))         # transformers changes what it is given


def build_model(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """The transformers model itself, with weights that depend only on the name."""
    import transformers

    kind, differences = CHECKPOINTS[name]
    config = build_config(name, **overrides)
    model = getattr(transformers, architecture(kind))(config).eval().to(dtype)
    if "swiglu_limit" in differences:                    # before transformers 5.18 its model has 7.0, whatever the config says
        for layer in model.model.layers:
            layer.mlp.experts.limit = config.swiglu_limit
    randomise(model, seed=SEEDS[name], norm_mean=0.0 if kind.startswith(("Gemma", "VaultGemma", "Nemotron")) else 1.0)
    return model


EMBEDDINGS = ("embed_tokens", "embed_in", "embed_positions", "word_embeddings", "wte", "wpe", "lm_head", "embed_out")


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int, norm_mean: float) -> None:
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor, mean: float, deviation: float) -> None:
        like.copy_(torch.randn(like.shape, generator=generator, dtype=torch.float64) * deviation + mean)

    for name, parameter in model.named_parameters():
        if "norm" in name or ".ln_" in name:
            noise(parameter, norm_mean, 0.3)
        elif name.endswith("bias"):
            noise(parameter, 0.0, 0.5)
        elif any(each in name for each in EMBEDDINGS):
            noise(parameter, 0.0, 0.4)
        else:
            noise(parameter, 0.0, 1.5 * parameter.shape[-1] ** -0.5)
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):     # which some classes have as a parameter
            noise(tensor, 0.0, 0.2)


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same facts as transformers 4 wrote them, and nothing that it left to its classes' defaults."""
    rope = config.pop("rope_parameters", None) or {"rope_theta": 10_000.0, "rope_type": "default"}
    local = rope.get("sliding_attention")
    rope = dict(rope.get("full_attention", rope))
    if local is not None:
        config["rope_local_base_freq"] = local["rope_theta"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "gpt_neox":
        config["rotary_emb_base"], config["rotary_pct"] = config.pop("rope_theta"), config.pop("partial_rotary_factor")
    if config["model_type"] == "phi3":
        rope.pop("original_max_position_embeddings", None)
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if config.get("rope_interleave"):
        del config["rope_interleave"]
    if config["model_type"] not in LISTED:
        config.pop("layer_types", None)
    config.pop("_sliding_window_pattern", None)
    for name in LEFT_OUT.get(config["model_type"], ()):
        del config[name]
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.50.0"
    return config


def load(path: Path, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None,
         comm: Communicator | None = None, max_model_len: int = MAX_POSITION) -> Decoder:
    """Our decoder with the checkpoint's weights; `config` in place of the checkpoint's own to try a change."""
    config = config or load_model_config(path)
    model = Decoder(config, comm or Communicator(), dtype, "cpu", max_model_len)
    load_weights(model, path, config)
    return model


@dataclass
class PagedSequences:
    """Sequences driven through a decoder with a KV cache of scattered blocks: no scheduler, no sampler."""

    model: Decoder
    block_size: int = 4
    num_blocks: int = 64
    tp_size: int = 1
    context_size: int = 1

    def __post_init__(self) -> None:
        dtype = self.model.norm.weight.dtype
        self.specs = kv_groups(self.model.config, self.block_size, self.tp_size, self.context_size)
        self.block_size *= self.context_size
        found: dict[int, LayerKV] = {}
        for spec in self.specs:
            shape = (self.num_blocks, spec.tokens_here, spec.num_kv_heads, spec.head_dim)
            for layer in spec.layers:
                # NaN: a read of a slot that was never written shows.
                pages = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(spec.vectors)]
                found[layer] = LayerKV(pages[0], pages[-1][..., : spec.value_dim])
        self.kv = [found[layer] for layer in self.model.numbers_here]
        generator = torch.Generator().manual_seed(0)
        self.free = [torch.randperm(self.num_blocks - 1, generator=generator).add(1).tolist() for _ in self.specs]
        self.tables: dict[int, list[list[int]]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, tokens: dict[int, list[int]]) -> dict[int, Tensor]:
        """Feed each sequence some tokens; returns the logits after every one of them, [tokens, vocabulary]. On a stage but
        the last: what it has sent on."""
        starts = [self.lengths.get(sequence, 0) for sequence in tokens]
        counts = [len(each) for each in tokens.values()]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        groups = []
        for group, free in enumerate(self.free):
            tables = []
            for sequence, end in zip(tokens, ends, strict=True):
                table = self.tables.setdefault(sequence, [[] for _ in self.specs])[group]
                while len(table) * self.block_size < end:
                    table.append(free.pop())
                tables.append(table)
            width = max(len(table) for table in tables)
            block_table = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
            slots = torch.cat([
                block_table[row, where // self.block_size] * self.block_size + where % self.block_size
                for row, where in enumerate(positions)
            ])
            groups.append(GroupBatch(slots.long(), block_table))
        query_start = [0, *torch.tensor(counts).cumsum(0).tolist()]
        batch = Batch(
            tokens=torch.tensor([token for each in tokens.values() for token in each]),
            positions=torch.cat(positions),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            kv_len=torch.tensor(ends, dtype=torch.int32),
            query_start_host=query_start,
            kv_len_host=ends,
            groups=groups,
            logits_index=torch.arange(sum(counts)),
            sample_rows=torch.arange(sum(counts)),
            picks=np.arange(sum(counts)),
            device_picks=torch.arange(sum(counts)),
        )
        logits = self.model(batch, self.kv)[batch.logits_index]
        if self.model.stage.last:
            logits = self.model.logits(logits)
        self.lengths.update(zip(tokens, ends, strict=True))
        return dict(zip(tokens, logits.split(counts), strict=True))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def teacher_forced_logits(model: Decoder, tokens: list[int], prefill: int, tp_size: int = 1, context_size: int = 1) -> Tensor:
    """Logits after every token: one prefill, then one step per token."""
    sequences = PagedSequences(model, tp_size=tp_size, context_size=context_size)
    logits = [sequences.step({0: tokens[:prefill]})[0]]
    logits += [sequences.step({0: [token]})[0] for token in tokens[prefill:]]
    return torch.cat(logits)
