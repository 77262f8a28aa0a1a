"""AWQ, SmoothQuant and 2:4: scales that move change no layer, and each method is nearer than what it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantised_models import SIZES
from safetensors.torch import load_file, save_file
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.evaluate.rounded_inputs import round_inputs
from ridgeline.quant.format import INT8_ROW, WeightFormat
from ridgeline.quantize import quantize_model
from ridgeline.quantize.calibration import Calibration, Inputs
from ridgeline.quantize.methods.folding import Fold, apply, fold_layer, folds
from ridgeline.quantize.methods.gptq_rounding import InverseFactor
from ridgeline.quantize.methods.rounding import expanded, rounded
from ridgeline.quantize.methods.scale_search import awq_scales, clipped, int8_tokens, smooth_scales
from ridgeline.quantize.methods.sparse24 import magnitude_sparse, sparsegpt_sparse, two_of_four, wanda_sparse
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import RECIPES, read_recipe

SEQUENCES = [random_tokens(20 + number, seed=number) for number in range(11)]
LINEARS = (".qkv", ".output", ".gate_up", ".down")
PLAIN = Fold("layers.0.mlp.down", ("down_proj.weight",))


def uneven(inputs: int, count: int = 400) -> Tensor:
    """Activations with a few large inputs, and correlated."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(inputs, inputs, generator=generator) / inputs**0.5 + torch.eye(inputs)
    sizes = torch.rand(inputs, generator=generator) + 0.05
    sizes[::37] *= 60
    return (torch.randn(count, inputs, generator=generator) @ mixing) * sizes


def weights(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))


def inputs_of(x: Tensor) -> Inputs:
    return Inputs(x.abs().mean(0), x.abs().amax(0), x.t() @ x, x)


def int4(inputs: int, name: str = "int4-awq") -> WeightFormat:
    found = read_recipe(name, group=32).choose("layers.0.q_proj", inputs, 0, 1).format
    assert found is not None
    return found


def product_error(x: Tensor, weight: Tensor, found: Tensor) -> float:
    return float((x @ (found - weight).t()).pow(2).mean())


@pytest.mark.parametrize("name", ["int4-awq", "int4-awq-asym"])
def test_awq_is_nearer_than_rounding_to_nearest(name: str) -> None:
    x, weight, format = uneven(192), weights(48, 192), int4(192, name)
    scales = awq_scales(PLAIN, [(weight, format)], inputs_of(x))
    nearest = product_error(x, weight, expanded(rounded(weight, format), format, 192))
    moved = expanded(rounded(weight * scales, format), format, 192) / scales
    assert product_error(x, weight, moved) < 0.7 * nearest
    cut = expanded(rounded(clipped(weight * scales, format, x / scales), format), format, 192) / scales
    assert product_error(x, weight, cut) < product_error(x, weight, moved)


def test_inputs_of_one_size_move_nothing_and_clipping_leaves_what_it_would_worsen() -> None:
    x, format = torch.eye(64).repeat(4, 1), int4(64)
    weight = weights(16, 64).sign()                      # every group lies on its grid but for 7.5 / 7
    scales = awq_scales(PLAIN, [(weight, format)], inputs_of(x))
    assert bool((scales == scales[0]).all())
    cut = expanded(rounded(clipped(weight, format, x), format), format, 64)
    assert product_error(x, weight, cut) <= product_error(x, weight, expanded(rounded(weight, format), format, 64))


def test_smoothquant_is_nearer_than_plain_w8a8_where_x_has_outliers() -> None:
    x, weight = uneven(192), weights(48, 192)
    x[:, 5] *= 30
    scales = smooth_scales(PLAIN, [(weight, INT8_ROW)], inputs_of(x))

    def error(s: Tensor) -> float:
        found = int8_tokens(x / s) @ expanded(rounded(weight * s, INT8_ROW), INT8_ROW, 192).t()
        return float((found - x @ weight.t()).pow(2).mean())

    assert error(scales) < 0.3 * error(torch.ones(192))
    assert scales[5] > 3 * scales.median()


def test_another_order_of_sums_finds_the_same_scales_for_smoothquant() -> None:
    """As another device, or another number of threads, has it: last bits of what was observed differ."""
    x, weight = uneven(192), weights(48, 192)
    noise = 1 + 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    before, after = (smooth_scales(PLAIN, [(weight, INT8_ROW)], inputs_of(each)) for each in (x, x * noise))
    assert float((before == after).float().mean()) > 0.99 and len(before.unique()) > 4
    in_four = before.double().log2() * 4
    assert float((in_four - in_four.round()).abs().max()) < 1e-5


def test_heads_that_share_a_value_share_its_scales() -> None:
    fold = Fold("layers.0.attention.output", ("o_proj.weight",), repeats=3, head=4)
    each = torch.arange(24.0)
    assert fold.narrow(each).tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    assert fold.wide(torch.arange(8.0)).view(2, 3, 4)[:, 1].flatten().tolist() == list(range(8))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma2"])
