"""The dialect of AutoGPTQ, GPTQModel and auto-round: codes packed along the inputs, zeros packed along the outputs.

Version 1 stores zero points minus one, version 2 stores them as they are. `desc_act` gives every input the number of its group.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from ridgeline.errors import ModelError
from ridgeline.models.checkpoints.awq import awq_recipe
from ridgeline.models.checkpoints.compressed_tensors import codes_recipe, fp4_recipe
from ridgeline.models.checkpoints.fp8_checkpoints import fp8_recipe
from ridgeline.models.checkpoints.recipe import (
    ANY,
    HEAD,
    KV_SCALES,
    TUNING,
    Quantisation,
    Recipe,
    Section,
    anywhere,
    component,
    is_block,
    regex,
)
from ridgeline.quant.format import Activation, Scales, WeightFormat

_ROLES = (
    ("codes", (".qweight",)), ("scale", (".scales",)), ("zero", (".qzeros",)), ("groups", (".g_idx",)),
)
# Facts about how the codes were found; the tensors mean the same.
_HISTORY = (
    "quant_method", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path",
    "model_file_base_name", "meta", "dataset", "use_cuda_fp16", "exllama_config", "use_exllama", "max_input_length", "backend",
    "cache_block_outputs", "module_name_preceding_first_block", "pad_token_id", "tokenizer", "model_seqlen", "disable_exllama",
    "is_marlin_format", "act_bits", "fallback", "packing", "packing_format", "pack_dtype", "hyb_act", "mse", "method",
    "act_group_aware", "offload_to_disk", "offload_to_disk_path", *TUNING,
)
_PATTERN = re.compile(r"\.\*|[\\^$|()\[\]?+]")       # what makes a name of extra_config a regular expression
_AUTO_ROUND_TYPES = ("int", "int4", "mx_fp", "nv_fp", "fp")


def read(section: Section) -> Quantisation:
    section.skip(*_HISTORY)
    section.one_of("data_type", ("int", None), "int")
    versions = ("gptq", "gptq_v2")
    version = section.one_of("checkpoint_format", versions, section.one_of("format", versions, "gptq"))
    return _quantisation(section, "gptq", version)


def read_auto_round(section: Section) -> Quantisation:
    """auto-round writes GPTQ's tensors, or AWQ's; floating-point codes as compressed-tensors does."""
    section.skip(*_HISTORY)
    kind = section.one_of("data_type", (*_AUTO_ROUND_TYPES, None), "int") or "int"
    if kind in ("mx_fp", "nv_fp", "fp"):
        return _floats(section, kind)
    if section.get("act_bits", 16) not in (None, 16, 32):
        raise section.error("act_bits", section.get("act_bits"), "is not supported; supported: 16")
    return _quantisation(section, "auto-round", "awq" if "awq" in section.text("packing_format") else "gptq")


def _floats(section: Section, kind: str) -> Quantisation:
    bits, block = section.of("bits", int, 4), _block(section) if kind == "fp" else None
    group = 0 if block else _group_size(section, 0)
    section.one_of("fmt", ("e4m3", None), "e4m3")
    section.one_of("sym", (True, None), True)
    scheme = section.one_of("activation_scheme", ("static", "dynamic", None))
    wide = section.of("act_bits", int, 8 if scheme else 16) >= 16        # auto-round leaves out what it did not quantise

    def inputs(kind: str, per: str, static: bool = False) -> Activation | None:
        return None if wide else Activation(kind, per, static)

    recipes = {
        ("mx_fp", 4, 32): lambda: fp4_recipe("mxfp4-pack-quantized", inputs("fp4", "group")),
        ("mx_fp", 8, 32): lambda: codes_recipe("e4m3", Scales((1, 32), "e8m0"), inputs("fp8", "group")),
        ("nv_fp", 4, 16): lambda: fp4_recipe("nvfp4-pack-quantized", inputs("fp4", "group", True)),
        # One scale for the tensor, or one for each output.
        ("fp", 8, 0): lambda: codes_recipe("e4m3", Scales((1, 0)), inputs("fp8", "token", scheme == "static")),
    }
    found = recipes.get((kind, bits, max(0, group)))
    if block and bits == 8:
        found = functools.partial(fp8_recipe, block, inputs("fp8", "group", scheme == "static"))
    if found is None:
        raise section.error("bits", f"{kind}{bits} in groups of {group}", "is not supported; supported: mx_fp4 and mx_fp8 in "
                            "groups of 32, nv_fp4 in groups of 16, fp8 with a scale for each tensor, output or block")
    rules: list[tuple[str, Recipe | None]] = []
    for name, overrides in (section.section("extra_config") or Section({}, "")).raw.items():
        own = _own(overrides, f"{section.where}.extra_config[{name}]")
        if (its_bits := own.of("bits", int, bits)) < 16:
            raise own.error("bits", its_bits, "is not supported beside floating-point codes; supported: 16")
        rules.append((_extra_name(name, section), None))
    if not section.get("lm_head", False) and not section.get("quant_lm_head", False):
        rules.append((HEAD, None))
    skipped = [*section.names("modules_to_not_convert"), *section.names("ignored_layers")]
    rules += [(anywhere(name), None) for name in dict.fromkeys(skipped)]
    section.finish()
    return Quantisation("auto-round", (*rules, (ANY, found())), KV_SCALES)


def _block(section: Section) -> tuple[int, int] | None:
    """fp8 with a scale for each block of outputs and inputs, which auto-round says once or twice."""
    sizes = [each for each in (section.get("group_size"), section.get("weight_block_size")) if isinstance(each, (list, tuple))]
    for each in sizes:
        if not is_block(each) or each != sizes[0]:
            raise section.error("group_size", sizes, "must be two sizes, of outputs and inputs, as in weight_block_size")
    return (sizes[0][0], sizes[0][1]) if sizes else None


def _quantisation(section: Section, method: str, version: str) -> Quantisation:
    recipe = _recipe(
        section, version, section.of("bits", int, 4), _group_size(section, 128), section.of("sym", bool, True),
        bool(section.of("desc_act", bool, False)),
    )
    rules = _exceptions(section, version)
    if not section.get("lm_head", False) and not section.get("quant_lm_head", False):
        rules.append((HEAD, None))
    rules += [(anywhere(name), None) for name in section.names("modules_to_not_convert")]
    section.finish()
    return Quantisation(method, (*rules, (ANY, recipe)), KV_SCALES)


def _exceptions(section: Section, version: str) -> list[tuple[str, Recipe | None]]:
    """Modules with settings of their own, and modules that are left out."""
    rules: list[tuple[str, Recipe | None]] = []
    dynamic = section.section("dynamic") or Section({}, "")
    for pattern, overrides in dynamic.raw.items():
        matching = regex(pattern.removeprefix("+:").removeprefix("-:"), section, "dynamic")
        if pattern.startswith("-:") or overrides is False:
            rules.append((matching, None))
            continue
        own = _own(overrides, f"{section.where}.dynamic[{pattern}]")
        rules.append((matching, _overridden(own, section, version)))
    rules += _extra_rules(section, version)
    blocks = section.of("modules_in_block_to_quantize", list)
    if blocks:
        names = [name for group in blocks for name in (group if isinstance(group, list) else [group])]
        if not all(isinstance(name, str) for name in names):
            raise section.error("modules_in_block_to_quantize", blocks, "must be a list of names, or of lists of names")
        rules.append((rf"(?!{'|'.join(component(name) for name in names)}$).*", None))
    return rules


def _extra_rules(section: Section, version: str) -> list[tuple[str, Recipe | None]]:
    """auto-round's way of saying the same."""
    rules: list[tuple[str, Recipe | None]] = []
    extra = section.section("extra_config") or Section({}, "")
    for name in sorted(extra.raw, key=lambda name: bool(_PATTERN.search(name))):
        overrides = extra.raw[name]
        own = _own(overrides, f"{section.where}.extra_config[{name}]")
        own.skip(*_HISTORY)
        wide = own.of("bits", int, 4) >= 16
        if (kind := own.text("data_type", "int")) not in ("int", "int4") and not wide:
            raise own.error("data_type", kind, "is not supported beside integer codes; supported: int, and any in 16 bits")
        own.skip(*(("bits", "group_size", "sym") if wide else ()))
        rules.append((_extra_name(name, section), None if wide else _overridden(own, section, version)))
    return rules


