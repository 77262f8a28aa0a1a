"""`ridgeline quantize` of mixtures of experts: each expert's linears by the tokens that choose it; the router stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import SIZES
from safetensors.torch import load_file, save_file
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits
from torch import Tensor

from ridgeline.errors import ConfigError, ModelError
from ridgeline.quantize import quantize_model
from ridgeline.quantize.calibration import Calibration
from ridgeline.quantize.methods.rounding import expanded, rounded
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import read_recipe

SEQUENCES = [random_tokens(24, seed=number) for number in range(9)]
WIDTHS: dict[str, dict[str, Any]] = {                    # groups of 32 divide them
    "mixtral": {}, "olmoe": {"intermediate_size": 32}, "glm4_moe": {"moe_intermediate_size": 32},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}, "qwen3_moe": {"moe_intermediate_size": 32},
}


@pytest.fixture(autouse=True)
def own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_model, "_passages", lambda job, tokens: SEQUENCES)


def saved(family: str, path: Path) -> Path:
    return save_checkpoint(family, path, **SIZES | WIDTHS[family])


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def made(plain: Path, out: Path, recipe: str) -> Path:
    quantize(Job(model=plain, recipe=read_recipe(recipe), out=out, show=False))
    return out


@pytest.mark.parametrize(("family", "recipe"), [
    ("mixtral", "int4-rtn"), ("mixtral", "fp8"), ("olmoe", "mxfp4"), ("qwen2_moe", "int4-rtn-asym"), ("qwen3_moe", "nvfp4"),
    ("glm4_moe", "int4-rtn"),
])
def test_the_engine_loads_experts_as_their_rounded_weights(family: str, recipe: str, tmp_path: Path) -> None:
    plain = saved(family, tmp_path / "plain")
    out = made(plain, tmp_path / "out", recipe)
    model, numbers = PlainModel(plain), tensors(plain)
    linears = model.linears(read_recipe(recipe))
    largest: dict[str, float] = {}
    for linear in linears:
        largest[linear.fused] = max(largest.get(linear.fused, 0.0), float(numbers[linear.weight].abs().max()))
    for linear in linears:
        if linear.format is not None:
            codes = rounded(numbers[linear.weight], linear.format, largest[linear.fused])
            numbers[linear.weight] = expanded(codes, linear.format, linear.inputs)
    model.close()
    routers = [linear for linear in linears if linear.reason == "it chooses experts"]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert routers and {linear.module for linear in routers} <= set(config["ignore"])
    assert sum(linear.quantised for linear in linears if ".experts." in linear.module) >= 15
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    expected, found = load(plain), load(out)
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    logits = [teacher_forced_logits(each, SEQUENCES[0], 20) for each in (found, expected)]
    assert torch.equal(*logits)


def test_an_expert_is_calibrated_by_the_tokens_that_choose_it(tmp_path: Path) -> None:
    """Those tokens alone, and together all tokens as often as each chooses; what reaches down is of that expert."""
    plain = saved("mixtral", tmp_path / "plain")
    model, numbers = PlainModel(plain), tensors(plain)
    run = Calibration(model, SEQUENCES)
    run.begin()
    values = {name: model.read(name) for name in model.names(0)}
    observed = run.observe(values)
    layer = load(plain).layers[0]
    path = "model.layers.0.block_sparse_moe"
    routed = observed["layers.0.mlp.router"].moments     # of all tokens: the experts' parts of it, each token by two of them
    assert routed is not None
    parts = [observed.get(f"layers.0.mlp.experts.{expert}.gate_up") for expert in range(layer.mlp.spec.count)]
    total = sum((part.moments for part in parts if part is not None and part.moments is not None), torch.zeros_like(routed))
    torch.testing.assert_close(total, layer.mlp.spec.used * routed, rtol=1e-4, atol=1e-3)
    for expert, part in enumerate(parts):
        if part is None:
            continue
        gate, up = (part.sample @ numbers[f"{path}.experts.{expert}.{name}.weight"].t() for name in ("w1", "w3"))
        wide = torch.nn.functional.silu(gate) * up
        below = observed[f"layers.0.mlp.experts.{expert}.down"]
        torch.testing.assert_close(below.sample, wide, rtol=1e-4, atol=1e-5)
        chosen = (part.sample @ numbers[f"{path}.gate.weight"].t()).topk(layer.mlp.spec.used).indices
        assert bool((chosen == expert).any(1).all())
    model.close()


def test_gptq_of_experts_is_nearer_than_rounding_to_nearest(tmp_path: Path) -> None:
    plain = saved("qwen3_moe", tmp_path / "plain")
    before = load(plain)
    kls = {}
    for recipe in ("int4-rtn", "int4-gptq"):
        after, found = load(made(plain, tmp_path / recipe, recipe)), []
        for tokens in SEQUENCES:
            old, new = (teacher_forced_logits(each, tokens, len(tokens)).log_softmax(-1) for each in (before, after))
            found.append((old.exp() * (old - new)).sum(-1))
        kls[recipe] = float(torch.cat(found).mean())
    assert kls["int4-gptq"] < 0.8 * kls["int4-rtn"]


def test_experts_that_no_token_chooses_are_rounded_to_nearest(tmp_path: Path) -> None:
    plain = saved("mixtral", tmp_path / "plain")
    numbers = load_file(plain / "model.safetensors")
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    numbers[gate] = torch.zeros_like(numbers[gate])      # a tie of all: every token chooses the same two
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    nearest, gptq = (tensors(made(plain, tmp_path / recipe, recipe)) for recipe in ("int4-rtn", "int4-gptq"))
    same = {expert: torch.equal(*(each[f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight_packed"]
                                  for each in (nearest, gptq))) for expert in range(5)}
    assert sum(same.values()) == 3
    with pytest.raises(ModelError, match="no token of the calibration text reaches this expert"):
        made(plain, tmp_path / "static", "fp8-static")


def test_what_experts_cannot_have_is_one_line(tmp_path: Path) -> None:
    plain = saved("mixtral", tmp_path / "plain")
    with pytest.raises(ConfigError, match="awq cannot move scales into experts"):
        made(plain, tmp_path / "out", "int4-awq")
    recipe = tmp_path / "two.yaml"
    recipe.write_text("experts.3: fp8\nexperts: int4-rtn\n")
    with pytest.raises(ConfigError, match="experts of a layer must have one format"):
        made(plain, tmp_path / "out", str(recipe))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "two.yaml"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_transformers_computes_the_same_logits(family: str, tmp_path: Path) -> None:
    """As it loads by default, with one size of groups for all linears: of several, it takes one for all experts. Experts with
    zero points it does not load."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    plain, out = saved(family, tmp_path / "plain"), tmp_path / "out"
    quantize(Job(model=plain, recipe=read_recipe("int4-gptq", group=32), out=out, show=False))
    theirs, missed = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not missed["missing_keys"] and not missed["unexpected_keys"]
    tokens = SEQUENCES[0]
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0]
    assert torch.allclose(teacher_forced_logits(load(out), tokens, len(tokens)), logits, atol=1e-4)
