"""Options of a family's config that its known checkpoints do not use: computed as transformers does, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import AllFloat64
from tiny_configs import LINEAR, LLAMA3, PLAIN, YARN
from tiny_models import build_model, load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.errors import ModelError

TOKENS = random_tokens(36)
PREFILL = 30
FULL, SLIDING = "full_attention", "sliding_attention"

# checkpoint, what is other than in its entry of tiny_models
COMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "gelu", "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}),
    ("qwen3-window", {"layer_types": [FULL, SLIDING, FULL], "attention_bias": False}),
    ("gemma2", {"final_logit_softcapping": None, "layer_types": [FULL, SLIDING, SLIDING]}),
    ("gemma3", {"final_logit_softcapping": 1.5, "attn_logit_softcapping": 1.5}),
    ("gemma3", {"final_logit_softcapping": None, "rope_parameters": {FULL: YARN, SLIDING: LINEAR}}),
    ("cohere2", {"layer_types": [FULL] * 5}),            # no rope at all
    ("exaone4", {"layer_types": [FULL] * 5}),            # the same
    ("exaone4", {"sliding_window_pattern": 1}),          # the same
    ("exaone4", {"layer_types": [FULL] * 5, "sliding_window": None}),    # a rope in every layer
    ("phimoe", {"tie_word_embeddings": True, "lm_head_bias": False}),
    ("deepseek_v3", {"norm_topk_prob": False, "n_shared_experts": 1, "first_k_dense_replace": 0, "topk_group": 4}),
    ("glm4_moe", {"use_qk_norm": False, "num_key_value_heads": 1}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 1}),
    ("llama4", {"rope_parameters": LINEAR, "use_qk_norm": False}),
    ("olmo3", {"rope_parameters": {FULL: PLAIN, SLIDING: LLAMA3}}),
    # Every layer has a plain MLP.
    ("deepseek_v3", {"first_k_dense_replace": 5}),
    ("qwen3_moe", {"decoder_sparse_step": 4}),
    ("qwen3_moe", {"num_experts": 0}),
    # Fields that are nothing to transformers.
    ("gptj", {"rope_theta": 77.0, "rope_scaling": LINEAR, "partial_rotary_factor": 0.25}),
    ("codegen", {"rope_theta": 77.0, "rope_parameters": LINEAR}),
    ("deepseek_v2", {"rope_interleave": False}),
    ("minicpm3", {"rope_interleave": True}),
    ("olmo", {"rms_norm_eps": 0.3}),
    ("opt", {"rms_norm_eps": 0.3}),
]


@pytest.mark.parametrize(("name", "options"), COMPUTED, ids=[f"{name}-{'-'.join(options)}" for name, options in COMPUTED])
def test_an_odd_option_is_computed_as_transformers_does(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path, dtype=torch.float64, **options)
    with torch.no_grad(), AllFloat64():
        expected = build_model(name, torch.float64, **options)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    got = teacher_forced_logits(load(tmp_path, torch.float64), TOKENS, PREFILL)
    assert float((got - expected).abs().max()) < 1e-10


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("phi", {"tie_word_embeddings": True}, "lm_head_bias of a head that is the embedding"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not supported for phimoe"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported for deepseek_v2"),
        ("deepseek_v2", {"topk_group": 1}, "num_experts_per_tok 3 is more than the experts of topk_group 1"),
        ("llama4", {"rope_parameters": YARN}, "a rope with a scale of 1.13"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("jais2", {"hidden_act": "xielu"}, "hidden_act 'xielu' is not supported; supported: silu, .* relu2$"),
        ("granite", {"attention_multiplier": 0.0}, "attention_multiplier must be a positive number, got 0.0"),
        ("qwen2", {"is_causal": False}, "is_causal False is not supported: tokens that see those behind them"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("llama", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_an_odd_option_is_refused_by_name(name: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path, **options)
    with pytest.raises(ModelError, match=says):
        load(tmp_path)
