"""`ridgeline quantize` on tiny models: what is written loads, means the rounded weights, and a stopped run goes on."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from quantised_models import SIZES
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.errors import ConfigError, ModelError
from ridgeline.evaluate.task import Task
from ridgeline.models.model_config import load_model_config
from ridgeline.quantize import quantize_model, workspace
from ridgeline.quantize.blocks import block_bytes
from ridgeline.quantize.ct_writer import header_bytes
from ridgeline.quantize.methods.rounding import expanded, rounded
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import RECIPES, read_recipe
from ridgeline.quantize.workspace import Workspace

TOKENS = random_tokens(24)
NEAREST = [name for name, (_, method, _) in RECIPES.items() if method == "rtn"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("plain") / "tiny", **SIZES)


def job(model: Path, out: Path, recipe: str = "int4-rtn", **more: Any) -> Job:
    return Job(model=model, recipe=read_recipe(recipe, **more), out=out, show=False)


def expanded_checkpoint(model: Path, folder: Path, recipe: str) -> Path:
    """The same model with every quantised weight replaced by the numbers that its codes mean."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    source = PlainModel(model)
    linears = [linear for linear in source.linears(read_recipe(recipe)) if linear.format is not None]
    largest = {linear.fused: max(float(tensors[each.weight].abs().max()) for each in linears if each.fused == linear.fused)
               for linear in linears}
    for linear in linears:
        codes = rounded(tensors[linear.weight], linear.format, largest[linear.fused])
        tensors[linear.weight] = expanded(codes, linear.format, linear.inputs)
    source.close()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("recipe", NEAREST)
def test_the_engine_loads_what_is_written_as_the_rounded_weights(recipe: str, plain: Path, tmp_path: Path) -> None:
    quantize(job(plain, tmp_path / "out", recipe))
    expected = load(expanded_checkpoint(plain, tmp_path / "expanded", recipe))
    found = load(tmp_path / "out")
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert torch.equal(teacher_forced_logits(found, TOKENS, 20), teacher_forced_logits(expected, TOKENS, 20))
    original = load(plain)
    assert not torch.equal(found.layers[0].mlp.down.weight, original.layers[0].mlp.down.weight)
    assert torch.equal(found.embed.weight, original.embed.weight) and torch.equal(found.head.weight, original.head.weight)
    assert not (tmp_path / "out.part").exists()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3", "gemma2"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Biases, norms of heads, fused matrices, a tied head."""
    made = save_checkpoint(family, tmp_path / "plain", **SIZES | {"tie_word_embeddings": family == "gemma2"})
    quantize(job(made, tmp_path / "out"))
    expected, found = load(expanded_checkpoint(made, tmp_path / "expanded", "int4-rtn")), load(tmp_path / "out")
    assert all(torch.equal(found.state_dict()[name], value) for name, value in expected.state_dict().items())
    assert not torch.equal(found.layers[0].attention.qkv.weight, load(made).layers[0].attention.qkv.weight)


