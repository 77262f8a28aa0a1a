"""fp8 checkpoints with `quant_method` fp8: blocks of 128 x 128 with `weight_scale_inv` (DeepSeek, Qwen), or one scale for each
tensor; the same of GPTQModel, whose scales divide; and `fbgemm_fp8`, one scale for each output."""

from __future__ import annotations

from ridgeline.models.checkpoints.recipe import (
    ANY,
    HEAD,
    KV_SCALES,
    TUNING,
    Quantisation,
    Recipe,
    Section,
    component,
    is_block,
)
from ridgeline.quant.format import Activation, Scales, WeightFormat

UNUSED = (".input_scale", ".activation_scale", ".input_scale_ub")


def read(section: Section) -> Quantisation:
    section.skip("quant_method", "kv_cache_scheme", "activation_scale_ub", "dequantize", "group_size", "sym", *TUNING)
    # auto-round says once more what the other keys say.
    section.one_of("data_type", ("fp", "fp8", None))
    section.one_of("bits", (8, None))
    section.one_of("expert_dtype", ("fp8", None))        # of transformers since 5.22; the other is fp4
    wide = section.one_of("act_bits", (8, 16, None)) == 16
    # GPTQModel quantises weights alone, and its `weight_scale_inv` divides the codes; that of all others multiplies them.
    section.skip("method", "pack_dtype", "desc_act", "meta")
    kinds = (section.one_of("weight_scale_method", ("tensor", "row", "block", None)),
             section.one_of("weight_scale_semantics", ("inverse", None)))
    divides = kinds != (None, None)
    wide = wide or divides
    for name in ("fmt", "format", "checkpoint_format"):
        section.one_of(name, ("e4m3", "float8_e4m3fn", None), "e4m3")
    section.one_of("scale_fmt", (None, "float", "float32", "ue8m0"), None)
    per_output = section.raw.get("quant_method") == "fbgemm_fp8"
    static = section.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    block = section.get("weight_block_size")
    if block is not None and not is_block(block):
        raise section.error("weight_block_size", block, "must be two sizes, of outputs and inputs")
    skipped = [*section.names("modules_to_not_convert"), *section.names("ignored_layers")]
    head = () if section.get("lm_head", False) else ((HEAD, None),)
    section.finish()
    per = "token" if per_output else "tensor" if block is None else "group"
    recipe = fp8_recipe(
        (1, 0) if block is None else (block[0], block[1]), None if wide else Activation("fp8", per, static), divides,
    )
    rules = (*((component(name), None) for name in skipped), *head, (ANY, recipe))
    return Quantisation("fp8", rules, KV_SCALES)


def fp8_recipe(block: tuple[int, int], activation: Activation | None, divides: bool = False) -> Recipe:
    """The scale may be spelled either way, and multiplies the codes unless it `divides` them."""
    endings = (".weight_scale", ".weight_scale_inv")
    return Recipe(
        WeightFormat("e4m3", Scales(block), activation), "codes",
        (("codes", (".weight",)), ("scale", endings if block[1] == 0 else endings[::-1])), unused=UNUSED,
        variant="divides" if divides else "",
    )
