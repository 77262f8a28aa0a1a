"""The embedded model from end to end, a GGUF file's tokenizer as Hugging Face files, and other readers of what is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantised_models import SIZES
from safetensors.torch import load_file
from test_weights import save_gguf
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.config import ModelOptions
from ridgeline.engine.client.sampling_defaults import load_sampling_defaults
from ridgeline.errors import ModelError
from ridgeline.evaluate.task import Task
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import load_model_config
from ridgeline.ops.quantised.codes import unpacked_codes
from ridgeline.process import embedded
from ridgeline.quant.format import SCALE, WEIGHT, ZERO
from ridgeline.quant.quality_card import find_card
from ridgeline.quantize import quantize_model
from ridgeline.quantize.ct_writer import Linear, quantization_config
from ridgeline.quantize.hf_files import _generation, gguf_config, write_small_files, write_tokenizer
from ridgeline.quantize.methods.rounding import rounded
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import RECIPES, read_recipe, stored_scales
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.vocabulary_gguf import gguf_vocabulary

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = ("The capital of France is", "  x = 12345\n\tdef f(a):\n", "naïve – 日本語 🙂", "<|im_start|>user", "", " a")


@pytest.mark.parametrize("name", ["llama-bpe-small", "llama-spm-small", "qwen2-small"])
def test_a_gguf_tokenizer_as_hugging_face_files(name: str, tmp_path: Path) -> None:
    path = GOLDEN / f"{name}.gguf"
    with GGUFFile(path) as file:
        write_tokenizer(gguf_vocabulary(file.metadata, path.name), tmp_path)
    before, after = Tokenizer.load(path), Tokenizer.load(tmp_path)
    for text in TEXTS:
        for parse in (True, False):
            ids = before.encode(text, parse_special=parse)
            assert after.encode(text, parse_special=parse) == ids
            assert after.decode(ids) == before.decode(ids)
    assert after.bos_token_id == before.bos_token_id and after.chat_templates == before.chat_templates
    assert after.token_pieces() == before.token_pieces()


def test_every_chat_template_is_copied(tmp_path: Path) -> None:
    plain, out = save_checkpoint("llama", tmp_path / "tiny", **SIZES), tmp_path / "out"
    named = plain / "additional_chat_templates"
    for folder in (named, out):
        folder.mkdir()
    (plain / "chat_template.jinja").write_text("plain")
    (named / "tool_use.jinja").write_text("with tools")
    write_small_files(plain, load_model_config(plain), None, out)
    assert (out / "chat_template.jinja").read_text() == "plain"
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "with tools"


def test_a_small_file_of_a_terabyte_is_refused_before_the_work(tmp_path: Path) -> None:
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    (plain / "vocab.json").touch()
    os.truncate(plain / "vocab.json", 1 << 40)
    with pytest.raises(ModelError, match=r"vocab\.json: 1,099,511,627,776 bytes are more than"):
        quantize(Job(model=plain, recipe=read_recipe("w8a8"), out=tmp_path / "out", show=False))
    assert not (tmp_path / "out.part").exists()


@pytest.mark.parametrize("recipe", [name for name, (_, method, _) in RECIPES.items() if method == "rtn" and name != "llm-int8"])
def test_transformers_and_compressed_tensors_expand_the_same_weights(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    out = tmp_path / "out"
    quantize(Job(model=plain, recipe=read_recipe(recipe), out=out, show=False))
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=config)
    ours = load(out)
    for number, layer in enumerate(theirs.model.layers):
        down = layer.mlp.down_proj.weight                # of NVFP4 it is bfloat16 there, whatever dtype is asked for
        assert torch.equal(ours.layers[number].mlp.down.weight.to(down.dtype), down)
        attention = layer.self_attn
        fused = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        assert torch.equal(ours.layers[number].attention.qkv.weight.to(fused.dtype), fused)


@pytest.mark.parametrize("recipe", ["int4-rtn", "w8a16", "w8a8-static", "fp8"])
def test_a_tied_model_means_the_same_in_transformers(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it loads by default: it must not look for codes of the head, which has no tensor. Logits are compared where
    transformers does not round activations; the weights' numbers, as it computes with them, in every case."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    tokens = random_tokens(24)
    monkeypatch.setattr(quantize_model, "_passages", lambda job, count: [tokens])
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES | {"tie_word_embeddings": True})
    quantize(Job(model=plain, recipe=read_recipe(recipe, kv="fp8" if recipe == "fp8" else ""), out=tmp_path / "out", show=False))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load(tmp_path / "out")
    logits = theirs(torch.tensor([tokens])).logits[0]    # the first use expands its weights
    assert logits.isfinite().all()
    for layer, mine in zip(theirs.model.layers, ours.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        for weight, parts in (
            (mine.attention.qkv.weight, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (mine.attention.output.weight, (attention.o_proj,)),
            (mine.mlp.gate_up.weight, (mlp.gate_proj, mlp.up_proj)), (mine.mlp.down.weight, (mlp.down_proj,)),
        ):
            assert torch.equal(weight, torch.cat([part.weight for part in parts]))
    assert all(name not in dict(theirs.named_parameters()) for name in ("lm_head.weight_scale", "lm_head.weight_packed"))
    if recipe in ("int4-rtn", "w8a16"):
        assert torch.allclose(teacher_forced_logits(ours, tokens, len(tokens)), logits, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(embedded.find() is None, reason="the embedded model is not on this machine")
def test_the_embedded_model_from_end_to_end(tmp_path: Path) -> None:
    path, out = embedded.require(), tmp_path / "out"
    task = Task(slices=("prose",), context=64, tokens=128)
    made = quantize(Job(model=path, recipe=read_recipe("fp8"), out=out, card=task, show=False))
    found = find_card(out)
    assert made is not None and found is not None and found.matches
    assert made["quality"]["all"]["kl"] < 0.05 and made["quality"]["all"]["perplexity_ratio"] < 1.05
    assert any("GGUF" in note for note in made["notes"])
    before, after = load_model_config(path), load_model_config(out)
    for name in ("vocab_size", "hidden_size", "num_layers", "tied", "ropes", "windows", "eos_token_ids", "dtype"):
        assert getattr(before, name) == getattr(after, name), name
    assert Tokenizer.load(out).encode(TEXTS[1]) == Tokenizer.load(path).encode(TEXTS[1])
    assert json.loads((out / "quality.json").read_text()) == made


@pytest.mark.parametrize("recipe", ["int4-rtn", "int4-rtn-asym", "w8a8", "w8a16", "fp8"])
def test_codes_and_scales_are_those_of_compressed_tensors(recipe: str) -> None:
    """What llm-compressor's round to nearest gives."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as theirs
    from compressed_tensors.quantization.utils import calculate_qparams

    format = read_recipe(recipe).choose("layers.0.q_proj", 192, 0, 1).format
    assert format is not None and format.scales is not None
    format = stored_scales(format, "float32")
    weights = quantization_config([Linear("q_proj", 24, 192, 0, format, "rtn")], False, "")["config_groups"]["group_0"]["weights"]
    args = QuantizationArgs(**weights)
    values = torch.randn(24, 192, generator=torch.Generator().manual_seed(5))
    parts = values if args.group_size is None else values.unflatten(1, (-1, args.group_size))
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    scale, zero = (each[:, None] if each.dim() == 1 else each for each in (scale, zero))
    codes = theirs(values, scale, zero, args)
    found = rounded(values, format)
    assert torch.equal(found[SCALE].view(scale.shape), scale)
    if format.grid == "uint4":
        assert torch.equal(unpacked_codes("uint4", found[WEIGHT], None).float() - 8, codes.float())
        assert ZERO not in found or torch.equal(found[ZERO] - 8, zero.float())
    else:
        assert torch.equal(found[WEIGHT].float(), codes.to(found[WEIGHT].dtype).float())


