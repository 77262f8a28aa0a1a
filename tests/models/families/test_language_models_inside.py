"""Checkpoints of transformers' classes that also see or hear: their language model gives the same logits of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import VOCAB
from tiny_models import load, random_tokens, randomise, teacher_forced_logits

from ridgeline.models.families.all_families import FAMILIES, TEXT_TYPES, WITH_MORE

TOKENS = random_tokens(24)
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_EYES = {"depth": 1, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 40}
EARS = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 40, "num_mel_bins": 8}
THREE = {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [2, 2, 2]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16,
           "experts_implementation": "eager"}
IMAGE = {"image_token_id": 5, "video_token_id": 6}

# The class of transformers, and its config.
MODELS: dict[str, dict[str, Any]] = {
    "Llava": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP, "image_token_index": 5},
    "LlavaNext": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": CLIP, "image_token_index": 5},
    # Its two configs disagree on whether the head is the embedding.
    "InternVL": {"text_config": TEXT | {"model_type": "qwen2", "tie_word_embeddings": False},
                 "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40,
                                   "image_size": (28, 28), "patch_size": (14, 14)}, "image_token_id": 5},
    "SmolVLM": {"text_config": TEXT | {"model_type": "llama"}, "image_token_id": 5,
                "vision_config": {name: value for name, value in CLIP.items() if name != "model_type"}},
    "Qwen2_5_VL": {"text_config": TEXT | {"rope_parameters": THREE}, "vision_config": QWEN_EYES, **IMAGE},
    "Qwen3VLMoe": {"text_config": TEXT | EXPERTS, "vision_config": QWEN_EYES | {"deepstack_visual_indexes": [0]}, **IMAGE},
    "Glm4v": {"text_config": TEXT | {"rope_parameters": THREE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}},
              "vision_config": QWEN_EYES, **IMAGE},
    "Qwen2Audio": {"text_config": TEXT | {"model_type": "qwen2"}, "audio_config": EARS, "audio_token_index": 5},
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_language_model_inside(kind: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    randomise(model, seed=1, norm_mean=1.0)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 1
    torch.testing.assert_close(teacher_forced_logits(load(tmp_path), TOKENS, 20), expected, rtol=0, atol=1e-3)


def test_experts_as_their_makers_store_them(tmp_path: Path) -> None:
    """Qwen3-VL's are [experts, inputs, outputs]; transformers 5 saves them the other way round."""
    import transformers
    from safetensors.torch import load_file, save_file

    config = transformers.Qwen3VLMoeConfig(**MODELS["Qwen3VLMoe"])
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    randomise(model, seed=1, norm_mean=1.0)
    model.save_pretrained(tmp_path)
    expected = teacher_forced_logits(load(tmp_path), TOKENS, 20)
    file = tmp_path / "model.safetensors"
    turned = {name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
              for name, tensor in load_file(file).items()}
    save_file(turned, file)
    assert torch.equal(teacher_forced_logits(load(tmp_path), TOKENS, 20), expected)


def test_the_names_are_known() -> None:
    import transformers

    own = {"InternVLChatModel", "KimiK25ForConditionalGeneration", "Qwen2_5OmniModel"}      # of code beside the checkpoint
    assert [name for name in WITH_MORE if name not in own and not hasattr(transformers, name)] == []
    assert set(TEXT_TYPES.values()) <= {family.name for family in FAMILIES}
