"""Recipes: names, the YAML form, groups that divide the inputs, and what stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.errors import ConfigError
from ridgeline.quantize.recipes import RECIPES, read_recipe

Q, DOWN = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"


@pytest.mark.parametrize(("inputs", "group"), [(4096, 128), (576, 64), (96, 32)])
def test_the_largest_group_that_divides_the_inputs(inputs: int, group: int) -> None:
    for name in ("int4-rtn", "int4-rtn-asym"):
        choice = read_recipe(name).choose(Q.format(0), inputs, 0, 4)
        assert choice.format is not None and choice.format.scales is not None
        assert choice.format.scales.block == (1, group)
        assert (choice.format.scales.zero == "code") == name.endswith("asym")


def test_inputs_that_no_group_divides_stay_and_the_reason_is_said() -> None:
    choice = read_recipe("int4-rtn").choose(Q.format(0), 72, 0, 4)
    assert choice.format is None and "72 inputs" in choice.reason
    assert read_recipe("fp8").choose(Q.format(0), 72, 0, 4).format is not None


def test_the_head_only_where_a_pattern_names_it(tmp_path: Path) -> None:
    assert all(read_recipe(name).choose("lm_head", 128, None, 4).format is None for name in RECIPES)
    file = tmp_path / "head.yaml"
    file.write_text("lm_head: fp8\n'': int4-rtn\n")
    format = read_recipe(str(file)).choose("lm_head", 128, None, 4).format
    assert format is not None and format.grid == "e4m3"


def test_layers_and_patterns_to_keep() -> None:
    recipe = read_recipe("w8a8", keep=["down_proj"], keep_first=1, keep_last=2)
    kept = [layer for layer in range(6) if recipe.choose(Q.format(layer), 128, layer, 6).format is None]
    assert kept == [0, 4, 5]
    assert recipe.choose(DOWN.format(2), 128, 2, 6).reason == "kept as asked"


def test_a_file_of_patterns(tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text("down_proj: {bits: 8}\n'layers\\.0\\.': none\nmlp: {bits: 4, group: 32, symmetric: false}\nself_attn: fp8\n")
    recipe = read_recipe(str(file))

    def name(module: str) -> str | None:
        format = recipe.choose(module, 128, 1, 4).format
        return None if format is None else format.name

    assert name(DOWN.format(0)) == "int8-row"            # the first pattern counts
    assert name("model.layers.0.mlp.up_proj") is None
    assert name("model.layers.1.mlp.up_proj") == "uint4-32"
    assert name(Q.format(1)) == "e4m3-row"
    assert recipe.choose("model.layers.1.other", 128, 1, 4).reason == "no pattern of the recipe"


@pytest.mark.parametrize(("text", "said"), [
    ("mlp: {bits: 5}", "5 bits"), ("mlp: {bits: 4, gruop: 64}", "'gruop' is not known"), ("mlp: int3", "no recipe 'int3'"),
    ("'(': fp8", "no regular expression"), ("mlp: {bits: 4, group: 12}", "multiple of 8"), ("- fp8", "must map patterns"),
    ("mlp: {bits: 8, symmetric: false}", "only 4-bit integers can be asymmetric"), ("a: [", "is not YAML"),
    ("mlp: {bits: 4, method: magic}", "method 'magic'"),
])
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        read_recipe(str(file))


def test_an_unknown_name_lists_the_recipes() -> None:
    with pytest.raises(ConfigError, match="no recipe 'int3'; there are fp8"):
        read_recipe("int3")
    with pytest.raises(ConfigError, match=r"no recipe 'int4-gtpq' \(did you mean int4-gptq\?\); there are fp8"):
        read_recipe("int4-gtpq")
    with pytest.raises(ConfigError, match="--group changes 4-bit integers"):
        read_recipe("fp8", group=64)
