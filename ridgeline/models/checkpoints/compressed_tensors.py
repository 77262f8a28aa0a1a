"""The dialect of compressed-tensors (llm-compressor): groups of modules, each with bits, strategy and a storage format."""

from __future__ import annotations

import re

from ridgeline.models.checkpoints.recipe import (
    ANY,
    EMBEDDING,
    KV_SCALES,
    Quantisation,
    Recipe,
    Section,
    is_block,
    regex,
)
from ridgeline.quant.format import Activation, Scales, WeightFormat

FORMATS = (
    "dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "sparse-24-bitmask", "sparse-bitmask",
)
_HISTORY = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
_INPUT_SCALES = (".input_scale", ".input_zero_point", ".input_global_scale")


def read(section: Section) -> Quantisation:
    section.skip("quant_method", "quantization_status", "global_compression_ratio", "version", "provider")
    format = section.one_of("format", FORMATS, "dense")
    rules: list[tuple[str, Recipe | None]] = [
        (regex(name.removeprefix("re:"), section, "ignore") if name.startswith("re:") else re.escape(name), None)
        for name in section.names("ignore")
    ]
    sparse = _sparsity(section, format)
    found: list[tuple[int, str, str, Recipe | None]] = []
    groups = section.section("config_groups")
    for name in groups.raw if groups is not None else ():
        group = groups.section(name) if groups is not None else None
        if group is None:
            continue
        recipe = _recipe(group, format, sparse)
        for target in group.names("targets"):
            # As compressed-tensors orders them: names before patterns before classes of modules, each by their text. The order
            # of the groups means nothing: a file that it wrote may have them in another one.
            if target.startswith("re:"):
                found.append((1, target, regex(target.removeprefix("re:"), group, "targets"), recipe))
            elif target == "Embedding":
                found.append((2, target, EMBEDDING, recipe))
            elif target == "Linear":
                found.append((3, target, ANY, recipe))   # also matches embeddings
            else:
                found.append((0, target, re.escape(target), recipe))
        group.finish()
    if not found and sparse is not None:
        found.append((3, "", ANY, sparse))
    rules += [(pattern, recipe) for _, _, pattern, recipe in sorted(found, key=lambda each: each[:2])]
    kv_format = _kv_format(section)
    section.finish()
    return Quantisation("compressed-tensors", tuple(rules), KV_SCALES, kv_format=kv_format)


def _kv_format(section: Section) -> str:
    """What the checkpoint's scales of the KV cache are for. They are used if the cache is asked to have this format."""
    scheme = section.section("kv_cache_scheme")
    if scheme is not None and scheme.get("num_bits", 8) != 8:
        raise scheme.error("num_bits", scheme.get("num_bits"), "is not supported for the KV cache; supported: 8")
    return "int8" if scheme is not None and scheme.get("type") == "int" else "fp8"


def _sparsity(section: Section, format: str) -> Recipe | None:
    """Bitmask formats hold the values that are not zero, and a bit for each place."""
    sparsity = section.section("sparsity_config")
    if sparsity is None and not format.startswith("sparse"):
        return None
    stored = format
    if sparsity is not None:
        stored = sparsity.one_of("format", ("dense", "sparse-24-bitmask", "sparse-bitmask"), "dense")
    if stored == "dense":
        return None
    structure = "2:4" if stored == "sparse-24-bitmask" else "unstructured"
    return Recipe(
        WeightFormat("bf16", sparse=structure), "bitmask",
        (("codes", (".compressed", ".weight.compressed")), ("mask", (".bitmask", ".weight.bitmask")),
         ("shape", (".shape", ".weight.shape")), ("starts", (".row_offsets", ".weight.row_offsets"))),
        optional=("starts",), variant=stored,
    )


