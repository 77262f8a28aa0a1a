"""Quantised checkpoints through the loader: every dialect gives the model of the numbers that its tensors mean, kept packed or
expanded, whole or in shards."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from quantised_models import DIALECTS, GROUP, SIZES, gptq, save_quantised, set_quantization
from safetensors.torch import load_file, save_file
from tiny_models import random_tokens, save_checkpoint, teacher_forced_logits
from torch import Tensor

from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Axis, Communicator
from ridgeline.errors import ConfigError, ModelError
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.kernel_table import H200
from ridgeline.quant.choose import schemes
from ridgeline.quant.cpu_packed import CpuPacked, plain_scheme
from ridgeline.quant.gpu_layout import may_pack
from ridgeline.quant.packed import Packed
from ridgeline.quant.quantised import Quantised
from ridgeline.quant.scheme import Scheme, Unquantised
from ridgeline.resolve import DeviceFacts, resolve

TOKENS = random_tokens(24)
AMPERE = H200._replace(hopper=False)
NUMBERS = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def logs_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a test that has set up the command's own log."""
    monkeypatch.setattr(logging.getLogger("ridgeline"), "propagate", True)


def decoder(
    path: Path, packed: bool, dtype: torch.dtype = torch.float64, comm: Communicator | None = None,
    kind: type[Quantised] = Quantised,
) -> Decoder:
    """On the CPU; `packed`: codes are kept, as on a GPU."""
    comm = comm or Communicator()
    config = load_model_config(path)
    formats = LinearFormats(config, "none", "cuda" if packed else "cpu", comm.tensor.size)
    plain = Unquantised()

    def scheme(place: str) -> Scheme:
        chosen = formats(place).format
        return plain if chosen is None else kind(chosen, plain, keeps=True)

    made = Decoder(config, comm, dtype, "cpu", 64, scheme)
    load_weights(made, path, config)
    return made


