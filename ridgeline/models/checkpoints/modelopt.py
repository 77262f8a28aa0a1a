"""The dialect of NVIDIA's ModelOpt: FP8 with one scale for each tensor (or output), and NVFP4. Its config is in config.json, or
in hf_quant_config.json beside it."""

from __future__ import annotations

import fnmatch

from ridgeline.models.checkpoints.recipe import (
    ANY,
    HEAD,
    KV_SCALES,
    Quantisation,
    Recipe,
    Section,
    component,
    glob,
)
from ridgeline.quant.format import Activation, Scales, WeightFormat

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MXFP4", "MXFP8")


def read(section: Section) -> Quantisation:
    section.skip("quant_method", "producer", "quant_lib", "version")
    inner = section.section("quantization") or section   # hf_quant_config.json has one level more
    inner.skip("quant_method", "producer", "has_zero_point", "pre_quant_scale", "quant_lib", "version")
    algorithm = inner.text("quant_algo").upper()     # ModelOpt 0.47 writes some of them small
    if algorithm not in ALGORITHMS:
        raise inner.error("quant_algo", inner.get("quant_algo"), f"is not supported; supported: {', '.join(ALGORITHMS)}")
    if inner.raw.get("pre_quant_scale"):
        raise inner.error("pre_quant_scale", True, "is not supported")
    cache = inner.get("kv_cache_quant_algo") or ""
    inner.skip("kv_cache_scheme")
    if cache not in ("", "FP8", "none"):
        raise inner.error("kv_cache_quant_algo", cache, "is not supported; supported: FP8")
    group = _group_size(inner)
    skipped = [*inner.names("exclude_modules"), *inner.names("ignore")]
    inner.finish()
    section.finish()
    recipe = _recipe(algorithm, group, inner)
    rules = ((_glob(name) if "*" in name else component(name), None) for name in skipped)
    return Quantisation("modelopt", (*rules, (HEAD, None), (ANY, recipe)), KV_SCALES)


def _group_size(section: Section) -> int | None:
    """In config.json it lies in config_groups, whose other facts follow from quant_algo."""
    groups = section.section("config_groups") or Section({}, "")
    weights = [named.section("weights") for name in groups.raw if (named := groups.section(name)) is not None]
    sizes = {section.of("group_size", int), *(each.of("group_size", int) for each in weights if each is not None)} - {None}
    if len(sizes) > 1:
        raise section.error("group_size", sorted(sizes), "are several sizes, which is not supported; supported: one")
    return next(iter(sizes), None)


def _glob(name: str) -> str:
    """With stars alone its texts are looked up (recipe.RuleIndex)."""
    return fnmatch.translate(name) if set(name) & set("?[") else glob(name)


def _recipe(algorithm: str, group: int | None, section: Section) -> Recipe:
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        activation = Activation("fp8", "tensor", True) if algorithm == "FP8" else Activation("fp8")
        return Recipe(
            WeightFormat("e4m3", Scales((1, 0)), activation), "codes",
            (("codes", (".weight",)), ("scale", (".weight_scale",))), unused=(".input_scale",),
        )
    if algorithm == "FP8_PB_WO":                         # weights only
        return Recipe(
            WeightFormat("e4m3", Scales((128, 128))), "codes", (("codes", (".weight",)), ("scale", (".weight_scale",))),
        )
    if algorithm in ("MXFP4", "MXFP8"):
        if group not in (None, 32):
            raise section.error("group_size", group, f"is not supported in {algorithm}; supported: 32")
        grid, kind, unpack = ("e2m1", "fp4", "fp4") if algorithm == "MXFP4" else ("e4m3", "fp8", "codes")
        return Recipe(
            WeightFormat(grid, Scales((1, 32), "e8m0"), Activation(kind, "group")), unpack,
            (("codes", (".weight",)), ("scale", (".weight_scale",))),
        )
    sizes = (16, 32) if algorithm == "W4A16_NVFP4" else (16,)        # matrix units that multiply fp4 know groups of 16 alone
    if group not in (None, *sizes):
        raise section.error("group_size", group, f"is not supported in {algorithm}; supported: {', '.join(map(str, sizes))}")
    inputs = None if algorithm == "W4A16_NVFP4" else Activation("fp4", "group", True)
    scales = Scales((1, group or 16), "float8_e4m3fn", outer=Scales((1, 0)))
    # The second scale multiplies here; compressed-tensors stores its inverse.
    return Recipe(
        WeightFormat("e2m1", scales, inputs), "fp4",
        (("codes", (".weight",)), ("scale", (".weight_scale",)), ("outer", (".weight_scale_2",))),
        unused=(".input_scale",), variant="multiplies",
    )
