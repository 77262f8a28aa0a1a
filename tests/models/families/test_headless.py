"""Models that were made for vectors: decoders saved without a head, whose embedding is not the head either (E5-Mistral)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import build_model, random_tokens, save_checkpoint

from ridgeline import LLM, SamplingParams
from ridgeline.choices.draft_checkpoint import draft_checkpoint
from ridgeline.config import EngineConfig
from ridgeline.errors import BadRequest, ConfigError, ModelError
from ridgeline.models.model_config import hf_model_config, kv_groups, load_model_config
from ridgeline.quantize.plain_model import PlainModel

TOKENS = random_tokens(20)
PROMPT = {"prompt_token_ids": TOKENS}


@pytest.mark.parametrize("name", ["mistral", "phi"])
def test_a_decoder_without_a_head_gives_vectors_and_no_text(name: str, tmp_path: Path) -> None:
    model = build_model(name).model
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS]), use_cache=False).last_hidden_state[0, -1]
    config = load_model_config(tmp_path)
    assert config.headless and config.num_parameters == sum(each.numel() for each in model.parameters())
    options = {"dtype": "float32", "kv_cache_dtype": "float32", "num_gpu_blocks_override": 32, "use_tqdm_on_load": False}
    with LLM(tmp_path, skip_tokenizer_init=True, **options) as llm:
        output, = llm.embed(PROMPT, normalize=False, use_tqdm=False)
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
        for params in (SamplingParams(max_tokens=2), SamplingParams(max_tokens=1, pooling="last", prompt_logprobs=1)):
            with pytest.raises(BadRequest, match=r"no head of a language model: it gives vectors \(/v1/embeddings, LLM.embed\)"):
                llm.generate(PROMPT, params, use_tqdm=False)


def test_a_model_without_a_head_neither_drafts_nor_is_quantised(tmp_path: Path) -> None:
    build_model("qwen3").model.save_pretrained(tmp_path)
    config = EngineConfig()
    execution = dataclasses.replace(
        config.execution, speculative_config=json.dumps({"method": "draft_model", "model": str(tmp_path)}))
    model = load_model_config(save_checkpoint("qwen3", tmp_path / "target"))
    with pytest.raises(ConfigError, match="a draft model needs a head of a language model"):
        asked = dataclasses.replace(config, execution=execution)
        draft_checkpoint(asked, tmp_path, model, kv_groups(model, 16), "cpu", "float32")
    with pytest.raises(ModelError, match="has no head of a language model"):
        PlainModel(tmp_path)


def test_a_class_with_a_head_or_whose_embedding_is_one_generates(tmp_path: Path) -> None:
    raw = json.loads((save_checkpoint("mistral", tmp_path) / "config.json").read_text())
    for change, headless in (({}, False), ({"architectures": ["MistralModel"]}, True),
                             ({"architectures": ["MistralModel"], "tie_word_embeddings": True}, False)):
        assert hf_model_config(raw | change, {}).headless == headless
    with_files = hf_model_config(raw | {"architectures": ["MistralModel"]}, {}, directory=tmp_path)
    assert not with_files.headless                       # its files have one
