"""The configs of tiny checkpoints of every family (tiny_models.py makes them): what each differs in from a small Llama."""

from __future__ import annotations

from typing import Any

VOCAB = 131                          # odd, so that sharding it needs padding
WINDOW = 7                           # not a multiple of the block size
ORIGINAL_CONTEXT = 24
MAX_POSITION = 96

BASE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_POSITION, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}
EAGER_EXPERTS = {"experts_implementation": "eager"}      # the others compute in 32 bits at most
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": ORIGINAL_CONTEXT}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "beta_fast": 4.0, "beta_slow": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e3, "factor": 3.0}
NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e2, "alpha": 50.0, "factor": 1.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e3, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.2, 3.9]}
PLAIN = {"rope_type": "default", "rope_theta": 1e3}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
          "v_head_dim": 10}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
DEEPSEEK_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 20,
                    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
GEMMA_ROPES = {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
               "sliding_attention": {"rope_type": "default", "rope_theta": 1e2}}

# name: (the class of transformers without its suffix, what differs from BASE)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-bias": ("Llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True,
                             "num_key_value_heads": 1}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "num_key_value_heads": 4, "head_dim": 8}),
    "smollm2": ("Llama", {"rope_parameters": PLAIN, "hidden_size": 72, "num_attention_heads": 9,
                          "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "ministral3": ("Ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.4}, "sliding_window": WINDOW,
                                  "head_dim": 16}),
    "mistral": ("Mistral", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN, "use_sliding_window": True, "sliding_window": WINDOW,
                        "max_window_layers": 1}),
    "qwen2.5-yarn": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": PLAIN, "head_dim": 16}),
    "qwen3-window": ("Qwen3", {"rope_parameters": PLAIN, "head_dim": 16, "attention_bias": True,
                               "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "phi3": ("Phi3", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "sliding_window": WINDOW}),
    "phi3-long": ("Phi3", {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
                           "original_max_position_embeddings": ORIGINAL_CONTEXT}),
    "gemma2": ("Gemma2", {"rope_parameters": PLAIN, "head_dim": 16, "query_pre_attn_scalar": 24,
                          "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"rope_parameters": GEMMA_ROPES, "head_dim": 16, "query_pre_attn_scalar": 24,
                          "sliding_window": WINDOW, "num_hidden_layers": 7, "final_logit_softcapping": 3.0}),
    "deepseek_v2": ("DeepseekV2", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": DEEPSEEK_YARN, "attention_bias": True,
                                                               "topk_method": "group_limited_greedy"}),
    "deepseek_v2-lite": ("DeepseekV2", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": PLAIN, "q_lora_rank": None,
                                                                    "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3-halves": ("DeepseekV3", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": PLAIN, "rope_interleave": False}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": PLAIN}),
    "minicpm3": ("MiniCPM3", LATENT | {"rope_parameters": YARN, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 32}),
    "minicpm3-long": ("MiniCPM3", LATENT | {
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": ORIGINAL_CONTEXT},
    }),
    "smollm3": ("SmolLM3", {"rope_parameters": PLAIN, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "seed_oss": ("SeedOss", {"rope_parameters": PLAIN, "head_dim": 16, "attention_bias": True, "attention_dropout": 0.0}),
    "ernie4_5": ("Ernie4_5", {"rope_parameters": PLAIN, "head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"rope_parameters": PLAIN, "head_dim": 16, "moe_num_experts": 8, "moe_k": 3,
                                      "moe_intermediate_size": 20, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}),
    "helium": ("Helium", {"rope_parameters": PLAIN, "head_dim": 12, "attention_bias": True}),
    "gemma": ("Gemma", {"rope_parameters": PLAIN, "head_dim": 16}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"rope_parameters": NTK_ALPHA, "head_dim": 16, "attention_bias": True}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"rope_parameters": NTK_ALPHA, "head_dim": 16, "num_experts": 6, "moe_topk": 2,
                                        "intermediate_size": 20}),
    "arcee": ("Arcee", {"rope_parameters": YARN, "mlp_bias": True}),
    "olmo2": ("Olmo2", {"rope_parameters": PLAIN}),
    "olmo3": ("Olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}, "num_hidden_layers": 5,
                        "sliding_window": WINDOW}),
    "granite": ("Granite", {"rope_parameters": PLAIN, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
                            "attention_multiplier": 0.2, "logits_scaling": 0.5, "tie_word_embeddings": True}),
    "glm": ("Glm", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "head_dim": 16}),
    "glm4": ("Glm4", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "head_dim": 16}),
    "cohere": ("Cohere", {"rope_parameters": PLAIN, "logit_scale": 0.8}),
    "cohere2": ("Cohere2", {"rope_parameters": PLAIN, "logit_scale": 0.8, "sliding_window": WINDOW, "num_hidden_layers": 5}),
    "starcoder2": ("Starcoder2", {"rope_parameters": PLAIN, "sliding_window": WINDOW}),
    "exaone4": ("Exaone4", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "num_hidden_layers": 5}),
    "nemotron": ("Nemotron", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3, "dtype": "float64"}),
    "stablelm": ("StableLm", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "use_qkv_bias": True,
                              "use_parallel_residual": True}),
    "stablelm-in-turn": ("StableLm", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "phi": ("Phi", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION}),
    "phimoe": ("Phimoe", {
        # transformers takes the short factors for every context: the same twice.
        "rope_parameters": LONGROPE | {name: [1.0, 1.1, 1.3, 1.7, 2.2, 3.9] for name in ("short_factor", "long_factor")} | {
            "short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": ORIGINAL_CONTEXT,
        },
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "attention_bias": True, "lm_head_bias": True,
        "router_jitter_noise": 0.2, "sliding_window": WINDOW,
    }),
    "mixtral": ("Mixtral", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "num_local_experts": 5,
                            "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {"rope_parameters": PLAIN, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
                               "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", {"rope_parameters": PLAIN, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3,
                               "moe_intermediate_size": 20, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "olmoe": ("Olmoe", {"rope_parameters": PLAIN, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}),
    "granitemoe": ("GraniteMoe", {"rope_parameters": PLAIN, "num_local_experts": 6, "num_experts_per_tok": 2,
                                  "intermediate_size": 20, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
                                  "attention_multiplier": 0.2, "logits_scaling": 0.5, "tie_word_embeddings": True}),
    "granitemoeshared": ("GraniteMoeShared", {
        "rope_parameters": PLAIN, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20,
        "shared_intermediate_size": 28, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
        "logits_scaling": 0.5, "tie_word_embeddings": True,
    }),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        "rope_parameters": PLAIN, "num_local_experts": 0, "shared_intermediate_size": 80, "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope", "mamba_n_heads": 4, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.2, "logits_scaling": 0.5,
    }),
    "dots1": ("Dots1", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "max_window_layers": 2, "attention_bias": True,
                        "norm_topk_prob": True} | DEEPSEEK_EXPERTS),
    "minimax_m2": ("MiniMaxM2", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "head_dim": 16,
                                 "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}),
    "glm4_moe": ("Glm4Moe", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "head_dim": 16, "use_qk_norm": True,
                             "attention_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
                             "topk_group": 2, "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
                             "routed_scaling_factor": 1.7}),
    "llama4": ("Llama4", {"rope_parameters": LLAMA3, "head_dim": 16, "attention_chunk_size": WINDOW, "floor_scale": 8,
                          "attn_scale": 0.3, "num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size": 20,
                          "intermediate_size_mlp": 36, "num_hidden_layers": 5, "moe_layers": [0, 1, 3, 4],
                          "no_rope_layers": [1, 0, 1, 0, 1]}),
    "gpt_oss": ("GptOss", {"rope_parameters": YARN | {"truncate": False}, "head_dim": 16, "num_local_experts": 6,
                           "num_experts_per_tok": 2, "intermediate_size": 20, "sliding_window": WINDOW, "swiglu_limit": 1.5}),
    "ministral": ("Ministral", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "head_dim": 16}),
    "cwm": ("Cwm", {"rope_parameters": LLAMA3, "sliding_window": WINDOW, "head_dim": 16, "num_hidden_layers": 5}),
    "vaultgemma": ("VaultGemma", {"rope_parameters": PLAIN, "head_dim": 16, "query_pre_attn_scalar": 24,
                                  "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "youtu": ("Youtu", LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "olmo": ("Olmo", {"rope_parameters": PLAIN, "clip_qkv": 1.5}),
    "flex_olmo": ("FlexOlmo", {"rope_parameters": PLAIN, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}),
    "solar_open": ("SolarOpen", {"rope_parameters": PLAIN, "head_dim": 16, "attention_bias": True, "n_routed_experts": 8,
                                 "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 20,
                                 "n_shared_experts": 2, "routed_scaling_factor": 1.7}),
    "exaone_moe": ("ExaoneMoe", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "num_hidden_layers": 5, "num_experts": 8,
                                 "num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_shared_experts": 2, "n_group": 4,
                                 "topk_group": 2, "routed_scaling_factor": 1.7}),
    "gptj": ("GPTJ", {"n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION, "rotary_dim": 6}),
    "opt": ("OPT", {"ffn_dim": 80}),
    "gpt_bigcode": ("GPTBigCode", {"n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION,
                                   "num_key_value_heads": 1}),
    "falcon": ("Falcon", {"rope_parameters": PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80,
                          "bias": True}),
    "falcon-7b": ("Falcon", {"rope_parameters": PLAIN, "num_kv_heads": 4, "ffn_hidden_size": None}),
    "falcon-11b": ("Falcon", {"rope_parameters": PLAIN, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1,
                              "num_kv_heads": 2}),
    "falcon-in-turn": ("Falcon", {"rope_parameters": PLAIN, "parallel_attn": False, "multi_query": False}),
    "bitnet": ("BitNet", {"rope_parameters": PLAIN, "attention_bias": True}),
    "hyperclovax": ("HyperCLOVAX", {"rope_parameters": PLAIN, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
                                    "attention_multiplier": 0.2, "logits_scaling": 0.5}),
    "hyperclovax-plain": ("HyperCLOVAX", {"rope_parameters": PLAIN, "use_post_norm": False}),
    "gpt_neo": ("GPTNeo", {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local"], 1], [["local"], 1]],
                           "window_size": WINDOW, "intermediate_size": None}),
    "codegen": ("CodeGen", {"n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION,
                            "n_ctx": MAX_POSITION, "rotary_dim": 6}),
    "jais2": ("Jais2", {"rope_parameters": PLAIN, "mlp_bias": True}),
    "mistral4": ("Mistral4", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": DEEPSEEK_YARN | {"llama_4_scaling_beta": 0.4},
                                                          "norm_topk_prob": True}),
    "hy_v3": ("HYV3", {"rope_parameters": PLAIN, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 20, "num_shared_experts": 1, "router_scaling_factor": 1.7}),
    "phi4_multimodal": ("Phi4Multimodal", {
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5}, "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "vision_config": {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "image_size": 28, "crop_size": 28},
        "audio_config": {"hidden_size": 32, "intermediate_size": 40, "num_blocks": 1, "num_attention_heads": 2,
                         "ext_pw_out_channel": 32, "nemo_conv_channels": 8, "input_size": 16, "sliding_window": None},
        "sliding_window": WINDOW,
    }),
    "mellum": ("Mellum", {
        "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN | {"rope_theta": 1e2}}, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "sliding_window": WINDOW, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    }),
    "flint": ("Flint", {"rope_parameters": PLAIN, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3,
                        "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "sliding_window": WINDOW,
                        "num_hidden_layers": 5, "mlp_only_layers": [0]}),
    # Under names that transformers does not have (RENAMED).
    "internlm2": ("Llama", {"rope_parameters": PLAIN, "head_dim": 12}),
    "exaone": ("Llama", {"rope_parameters": LLAMA3}),
    "minicpm": ("Granite", {"rope_parameters": LONGROPE | {
                                "original_max_position_embeddings": ORIGINAL_CONTEXT,
                                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 3.9], "long_factor": [1.0, 2.2, 3.9, 4.1, 5.0, 7.0],
                            }, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 12**-0.5,
                            "logits_scaling": 0.5, "tie_word_embeddings": True}),
}
# A new checkpoint comes to the end of this list, so that the seeds of all others stay: tests that need a guess to be right, or
# experts to be shared, depend on their weights.
LATER = (
    "ernie4_5_moe", "helium", "gemma", "hunyuan_v1_dense", "hunyuan_v1_moe", "granitemoeshared", "granitemoehybrid", "dots1",
    "minimax_m2", "apertus", "stablelm", "stablelm-in-turn", "phi", "gpt_neox", "gpt2", "phimoe",
    "ministral", "cwm", "vaultgemma", "youtu",
    "olmo", "flex_olmo", "solar_open", "exaone_moe", "gptj", "opt", "gpt_bigcode", "internlm2", "exaone", "minicpm",
    "falcon", "falcon-7b", "falcon-11b", "falcon-in-turn", "bitnet", "hyperclovax", "hyperclovax-plain", "gpt_neo", "codegen",
    "jais2", "mistral4", "hy_v3", "phi4_multimodal", "mellum", "flint",
)
SEEDS = {name: seed for seed, name in enumerate((*sorted(CHECKPOINTS.keys() - set(LATER)), *LATER))}
# Fields that config.json of these families leaves to the class, and that the family declares.
LEFT_OUT = {
    "gemma": ("tie_word_embeddings", "hidden_act"), "gemma2": ("tie_word_embeddings", "hidden_activation"),
    "vaultgemma": ("tie_word_embeddings", "hidden_activation"), "youtu": ("tie_word_embeddings",),
    "gemma3_text": ("tie_word_embeddings", "hidden_activation"), "smollm3": ("tie_word_embeddings",),
    "ernie4_5": ("tie_word_embeddings",), "ernie4_5_moe": ("tie_word_embeddings",), "arcee": ("hidden_act",),
    "cohere": ("tie_word_embeddings",), "cohere2": ("tie_word_embeddings",), "starcoder2": ("tie_word_embeddings", "hidden_act"),
    "nemotron": ("hidden_act",), "apertus": ("hidden_act",), "phi": ("hidden_act",), "gpt_neox": ("hidden_act",),
    "gpt2": ("activation_function", "tie_word_embeddings"), "minicpm3": ("tie_word_embeddings",),
    "exaone4": ("sliding_window_pattern",), "exaone_moe": ("sliding_window_pattern", "mlp_layer_types"),
    "gptj": ("activation_function",), "opt": ("activation_function", "tie_word_embeddings"),
    "gpt_bigcode": ("activation_function", "tie_word_embeddings", "num_key_value_heads"),
    "falcon": ("activation", "tie_word_embeddings"), "bitnet": ("hidden_act",),
    "gpt_neo": ("activation_function", "tie_word_embeddings"),
    "codegen": ("activation_function",), "jais2": ("hidden_act",),
}
# Families whose windows only a list of layers says: such a list is in every config.json of theirs.
LISTED = ("mellum",)
