"""Scales of whole matrices and of activations, KV scales, LLM.int8(), and activations rounded for the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import SIZES
from safetensors import safe_open
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.evaluate import rounded_inputs
from ridgeline.models.checkpoints.quantisation import calibrated_scales
from ridgeline.models.model_config import load_model_config
from ridgeline.quant.format import Activation
from ridgeline.quantize import quantize_model
from ridgeline.quantize.calibration import Calibration
from ridgeline.quantize.ct_writer import quantization_config
from ridgeline.quantize.methods.rounding import expanded, rounded
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import RECIPES, read_recipe

SEQUENCES = [random_tokens(24, seed=number) for number in range(9)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("static") / "tiny", **SIZES)


@pytest.fixture(autouse=True)
def own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_model, "_passages", lambda job, tokens: SEQUENCES)


def tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


def made(plain: Path, out: Path, recipe: str, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    quantize(Job(model=plain, recipe=read_recipe(recipe, **more), out=out, show=False))
    return tensors(out), json.loads((out / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("recipe", ["fp8-static", "w8a8-static"])
def test_one_scale_for_a_matrix_and_one_for_its_inputs(recipe: str, plain: Path, tmp_path: Path) -> None:
    found, config = made(plain, tmp_path / "out", recipe)
    group = config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "tensor" and group["input_activations"]["strategy"] == "tensor"
    assert group["input_activations"]["dynamic"] is False
    model = PlainModel(plain)
    run = Calibration(model, SEQUENCES)
    run.begin()
    observed = run.observe({name: model.read(name) for name in model.names(0)})
    largest = float(observed[run.linear_of("model.layers.0.self_attn.k_proj.weight")].largest.amax())
    half = {"fp8-static": 448.0, "w8a8-static": 127.5}[recipe]
    for part in "qkv":                                   # the same inputs
        name = f"model.layers.0.self_attn.{part}_proj"
        assert found[f"{name}.weight_scale"].shape == (1,) == found[f"{name}.input_scale"].shape
        assert float(found[f"{name}.input_scale"]) == pytest.approx(largest / half, rel=1e-2)
        top = float(model.read(f"{name}.weight").abs().max())
        assert float(found[f"{name}.weight_scale"]) == pytest.approx(top / half, rel=1e-2)
    model.close()
    logits = [teacher_forced_logits(load(path), SEQUENCES[0], 24) for path in (plain, tmp_path / "out")]
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.2


@pytest.mark.parametrize(("rows", "whole"), [("fp8", "fp8-static"), ("w8a8", "w8a8-static")])
def test_a_scale_for_each_output_is_nearer_than_one_for_all(rows: str, whole: str) -> None:
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 1, 32)[:, None]
    error = {}
    for recipe in (rows, whole):
        format = RECIPES[recipe][0]
        shares = (expanded(rounded(values, format), format, 64) - values) / values.abs().amax(1, keepdim=True)
        error[recipe] = float(shares.norm())
    assert error[rows] < 0.5 * error[whole]


@pytest.mark.parametrize(("kv", "largest", "recipe"), [("fp8", 448.0, "fp8"), ("int8", 127.0, "int4-awq"),
                                                       ("fp8", 448.0, "w8a8-smooth")])
def test_kv_scales_are_of_what_the_output_computes(kv: str, largest: float, recipe: str, plain: Path, tmp_path: Path) -> None:
    """With the codes that were written, and after AWQ and SmoothQuant have moved scales from v to o."""
    found, config = made(plain, tmp_path / "out", recipe, kv=kv)
    assert config["kv_cache_scheme"]["type"] == {"fp8": "float", "int8": "int"}[kv]
    loaded = load_model_config(tmp_path / "out")
    assert loaded.quantisation is not None and loaded.quantisation.kv_format == kv
    scales, why_not = calibrated_scales(tmp_path / "out", loaded.quantisation, loaded.num_layers)
    assert not why_not and len(scales) == loaded.num_layers
    model = PlainModel(plain)
    run = Calibration(model, SEQUENCES)
    run.begin()
    first, values = load(tmp_path / "out").layers[0], {name: model.read(name) for name in model.names(0)}
    attention = "model.layers.0.self_attn.{}_proj.weight"
    sizes = [len(values[attention.format(part)]) for part in "qkv"]
    values |= dict(zip(map(attention.format, "qkv"), first.attention.qkv.weight.split(sizes), strict=True))
    run.move_on(values | {"model.layers.0.input_layernorm.weight": first.attention_norm.weight})
    assert scales[0] == pytest.approx([top / largest for top in run.largest_kv], rel=1e-2) and min(run.largest_kv) > 0
    model.close()
    assert "model.layers.1.self_attn.v_scale" in found


@pytest.mark.parametrize("kept", [{"keep_first": 1}, {"keep_last": 1}, {"keep": ["self_attn"]}])
def test_layers_that_are_kept_have_kv_scales(kept: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    made(plain, tmp_path / "out", "fp8", kv="fp8", **kept)
    loaded = load_model_config(tmp_path / "out")
    assert loaded.quantisation is not None
    scales, why_not = calibrated_scales(tmp_path / "out", loaded.quantisation, loaded.num_layers)
    assert not why_not and len(scales) == loaded.num_layers and all(min(pair) > 0 for pair in scales)
    load(tmp_path / "out")                               # no tensor is left over


def test_kv_scales_need_a_place(plain: Path, tmp_path: Path) -> None:
    for recipe, words in (("sparse24-magnitude", "stored with quantised weights"), ("llm-int8", "no KV scales")):
        with pytest.raises(ConfigError, match=words):
            made(plain, tmp_path / recipe, recipe, kv="fp8")
        assert not list(tmp_path.iterdir())


def test_llm_int8_is_written_as_bitsandbytes_has_it(plain: Path, tmp_path: Path) -> None:
    found, config = made(plain, tmp_path / "out", "llm-int8")
    assert config["quant_method"] == "bitsandbytes" and config["load_in_8bit"] and "lm_head" in config["llm_int8_skip_modules"]
    name = "model.layers.0.mlp.down_proj"
    weight = tensors(plain)[f"{name}.weight"].float()
    assert torch.allclose(found[f"{name}.SCB"], weight.abs().amax(1), rtol=3e-7)
    assert int(found[f"{name}.weight"].abs().max()) == 127
    numbers = found[f"{name}.weight"].float() * found[f"{name}.SCB"][:, None] / 127
    assert torch.allclose(load(tmp_path / "out").layers[0].mlp.down.weight.float(), numbers, atol=1e-6)


def test_the_head_of_a_tied_model_is_not_quantised_elsewhere(tmp_path: Path) -> None:
    """It has no tensor, but it is a Linear in transformers, which would look for its codes."""
    tied = save_checkpoint("llama", tmp_path / "tied", **SIZES | {"tie_word_embeddings": True})
    model = PlainModel(tied)
    linears = model.linears(read_recipe("int4-rtn"))
    config = quantization_config(linears, model.others, "1")
    model.close()
    assert config is not None and config["ignore"] == ["lm_head"] and all(linear.layer is not None for linear in linears)


# ── activations ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("activation", "most"), [
    (Activation("int8"), 0.01), (Activation("fp8"), 0.04), (Activation("fp8", "group"), 0.04),
    (Activation("int8", "tensor"), 0.02),
])
def test_activations_are_rounded(activation: Activation, most: float) -> None:
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    found = rounded_inputs.rounded(x, activation)
    error = float((found - x).norm() / x.norm())
    assert found.shape == x.shape and 1e-4 < error < most


def test_columns_with_outliers_stay_as_they_are() -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 100
    plainly, kept = (rounded_inputs.rounded(x, Activation("int8", outliers=limit)) for limit in (None, 6.0))
    others = [column for column in range(64) if column != 7]
    assert torch.equal(kept[:, 7], x[:, 7])
    assert float((kept - x)[:, others].norm()) < 0.1 * float((plainly - x)[:, others].norm())


def test_linears_by_path_read_rounded_inputs(plain: Path) -> None:
    model = load(plain)
    before = teacher_forced_logits(model, SEQUENCES[0], 24)
    assert rounded_inputs.round_inputs(model, {"layers.0.mlp.down": Activation("int8"), "none": Activation("int8")}) == 1
    few = teacher_forced_logits(model, SEQUENCES[0], 24)
    paths = {path: Activation("fp8", "tensor") for path, _ in model.named_modules() if path.endswith((".qkv", ".gate_up"))}
    assert rounded_inputs.round_inputs(model, paths) == 4
    many = teacher_forced_logits(model, SEQUENCES[0], 24)
    assert 0 < float((few - before).norm()) < float((many - before).norm()) < 0.2 * float(before.norm())