def test_scales_that_move_change_no_layer(family: str, tmp_path: Path) -> None:
    """Fused matrices, biases of v, norms with an offset, shared values. `fold_layer` itself compares the outputs."""
    model = PlainModel(save_checkpoint(family, tmp_path / family))
    run = Calibration(model, SEQUENCES)
    run.begin()
    values = {name: model.read(name) for name in model.names(0)}
    before, observed = dict(values), run.observe(values)
    found = folds(model.config, run.rows(values))
    names = [fold.linear.removeprefix("layers.0.") for fold in found]
    assert names == ["attention.qkv", "mlp.gate_up", "attention.output", "mlp.down"]
    generator = torch.Generator().manual_seed(7)
    chosen = []
    for fold in found:
        size = len(fold.narrow(observed[fold.linear].mean))
        chosen.append((fold, torch.rand(size, generator=generator) * 3 + 0.3))
    fold_layer(run, values, chosen, observed)
    assert all(not torch.equal(values[name], before[name].float()) for fold in found for name in fold.readers)
    after = run.observe(values)                          # what was observed moved with the weights
    for fold in found:
        torch.testing.assert_close(after[fold.linear].sample, observed[fold.linear].sample, rtol=2e-3, atol=2e-4)
    model.close()


def test_a_layer_that_would_change_is_an_error(tmp_path: Path) -> None:
    model = PlainModel(save_checkpoint("llama", tmp_path / "llama"))
    run = Calibration(model, SEQUENCES)
    run.begin()
    values = {name: model.read(name) for name in model.names(0)}
    observed = run.observe(values)
    wrong = Fold("layers.0.mlp.down", ("model.layers.0.mlp.down_proj.weight",))      # nothing divides what it reads
    with pytest.raises(ModelError, match="cannot be moved between the linears"):
        fold_layer(run, values, [(wrong, torch.full_like(observed[wrong.linear].mean, 2.0))], observed)
    model.close()


def test_a_norm_is_rounded_and_its_readers_follow() -> None:
    values = {"norm": torch.tensor([1.0, 0.3, 0.0]).bfloat16(), "q": torch.ones(2, 3)}
    wide = apply(Fold("q", ("q",), norm="norm"), torch.tensor([3.0, 0.7, 5.0]), values, 0.0)
    torch.testing.assert_close(values["norm"].float() * wide, torch.tensor([1.0, 0.3, 0.0]).bfloat16().float())
    assert torch.equal(values["q"][0], wide) and wide[2] == 1


# ── 2:4 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_of_four_stay() -> None:
    assert two_of_four(torch.tensor([[4.0, 1, 3, 2, 0, 0, 0, 9]])).int().tolist() == [[1, 0, 1, 0, 1, 0, 0, 1]]


def test_sparsegpt_is_nearer_than_wanda_and_wanda_than_magnitude() -> None:
    generator, weight = torch.Generator().manual_seed(3), weights(48, 192)
    x = torch.randn(600, 192, generator=generator) @ (
        torch.randn(192, 192, generator=generator) * torch.rand(192, generator=generator).pow(2))
    moments = x.t() @ x
    factor = InverseFactor(moments, ordered=False)
    found = [magnitude_sparse(weight), wanda_sparse(weight, moments), sparsegpt_sparse(weight, factor)]
    for each in found:
        assert bool(((each != 0).unflatten(1, (-1, 4)).sum(2) == 2).all())
    errors = [product_error(x, weight, each) for each in found]
    assert errors[2] < 0.8 * errors[1] < 0.64 * errors[0]


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def planted(path: Path) -> Path:
    """Outliers in what the linears read: some inputs of the norms are large, and their weights small."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::29] *= 40
            for reader in ("q_proj", "k_proj", "v_proj") if "input" in name else ("gate_proj", "up_proj"):
                part = "self_attn" if "input" in name else "mlp"
                tensors[f"{name.rsplit('.', 2)[0]}.{part}.{reader}.weight"][:, ::29] /= 20
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(("better", "worse"), [
    ("int4-awq-asym", "int4-rtn-asym"), ("sparse24-sparsegpt", "sparse24-wanda"), ("w8a8-smooth", "w8a8"),
    pytest.param("int4-awq", "int4-rtn", marks=pytest.mark.slow),
    pytest.param("w8a8", "w8a8-static", marks=pytest.mark.slow),
    pytest.param("sparse24-wanda", "sparse24-magnitude", marks=pytest.mark.slow),
])
def test_logits_are_nearer(better: str, worse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations rounded as the recipe's file asks for: kernels of a CPU keep them."""
    monkeypatch.setattr(quantize_model, "_calibration", lambda job, model, linears: Calibration(model, SEQUENCES))
    plain = planted(save_checkpoint("llama", tmp_path / "tiny", **SIZES))
    expected = load(plain)

    def error(recipe: str) -> float:
        quantize(Job(model=plain, recipe=read_recipe(recipe), out=tmp_path / recipe, show=False))
        found, activation = load(tmp_path / recipe), RECIPES[recipe][0].activation
        if activation is not None:
            linears = [path for path, _ in found.named_modules() if path.endswith(LINEARS)]
            assert round_inputs(found, dict.fromkeys(linears, activation)) == len(LINEARS) * SIZES["num_hidden_layers"]
        return sum(float((teacher_forced_logits(found, each, len(each)) - teacher_forced_logits(expected, each, len(each))).pow(2)
                         .mean()) for each in SEQUENCES)

    assert error(better) < 0.9 * error(worse)


def test_what_is_sparse_loads_as_an_ordinary_checkpoint(tmp_path: Path) -> None:
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    quantize(Job(model=plain, recipe=read_recipe("sparse24-magnitude"), out=tmp_path / "out", show=False))
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()
    weight = load(tmp_path / "out").layers[0].mlp.down.weight
    assert bool(((weight != 0).unflatten(1, (-1, 4)).sum(2) <= 2).all())
    assert torch.equal(load(tmp_path / "out").embed.weight, load(plain).embed.weight)