def _recipe(group: Section, format: str, sparse: Recipe | None) -> Recipe | None:
    weights, inputs, outputs = (group.section(name) for name in ("weights", "input_activations", "output_activations"))
    if outputs is not None:
        raise group.error("output_activations", "", "is not supported")
    stored = group.get("format") or format
    if stored not in FORMATS:
        raise group.error("format", stored, f"is not supported; supported: {', '.join(FORMATS)}")
    activation = _activation(inputs)
    if weights is None:
        return sparse
    weights.skip(*_HISTORY, "dynamic")
    bits, kind = weights.of("num_bits", int, 8), weights.one_of("type", ("int", "float"), "int")
    symmetric = weights.of("symmetric", bool, True)
    block = _block(weights, stored)
    weights.finish()
    if sparse is not None:
        raise group.error("weights", f"{kind}{bits}", "together with sparse storage is not supported")
    if stored in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return fp4_recipe(stored, activation)
    integers = kind == "int" and 1 <= bits <= 8
    if stored == "pack-quantized":
        if not integers:
            raise weights.error("num_bits", f"{kind}{bits}", "is not supported in pack-quantized; supported: 1 to 8 integer bits")
        return _packed(bits, symmetric, block, activation)
    if not integers and (kind, bits) != ("float", 8):    # W4A8: integers of fewer bits lie in whole bytes, too
        raise weights.error("num_bits", f"{kind}{bits}", f"is not supported in {stored}; supported: 1 to 8 integer bits, float8")
    scales = Scales(block, "float32", None if symmetric else "code")
    if stored == "mxfp8-quantized":
        scales = Scales((1, 32), "e8m0")
    return codes_recipe("e4m3" if kind == "float" else "int8", scales, activation)


def codes_recipe(grid: str, scales: Scales, activation: Activation | None) -> Recipe:
    """A byte for each code."""
    return Recipe(
        WeightFormat(grid, scales, activation), "codes",
        (("codes", (".weight",)), ("scale", (".weight_scale",)), ("zero", (".weight_zero_point",))),
        optional=("zero",), unused=_INPUT_SCALES,
    )


def _block(weights: Section, stored: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale. A scale for the whole tensor is written out for every output."""
    block = weights.get("block_structure")
    size = None if weights.get("group_size") is None else weights.group("group_size", -1)
    if stored.startswith("mx") and size not in (None, 32):
        raise weights.error("group_size", size, f"is not supported in {stored}; supported: 32")
    strategy = weights.of("strategy", str) or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy in ("tensor", "channel"):
        return 1, 0
    if strategy in ("group", "tensor_group"):
        return 1, max(0, size or 0)
    if isinstance(block, str):
        block = [int(each) for each in block.split("x") if each.isdecimal() and len(each) < 9]
    if strategy != "block" or not is_block(block):
        raise weights.error("strategy", strategy, "is not supported; supported: tensor, channel, group, tensor_group, and block "
                            "with a block_structure of two sizes")
    return block[0], block[1]


def _packed(bits: int, symmetric: bool, block: tuple[int, int], activation: Activation | None) -> Recipe:
    grid = "uint4" if bits <= 4 else {5: "q5", 6: "q6"}.get(bits, "int8")
    roles: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("codes", (".weight_packed",)), ("scale", (".weight_scale",)), ("shape", (".weight_shape",)),
        ("zero", (".weight_zero_point",)), ("groups", (".weight_g_idx",)),
    )
    return Recipe(
        WeightFormat(grid, Scales(block, "float32", None if symmetric else "code"), activation), "ct_packed", roles,
        optional=("zero", "groups"), unused=_INPUT_SCALES, bits=bits,
    )


def fp4_recipe(stored: str, activation: Activation | None) -> Recipe:
    scales = Scales((1, 32), "e8m0")
    roles: tuple[tuple[str, tuple[str, ...]], ...] = ()
    if stored == "nvfp4-pack-quantized":
        scales, roles = Scales((1, 16), "float8_e4m3fn", outer=Scales((1, 0))), (("outer", (".weight_global_scale",)),)
    return Recipe(
        WeightFormat("e2m1", scales, activation), "fp4",
        (("codes", (".weight_packed",)), ("scale", (".weight_scale",)), *roles), unused=_INPUT_SCALES, variant="divides",
    )


def _activation(inputs: Section | None) -> Activation | None:
    if inputs is None:
        return None
    inputs.skip(*_HISTORY, "symmetric", "group_size", "block_structure")
    bits, kind = inputs.of("num_bits", int, 8), inputs.one_of("type", ("int", "float"), "int")
    names = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4"}
    if (kind, bits) not in names:
        raise inputs.error("num_bits", f"{kind}{bits}", "is not supported for activations; supported: int8, float8, float4")
    strategy = inputs.of("strategy", str) or "tensor"
    dynamic = inputs.get("dynamic", False)
    inputs.finish()
    per = {"token": "token", "tensor": "tensor"}.get(strategy, "group")
    return Activation(names[kind, bits], per, static=dynamic is False)
