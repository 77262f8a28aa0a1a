"""Dialects of quantised checkpoints: their tensors become the canonical ones exactly, and expand to what their own packages say.

tests/golden/quantised.safetensors has matrices that compressed-tensors, bitsandbytes and transformers stored and expanded
(make_quantised.py beside it). AWQ, GPTQ, ModelOpt and 2:4 are written here by hand, from codes that are known.
"""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_models import DIALECTS, words
from safetensors import safe_open
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.models.checkpoints import recipe as recipe_file
from ridgeline.models.checkpoints.canonical import bitstream, canonical, matrix_shape
from ridgeline.models.checkpoints.quantisation import read_quantisation
from ridgeline.models.checkpoints.recipe import (
    ANY,
    KV_SCALES,
    Recipe,
    RuleIndex,
    anywhere,
    beginning,
    component,
    glob,
    takes_long,
)
from ridgeline.ops.kernel_table import H200
from ridgeline.ops.quantised.expand import expand
from ridgeline.quant.choose import make
from ridgeline.quant.format import FP8_ROW, SCALE, WEIGHT, ZERO, common, per_row, quantises_rows
from ridgeline.quant.fp8 import Fp8
from ridgeline.quant.gpu_layout import GENERAL, OWN, served
from ridgeline.quant.quantised import quantised_weight
from ridgeline.quant.scheme import Unquantised

GOLDEN = Path(__file__).parents[2] / "golden" / "quantised.safetensors"
MODULE = "model.layers.0.mlp.up_proj"


def golden() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """case -> (its quantization_config, its tensors by ending)"""
    with safe_open(GOLDEN, framework="pt") as file:
        found: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
            name: (json.loads(config), {}) for name, config in file.metadata().items() if name != "made_by"
        }
        for key in file.keys():
            name, _, ending = key.partition("/")
            found[name][1][ending] = file.get_tensor(key)
    return found


CASES = golden()


def recipe_of(config: dict[str, Any], module: str = MODULE) -> Recipe:
    quantisation = read_quantisation({"quantization_config": config}, "config.json")
    assert quantisation is not None
    recipe = quantisation.recipe(module)
    assert recipe is not None
    return recipe