def _extra_name(name: str, section: Section) -> str:
    """auto-round writes the names of modules, and the patterns that it was given for them."""
    return regex(name, section, "extra_config") if _PATTERN.search(name) else component(name)


def _group_size(section: Section, default: int) -> int:
    if isinstance(section.get("group_size"), list):
        raise section.error("group_size", section.get("group_size"), "is a block of outputs and inputs, which is not supported "
                            "here; supported: one number of inputs")
    return section.group("group_size", default) if section.get("group_size") is not None else default


def _own(overrides: Any, where: str) -> Section:
    if not isinstance(overrides, dict):
        raise ModelError(f"{where} must be an object")
    return Section(overrides, where)


def _overridden(own: Section, base: Section, version: str) -> Recipe:
    own.skip("damp_percent", "mse", "static_groups", "true_sequential")
    recipe = _recipe(
        own, version, own.of("bits", int, base.of("bits", int, 4)), _group_size(own, _group_size(base, 128)),
        own.of("sym", bool, base.of("sym", bool, True)), bool(own.of("desc_act", bool, base.of("desc_act", bool, False))),
    )
    own.finish()
    return recipe


def _recipe(section: Section, version: str, bits: int, group: int, symmetric: bool, ordered: bool) -> Recipe:
    if bits not in (2, 3, 4, 8):
        raise section.error("bits", bits, "is not supported; supported: 2, 3, 4, 8")
    if version == "awq":
        return awq_recipe(group, not symmetric)
    # A symmetric checkpoint also stores its zero points, all of them the middle code. They are checked and left out.
    scales = Scales((1, max(0, group)), "float16", None if symmetric else "code")
    return Recipe(
        WeightFormat("int8" if bits == 8 else "uint4", scales, reordered=ordered and group > 0), "gptq", _ROLES,
        optional=("groups",), bits=bits, variant=version,
    )

