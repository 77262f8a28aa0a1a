"""GPTQ: smaller errors of the products than rounding to nearest, streaming calibration, and runs that go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import SIZES
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits
from torch import Tensor

from ridgeline.errors import ConfigError, ModelError
from ridgeline.quant.format import WeightFormat
from ridgeline.quantize import calibration as calibrating
from ridgeline.quantize import quantize_model
from ridgeline.quantize.calibration import Calibration, calibration_passages, halves
from ridgeline.quantize.methods.gptq_rounding import InverseFactor, gptq_rounded
from ridgeline.quantize.methods.rounding import expanded, rounded
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import read_recipe
from ridgeline.quantize.workspace import Workspace

SEQUENCES = [random_tokens(20 + number, seed=number) for number in range(11)]      # more than one group, of several lengths


def format_of(name: str, inputs: int = 192) -> WeightFormat:
    found = read_recipe(name, group=32).choose("layers.0.q_proj", inputs, 0, 1).format
    assert found is not None
    return found


def correlated(inputs: int, count: int = 600) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(inputs, inputs, generator=generator) * torch.rand(inputs, generator=generator).pow(3)
    return torch.randn(count, inputs, generator=generator) @ mixing


@pytest.mark.parametrize("name", ["int4-gptq", "int4-gptq-asym"])
def test_products_are_nearer_than_with_rounding_to_nearest(name: str) -> None:
    x, format = correlated(192), format_of(name)
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(1))
    nearest = expanded(rounded(weight, format), format, 192)
    found = expanded(gptq_rounded(weight, InverseFactor(x.t() @ x), format), format, 192)
    errors = [((x @ (each - weight).t()) ** 2).mean() for each in (nearest, found)]
    assert errors[1] < 0.6 * errors[0]
    assert (found - weight).abs().max() > (nearest - weight).abs().max()        # which it pays for with single weights


@pytest.mark.parametrize("name", ["int4-gptq", "int4-gptq-asym"])
def test_inputs_without_correlation_are_rounded_to_nearest(name: str) -> None:
    """With a diagonal Hessian nothing can make up for an error. Blocks of 128 inputs and the order change nothing, either."""
    format = format_of(name)
    weight = torch.randn(16, 192, generator=torch.Generator().manual_seed(2))
    moments = torch.rand(192, generator=torch.Generator().manual_seed(4)) + 0.1
    found = gptq_rounded(weight, InverseFactor(moments.diag()), format)
    assert all(torch.equal(found[part], value) for part, value in rounded(weight, format).items())


def test_an_input_that_was_never_seen() -> None:
    x, format = correlated(192), format_of("int4-gptq")
    x[:, 7] = 0
    found = expanded(gptq_rounded(torch.ones(8, 192), InverseFactor(x.t() @ x), format), format, 192)
    assert bool(found.isfinite().all()) and bool((found[:, 7] == 0).all())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [(slice(None), slice(None)), ([3, 5], [5, 3]), (3, 3)], ids=["all", "a pair", "one moment"])
def test_a_hessian_that_is_not_finite_is_an_error(wrong: float, where: Any) -> None:
    hessian = torch.eye(8)
    hessian[where] = wrong
    with pytest.raises(ModelError, match="no invertible Hessian"):
        InverseFactor(hessian)


# ── streaming ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma2"])
def test_layer_by_layer_is_the_whole_model(family: str, tmp_path: Path) -> None:
    path = save_checkpoint(family, tmp_path / family)
    model, whole = PlainModel(path), load(path)
    run = Calibration(model, SEQUENCES)
    run.begin()
    for layer in range(model.config.num_layers):
        run.move_on({name: model.read(name) for name in model.names(layer)})
    model.close()
    for sequence, states in zip(SEQUENCES[:8], run.streams[0].split([len(each) for each in SEQUENCES[:8]]), strict=True):
        found = whole.logits(whole.norm(states))
        torch.testing.assert_close(found, teacher_forced_logits(whole, sequence, len(sequence)), rtol=1e-4, atol=1e-4)


def test_moments_are_those_of_the_inputs(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "tiny")
    model = PlainModel(path)
    run = Calibration(model, SEQUENCES)
    run.begin()
    before = [stream.clone() for stream in run.streams]
    weights = {name: model.read(name) for name in model.names(0)}
    observed = run.observe(weights)
    assert set(observed) == {f"layers.0.{name}" for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")}
    assert all(torch.equal(*pair) for pair in zip(before, run.streams, strict=True))
    x = torch.cat(before).double()
    exact = x * (x.pow(2).mean(1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
    exact = exact * weights["model.layers.0.input_layernorm.weight"].double()
    found = observed[run.linear_of("model.layers.0.self_attn.k_proj.weight")]
    # Sums of 275 products in float32, in any order: what cancels has its rounding errors, too.
    size = exact.abs().t() @ exact.abs()
    assert bool(((found.moments - exact.t() @ exact).abs() <= 1e-6 * size).all())
    normed = exact.float()
    torch.testing.assert_close(found.mean, normed.abs().mean(0))
    torch.testing.assert_close(found.largest, normed.abs().amax(0))
    torch.testing.assert_close(found.sample, normed)     # so few tokens are all kept
    model.close()


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quantize_model, "_calibration", lambda job, model, linears: Calibration(model, SEQUENCES))
    return save_checkpoint("llama", tmp_path / "tiny", **SIZES)


def job(model: Path, out: Path, recipe: str = "int4-gptq") -> Job:
    return Job(model=model, recipe=read_recipe(recipe), out=out, show=False)


def test_logits_are_nearer_than_with_rounding_to_nearest(plain: Path, tmp_path: Path) -> None:
    expected = load(plain)

    def error(recipe: str) -> float:
        quantize(job(plain, tmp_path / recipe, recipe))
        found = load(tmp_path / recipe)
        return sum(float((teacher_forced_logits(found, each, len(each)) - teacher_forced_logits(expected, each, len(each))).pow(2)
                         .mean()) for each in SEQUENCES)

    assert error("int4-gptq") < 0.8 * error("int4-rtn")


def test_a_stopped_run_gives_the_same_bytes(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(job(plain, tmp_path / "whole"))
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    save, write = Calibration.save, Workspace.write

    def stops_before_saving(self: Calibration, file: Path) -> None:
        raise KeyboardInterrupt

    def stops_before_writing(self: Workspace, block: int, tensors: Any) -> None:
        if block == 2:
            raise KeyboardInterrupt
        write(self, block, tensors)

    monkeypatch.setattr(Calibration, "save", stops_before_saving)
    with pytest.raises(KeyboardInterrupt):
        quantize(job(plain, tmp_path / "out"))
    monkeypatch.setattr(Calibration, "save", save)
    monkeypatch.setattr(Workspace, "write", stops_before_writing)
    with pytest.raises(KeyboardInterrupt):
        quantize(job(plain, tmp_path / "out"))
    monkeypatch.setattr(Workspace, "write", write)
    quantize(job(plain, tmp_path / "out"))
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == whole


class Words:
    """A tokenizer of one token for each word."""

    def __init__(self) -> None:
        self.prefix_ids: list[int] = []

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return list(range(len(text.split())))


def test_calibration_text(tmp_path: Path) -> None:
    short, lines = tmp_path / "short.txt", tmp_path / "some.jsonl"
    short.write_text("a few words")
    with pytest.raises(ConfigError, match="too little text to calibrate with: 3 tokens, at least 1024"):
        calibration_passages(str(short), Words(), 8192, 0)               # type: ignore[arg-type]
    read, write = os.pipe()                              # can be read once; a run reads it several times
    os.write(write, b"one two")
    os.close(write)
    assert [calibrating.calibration_text(f"/dev/fd/{read}") for _ in range(2)] == ["one two"] * 2
    os.close(read)
    lines.write_text('{"text": "one two"}\n\n{"text": "three"}\n')
    assert calibrating.calibration_text(str(lines)) == "one two\n\nthree"
    lines.write_text('{"words": "one two"}\n')
    with pytest.raises(ConfigError, match='object with a "text"'):
        calibrating.calibration_text(str(lines))
    found = [calibration_passages("", Words(), 2048, seed) for seed in (0, 0, 1)]        # type: ignore[arg-type]
    assert found[0] == found[1] != found[2] and sum(map(len, found[0])) == 2048
    assert halves()[0] + halves()[1] == calibrating.default_text()
