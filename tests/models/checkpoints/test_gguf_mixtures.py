"""GGUF files of mixtures and of latent attention, written through the `gguf` package with its own names of keys and tensors: the
same model as the checkpoint of transformers that they were made of."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_gguf_packed import packed_decoder
from test_weights import logits_of
from tiny_configs import ORIGINAL_CONTEXT
from tiny_models import load, save_checkpoint

from ridgeline.distributed.comm import Communicator
from ridgeline.errors import ModelError
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.checkpoints.quantised_source import Stored
from ridgeline.models.config_fields import Fields
from ridgeline.models.decoder import Decoder
from ridgeline.models.expert_config import gguf_experts, gguf_score
from ridgeline.models.families.deepseek import DEEPSEEK_V3_EXPERTS
from ridgeline.models.model_config import load_model_config
from ridgeline.models.regrouped import JoinedLatents
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.quant.cpu_packed import CpuPacked, plain_scheme

YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "mscale": 1.3, "mscale_all_dim": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}
ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v2-lite": gguf.MODEL_ARCH.DEEPSEEK2, "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE, "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE, "dots1": gguf.MODEL_ARCH.DOTS1,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2, "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
}
# What GGUF has no field for: take what it implies.
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": []}, "qwen3_moe": {"decoder_sparse_step": 1},
    "gpt_oss": {"swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    "dots1": {"sliding_window": None, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"rope_parameters": YARN, "attention_bias": False}, "deepseek_v3": {"rope_parameters": YARN},
}


GGUF_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a checkpoint, all in one tensor for each linear; takes them out of `tensors`."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        tensor, (_, _, layer, *_, last) = tensors.pop(name), name.removesuffix(".weight").split(".")
        place = f"blk.{layer}.ffn_{{}}_exps.{{}}"
        expert = name.split(".")[5]
        if expert.isdigit():
            found.setdefault(place.format(GGUF_EXPERTS[last], "weight"), {})[int(expert)] = tensor
            continue
        kind = "bias" if last.endswith("bias") else "weight"     # gpt-oss: all experts, inputs first, gate and up by turns
        whole = tensor if kind == "bias" else tensor.transpose(1, 2)
        parts = {"gate": whole[:, 0::2], "up": whole[:, 1::2]} if last.startswith("gate_up") else {"down": whole}
        for part, values in parts.items():
            found[place.format(part, kind)] = dict(enumerate(values))
    return {name: torch.stack([each[expert] for expert in sorted(each)]) for name, each in found.items()}


def write_metadata(writer: gguf.GGUFWriter, raw: dict[str, Any], split: bool) -> None:
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(1 if split else raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(raw[name] for name in counts if raw.get(name)))
    writer.add_expert_used_count(next(raw[name] for name in ("num_experts_per_tok", "moe_k", "moe_topk") if raw.get(name)))
    writer.add_eos_token_id(2)
    rope = raw["rope_parameters"]
    alpha, dim = rope.get("alpha"), raw.get("head_dim", 0)
    writer.add_rope_freq_base(rope["rope_theta"] * (alpha ** (dim / (dim - 2)) if alpha else 1.0))
    if raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
    if raw.get("head_dim") and "kv_lora_rank" not in raw:
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
    if raw.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if raw.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "kv_lora_rank" in raw:
        write_latent(writer, raw, split)
    else:
        write_family(writer, raw)


def write_family(writer: gguf.GGUFWriter, raw: dict[str, Any]) -> None:
    """What the converter of llama.cpp adds for one family."""
    kind = raw["model_type"]
    if kind == "ernie4_5_moe":
        writer.add_leading_dense_block_count(raw["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(raw["moe_layer_interval"])
        writer.add_expert_shared_count(raw["moe_num_shared_experts"])
    elif kind == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(raw["intermediate_size"])
    elif kind == "dots1":
        writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
        writer.add_expert_shared_count(raw["n_shared_experts"])
        writer.add_expert_weights_scale(raw["routed_scaling_factor"])
        writer.add_expert_weights_norm(raw["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif kind == "glm4_moe":
        writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
        writer.add_expert_shared_count(raw["n_shared_experts"])
        writer.add_expert_weights_scale(raw["routed_scaling_factor"])
        writer.add_expert_weights_norm(raw["norm_topk_prob"])
        writer.add_expert_group_count(raw["n_group"])
        writer.add_expert_group_used_count(raw["topk_group"])
        writer.add_rope_dimension_count(raw["head_dim"] // 2)
    elif kind == "minimax_m2":
        writer.add_rope_dimension_count(raw["head_dim"] // 2)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif kind == "granitemoe":
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])


def write_latent(writer: gguf.GGUFWriter, raw: dict[str, Any], split: bool) -> None:
    head, rank, rope = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"], raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    if raw["q_lora_rank"]:
        writer.add_q_lora_rank(raw["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope if split else head)
    writer.add_value_length(rank if split else raw["v_head_dim"])
    if split:
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(raw["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(raw["norm_topk_prob"]))
    if raw.get("topk_method") != "greedy":
        writer.add_expert_group_count(raw["n_group"])
        writer.add_expert_group_used_count(raw["topk_group"])
    v3 = raw["model_type"] == "deepseek_v3"
    if v3 or split:                  # older files of V2 do not say it
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if v3 else gguf.ExpertGatingFuncType.SOFTMAX)


def gguf_tensors(directory: Path, architecture: gguf.MODEL_ARCH, raw: dict[str, Any], split: bool) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(architecture, raw["num_hidden_layers"])
    read = load_file(directory / "model.safetensors")
    stored = stacked_experts(read)
    for name, tensor in read.items():
        if name.endswith("kv_b_proj.weight") and split:
            heads = tensor.unflatten(0, (raw["num_attention_heads"], -1))
            keys, values = heads.split([raw["qk_nope_head_dim"], raw["v_head_dim"]], dim=1)
            base = name.removesuffix("kv_b_proj.weight")
            stored[names.get_name(base + "k_b_proj") + ".weight"] = keys.transpose(1, 2).contiguous()
            stored[names.get_name(base + "v_b_proj") + ".weight"] = values.contiguous()
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")) and architecture in (
            gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE_MOE
        ):
            dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
            tensor = tensor.reshape(-1, 2, dim // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if name.endswith("e_score_correction_bias"):
            stored[names.get_name(name.removesuffix("_bias")) + ".bias"] = tensor        # ERNIE's is a matrix of one row
            continue
        if name.endswith(("input_linear.weight", "output_linear.weight")):       # Granite: [experts, gate and up, hidden]
            parts = dict(zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)) if "input" in name else {"down": tensor}
            stored |= {f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight": each.contiguous() for part, each in parts.items()}
            continue
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        ours += "" if ours.endswith((".weight", ".bias")) else ".weight"
        stored[ours] = tensor.squeeze() if "ffn_gate_inp_shexp" in ours else tensor
    return {name: tensor.numpy() for name, tensor in stored.items()}


def convert(directory: Path, name: str, split: bool = False, packed: dict[str, gguf.GGMLQuantizationType] | None = None) -> Path:
    """`split`: latents as newer files have them. `packed`: types by a part of a tensor's name."""
    raw, architecture = json.loads((directory / "config.json").read_text()), ARCHITECTURES[name]
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    write_metadata(writer, raw, split)
    for tensor_name, tensor in gguf_tensors(directory, architecture, raw, split).items():
        kind = next((kind for part, kind in (packed or {}).items() if part in tensor_name), None)
        if kind is None:
            writer.add_tensor(tensor_name, tensor)
        else:
            writer.add_tensor(tensor_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "split"), [
    *((name, False) for name in ARCHITECTURES), ("deepseek_v2-lite", True), ("deepseek_v3", True),
])
def test_the_file_is_the_same_model(name: str, split: bool, tmp_path: Path) -> None:
    directory = save_checkpoint(name, tmp_path, **OVERRIDES.get(name, {}))
    config, path = load_model_config(directory), convert(directory, name, split)
    read = load_model_config(path)
    assert read.family.name == config.family.name and read.num_parameters == config.num_parameters
    assert (read.latent, read.windows, read.tied) == (config.latent, config.windows, config.tied)
    expected = logits_of(directory, torch.float64)
    noise = float((logits_of(directory) - expected).abs().max())
    # The file's numbers (rope, epsilon, routing scale) are rounded to float32; the rest is exact.
    assert float((logits_of(path, torch.float64) - expected).abs().max()) <= 4 * noise
    assert float((logits_of(path) - expected).abs().max()) <= 4 * noise


