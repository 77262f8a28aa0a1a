"""The embedded model from end to end, a GGUF file's tokenizer as Hugging Face files, and other readers of what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantised_models import SIZES
from tiny_models import load, save_checkpoint

from ridgeline.evaluate.task import Task
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import load_model_config
from ridgeline.process import embedded
from ridgeline.quantize.card import find_card
from ridgeline.quantize.hf_files import write_tokenizer
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import RECIPES, read_recipe
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


@pytest.mark.parametrize("recipe", [name for name, (_, method, _) in RECIPES.items() if method == "rtn"])
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
        assert torch.equal(ours.layers[number].mlp.down.weight, layer.mlp.down_proj.weight)
        attention = layer.self_attn
        fused = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        assert torch.equal(ours.layers[number].attention.qkv.weight, fused)


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
