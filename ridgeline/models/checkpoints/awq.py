"""The dialect of AutoAWQ: 4-bit codes packed along the outputs, in the order in which its kernels unpack them."""

from __future__ import annotations

from ridgeline.models.checkpoints.recipe import ANY, HEAD, KV_SCALES, TUNING, Quantisation, Recipe, Section, anywhere
from ridgeline.quant.format import Scales, WeightFormat


def read(section: Section) -> Quantisation:
    section.skip(
        "quant_method", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", "sym", "desc_act",
        "true_sequential", "tokenizer", "dataset", "meta", "damp_percent", "max_input_length", "model_seqlen", "method", *TUNING,
        # Of GPTQ, whose fields transformers writes for AWQ, too.
        "act_group_aware", "cache_block_outputs", "module_name_preceding_first_block", "pad_token_id",
    )
    section.one_of("pack_dtype", ("int32", None))        # of GPTQModel, which says `format` and `lm_head`, too
    section.one_of("data_type", ("int", None), "int")
    for name in ("version", "format", "checkpoint_format"):
        if section.text(name).lower() not in ("", "gemm"):
            raise section.error(name, section.get(name), "is not supported; supported: gemm")
    bits = section.get("bits", section.get("w_bit", 4))
    if bits != 4:
        raise section.error("bits", bits, "is not supported; supported: 4")
    group = section.group("group_size", section.group("q_group_size", 128))
    zeros = section.of("zero_point", bool, True)
    skipped = section.names("modules_to_not_convert")
    head = () if section.get("lm_head", False) else ((HEAD, None),)
    section.finish()
    recipe = awq_recipe(group, zeros)
    return Quantisation("awq", (*((anywhere(name), None) for name in skipped), *head, (ANY, recipe)), KV_SCALES)


def awq_recipe(group: int, zeros: bool) -> Recipe:
    """Zero points are stored also where all of them are the middle code."""
    scales = Scales((1, max(0, group)), "float16", "code" if zeros else None)
    return Recipe(
        WeightFormat("uint4", scales), "awq", (("codes", (".qweight",)), ("scale", (".scales",)), ("zero", (".qzeros",))),
        optional=() if zeros else ("zero",), bits=4,
    )