@pytest.mark.parametrize("name", ["deepseek_v2-lite", "qwen2_moe"])
def test_the_memory_on_a_cpu_is_counted(name: str, tmp_path: Path) -> None:
    directory = save_checkpoint(name, tmp_path, hidden_size=64, **OVERRIDES.get(name, {}))
    types = {"attn_kv_a_mqa": gguf.GGMLQuantizationType.Q8_0, "ffn_gate_inp": gguf.GGMLQuantizationType.F16}
    path = convert(directory, name, packed=types)
    config = load_model_config(path)
    scheme = plain_scheme(torch.device("cpu"), torch.float32)
    if not isinstance(scheme, CpuPacked):
        pytest.skip("the native kernels are not built: weights do not lie in tiles")
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32, lambda place: scheme)
    load_weights(model, path, config)
    assert model.weight_bytes == weight_bytes(config, "float32", "cpu")


@pytest.mark.parametrize(("kind", "kept"), [("MXFP4", "e2m1-32"), ("Q4_0", "uint4-32"), ("Q8_0", None), ("Q4_1", None)])
def test_experts_stay_packed_where_their_kernels_take_the_codes(
    kind: str, kept: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ridgeline"), "propagate", True)       # an engine of another test may have set it
    directory = save_checkpoint("qwen3_moe", tmp_path, hidden_size=64, moe_intermediate_size=32, **OVERRIDES["qwen3_moe"])
    path = convert(directory, "qwen3_moe", packed={"_exps": getattr(gguf.GGMLQuantizationType, kind)})
    config = load_model_config(path)
    formats = LinearFormats(config, "none", "cuda")
    format = formats("layers.0.mlp.experts.down").format
    assert (None if format is None else format.name) == kept
    with caplog.at_level(logging.INFO, "ridgeline"):
        packed = packed_decoder(path, torch.float64)
    assert ("experts stored as" in caplog.text) == (kept is None)
    plain = load(path, torch.float64)
    for name, value in packed.numbers().items():
        assert torch.equal(value, plain.numbers()[name]), name


def test_older_files_of_deepseek_do_not_say_its_groups() -> None:
    raw = {"general.architecture": "deepseek2", "expert_count": 256, "expert_used_count": 8, "feed_forward_length": 18432,
           "expert_feed_forward_length": 2048, "leading_dense_block_count": 3, "expert_weights_scale": 2.5,
           "expert_weights_norm": True, "expert_gating_func": 2}

    def routing(**changes: Any) -> Any:
        return gguf_experts(Fields("m.gguf", raw | changes, {}), DEEPSEEK_V3_EXPERTS, 61, str).routing

    assert (routing().groups, routing().top_groups, routing().scale, routing().normalise) == (8, 4, 2.5, True)
    assert routing(expert_group_count=4, expert_group_used_count=2).groups == 4
    assert (routing(expert_count=160).groups, routing(expert_count=160).top_groups) == (8, 3)
    assert routing(expert_count=384).groups == 1
    for count in (160, 256):         # GLM-4.5 has 160 experts and the same rule, and no groups
        other = routing(**{"general.architecture": "glm4moe", "expert_count": count})
        assert (other.groups, other.top_groups) == (1, 1)
    with pytest.raises(ModelError, match="3 of 2 groups"):
        routing(expert_group_count=2, expert_group_used_count=3)
    with pytest.raises(ModelError, match="expert_gating_func 4 is not supported"):
        gguf_score(Fields("m.gguf", {"expert_count": 8, "expert_gating_func": 4}, {}), str)


class Halves:
    """A source of two tensors of these shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.tensors = {f"blk.0.attn_{name}.weight": Stored(shape, 4, "m.gguf") for name, shape in shapes.items()}

    def read(self, name: str, into: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("not read")

    stored = read  # type: ignore[assignment]


@pytest.mark.parametrize(("shapes", "reason"), [
    ({"k_b": (2, 8, 4)}, "there is no tensor blk.0.attn_v_b.weight"),
    ({"k_b": (2, 8, 4), "v_b": (2, 6, 9)}, "do not belong together"),
    ({"k_b": (2, 8, 4), "v_b": (12, 8)}, "do not belong together"),
])
def test_halves_of_a_widening_that_do_not_fit_are_named(shapes: dict[str, tuple[int, ...]], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        JoinedLatents(Halves(**shapes))
