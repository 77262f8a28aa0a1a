"""Makes tests/golden/quantised.safetensors: matrices as the packages of each dialect store and expand them.

Needs compressed-tensors, bitsandbytes and transformers. Every case NAME has the stored tensors as NAME/ENDING, what the package
expands them to as NAME/expected, and its entry of a `quantization_config` in the file's metadata.

    PYTHONPATH=/path/to/those/packages python tests/golden/make_quantised.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import bitsandbytes
import compressed_tensors
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.bitnet import pack_weights
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUTPUTS, INPUTS = 24, 128
tensors: dict[str, Tensor] = {}
configs: dict[str, str] = {}


def matrix(outputs: int = OUTPUTS, inputs: int = INPUTS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(len(configs))
    return (torch.randn(outputs, inputs, generator=generator) * 0.1 * (1 + torch.arange(outputs)[:, None] / 7)).to(dtype)


def add(name: str, config: dict[str, Any], stored: dict[str, Tensor], expected: Tensor) -> None:
    tensors.update({f"{name}/{ending}": value.contiguous() for ending, value in stored.items()})
    tensors[f"{name}/expected"] = expected.contiguous()
    configs[name] = json.dumps(config)


def groups_of(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Least and largest of what shares a scale."""
    kind = args.strategy
    if kind == "tensor":
        parts = weight.reshape(1, -1)
    elif kind == "channel":
        parts = weight
    elif kind == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    else:
        parts = weight.unflatten(1, (-1, args.group_size))
    least, largest = parts.amin(-1), parts.amax(-1)
    return (least[:, None], largest[:, None]) if kind in ("tensor", "channel") else (least, largest)


def compressed(
    name: str, format: str, weights: dict[str, Any], shape: tuple[int, int] = (OUTPUTS, INPUTS),
    inputs: dict[str, Any] | None = None, dtype: torch.dtype = torch.bfloat16,
) -> None:
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=None if inputs is None else QuantizationArgs(**inputs)
    )
    weight = matrix(*shape, dtype=dtype)
    state: dict[str, Tensor] = {"weight": weight}
    least, largest = groups_of(weight, args)
    second = None
    if args.strategy == "tensor_group":
        second = generate_gparam(weight.amin(), weight.amax())
        state["weight_global_scale"] = second
    scale, zero = calculate_qparams(least, largest, args, global_scale=second)
    state["weight_scale"] = scale if args.strategy != "tensor" else scale.reshape(1)
    state["weight_zero_point"] = zero if args.strategy != "tensor" else zero.reshape(1)
    compressor = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": format}
    add(name, {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}, stored, expected)


def compressed_cases() -> None:
    tensor8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    token8 = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    compressed("ct-fp8-tensor", "float-quantized", tensor8, inputs=tensor8)
    compressed("ct-fp8-channel", "float-quantized", {**tensor8, "strategy": "channel"}, inputs=token8)
    compressed("ct-fp8-block", "float-quantized", {**tensor8, "strategy": "block", "block_structure": [32, 48]}, (80, 112),
               inputs={**token8, "strategy": "group", "group_size": 48})
    integers = {"type": "int", "symmetric": True, "dynamic": False}
    eight = {**integers, "num_bits": 8, "strategy": "channel"}
    compressed("ct-w8a8", "int-quantized", eight, inputs={**integers, "num_bits": 8, "strategy": "token", "dynamic": True})
    compressed("ct-w8a16", "pack-quantized", eight)
    compressed("ct-w8a16-asymmetric", "pack-quantized", {**eight, "symmetric": False})
    for size in (32, 64, 128):
        compressed(f"ct-w4a16-{size}", "pack-quantized", {**integers, "num_bits": 4, "strategy": "group", "group_size": size})
    compressed("ct-w4a16-float16", "pack-quantized", {**integers, "num_bits": 4, "strategy": "group", "group_size": 64},
               dtype=torch.float16)
    compressed("ct-w4a16-channel", "pack-quantized", {**integers, "num_bits": 4, "strategy": "channel"})
    compressed("ct-w4a16-asymmetric", "pack-quantized",
               {**integers, "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False})
    for bits in (2, 3, 5, 6, 7):
        compressed(f"ct-w{bits}a16", "pack-quantized", {**integers, "num_bits": bits, "strategy": "group", "group_size": 64})
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    compressed("ct-nvfp4", "nvfp4-pack-quantized", {**fp4, "strategy": "tensor_group", "group_size": 16})
    compressed("ct-mxfp8", "mxfp8-quantized",
               {**tensor8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"})
    compressed("ct-mxfp4", "mxfp4-pack-quantized",
               {**fp4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"})


def bitsandbytes_cases() -> None:
    for nested in (False, True):
        weight = matrix(dtype=torch.float32)
        codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        stored = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()} | {"weight": codes}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                  "bnb_4bit_use_double_quant": nested}
        add(f"bnb-nf4{'-nested' * nested}", config, stored, dequantize_4bit(codes, state))
    codes, scales, _ = int8_vectorwise_quant(matrix(dtype=torch.float16))
    add("bnb-int8", {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
        {"weight": codes, "SCB": scales}, int8_vectorwise_dequant(codes, scales))


def others() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (1, OUTPUTS, INPUTS // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 131, (1, OUTPUTS, INPUTS // 32), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)[0].t()         # gpt-oss has inputs first
    add("mxfp4", {"quant_method": "mxfp4"}, {"_blocks": blocks[0], "_scales": scales[0]}, expected)
    signs = torch.randint(-1, 2, (OUTPUTS, INPUTS), generator=generator, dtype=torch.int8)
    size = torch.tensor([math.pi], dtype=torch.bfloat16)
    add("bitnet", {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"},
        {"weight": pack_weights(signs.clone()), "weight_scale": size}, signs.float() / size.float())


if __name__ == "__main__":
    compressed_cases()
    bitsandbytes_cases()
    others()
    versions = {package.__name__: package.__version__ for package in (compressed_tensors, bitsandbytes, transformers)}
    path = Path(__file__).parent / "quantised.safetensors"
    save_file(tensors, path, configs | {"made_by": json.dumps(versions)})
    print(path, path.stat().st_size, len(configs))
