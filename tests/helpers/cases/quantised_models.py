"""Tiny checkpoints in every dialect of quantised weights, written by hand from codes that are known.

A writer takes the name of a linear and a weight and gives (what the checkpoint stores, by ending; the numbers that this means).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_checkpoint
from torch import Tensor

from ridgeline.models.checkpoints.gguf_formats import FORMATS
from ridgeline.ops.quantised.codes import NF4
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.quant.format import SPREAD, WeightFormat, common
from ridgeline.quant.quantised import quantised_weight, torch_dtype

Stored = dict[str, Tensor]
Writer = Callable[[str, Tensor], tuple[Stored, Tensor]]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "num_hidden_layers": 2, "tie_word_embeddings": False}
GROUP = 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def grouped(weight: Tensor, group: int = GROUP) -> Tensor:
    return weight.double().unflatten(1, (-1, group))


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] -> int32 [rows, n * bits / 32], one dense stream of bits."""
    stream = ((codes.long()[..., None] >> torch.arange(bits)) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32)).unflatten(1, (-1, 32))
    value = (stream << torch.arange(32)).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


def nibbles(codes: Tensor) -> Tensor:
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def four_bits(weight: Tensor, asymmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, zeros, float16 scales, numbers)"""
    parts = grouped(weight)
    if asymmetric:
        least, largest = parts.amin(-1), parts.amax(-1)
        scale = ((largest - least) / 15).half()
        zero = (-least / scale.double()).round().clamp(0, 15)
    else:
        scale, zero = (parts.abs().amax(-1) / 7).half(), torch.full(parts.shape[:2], 8.0, dtype=torch.float64)
    codes = ((parts / scale.double()[..., None]).round() + zero[..., None]).clamp(0, 15)
    numbers = (codes - zero[..., None]) * scale.double()[..., None]
    return codes.flatten(1).to(torch.uint8), zero.to(torch.uint8), scale, numbers.flatten(1)


# ── 8 bits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def fp8(scale_name: str, rows: int, columns: int, more: Stored | None = None) -> Writer:
    """One scale for blocks of rows x columns; 0: of all of them."""

    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        outputs, inputs = weight.shape
        r, c = rows or outputs, columns or inputs
        padded = torch.nn.functional.pad(weight.float(), (0, -inputs % c, 0, -outputs % r))
        scale = padded.abs().unflatten(1, (-1, c)).unflatten(0, (-1, r)).amax((1, 3)) / 448
        spread = scale.repeat_interleave(r, 0)[:outputs].repeat_interleave(c, 1)[:, :inputs]
        codes = (weight.float() / spread).to(torch.float8_e4m3fn)
        stored = scale if columns else scale[:, 0] if rows else scale.reshape(())
        if rows == 1 and not columns:
            stored = scale                               # [outputs, 1], as compressed-tensors has it
        return {".weight": codes, scale_name: stored, **(more or {})}, codes.double() * spread.double()

    return write


def int8_rows(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight.float() / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.double() * scale.double()


def int4_bytes(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """W4A8 of compressed-tensors: codes of 4 bits, a byte for each."""
    codes, _, scale, numbers = four_bits(weight, False)
    return {".weight": (codes.int() - 8).to(torch.int8), ".weight_scale": scale}, numbers


def int8_packed(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    stored, numbers = int8_rows(name, weight)
    codes = stored.pop(".weight").int() + 128
    return {".weight_packed": words(codes, 8), ".weight_shape": torch.tensor(weight.shape), **stored}, numbers


def bnb_int8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    top = weight.float().abs().amax(1)
    codes = (weight.float() / top[:, None] * 127).round().to(torch.int8)
    scale = top * (1.0 / 127.0)
    return {".weight": codes, ".SCB": top, ".weight_format": torch.tensor(0, dtype=torch.uint8)}, codes.double() * scale[:, None]


# ── 4 bits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def ct_packed(asymmetric: bool) -> Writer:
    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        codes, zero, scale, numbers = four_bits(weight, asymmetric)
        stored = {".weight_packed": words(codes, 4), ".weight_scale": scale, ".weight_shape": torch.tensor(weight.shape)}
        if asymmetric:
            stored[".weight_zero_point"] = words(zero.t(), 4).t().contiguous()
        return stored, numbers

    return write


def awq(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    codes, zero, scale, numbers = four_bits(weight, True)

    def packed(values: Tensor) -> Tensor:                # [n, outputs]: nibble i of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[i]
        return words(values.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    return {".qweight": packed(codes.t()), ".qzeros": packed(zero.t()), ".scales": scale.t().contiguous()}, numbers


def gptq(asymmetric: bool, version: int = 1, ordered: bool = False) -> Writer:
    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if ordered:                                      # q, k and v see the same inputs; so do gate and up
            seed = {"q": 1, "k": 1, "v": 1, "g": 2, "u": 2}.get(name.rpartition(".")[2][0], 3)
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
        codes, zero, scale, numbers = four_bits(weight[:, order], asymmetric)
        back = torch.argsort(order)
        stored = {
            ".qweight": words(codes[:, back], 4).t().contiguous(),
            ".qzeros": words((zero.t().int() - int(version == 1)) & 15, 4), ".scales": scale.t().contiguous(),
            ".g_idx": (back // GROUP).to(torch.int32),
        }
        return stored, numbers[:, back]

    return write


def e2m1_codes(shares: Tensor) -> Tensor:
    return (shares[..., None] - E2M1).abs().argmin(-1)


def nvfp4(dialect: str, group: int = 16) -> Writer:
    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        parts = grouped(weight, group)
        second = (weight.float().abs().amax() / (448 * 6)).reshape(1)    # the number that multiplies
        if dialect == "ct":
            second = 1 / second
        outer = (1 / second if dialect == "ct" else second).double()
        scale = (parts.abs().amax(-1) / 6 / outer).float().to(torch.float8_e4m3fn)
        codes = e2m1_codes(parts / (scale.double() * outer)[..., None])
        numbers = E2M1[codes] * (scale.double() * outer)[..., None]
        packed = nibbles(codes.flatten(1))
        if dialect == "ct":
            return {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": second}, numbers.flatten(1)
        stored = {".weight": packed, ".weight_scale": scale, ".weight_scale_2": second, ".input_scale": torch.ones(1)}
        return stored, numbers.flatten(1)

    return write


def mxfp4(dialect: str) -> Writer:
    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        parts = grouped(weight, 32)
        exponent = parts.abs().amax(-1).log2().floor() - 2
        codes = e2m1_codes(parts * 2**-exponent[..., None])
        numbers = (E2M1[codes] * 2 ** exponent[..., None]).flatten(1)
        packed, scale = nibbles(codes.flatten(1)), (exponent + 127).to(torch.uint8)
        if dialect == "ct":
            return {".weight_packed": packed, ".weight_scale": scale}, numbers
        return {"_blocks": packed.unflatten(1, (-1, 16)), "_scales": scale}, numbers

    return write


def bnb_nf4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    parts = weight.float().unflatten(1, (-1, 64))
    scale = parts.abs().amax(-1)
    shares = (parts / scale[..., None])[..., None]
    codes = (shares - torch.tensor(NF4)).abs().argmin(-1).flatten(1)
    numbers = torch.tensor(NF4).double()[codes].unflatten(1, (-1, 64)) * scale.double()[..., None]
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}).encode()
    flat = codes.flatten()
    return {
        ".weight": ((flat[::2] << 4) | flat[1::2]).to(torch.uint8)[:, None], ".weight.absmax": scale.flatten(),
        ".weight.quant_map": torch.tensor(NF4),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }, numbers.flatten(1)


def bitnet(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    scale = (1 / weight.float().abs().mean()).reshape(1)
    codes = (weight.float() * scale).round().clamp(-1, 1) + 1
    quarters = codes.to(torch.uint8).unflatten(0, (4, -1))
    packed = sum((quarters[place] << (2 * place) for place in range(1, 4)), quarters[0])
    return {".weight": packed, ".weight_scale": scale}, (codes.double() - 1) * (1 / scale).double()


def two_four(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    parts = weight.unflatten(1, (-1, 4))
    places = torch.zeros_like(parts, dtype=torch.bool).scatter_(2, parts.abs().topk(2).indices, True).flatten(1)
    mask = (places.unflatten(1, (-1, 8)).int() << torch.arange(8)).sum(-1).to(torch.uint8)
    stored = {".compressed": weight[places].view(len(weight), -1), ".bitmask": mask, ".shape": torch.tensor(weight.shape)}
    return stored, (weight * places).double()


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ct_config(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"], "config_groups": {"group_0": group},
            "quantization_status": "compressed", "kv_cache_scheme": None}


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_INT = {"type": "int", "symmetric": True, "dynamic": False}
_INT4 = _INT | {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "lm_head": False}

DIALECTS: dict[str, tuple[dict[str, Any], Writer]] = {
    "ct-fp8-tensor": (ct_config("float-quantized", _FLOAT8 | {"strategy": "tensor"}, _FLOAT8 | {"strategy": "tensor"}),
                      fp8(".weight_scale", 0, 0, {".input_scale": torch.ones(1)})),
    "ct-fp8-channel": (ct_config("float-quantized", _FLOAT8 | {"strategy": "channel"}), fp8(".weight_scale", 1, 0)),
    "ct-fp8-block": (ct_config("float-quantized", _FLOAT8 | {"strategy": "block", "block_structure": [48, 40]}),
                     fp8(".weight_scale", 48, 40)),
    "fp8-block": ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]},
                  fp8(".weight_scale_inv", 16, 16)),
    "fp8-uneven-block": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8(".weight_scale_inv", 48, 40)),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"},
                   fp8(".weight_scale", 0, 0, {".input_scale": torch.ones(())})),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
                     fp8(".weight_scale", 0, 0, {".input_scale": torch.ones(())})),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
                       nvfp4("modelopt")),
    "modelopt-nvfp4-32": ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 32, "ignore": ["lm_head"]},
                          nvfp4("modelopt", 32)),
    "ct-w8a8": (ct_config("int-quantized", _INT | {"num_bits": 8, "strategy": "channel"},
                          _INT | {"num_bits": 8, "strategy": "token", "dynamic": True}), int8_rows),
    "ct-w4a8": (ct_config("int-quantized", _INT4, _INT | {"num_bits": 8, "strategy": "token", "dynamic": True}), int4_bytes),
    "ct-w8a16": (ct_config("pack-quantized", _INT | {"num_bits": 8, "strategy": "channel"}), int8_packed),
    "ct-w4a16": (ct_config("pack-quantized", _INT4), ct_packed(False)),
    "ct-w4a16-asymmetric": (ct_config("pack-quantized", _INT4 | {"symmetric": False}), ct_packed(True)),
    "ct-nvfp4": (ct_config("nvfp4-pack-quantized", _FLOAT4 | {"strategy": "tensor_group", "group_size": 16}), nvfp4("ct")),
    "ct-mxfp4": (ct_config("mxfp4-pack-quantized", _FLOAT4 | {"strategy": "group", "group_size": 32}), mxfp4("ct")),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (_GPTQ | {"sym": True, "desc_act": False}, gptq(False)),
    "gptq-asymmetric": (_GPTQ | {"sym": False, "desc_act": False}, gptq(True)),
    "gptq-v2": (_GPTQ | {"sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"}, gptq(True, 2)),
    "gptq-desc-act": (_GPTQ | {"sym": False, "desc_act": True}, gptq(True, 1, True)),
    "auto-round": (_GPTQ | {"quant_method": "auto-round", "sym": True, "packing_format": "auto_round:auto_gptq"}, gptq(False)),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4("gpt-oss")),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, bnb_int8),
    "bnb-nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb_nf4),
    "bitnet": ({"quant_method": "bitnet", "linear_class": "bitlinear"}, bitnet),
    "2:4": ({"quant_method": "compressed-tensors", "format": "sparse-24-bitmask", "config_groups": {}, "ignore": ["lm_head"],
             "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}}, two_four),
}


def save_quantised(
    dialect: str, folder: Path, model: str = "llama", only: Callable[[str], bool] = lambda name: True,
    writer: Writer | None = None, **sizes: Any,
) -> tuple[Path, Path]:
    """(a checkpoint in the dialect, a plain one in float64 that holds the same numbers); `only`: which linears are quantised"""
    config, write = DIALECTS[dialect]
    write = writer or write
    quantised, plain = folder / "quantised", folder / "plain"
    for path in (quantised, plain):
        save_checkpoint(model, path, **SIZES | sizes)
    stored: Stored = {}
    expanded: Stored = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if "layers." in name and name.endswith(("proj.weight", "proj_with_mqa.weight")) and only(module):
            found, numbers = write(module, tensor)
            stored |= {f"{module}{ending}": value.clone(memory_format=torch.contiguous_format) for ending, value in found.items()}
            expanded[name] = numbers.contiguous()
        else:
            stored[name] = expanded[name] = tensor
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    save_file(expanded, plain / "model.safetensors", {"format": "pt"})
    set_quantization(quantised, config)
    return quantised, plain


def set_quantization(path: Path, config: dict[str, Any]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


# GGUF's formats of 4 to 6 bits that have offsets, bytes as scales or more than four bits.
BLOCK_FORMATS = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q4_K and Q6_K")


def random_blocks(name: str, outputs: int, inputs: int, device: str = "cpu") -> QuantisedWeight:
    """Any codes, with scales and offsets of both signs. A name with "and": parts of a fused linear, in their common format."""
    format = common([FORMATS[each] for each in name.split(" and ")])
    assert format is not None
    return random_stored(format, outputs, inputs, device)


def random_stored(format: WeightFormat, outputs: int, inputs: int, device: str) -> QuantisedWeight:
    """Any codes of a GGUF format, with scales and offsets of both signs."""
    generator, tensors = torch.Generator(device).manual_seed(outputs + inputs), {}
    small = any(spec.name == "outer" for spec in format.tensors())
    for spec in format.tensors():
        shape, dtype = spec.shape(outputs, inputs), torch_dtype(spec.dtype)
        if not dtype.is_floating_point:
            most = 256 if spec.name in ("weight", "high") else 64
            codes = torch.randint(0, most, shape, device=device, generator=generator, dtype=torch.uint8)
            signed = spec.name in ("scale", "offset") and dtype == torch.int8
            tensors[spec.name] = (codes.int() - 32).to(dtype) if signed else codes.view(dtype)
        else:
            size = inputs**-0.5 / SPREAD[format.grid] / (20 if small else 1)
            tensors[spec.name] = (torch.randn(shape, device=device, generator=generator) * size).to(dtype)
    return quantised_weight(format, inputs, tensors)
