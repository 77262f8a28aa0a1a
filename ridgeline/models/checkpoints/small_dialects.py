"""Dialects of few words: gpt-oss `mxfp4`, `bitsandbytes` (LLM.int8() and NF4), `bitnet`."""

from __future__ import annotations

from ridgeline.models.checkpoints.recipe import ANY, HEAD, Quantisation, Recipe, Section, component
from ridgeline.quant.format import Activation, Scales, WeightFormat

MAX_THRESHOLD = 1e18


def read_mxfp4(section: Section) -> Quantisation:
    """gpt-oss names a matrix's tensors NAME_blocks and NAME_scales."""
    section.skip("quant_method", "dequantize")
    skipped = section.names("modules_to_not_convert")
    section.finish()
    recipe = Recipe(
        WeightFormat("e2m1", Scales((1, 32), "e8m0")), "mxfp4",
        (("codes", ("_blocks", ".weight_blocks", ".blocks")), ("scale", ("_scales", ".weight_scales", ".scales"))),
    )
    return Quantisation("mxfp4", (*((component(name), None) for name in skipped), (HEAD, None), (ANY, recipe)))


def read_bitsandbytes(section: Section) -> Quantisation:
    section.skip(
        "quant_method", "_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype",
        "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
    )
    four = bool(section.raw.get("load_in_4bit") or section.raw.get("_load_in_4bit"))
    kind = section.get("bnb_4bit_quant_type", "nf4")
    # Pairs of codes may lie in numbers of any width: the same bytes.
    section.one_of("bnb_4bit_quant_storage", ("uint8", "float16", "bfloat16", "float32", None), "uint8")
    threshold = section.of("llm_int8_threshold", (int, float), 6.0)
    if not 0 <= threshold <= MAX_THRESHOLD:
        raise section.error("llm_int8_threshold", threshold, f"must be a number from 0 to {MAX_THRESHOLD:g}")
    skipped = section.names("llm_int8_skip_modules") or ["lm_head"]
    if four and kind != "nf4":
        raise section.error("bnb_4bit_quant_type", kind, "is not supported; supported: nf4")
    section.finish()
    if four:
        recipe = Recipe(
            WeightFormat("nf4", Scales((1, 64))), "bnb_4bit",
            (("codes", (".weight",)), ("scale", (".weight.absmax",)), ("table", (".weight.quant_map",)),
             ("state", (".weight.quant_state.bitsandbytes__nf4",)), ("outer", (".weight.nested_absmax",)),
             ("outer_table", (".weight.nested_quant_map",))),
            optional=("outer", "outer_table"),
        )
    else:
        # Columns of x with values above the threshold are multiplied in 16 bits; x is not quantised here, so all of them are.
        activation = Activation("int8", "token", outliers=float(threshold))
        recipe = Recipe(
            WeightFormat("int8", Scales((1, 0)), activation), "bnb_8bit", (("codes", (".weight",)), ("scale", (".SCB",))),
            unused=(".weight_format",),
        )
    return Quantisation("bitsandbytes", (*((component(name), None) for name in skipped), (ANY, recipe)))


def read_bitnet(section: Section) -> Quantisation:
    """BitNet b1.58: -1, 0 or 1 times one number. `bitlinear` divides by its scale, `autobitlinear` multiplies."""
    section.skip("quant_method")
    kind = section.one_of("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    section.one_of("quantization_mode", ("offline", None), "offline")
    section.skip("rms_norm_eps")
    if section.get("use_rms_norm", False):
        raise section.error("use_rms_norm", True, "is not supported: each linear would have a norm of its own")
    skipped = section.names("modules_to_not_convert") or ["lm_head"]
    section.finish()
    recipe = Recipe(
        WeightFormat("ternary", Scales((1, 0)), Activation("int8")), "bitnet",
        (("codes", (".weight",)), ("scale", (".weight_scale",))), variant="divides" if kind == "bitlinear" else "multiplies",
    )
    return Quantisation("bitnet", (*((component(name), None) for name in skipped), (HEAD, None), (ANY, recipe)))