def by_role(recipe: Recipe, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """From a module's endings to roles; every tensor must have one, or be known as unused."""
    found = {}
    for name, tensor in tensors.items():
        role = recipe.endings[name if name.startswith("_") else f".{name}"]
        if role:
            found[role] = tensor
    return found


def numbers(recipe: Recipe, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    roles = by_role(recipe, tensors)
    outputs, inputs = matrix_shape(recipe, {role: tuple(tensor.shape) for role, tensor in roles.items()}, roles.__getitem__)
    found = canonical(recipe, roles)
    written = per_row(recipe.format)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        spec.name: spec.shape(outputs, inputs) for spec in written.tensors()
    }
    return expand(quantised_weight(written, inputs, found), dtype)


@pytest.mark.parametrize("name", sorted(CASES))
def test_expanded_as_its_own_package_expands(name: str) -> None:
    config, tensors = CASES[name]
    expected = tensors.pop("expected") if "expected" in tensors else torch.empty(0)
    found = numbers(recipe_of(config), tensors, expected.dtype)
    tensors["expected"] = expected
    if name in ("ct-nvfp4", "bnb-int8"):                 # they divide and multiply in another order: the last bit may differ
        torch.testing.assert_close(found, expected, rtol=2**-7 if expected.dtype == torch.bfloat16 else 2e-7, atol=0)
    else:
        assert torch.equal(found, expected)


# -- codes that are known -----------------------------------------------------------------------------------------------


def test_a_stream_of_bits_is_read_at_any_width() -> None:
    generator = torch.Generator().manual_seed(0)
    for bits in range(1, 9):
        for count in (1, 31, 32, 40, 77):
            codes = torch.randint(1 << bits, (3, count), generator=generator, dtype=torch.uint8)
            assert torch.equal(bitstream(words(codes, bits), bits, count), codes)
            each = 32 // bits                            # older files begin every word anew
            padded = torch.nn.functional.pad(codes, (0, -count % each)).unflatten(1, (-1, each))
            apart = torch.cat([words(padded[:, word], bits) for word in range(padded.shape[1])], dim=1)
            if apart.shape != words(codes, bits).shape:
                assert torch.equal(bitstream(apart, bits, count), codes)
    with pytest.raises(ModelError, match="5 words cannot hold 77 codes of 4 bits"):
        bitstream(torch.zeros(3, 5, dtype=torch.int32), 4, 77)


def test_gptq_zero_points_differ_by_one_between_versions() -> None:
    """Version 1 stores them minus one, modulo 16: a stored 15 is a zero."""
    codes, stored = torch.full((8, 8), 9, dtype=torch.uint8), torch.tensor([[0, 6, 7, 8, 14, 15, 3, 1]], dtype=torch.uint8)
    tensors = {"codes": words(codes, 4).t(), "zero": words(stored, 4), "scale": torch.ones(1, 8, dtype=torch.float16)}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
    first = canonical(recipe_of(config), tensors)[ZERO].flatten().tolist()
    second = canonical(recipe_of(config | {"checkpoint_format": "gptq_v2"}), tensors)[ZERO].flatten().tolist()
    assert second == stored[0].tolist() and first == [1, 7, 8, 9, 15, 0, 4, 2]


def test_a_symmetric_checkpoint_with_other_zero_points_is_refused() -> None:
    tensors = {"codes": torch.zeros(1, 8, dtype=torch.int32), "zero": torch.zeros(1, 1, dtype=torch.int32),
               "scale": torch.ones(1, 8, dtype=torch.float16)}
    with pytest.raises(ModelError, match="the config says symmetric, but there are zero points that are not in the middle"):
        canonical(recipe_of({"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True}), tensors)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_widths_of_gptq(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(1 << bits, (32, 64), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(1 << bits, (2, 32), generator=generator, dtype=torch.uint8)
    scale = torch.rand(2, 32, generator=generator).half()
    tensors = {"qweight": words(codes, bits).t(), "qzeros": words(zeros, bits), "scales": scale}
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}
    spread = [each.t().double().repeat_interleave(32, 1) for each in (zeros, scale)]
    assert torch.equal(numbers(recipe_of(config), tensors, torch.float64), (codes.double() - spread[0]) * spread[1])


def test_the_second_scale_of_nvfp4_multiplies_or_divides() -> None:
    """The same bytes mean other numbers in compressed-tensors than in ModelOpt."""
    packed, scale = torch.full((2, 8), 0x22, dtype=torch.uint8), torch.ones(2, 1).to(torch.float8_e4m3fn)
    second = torch.tensor([4.0])
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": second}
    assert numbers(recipe_of(modelopt), tensors).unique().tolist() == [4.0]
    ct, _ = CASES["ct-nvfp4"]
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": second}
    assert numbers(recipe_of(ct), tensors).unique().tolist() == [0.25]


@pytest.mark.parametrize("where", [{"group_size": 32}, {"config_groups": {"group_0": {
    "targets": ["Linear"], "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 32}}}}])
def test_nvfp4_weights_alone_may_have_groups_of_32(where: dict[str, Any]) -> None:
    """ModelOpt says it in its own file, and in config.json for each group of linears."""
    recipe = recipe_of({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"} | where)
    scale = torch.tensor([[1.0, 2.0]] * 2).to(torch.float8_e4m3fn)
    second = torch.tensor([0.5])
    tensors = {"weight": torch.full((2, 32), 0x22, dtype=torch.uint8), "weight_scale": scale, "weight_scale_2": second}
    assert torch.equal(numbers(recipe, tensors), torch.tensor([0.5, 1.0]).repeat_interleave(32).expand(2, 64))
    of_16 = recipe_of({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})
    with pytest.raises(ModelError, match=r"scales of shape \[2, 2\], blocks of 1 x 16 need \[2, 4\]"):
        numbers(of_16, tensors)


def test_scales_must_fit_their_blocks() -> None:
    recipe = recipe_of({"quant_method": "fp8", "weight_block_size": [128, 128]})
    weight = torch.zeros(256, 300, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ModelError, match=r"scales of shape \[2, 2\], blocks of 128 x 128 need \[2, 3\]"):
        canonical(recipe, {"codes": weight, "scale": torch.ones(2, 2)})
    found = canonical(recipe, {"codes": weight, "scale": torch.arange(6.0).view(2, 3)})
    assert found[SCALE].shape == (256, 3) and found[SCALE][128].tolist() == [3.0, 4.0, 5.0]
    assert found[WEIGHT].shape == (256, 300)


# -- configs ------------------------------------------------------------------------------------------------------------

GROUPS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
CT = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": GROUPS}


@pytest.mark.parametrize(("config", "message"), [
    (CT | {"transform_config": {"R1": {}}}, "quantization_config.transform_config is not known"),
    (CT | {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
    (CT | {"config_groups": {"g": GROUPS["g"] | {"output_activations": {"num_bits": 8}}}}, "output_activations"),
    (CT | {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "channel"}}}},
     "num_bits 'float4' is not supported in float-quantized"),
    *[(CT | {"format": stored, "config_groups": {"g": {"targets": ["Linear"], "weights": {
        "num_bits": bits, "type": "float", "strategy": "group", "group_size": 16}}}}, "group_size '16' is not supported in mxfp")
      for stored, bits in (("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8))],
    *[({"quant_method": "modelopt", "quant_algo": name, "group_size": size}, f"group_size '{size}' is not supported in {name}")
      for name, size in (("MXFP4", 16), ("MXFP8", 16), ("NVFP4", 32), ("W4A16_NVFP4", 64))],
    ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "config_groups": {"a": {"weights": {
        "group_size": 32}}}}, "group_size '[16, 32]' are several sizes"),
    (CT | {"ignore": ["re:("]}, "is no regular expression"),
    *[(CT | {"ignore": [pattern]}, "may take very long to match") for pattern in
      ("re:(.+)+x", "re:(a|a)*b", r"re:(\\w|(x*)){0,9}y", "re:" + ".*a" * 6 + "x", r"re:[^]+*]*\\+[)]*((a{2,}))*")],
    ({"quant_method": "fp8", "modules_to_not_convert": ["a" + "*a" * 6]}, "more than 5 stars between two dots"),
    (CT | {"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme.num_bits '4' is not supported"),
    ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported"),
    ({"quant_method": "awq", "bits": 3}, "bits '3' is not supported"),
    ({"quant_method": "gptq", "bits": 5}, "bits '5' is not supported"),
    ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation is not known"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type 'fp4'"),
    ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm 'True' is not supported"),
    ({"quant_method": "auto-round", "data_type": "mx_int"}, "data_type 'mx_int' is not supported"),
    ({"quant_method": "auto-round", "data_type": "mx_fp", "bits": 6, "group_size": 32}, "bits 'mx_fp6 in groups of 32' is not"),
    ({"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": 0, "extra_config": {"q_proj": {"bits": 4}}},
     "extra_config[q_proj].bits '4' is not supported beside floating-point codes"),
    ({"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": 0, "extra_config": {"q_proj": {"sym": True}}},
     "extra_config[q_proj].bits '8' is not supported beside floating-point codes"),
    ({"quant_method": "auto-round", "data_type": "int", "bits": 8, "group_size": [128, 128]},
     "group_size '[128, 128]' is a block of outputs and inputs, which is not supported here"),
    ({"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": [128, 128], "weight_block_size": [64, 64]},
     "group_size '[[128, 128], [64, 64]]' must be two sizes"),
    ({"quant_method": "auto-round", "bits": 4, "extra_config": {"q_proj": {"bits": 8, "data_type": "fp", "group_size": -1}}},
     "extra_config[q_proj].data_type 'fp' is not supported beside integer codes"),
    ({"quant_method": "gptq", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp' is not supported"),
    ({"quant_method": "fp8", "data_type": "int"}, "data_type 'int' is not supported"),
    ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported: compressed-tensors, awq"),
    ("int8", "must be an object"),
])
def test_what_is_not_known_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_quantisation({"quantization_config": config}, "config.json")
    assert message in str(caught.value) and str(caught.value).startswith("config.json: quantization_config")


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_a_checkpoint_of_mlx_is_refused_by_name(keys: tuple[str, ...]) -> None:
    """Older files have the first key alone, and would be read as plain numbers."""
    with pytest.raises(ModelError, match=r"config\.json: quantization: checkpoints of MLX are not supported; serve"):
        read_quantisation({key: {"bits": 4, "group_size": 64} for key in keys}, "config.json")


@pytest.mark.parametrize(("config", "quantised", "plain"), [
    (CT | {"ignore": ["lm_head", "re:.*layers\\.1\\..*"]}, [MODULE], ["lm_head", "model.layers.1.mlp.up_proj"]),
    ({"quant_method": "awq", "modules_to_not_convert": ["self_attn"]}, [MODULE], ["model.layers.0.self_attn.q_proj", "lm_head"]),
    ({"quant_method": "gptq", "lm_head": True}, [MODULE, "lm_head"], []),
    ({"quant_method": "gptq", "dynamic": {"-:.*up_proj": {}}}, ["model.layers.0.mlp.down_proj"], [MODULE, "lm_head"]),
    ({"quant_method": "gptq", "modules_in_block_to_quantize": [["mlp.up_proj"]]}, [MODULE], ["model.layers.0.mlp.down_proj"]),
    ({"quant_method": "auto-round", "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}},
     ["model.layers.10.mlp.up_proj"], [MODULE]),
    ({"quant_method": "fp8", "modules_to_not_convert": ["up_proj"]}, ["model.layers.0.mlp.down_proj"], [MODULE, "lm_head"]),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*.mlp*"]}, ["model.layers.0.self_attn.k_proj"],
     [MODULE]),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, [MODULE], ["lm_head"]),
])
def test_which_modules_are_quantised(config: dict[str, Any], quantised: list[str], plain: list[str]) -> None:
    found = read_quantisation({"quantization_config": config}, "config.json")
    assert found is not None
    assert all(found.recipe(name) is not None for name in quantised) and all(found.recipe(name) is None for name in plain)


def test_overrides_change_the_format_of_one_module() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 32}}}
    found = read_quantisation({"quantization_config": config}, "config.json")
    assert found is not None
    names = [recipe.format.name for recipe in map(found.recipe, (MODULE, "model.layers.0.mlp.down_proj")) if recipe is not None]
    assert names == ["uint4-128", "int8-32"]


def test_names_before_patterns_before_classes() -> None:
    def group(target: str, bits: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
        return {"targets": [target], "weights": weights, "format": "pack-quantized"}

    config = CT | {"format": "mixed-precision", "config_groups": {
        "a": group("Linear", 4), "b": group("re:.*mlp.*", 8), "c": group(MODULE, 2),
    }}
    found = read_quantisation({"quantization_config": config}, "config.json")
    assert found is not None
    bits = [recipe.bits for recipe in map(found.recipe, ("q_proj", "x.mlp.y", MODULE)) if recipe is not None]
    assert bits == [4, 8, 2]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_patterns_count_by_their_text_in_whatever_order_the_groups_are(order: str) -> None:
    """llm-compressor writes the groups in the order of the first module that each was given to."""
    targets = {"a": ("re:.*layers.0.mlp.down_proj", 8), "b": ("re:.*mlp.*", 4)}
    groups = {
        name: {"targets": [targets[name][0]], "format": "pack-quantized",
               "weights": {"num_bits": targets[name][1], "type": "int", "strategy": "group", "group_size": 32}}
        for name in order
    }
    found = read_quantisation({"quantization_config": CT | {"format": "mixed-precision", "config_groups": groups}}, "config.json")
    assert found is not None
    names = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    assert [recipe.bits for recipe in map(found.recipe, names) if recipe is not None] == [8, 4]


NAMES = st.lists(st.sampled_from(["a", "b", "c*", "a-b", "0"]), min_size=1, max_size=4).map(".".join)
PATTERNS = st.one_of(
    NAMES.map(re.escape), NAMES.map(component), NAMES.map(anywhere), NAMES.map(beginning),
    st.lists(st.sampled_from(["a", "b", ".", "*", "a.b"]), max_size=6).map("".join).map(glob),
    st.sampled_from(["a", "b.", ".", ""]).map(anywhere), st.sampled_from([ANY, "(?:a.*).*", r"(.*\.)?b", ""]))


@settings(max_examples=300, deadline=None)
@given(st.lists(PATTERNS, max_size=12), st.lists(NAMES, min_size=1, max_size=2))
def test_the_first_rule_counts_however_it_is_found(patterns: list[str], names: list[str]) -> None:
    expected = next((place for place, pattern in enumerate(patterns) if any(re.fullmatch(pattern, name) for name in names)), None)
    assert RuleIndex([(pattern, None) for pattern in patterns]).first(names) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", ".", "*", "a.b"]), max_size=8).map("".join), NAMES)
def test_a_glob_is_the_one_of_fnmatch(pattern: str, name: str) -> None:
    assert RuleIndex([(glob(pattern), None)]).first([name]) == (0 if fnmatch.fnmatchcase(name, pattern) else None)


def test_patterns_that_checkpoints_have_are_taken() -> None:
    known = (
        r".*\.mlp\.gate$", r".*(q|k|v)_proj.*", r"model\.layers\.[0-9]+\.mlp\.(?:gate|up)_proj", r"(?:.*\.)?lm_head",
        r"(?i:model)\.layers\.\d+\.mlp\.experts\.\d+\.(?P<part>gate|up|down)_proj.*", r"^(?!.*(?:mlp|attn)).*$", r"a[]*+]b[^]*]",
        r"[*+]{1}\*\+x",
    )
    assert [pattern for pattern in known if takes_long(pattern)] == []


MANY = [f"model.layers.{number}.mlp.down_proj" for number in range(4000)]


@pytest.mark.parametrize("config", [
    CT | {"ignore": MANY}, {"quant_method": "fp8", "modules_to_not_convert": MANY},
    {"quant_method": "awq", "bits": 4, "modules_to_not_convert": MANY},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_to_not_convert": MANY},
    *({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": excluded} for excluded in (
        [f"{name[:-2]}*" for name in MANY], [name.replace("model", "*") for name in MANY],
        [f"*{name[6:-2]}*" for name in MANY], [f"*.{number}.*down_proj" for number in range(4000)],
        [f"model.*.{number}.*down*" for number in range(4000)],
    )),
])
def test_a_long_list_of_names_is_not_searched_for_every_tensor(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """90,000 tensors and 4,000 names took minutes."""
    found = read_quantisation({"quantization_config": config}, "config.json")
    assert found is not None
    tried: list[object] = []
    fits = recipe_file._fits
    monkeypatch.setattr(recipe_file, "_compiled", lambda pattern: (tried.append(pattern), re.compile(pattern))[1])
    monkeypatch.setattr(recipe_file, "_fits", lambda pieces, name: (tried.append(pieces), fits(pieces, name))[1])
    assert found.recipe("model.layers.3999.mlp.down_proj") is None and found.recipe("model.layers.3999.mlp.up_proj") is not None
    assert len(tried) < 10


def test_a_rule_is_searched_once_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of a mixture asks for thousands of names, dozens of times each."""
    index = recipe_file.RuleIndex([(r".*down_proj", None), ("lm_head", None)])
    searched: list[tuple[str, ...]] = []
    search = recipe_file.RuleIndex._search
    monkeypatch.setattr(recipe_file.RuleIndex, "_search", lambda self, names: (searched.append(names), search(self, names))[1])
    assert [index.first([name]) for name in ("a.down_proj", "lm_head", "b") * 3] == [0, 1, None] * 3
    assert len(searched) == 3


def test_auto_round_signs_what_it_writes_as_compressed_tensors() -> None:
    """Of MXFP4 and MXFP8 alone (0.16)."""
    signed = {"provider": "auto-round", "moe_sparsity_config": None, "global_compression_ratio": None}
    for name in ("ct-mxfp4", "ct-mxfp8"):
        config, _ = CASES[name]
        assert recipe_of(config | signed) == recipe_of(config)


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({
        "producer": {"name": "modelopt", "version": "0.29"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }))
    found = read_quantisation({}, "config.json", tmp_path)
    assert found is not None and found.method == "modelopt" and found.recipe(MODULE) is not None
    assert read_quantisation({}, "config.json", tmp_path / "elsewhere") is None


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(), st.text(max_size=6), st.lists(st.text(max_size=4), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), st.data())
def test_a_config_with_any_value_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """Never another error: the message must name the field."""
    config = json.loads(json.dumps(DIALECTS[name][0]))
    place = config
    while True:
        key = data.draw(st.sampled_from(sorted(place)) if place else st.just("new"))
        if not isinstance(place.get(key), dict) or data.draw(st.booleans()):
            place[key] = data.draw(VALUES)
            break
        place = place[key]
    try:
        read_quantisation({"quantization_config": config}, "config.json")
    except ModelError as error:
        assert str(error).startswith("config.json: quantization_config")


@pytest.mark.parametrize("part", ["weights", "input_activations"])
def test_a_strategy_that_is_no_text_is_refused(part: str) -> None:
    config = json.loads(json.dumps(DIALECTS["ct-w4a8"][0]))
    config["config_groups"]["group_0"][part]["strategy"] = [""]
    with pytest.raises(ModelError, match=rf"{part}\.strategy .* is of the wrong type"):
        read_quantisation({"quantization_config": config}, "config.json")


# -- what the newest versions of tools write ----------------------------------------------------------------------------

AUTO_ROUND = {"autoround_version": "0.16.1", "provider": "auto-round", "amp": False, "enable_quanted_input": False,
              "to_quant_block_names": "model.layers", "iters": 200, "static_kv_granularity": "tensor",
              "static_attention_granularity": "tensor"}      # the last two since 0.15, whatever is asked for


@pytest.mark.parametrize(("config", "more"), [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, {"data_type": "int"}),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, {"data_type": "int", "sym": True}),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"data_type": "fp", "bits": 8, "act_bits": 8, "sym": True,
                                                               "group_size": [128, 128], "act_data_type": "fp"}),
])
def test_auto_round_says_in_other_dialects_how_it_found_the_codes(config: dict[str, Any], more: dict[str, Any]) -> None:
    """Its exports to GPTQ, AWQ and fp8: the tensors mean what they mean without these keys."""
    assert recipe_of(config | AUTO_ROUND | more) == recipe_of(config)


def test_auto_rounds_exceptions_are_names_and_patterns() -> None:
    """A layer_config of {"k_proj": 8 bits}: auto-round writes the pattern, and every name that it matched."""
    config = AUTO_ROUND | {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq",
        "extra_config": {".*k_proj.*": {"bits": 8}, "model.layers.1.self_attn.k_proj": {"bits": 16},
                         ".*layers\\.2\\.mlp.*": {"bits": 2}},
    }
    assert [recipe_of(config, f"model.layers.{layer}.self_attn.k_proj").bits for layer in (0, 2)] == [8, 8]
    found = read_quantisation({"quantization_config": config}, "config.json")
    assert found is not None and found.recipe("model.layers.1.self_attn.k_proj") is None
    assert [recipe_of(config, f"model.layers.{layer}.mlp.up_proj").bits for layer in (0, 2)] == [4, 2]
    with pytest.raises(ModelError, match=r"extra_config '\(k_proj.*' is no regular expression"):
        recipe_of(config | {"extra_config": {"(k_proj.*": {"bits": 8}}})


@pytest.mark.parametrize("config", [
    {"quant_method": "auto-round", "bits": 4, "group_size": 32}, {"quant_method": "gptq", "bits": 4},
    {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "group_size": 32}, {"quant_method": "awq", "bits": 4},
])
def test_scales_of_the_kv_cache_beside_auto_rounds_codes(config: dict[str, Any]) -> None:
    """static_kv_dtype: tensors k_scale and v_scale beside any codes, which are no unknown tensors."""
    found = read_quantisation({"quantization_config": config | {"static_kv_dtype": "fp8"}}, "config.json")
    assert found is not None and found.kv_scales == KV_SCALES


GPTQMODEL = {"group_size": -1, "desc_act": False, "lm_head": False, "pack_dtype": "int32", "meta": {"pack_impl": "auto"}}


def test_gptqmodel_writes_awq_too() -> None:
    """Version 7.7: its own keys in each dialect."""
    plain = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    more = {"method": "awq", "format": "gemm", "checkpoint_format": "gemm"}
    assert recipe_of(GPTQMODEL | plain | more) == recipe_of(plain)
    assert recipe_of(GPTQMODEL | plain | more | {"lm_head": True}, "lm_head") == recipe_of(plain)
    for changed in ({"checkpoint_format": "gemv_fast"}, {"pack_dtype": "int64"}):
        with pytest.raises(ModelError, match=f"{next(iter(changed))} '{next(iter(changed.values()))}' is not supported"):
            recipe_of(GPTQMODEL | plain | more | changed)


@pytest.mark.parametrize("method", ["row", "tensor", "block"])
def test_the_scales_of_gptqmodels_fp8_divide(method: str) -> None:
    """All other files with a `weight_scale_inv` mean a factor."""
    config = GPTQMODEL | {
        "method": "fp8", "quant_method": "fp8", "bits": 8, "format": "float8_e4m3fn", "checkpoint_format": "float8_e4m3fn",
        "weight_scale_method": method, "weight_scale_semantics": "inverse",
    } | ({"weight_block_size": [4, 4]} if method == "block" else {})
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    parts = {"row": (1, 16), "tensor": (8, 16), "block": (4, 4)}[method]
    largest = weight.abs().unflatten(1, (-1, parts[1])).unflatten(0, (-1, parts[0])).amax((1, 3))
    factor = 448 / largest
    spread = factor.repeat_interleave(parts[0], 0).repeat_interleave(parts[1], 1)
    codes = (weight * spread).to(torch.float8_e4m3fn)
    stored = factor if method == "block" else factor.flatten() if method == "row" else factor.reshape(())
    recipe = recipe_of(config)
    found = numbers(recipe, {"weight": codes, "weight_scale_inv": stored})
    torch.testing.assert_close(found, codes.float() / spread, rtol=2e-7, atol=0)
    assert recipe.format.activation is None              # weights alone
    with pytest.raises(ModelError, match="weight_scale_semantics 'plain' is not supported"):
        recipe_of(config | {"weight_scale_semantics": "plain"})


@pytest.mark.parametrize(("config", "case", "renamed"), [
    ({"data_type": "mx_fp", "bits": 4, "group_size": 32, "act_bits": 4, "packing_format": "auto_round:llm_compressor"},
     "ct-mxfp4", {}),
    ({"data_type": "mx_fp", "bits": 8, "group_size": 32, "act_bits": 8}, "ct-mxfp8", {}),
    ({"data_type": "nv_fp", "bits": 4, "group_size": 16, "act_bits": 4, "act_data_type": "nv_fp4_with_static_gs"},
     "ct-nvfp4", {}),
    ({"data_type": "fp", "bits": 8, "group_size": -1, "act_bits": 8, "activation_scheme": "static", "fmt": "e4m3"},
     "ct-fp8-channel", {}),
    ({"data_type": "fp", "bits": 8, "group_size": 0, "activation_scheme": "dynamic"}, "ct-fp8-tensor", {}),
    *[({"data_type": "fp", "bits": 8, "group_size": [32, 48], "weight_block_size": [32, 48], "act_bits": 8, "act_group_size": 128,
        "activation_scheme": "dynamic", "fmt": "e4m3", "ignored_layers": ["lm_head"]}, "ct-fp8-block", renamed)
      for renamed in ({}, {"weight_scale": "weight_scale_inv"})],
    ({"quant_method": "modelopt", "quant_algo": "mxfp4"}, "ct-mxfp4", {"weight_packed": "weight"}),
    ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "ct-mxfp8", {}),
])
def test_the_same_tensors_in_another_dialect(config: dict[str, Any], case: str, renamed: dict[str, str]) -> None:
    """auto-round and ModelOpt store floating-point codes as compressed-tensors does."""
    _, golden = CASES[case]
    stored = {renamed.get(name, name): tensor for name, tensor in golden.items() if name not in ("expected", "weight_zero_point")}
    found = numbers(recipe_of({"quant_method": "auto-round"} | config), stored)
    assert torch.equal(found.to(golden["expected"].dtype), golden["expected"])


FP = {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": -1}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(("config", "in_fp8"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "act_bits": 8}, True),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "act_bits": 16}, False),
    ({"quant_method": "fp8", "act_bits": 16}, False),
    ({"quant_method": "fbgemm_fp8"}, True),
    (FP | {"act_bits": 8}, True),
    (FP | {"activation_scheme": "dynamic"}, True),
    (FP | {"act_bits": 16}, False),
    (FP, False),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, False),
    (CT, False),
    (CT | {"config_groups": {"g": GROUPS["g"] | {"input_activations": FLOAT8 | {"strategy": "token", "dynamic": True}}}}, True),
])
def test_activations_are_fp8_only_where_the_checkpoint_was_made_for_them(config: dict[str, Any], in_fp8: bool) -> None:
    format = recipe_of(config).format
    assert quantises_rows(format) is in_fp8
    assert (type(make(format, False, Unquantised())) is Fp8) is in_fp8
    assert served(format, H200) == (OWN if in_fp8 else GENERAL)


def test_a_fused_linear_keeps_activations_that_one_part_needs() -> None:
    alone = replace(FP8_ROW, activation=None)
    assert common([FP8_ROW, FP8_ROW]) == FP8_ROW
    assert common([FP8_ROW, alone]) == common([alone, FP8_ROW]) == alone


def test_modelopt_keeps_the_dimensions_of_its_blocks() -> None:
    recipe = recipe_of({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"})
    weight = torch.zeros(256, 300, dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = canonical(recipe, {"codes": weight, "scale": torch.arange(6.0).view(2, 1, 3, 1)})
    assert found[SCALE].shape == (256, 3) and found[SCALE][128].tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("case", ["ct-mxfp4", "ct-mxfp8"])
def test_scales_of_mx_formats_are_bytes(case: str) -> None:
    """As numbers they would be rounded to bytes of 0."""
    config, stored = CASES[case]
    recipe, scale = recipe_of(config), stored["weight_scale"].view(torch.uint8)
    roles = by_role(recipe, {name: tensor for name, tensor in stored.items() if name != "expected"})
    expected = canonical(recipe, roles | {"scale": scale})[SCALE]
    assert torch.equal(canonical(recipe, roles | {"scale": scale.view(torch.float8_e8m0fnu)})[SCALE], expected)
    for wrong in (scale.view(torch.float8_e8m0fnu).to(torch.bfloat16), scale.to(torch.int8), scale.view(torch.float8_e4m3fn)):
        with pytest.raises(ModelError, match="scales of MX formats must be uint8 or float8_e8m0fnu, not"):
            canonical(recipe, roles | {"scale": wrong})


def test_nf4_codes_may_lie_in_wider_numbers() -> None:
    """`bnb_4bit_quant_storage`, as models for FSDP have it: the same bytes."""
    config, stored = CASES["bnb-nf4"]
    wide = stored | {"weight": stored["weight"].flatten().view(torch.bfloat16)[:, None]}
    expected = stored["expected"]
    del wide["expected"]
    assert torch.equal(numbers(recipe_of(config | {"bnb_4bit_quant_storage": "bfloat16"}), wide).to(expected.dtype), expected)
