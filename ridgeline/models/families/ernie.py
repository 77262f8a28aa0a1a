"""ERNIE 4.5: Llama with neighbours that rotate together. Its mixtures choose by softmax scores with a bias, and have shared
experts."""

from ridgeline.models.families.deepseek import SHARED_EXPERT_NAMES
from ridgeline.models.family import (
    EXPERT_NAMES,
    FUSED_EXPERTS,
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    LLAMA_NAMES,
    UNUSED_TENSORS,
    ExpertRule,
    Family,
    FusedExperts,
)

ERNIE = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM",),
    gguf="ernie4_5",
    gguf_permuted=True,
    tied=True,
    interleaved=True,
    spelled={"attention_bias": "use_bias", "attention_out_bias": "use_bias", "mlp_bias": "use_bias"},
    defaults={"head_dim": 128, "rope_theta": 500_000.0},
)

ERNIE_MOE = Family(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    gguf="ernie4_5-moe",
    gguf_permuted=True,
    tied=True,
    interleaved=True,
    experts=ExpertRule(normalise=True, choice_bias=True),
    spelled={"attention_bias": "", "attention_out_bias": "", "mlp_bias": "", "first_k_dense_replace": "moe_layer_start_index",
             "decoder_sparse_step": "moe_layer_interval"},
    only={"use_bias": False},
    defaults={"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "moe_layer_start_index": 1},
    names=LLAMA_NAMES | EXPERT_NAMES | SHARED_EXPERT_NAMES | {
        "model.layers.{}.mlp.moe_statics.{}.e_score_correction_bias": "layers.{}.mlp.router.e_score_correction_bias",
    },
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
    fused_experts=(                  # the bias is a matrix of one row
        FusedExperts(r"(model\.layers\.\d+\.mlp\.moe_statics)\.(e_score_correction_bias)", r"\1.{}.\2"), *FUSED_EXPERTS,
    ),
    ignored=(*UNUSED_TENSORS, r"model\.mtp_.*"),           # layers that predict the token after next
)
