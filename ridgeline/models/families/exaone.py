"""EXAONE 3: Llama under other names. EXAONE 4: norms only behind attention and MLP, norms on q and k, and no rope in full layers
where others have a window. K-EXAONE: norms before them, and a mixture that chooses as DeepSeek-V3 does."""

from ridgeline.models.families.deepseek import DEEPSEEK_EXPERT_NAMES, DEEPSEEK_V3_EXPERTS
from ridgeline.models.families.olmo import BEHIND_NAMES
from ridgeline.models.family import (
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    LLAMA_NAMES,
    NEXT_TOKEN_LAYER,
    QK_NORM_NAMES,
    UNUSED_TENSORS,
    Family,
)

EXAONE = Family(
    name="exaone",
    architectures=("ExaoneForCausalLM",),
    gguf="exaone",
    spelled={"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
             "attention_bias": "", "attention_out_bias": "", "mlp_bias": ""},
    defaults={"layer_norm_epsilon": 1e-5},
    names={
        "transformer.wte": "embed",
        "transformer.h.{}.ln_1": "layers.{}.attention_norm",
        "transformer.h.{}.attn.attention.q_proj": "layers.{}.attention.qkv:q",
        "transformer.h.{}.attn.attention.k_proj": "layers.{}.attention.qkv:k",
        "transformer.h.{}.attn.attention.v_proj": "layers.{}.attention.qkv:v",
        "transformer.h.{}.attn.attention.out_proj": "layers.{}.attention.output",
        "transformer.h.{}.ln_2": "layers.{}.mlp_norm",
        "transformer.h.{}.mlp.c_fc_0": "layers.{}.mlp.gate_up:gate",
        "transformer.h.{}.mlp.c_fc_1": "layers.{}.mlp.gate_up:up",
        "transformer.h.{}.mlp.c_proj": "layers.{}.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
)

EXAONE4 = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM",),
    gguf="exaone4",
    qk_norm=True,
    pre_norms=False,
    post_norms=True,
    nope="hybrid",
    window="pattern",
    full_every=4,
    spelled={"attention_bias": "", "attention_out_bias": "", "mlp_bias": ""},
    defaults={"sliding_window": 4096},
    names=BEHIND_NAMES | QK_NORM_NAMES,
)

EXAONE_MOE = Family(
    name="exaone_moe",
    architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    gguf="exaone-moe",
    qk_norm=True,
    nope="hybrid",
    window="pattern",
    full_every=4,
    experts=DEEPSEEK_V3_EXPERTS,
    spelled={"attention_bias": "", "attention_out_bias": "", "mlp_bias": ""},
    defaults={
        "sliding_window": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "num_shared_experts": 1,
    },
    names=LLAMA_NAMES | QK_NORM_NAMES | DEEPSEEK_EXPERT_NAMES | {
        "model.layers.{}.mlp.e_score_correction_bias": "layers.{}.mlp.router.e_score_correction_bias",
    },
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
    ignored=(*UNUSED_TENSORS, NEXT_TOKEN_LAYER, r"mtp\..*"),
)