def test_formats_differ_by_linear(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text("down_proj: {bits: 8}\n'layers\\.0\\.': none\nmlp: {bits: 4, group: 32, symmetric: false}\nlm_head: fp8\n")
    quantize(job(plain, tmp_path / "out", str(file)))
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert section["format"] == "mixed-precision"
    assert "model.layers.0.mlp.up_proj" in section["ignore"] and "model.layers.1.self_attn.q_proj" in section["ignore"]
    quantisation = load_model_config(tmp_path / "out").quantisation
    assert quantisation is not None
    names = {module: recipe.format.name if (recipe := quantisation.recipe(module)) else None for module in (
        "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head",
        "model.layers.1.self_attn.q_proj")}
    assert list(names.values()) == ["int8-row", None, "uint4-32", "e4m3-row", None]
    expected, found = load(expanded_checkpoint(plain, tmp_path / "expanded", str(file))), load(tmp_path / "out")
    assert all(torch.equal(found.state_dict()[name], value) for name, value in expected.state_dict().items())


def test_zeros_and_extremes_round_to_themselves() -> None:
    values = torch.zeros(16, 64)
    values[0, :2] = torch.tensor([-4.0, 3.0])
    for name in ("int4-rtn", "int4-rtn-asym", "w8a8", "fp8", "mxfp4", "nvfp4"):
        choice = read_recipe(name).choose("layers.0.q_proj", 64, 0, 1)
        assert choice.format is not None
        found = expanded(rounded(values, choice.format), choice.format, 64)
        assert bool((found[1:] == 0).all()) and bool(found.isfinite().all()), name
        assert (found - values).abs().max() <= (0.34 if name == "nvfp4" else 0.51 * 8 / 15), name    # e2m1 has no 5


# ── a stopped run ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stopped_run_goes_on_where_it_stopped(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(job(plain, tmp_path / "whole"))
    write, written = Workspace.write, []

    def stops(self: Workspace, block: int, tensors: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(block)
        write(self, block, tensors)

    monkeypatch.setattr(Workspace, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        quantize(job(plain, tmp_path / "out"))
    assert not (tmp_path / "out").exists() and written == [0, 1]
    with pytest.raises(ConfigError, match="belongs to a run with another"):
        quantize(job(plain, tmp_path / "out", "fp8"))
    monkeypatch.setattr(Workspace, "write", lambda self, block, tensors: (written.append(block), write(self, block, tensors)))
    quantize(job(plain, tmp_path / "out"))
    assert written == [0, 1, 2]
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}


def test_one_run_at_a_time_and_a_block_cut_short_is_made_again(plain: Path, tmp_path: Path) -> None:
    made = job(plain, tmp_path / "out")
    model = PlainModel(plain)
    space = Workspace(made.out, quantize_model._run(made, model, None), len(model.blocks))
    model.close()
    space.file(0).write_bytes(b"\0" * 100)
    assert not space.is_done(0)
    with pytest.raises(ConfigError, match=r"another run is writing .*out\.part: wait for it, or choose another --out"):
        quantize(made)
    space.end()
    quantize(made)
    load(made.out)


def test_a_file_system_without_locks_can_be_written(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(workspace.fcntl, "flock", no_locks)
    quantize(job(plain, tmp_path / "out"))
    load(tmp_path / "out")


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_output_that_exists_is_not_touched(plain: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in plain.iterdir()}
    with pytest.raises(ConfigError, match="exists already"):
        quantize(job(plain, plain))
    assert {file: file.read_bytes() for file in plain.iterdir()} == before


def test_a_quantised_checkpoint_is_refused(plain: Path, tmp_path: Path) -> None:
    quantize(job(plain, tmp_path / "out"))
    with pytest.raises(ModelError, match=r"out is quantised already \(compressed-tensors\)"):
        quantize(job(tmp_path / "out", tmp_path / "again"))


def test_weights_that_are_not_finite_are_named(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "bad")
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "bad/model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=re.escape("model.layers.1.mlp.up_proj.weight holds values that are not finite")):
        quantize(job(tmp_path / "bad", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_too_little_room_is_said_before_anything_is_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    with pytest.raises(ConfigError, match="no room for the output"):
        quantize(job(plain, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_one_line_and_the_run_can_go_on(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as during:
        during.setattr(workspace, "save_file", full)
        with pytest.raises(ConfigError, match=r"No space left on device.*same command again"):
            quantize(job(plain, tmp_path / "out"))
    quantize(job(plain, tmp_path / "out"))
    load(tmp_path / "out")


def test_what_the_card_needs_is_missed_before_the_work(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer.json"):
        quantize(replace(job(plain, tmp_path / "out"), card=Task()))
    assert not list(tmp_path.iterdir())


class Letters:
    """A tokenizer: each letter is a token."""

    bos_token_id = None
    prefix_ids: ClassVar[list[int]] = []

    @staticmethod
    def encode(text: str, **options: Any) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.mark.parametrize(("length", "says"), [
    (7, "cannot be hidden in 7 tokens"), (9000, "give a longer --card-text, or --card-needle 0"),
])
def test_needles_that_fit_into_no_text_are_refused_before_the_work(
    length: int, says: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_model.Tokenizer, "load", lambda path: Letters)
    text, out = tmp_path / "short.txt", tmp_path / "empty/out"
    text.write_text("too short for a haystack " * 4)
    out.parent.mkdir()
    with pytest.raises(ConfigError, match=says):
        quantize(replace(job(plain, out), card=Task(text=str(text), needle=(length,))))
    text.write_text("too short for a card")
    with pytest.raises(ConfigError, match="too little text to measure on: --card-text has 20 tokens, at least 64 are needed"):
        quantize(replace(job(plain, out), card=Task(text=str(text))))
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("words", ["too short for a haystack " * 4, "long enough for one. " * 20])
def test_needles_that_were_not_asked_for_are_left_out_of_a_short_text(
    words: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "short.txt"
    text.write_text(words)
    asked = replace(job(plain, tmp_path / "out"), needles_if_they_fit=True)
    task = Task(text=str(text), slices=(), needle=(256,))
    found = quantize_model._checked_card(asked, task, Letters)  # type: ignore[arg-type]
    assert found == (task if len(words) > 256 else replace(task, needle=()))


def test_the_predicted_bytes_are_the_bytes(plain: Path, tmp_path: Path) -> None:
    for recipe in NEAREST:
        model = PlainModel(plain)
        linears = model.linears(read_recipe(recipe))
        by_name = {linear.weight: linear for linear in linears if linear.format is not None}
        predicted = sum(block_bytes(model, by_name, block) for block in model.blocks)
        modules = {linear.module for linear in linears}
        headers = sum(header_bytes({name: model.shape(name) for name in model.names(block)}, modules) for block in model.blocks)
        model.close()
        quantize(job(plain, tmp_path / recipe, recipe))
        files = list((tmp_path / recipe).glob("*.safetensors"))
        stored = [tensor for file in files for tensor in load_file(file).items()]
        assert predicted == sum(tensor.nbytes for _, tensor in stored), recipe
        assert 0.2 * headers < sum(file.stat().st_size for file in files) - predicted <= headers, recipe


def test_a_recipe_that_fits_no_linear_says_why(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantises none of the 15 linears: .*kept as asked"):
        quantize(job(plain, tmp_path / "out", keep=["proj"]))
    with pytest.raises(ConfigError, match=r"--keep 'atention' matches none of the 15 linears"):
        quantize(job(plain, tmp_path / "out", keep=["lm_head", "atention"]))
    file = tmp_path / "typo.yaml"
    file.write_text("mlp: {bits: 4}\nmpl: {bits: 8}\n")
    with pytest.raises(ConfigError, match=r"typo.yaml 'mpl' matches none of the 15 linears, such as model\.layers\.1\."):
        quantize(job(plain, tmp_path / "out", str(file)))


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "gpt_neox", "gpt2"])
def test_what_cannot_be_quantised_yet_is_one_line(family: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot (be quantised by this command|quantise) yet"):
        PlainModel(save_checkpoint(family, tmp_path / family))