def logits(model: Decoder) -> Tensor:
    return teacher_forced_logits(model, TOKENS, 20)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_the_model_of_its_numbers(dialect: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(dialect, tmp_path)
    expected, expanded, packed = decoder(plain, False), decoder(quantised, False), decoder(quantised, True)
    for name, value in expected.state_dict().items():
        assert torch.equal(expanded.state_dict()[name], value), name
    for name, value in packed.numbers().items():
        assert torch.equal(value, expected.numbers()[name]), name
    torch.testing.assert_close(logits(packed), logits(expected), rtol=0, atol=1e-12)
    kept = [module for module in packed.modules() if isinstance(getattr(module, "scheme", None), Quantised)]
    assert len(kept) == (0 if dialect == "2:4" else 8)   # four linears in each of two layers


@pytest.mark.parametrize("model", ["deepseek_v3", "deepseek_v2-lite"])
def test_what_widens_latents_is_expanded_whatever_the_checkpoint_stores(model: str, tmp_path: Path) -> None:
    """DeepSeek's blocks with weight_scale_inv, kv_b_proj among them: attention multiplies by it in two parts."""
    quantised, plain = save_quantised("fp8-block", tmp_path, model, num_key_value_heads=4)
    expected, expanded, packed = decoder(plain, False), decoder(quantised, False), decoder(quantised, True)
    assert not isinstance(packed.layers[0].attention.kv_up.scheme, Quantised)
    assert isinstance(packed.layers[0].attention.qkv.scheme, Quantised)
    for name, value in packed.numbers().items():
        assert torch.equal(value, expected.numbers()[name]), name
    torch.testing.assert_close(logits(packed), logits(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(logits(expanded), logits(expected), rtol=0, atol=0)
    assert packed.weight_bytes == weight_bytes(load_model_config(quantised), "float64", "cuda", kernels=AMPERE)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_predicted_bytes_are_the_bytes(dialect: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised(dialect, tmp_path)
    stored, packed = (decoder(quantised, True, torch.float32, kind=kind) for kind in (Quantised, Packed))
    config = load_model_config(quantised)
    assert stored.weight_bytes == weight_bytes(config, "float32", "cuda", kernels=AMPERE)
    counted = weight_bytes(config, "float32", "cuda", kernels=H200)
    formats = [format for _, format in LinearFormats(config, "none", "cuda").shapes()]
    assert packed.weight_bytes == counted or (any(map(may_pack, formats)) and packed.weight_bytes < counted)


# -- shards and fused parts ---------------------------------------------------------------------------------------------


class Rank(Axis):
    """One rank of several, as far as loading is concerned."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dialect", [
    "fp8-uneven-block", "fp8-block", "ct-w4a16-asymmetric", "awq", "ct-nvfp4", "ct-mxfp4", "ct-w8a8", "bitnet",
])
def test_a_shard_may_end_inside_a_block(dialect: str, size: int, tmp_path: Path) -> None:
    """96 inputs of `down` in shards of 24 cut groups of 32; blocks of 48 outputs end inside q, k and v."""
    sizes = {"intermediate_size": 96}
    quantised, plain = save_quantised(dialect, tmp_path, **sizes)
    for rank in range(size):
        expected = decoder(plain, False, comm=Communicator(Rank(rank, size))).numbers()
        for packed in (False, True):
            found = decoder(quantised, packed, comm=Communicator(Rank(rank, size))).numbers()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_blocks_stay_blocks_where_no_part_cuts_them(tmp_path: Path) -> None:
    """16 divides q, k and v; 48 does not, and the scales are written out for every output."""
    for dialect, block, shape in (("fp8-block", (16, 16), (8, 4)), ("fp8-uneven-block", (1, 40), (128, 2))):
        quantised, _ = save_quantised(dialect, tmp_path / dialect)
        qkv = decoder(quantised, True).layers[0].attention.qkv
        assert qkv.format.scales.block == block and tuple(qkv.scale.shape) == shape


def test_a_factor_of_inputs_is_not_passed_over(tmp_path: Path) -> None:
    """ModelOpt's AWQ of NVFP4 keeps it for matrices behind no norm; config.json, as ModelOpt 0.47 writes it, does not say so."""
    path, _ = save_quantised("modelopt-nvfp4", tmp_path)
    raw, file = json.loads((path / "config.json").read_text()), path / "model.safetensors"
    raw["quantization_config"] |= {"quant_algo": "NVFP4_AWQ"}
    (path / "config.json").write_text(json.dumps(raw))
    decoder(path, False)
    width = raw["intermediate_size"]
    save_file(load_file(file) | {"model.layers.0.mlp.down_proj.pre_quant_scale": torch.full((width,), 2.0)}, file)
    with pytest.raises(ModelError, match=r"tensors that .* does not know: model.layers.0.mlp.down_proj.pre_quant_scale"):
        decoder(path, False)


@pytest.mark.parametrize("dialect", ["ct-fp8-tensor", "fp8-uneven-block", "awq", "gptq-desc-act", "ct-nvfp4", "mxfp4"])
def test_matrices_that_a_checkpoint_has_fused(dialect: str, tmp_path: Path) -> None:
    """Phi-3 stores q, k and v as one matrix: one scale for all of them, and one order."""
    quantised, plain = save_quantised(dialect, tmp_path, "phi3")
    expected, packed = decoder(plain, False), decoder(quantised, True)
    assert all(torch.equal(value, expected.numbers()[name]) for name, value in packed.numbers().items())
    assert isinstance(packed.layers[0].attention.qkv.scheme, Quantised)


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bitnet_has_norms_before_its_ternary_matrices(kind: str, tmp_path: Path) -> None:
    """As BitNet b1.58 2B 4T lies on the hub."""
    quantised, plain = save_quantised("bitnet", tmp_path, "bitnet")
    if kind == "autobitlinear":
        set_quantization(quantised, {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"})
        tensors = load_file(quantised / "model.safetensors")
        save_file({name: 1 / value if name.endswith("_scale") else value for name, value in tensors.items()},
                  quantised / "model.safetensors")
    expected, packed = decoder(plain, False).numbers(), decoder(quantised, True)
    assert all(torch.equal(value, expected[name]) for name, value in packed.numbers().items())
    outputs = (packed.layers[0].mlp.down, packed.layers[0].attention.output)
    assert all(isinstance(linear.scheme, Quantised) and linear.inner is not None for linear in outputs)


def test_parts_that_differ_are_kept_as_numbers_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised, plain = save_quantised("ct-w4a16", tmp_path, only=lambda name: not name.endswith("k_proj"))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*k_proj$")
    (quantised / "config.json").write_text(json.dumps(config))
    formats = LinearFormats(load_model_config(quantised), "none", "cuda")
    with caplog.at_level("INFO", logger="ridgeline"):
        plain_scheme = schemes(formats, Unquantised())("layers.1.attention.qkv")
    assert isinstance(plain_scheme, Unquantised)
    assert "its parts are stored as uint4-32, none, uint4-32 and kept together as the model's dtype" in caplog.text
    packed, expected = decoder(quantised, True), decoder(plain, False)
    assert all(torch.equal(value, expected.numbers()[name]) for name, value in packed.numbers().items())
    assert isinstance(packed.layers[0].mlp.down.scheme, Quantised)


def test_different_orders_of_fused_parts_are_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ordered = gptq(True, 1, True)
    quantised, plain = save_quantised(
        "gptq-desc-act", tmp_path, writer=lambda name, weight: ordered(name.replace("k_proj", "other"), weight)
    )
    with caplog.at_level("WARNING"):
        packed = decoder(quantised, True)
    assert "have their inputs in different orders" in caplog.text
    assert isinstance(packed.layers[0].attention.qkv.scheme, Unquantised)
    assert all(torch.equal(value, decoder(plain, False).numbers()[name]) for name, value in packed.numbers().items())


def test_activation_order_is_refused_with_ranks(tmp_path: Path) -> None:
    quantised, _ = save_quantised("gptq-desc-act", tmp_path)
    config = EngineConfig.of(model=str(quantised), tensor_parallel_size=2, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size above 1 does not work .* \(desc_act\)"):
        resolve(config, DeviceFacts("cuda", 2**34, ("bfloat16",)))


# -- known failures of others -------------------------------------------------------------------------------------------


def test_scales_of_the_kv_cache_are_used_by_a_cache_of_their_format(tmp_path: Path) -> None:
    """They are neither unknown tensors nor silently 1. Another cache scales every token and head, and says why."""
    quantised, plain = save_quantised("ct-fp8-channel", tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    for layer in range(2):
        for name in ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale"):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor([0.03])
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    found = decoder(quantised, True).numbers()
    here = DeviceFacts("cpu", 1 << 32, ("float32",))
    fp8, int8 = (resolve(EngineConfig.of(model=str(quantised), kv_cache_dtype=name), here) for name in ("fp8", "int8"))
    assert [each == pytest.approx((0.03, 0.03)) for each in fp8.kv_format.scales] == [True, True]
    assert "calibrated scales of the checkpoint" in fp8.reasons["kv_cache_dtype"]
    assert int8.kv_format.scales == () and "the checkpoint's KV scales are for fp8" in int8.reasons["kv_cache_dtype"]
    assert torch.equal(found["layers.1.mlp.down.weight"], decoder(plain, False).numbers()["layers.1.mlp.down.weight"])


def test_a_module_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    quantised, _ = save_quantised("awq", tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.scales"]
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"there is no tensor model\.layers\.1\.mlp\.down_proj\.scales, which awq needs"):
        decoder(quantised, True)


def test_biases_of_zeros_that_a_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    quantised, plain = save_quantised("gptq", tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    bias = "model.layers.0.mlp.up_proj.bias"
    save_file(tensors | {bias: torch.zeros(128)}, quantised / "model.safetensors", {"format": "pt"})
    found = decoder(quantised, True).numbers()
    assert all(torch.equal(value, found[name]) for name, value in decoder(plain, False).numbers().items())
    save_file(tensors | {bias: torch.ones(128)}, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"does not know: model\.layers\.0\.mlp\.up_proj\.bias"):
        decoder(quantised, True)


def test_a_code_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    quantised, _ = save_quantised("ct-fp8-channel", tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight holds values that are not finite"):
        decoder(quantised, True)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("dialect", "scale", "value", "says"), [
    ("ct-mxfp4", "weight_scale", 255, "a scale is 255, which is not a number"),
    ("ct-nvfp4", "weight_global_scale", float("inf"), "a scale is not finite"),
    ("bitnet", "weight_scale", float("inf"), "a scale is not finite"),
])
def test_a_scale_that_is_not_a_number_is_named(
    dialect: str, scale: str, value: float, says: str, keep: bool, tmp_path: Path
) -> None:
    """Bytes are always finite, and what is divided by infinity is a zero: neither was noticed."""
    quantised, _ = save_quantised(dialect, tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{scale}"].reshape(-1)[0] = value
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"layers\.0\.mlp\.up_proj: {says}"):
        decoder(quantised, keep)


def test_a_layer_that_the_config_leaves_out_is_read_as_it_is(tmp_path: Path) -> None:
    """`dynamic` of GPTQ: no codes in the first layer."""
    quantised, plain = save_quantised("gptq", tmp_path, only=lambda name: ".layers.0." not in name)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r"-:model\.layers\.0\..*": {}}
    (quantised / "config.json").write_text(json.dumps(config))
    packed = decoder(quantised, True)
    assert all(torch.equal(value, decoder(plain, False).numbers()[name]) for name, value in packed.numbers().items())
    assert [isinstance(layer.mlp.down.scheme, Quantised) for layer in packed.layers] == [False, True]


def test_dummy_weights_have_the_size_of_usual_ones(tmp_path: Path) -> None:
    for dialect in ("ct-fp8-block", "awq", "ct-nvfp4", "mxfp4", "ct-w8a8", "bitnet", "gptq-desc-act"):
        quantised, _ = save_quantised(dialect, tmp_path / dialect)
        config = load_model_config(quantised)
        formats = LinearFormats(config, "none", "cuda")
        model = Decoder(config, Communicator(), torch.float32, "cpu", 64, schemes(formats, Unquantised()))
        load_weights(model, quantised, config, "dummy")
        spread = model.numbers()["layers.0.mlp.gate_up.weight"].std() * 64**0.5
        assert 0.5 < spread < 2, (dialect, spread)


# -- as tools name things -----------------------------------------------------------------------------------------------


def an_expert_at_a_time(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As llm-compressor 0.14 names the experts of Mixtral, Granite and gpt-oss: linears gate_proj, up_proj and down_proj."""
    found = {}
    for name, tensor in tensors.items():
        moe, granite, linear = name.partition(".block_sparse_moe.")
        if granite and linear.endswith("put_linear.weight"):
            for expert, part in enumerate(tensor):
                names = ("gate_proj", "up_proj") if linear.startswith("input") else ("down_proj",)
                rows = dict(zip(names, part.chunk(len(names)), strict=True))
                found |= {f"{moe}{granite}experts.{expert}.{each}.weight": value.clone() for each, value in rows.items()}
            continue
        for short, long in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = name.replace(f".{short}.", f".{long}.")
        prefix, _, last = name.partition(".experts.")
        if not last or last[0].isdigit():
            found[name] = tensor
            continue
        kind = "bias" if last.endswith("_bias") else "weight"
        for expert, part in enumerate(tensor if kind == "bias" else tensor.transpose(1, 2)):
            parts = {"down_proj": part} if last.startswith("down") else {"gate_proj": part[::2], "up_proj": part[1::2]}
            found |= {f"{prefix}.experts.{expert}.{each}.{kind}": rows.contiguous() for each, rows in parts.items()}
    return found


@pytest.mark.parametrize("model", ["mixtral", "gpt_oss", "granitemoe", "granitemoeshared"])
def test_experts_that_a_tool_saved_one_by_one(model: str, tmp_path: Path) -> None:
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 64}
    for folder in ("usual", "plain", "quantised"):
        save_checkpoint(model, tmp_path / folder, **SIZES | sizes)
    file = tmp_path / "quantised" / "model.safetensors"
    renamed = an_expert_at_a_time(load_file(file))
    assert sum(".experts." in name and "proj.weight" in name for name in renamed) == 2 * 3 * 3
    save_file(renamed, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    usual, plain = decoder(tmp_path / "usual", False), decoder(tmp_path / "plain", False)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in usual.state_dict().items())

    config, write = DIALECTS["ct-w4a16"]
    stored, expanded = {}, {}
    for name, tensor in renamed.items():
        found, expanded[name] = write(name, tensor) if name.endswith("proj.weight") else ({".weight": tensor}, tensor)
        base = name.removesuffix(".weight") if ".weight_packed" in found else None
        stored |= {name: tensor} if base is None else {base + ending: each.clone() for ending, each in found.items()}
    save_file(stored, file, {"format": "pt"})
    save_file(expanded, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    set_quantization(tmp_path / "quantised", config)
    expected, packed = decoder(tmp_path / "plain", False), decoder(tmp_path / "quantised", True)
    for name, value in packed.numbers().items():
        assert torch.equal(value, expected.numbers()[name]), name


@pytest.mark.parametrize("named", ["gate_proj", "up_proj", "down_proj"])
def test_experts_that_a_list_leaves_out_by_their_names(named: str, tmp_path: Path) -> None:
    """llm-compressor lists every module that it left out. Families have a name for gate and up in one, too."""
    save_checkpoint("qwen3_moe", tmp_path, **SIZES | {"decoder_sparse_step": 1, "moe_intermediate_size": 64})
    left_out = [f"model.layers.0.mlp.experts.{expert}.{named}" for expert in range(8)]
    config, _ = DIALECTS["ct-fp8-channel"]
    set_quantization(tmp_path, config | {"ignore": ["lm_head", *left_out]})
    formats = LinearFormats(load_model_config(tmp_path), "none", "cuda")
    assert formats("layers.0.mlp.experts.gate_up").format is None
    assert formats("layers.1.mlp.experts.gate_up").format is not None


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("model", ["mixtral", "minimax_m2", "phimoe"])
def test_a_list_that_skips_the_router_leaves_experts_packed(model: str, method: str, tmp_path: Path) -> None:
    """["gate"] is the router, wherever it is in a name. Experts are w1, w2, w3 there; other tools call them gate_proj …"""
    fits_its_rope = {"hidden_size": 96, "num_attention_heads": 8, "head_dim": 12} if model == "phimoe" else {}
    save_checkpoint(model, tmp_path, **SIZES | fits_its_rope)
    config = {"quant_method": method, "bits": 4, "group_size": GROUP, "modules_to_not_convert": ["gate"]}
    set_quantization(tmp_path, config)
    assert any(name.endswith("experts.0.w1.weight") for name in load_file(tmp_path / "model.safetensors"))
    formats = LinearFormats(load_model_config(tmp_path), "none", "cuda")
    chosen = formats("layers.0.mlp.experts.gate_up").format
    assert chosen is not None and chosen.name == "uint4-32"


def test_the_headers_of_a_checkpoint_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _ = save_quantised("awq", tmp_path)
    read: list[Path] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args, **rest: (read.append(self), real(self, *args, **rest))[1])
    load_model_config(quantised)
    assert [path.suffix for path in read].count(".safetensors") == 1


@pytest.mark.parametrize("target", ["Embedding", "re:.*embed_tokens$", "model.embed_tokens"])
def test_an_embedding_with_a_format_of_its_own(target: str, tmp_path: Path) -> None:
    """Groups for torch's classes Embedding and Linear, or for a name: 8 bits and 4."""
    quantised, plain = save_quantised("ct-w4a16", tmp_path)
    config, _ = DIALECTS["ct-w4a16"]
    eight = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"embedding": {"targets": [target], "weights": eight}} | config["config_groups"]
    set_quantization(quantised, config | {"config_groups": groups})
    name = "model.embed_tokens"
    stored, numbers = load_file(quantised / "model.safetensors"), load_file(plain / "model.safetensors")
    found, numbers[f"{name}.weight"] = DIALECTS["ct-w8a16"][1](name, stored.pop(f"{name}.weight"))
    save_file(stored | {name + ending: each for ending, each in found.items()}, quantised / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    packed, expected = decoder(quantised, True), decoder(plain, False)
    for name, value in packed.numbers().items():
        assert torch.equal(value, expected.numbers()[name]), name
    store_numbers(quantised, torch.float16, "float16")   # codes are expanded to float32, numbers are not
    assert counted_on_a_cpu(quantised)


@pytest.mark.parametrize("ignored", ["model.embed_tokens", "re:.*embed_tokens"])
def test_an_embedding_that_a_list_leaves_out_counts_as_numbers(ignored: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised("ct-w4a16", tmp_path)
    config, _ = DIALECTS["ct-w4a16"]
    groups = {"embedding": {"targets": ["Embedding"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}
    set_quantization(quantised, config | {"config_groups": groups | config["config_groups"], "ignore": ["lm_head", ignored]})
    store_numbers(quantised, torch.float16, "float16")
    assert counted_on_a_cpu(quantised)


# -- the ledger of a CPU ------------------------------------------------------------------------------------------------


def counted_on_a_cpu(path: Path) -> bool:
    """Whether the bytes that are predicted from config and headers are those of the loaded model."""
    config = load_model_config(path)
    plain = plain_scheme(torch.device("cpu"), torch.float32)
    if not isinstance(plain, CpuPacked):
        pytest.skip("the native kernels are not built: weights do not lie in tiles")
    formats = LinearFormats(config, "none", "cpu", 1, "float32")
    made = Decoder(config, Communicator(), torch.float32, "cpu", 64, schemes(formats, plain))
    load_weights(made, path, config)
    return made.weight_bytes == weight_bytes(config, "float32", "cpu")


def store_numbers(path: Path, stored: torch.dtype, said: str) -> None:
    file, config = path / "model.safetensors", path / "config.json"
    plain = {name for name, each in load_file(file).items() if name.endswith(".weight") and each.dtype in NUMBERS}
    assert any("embed_tokens" in name or "layernorm" in name for name in plain)
    tensors = {name: each.to(stored) if name in plain else each for name, each in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": said}))


@pytest.mark.parametrize("said", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_count_as_they_are_stored_whatever_the_config_says(said: str, stored: torch.dtype, tmp_path: Path) -> None:
    """auto-round on a CPU writes float32 beside its codes, and a config that says bfloat16."""
    quantised, _ = save_quantised("auto-round", tmp_path)
    store_numbers(quantised, stored, said)
    assert counted_on_a_cpu(quantised)


def test_the_order_of_inputs_is_counted(tmp_path: Path) -> None:
    """desc_act: four bytes for each input, beside tiles."""
    quantised, _ = save_quantised("gptq-desc-act", tmp_path)
    store_numbers(quantised, torch.float16, "float16")
    assert counted_on_a_cpu(quantised)


@pytest.mark.parametrize("model", ["qwen2_moe", "deepseek_v2-lite"])
def test_shared_experts_of_a_quantised_checkpoint_are_counted(model: str, tmp_path: Path) -> None:
    """They have no format of their own on any device: their codes are expanded."""
    sizes = {"moe_intermediate_size": 64}
    if model == "qwen2_moe":
        sizes |= {"shared_expert_intermediate_size": 64, "mlp_only_layers": []}
    else:
        sizes |= {"num_key_value_heads": 4, "kv_lora_rank": 32, "v_head_dim": 16, "n_shared_experts": 1}
    quantised, _ = save_quantised("ct-w8a8", tmp_path, model, only=lambda name: "kv_b_proj" not in name, **sizes)
    assert any("shared_expert" in name and name.endswith("weight_scale") for name in load_file(quantised / "model.safetensors"))
    store_numbers(quantised, torch.float16, "float16")
    assert counted_on_a_cpu(quantised)