@pytest.mark.parametrize(("name", "architecture", "rope"), [
    ("smollm2", "llama", {}), ("qwen3", "qwen3", {}),
    ("llama-bias", "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
])
def test_a_gguf_file_as_a_hugging_face_checkpoint(name: str, architecture: str, rope: dict[str, object], tmp_path: Path) -> None:
    """The same tensors under the same names, and a config.json that says the same."""
    plain = save_checkpoint(name, tmp_path / "plain")
    file = save_gguf(plain, architecture, rope, {})
    model = PlainModel(file)
    expected = load_file(plain / "model.safetensors")
    found = {each: model.read(each) for block in model.blocks for each in model.names(block)}
    assert set(found) == set(expected)
    assert all(torch.equal(found[each], value) for each, value in expected.items())
    with GGUFFile(file) as opened:
        (tmp_path / "made").mkdir()
        (tmp_path / "made/config.json").write_text(json.dumps(gguf_config(model.config, opened)))
    model.close()
    before, after = load_model_config(plain), load_model_config(tmp_path / "made")
    for field in ("family", "tied", "ropes", "windows", "qkv_bias", "output_bias", "mlp_bias"):
        assert getattr(before, field) == getattr(after, field), field


def test_a_gguf_file_that_config_json_cannot_describe_is_refused(tmp_path: Path) -> None:
    scaled = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24}
    model = PlainModel(save_gguf(save_checkpoint("qwen2.5-yarn", tmp_path / "yarn"), "qwen2", scaled, {}))
    with GGUFFile(model.path) as opened, pytest.raises(ModelError, match="rope scaling cannot be written"):
        gguf_config(model.config, opened)
    model.close()
    with pytest.raises(ModelError, match="GGUF files of phi3 cannot be written"):
        PlainModel(save_gguf(save_checkpoint("phi3", tmp_path / "phi3"), "phi3", {}, {}))


def test_a_gguf_files_sampling_defaults_are_kept() -> None:
    """At temperature 1, which a directory without defaults is served with, small models talk nonsense."""
    file = next(GOLDEN.glob("*.gguf"))
    with GGUFFile(file) as opened:
        vocabulary = gguf_vocabulary(opened.metadata, file.name)
    written = _generation(file, SimpleNamespace(eos_token_ids=(2,)), vocabulary)  # type: ignore[arg-type]
    served = load_sampling_defaults(ModelOptions(), file)
    assert served and {name: written[name] for name in served} == dict(served) and written["eos_token_id"] == [2]
