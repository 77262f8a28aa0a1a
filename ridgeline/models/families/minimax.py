"""MiniMax-M2: norms over all heads of q and of k, heads rotated in part, and a mixture that chooses by sigmoid scores with a
bias."""

from ridgeline.models.families.mistral import SPARSE_MOE_NAMES
from ridgeline.models.family import GGUF_EXPERT_NAMES, GGUF_NAMES, LLAMA_NAMES, QK_NORM_NAMES, ExpertRule, Family

MINIMAX_M2 = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    gguf="minimax-m2",
    wide_qk_norm=True,
    partial_rotary=True,
    experts=ExpertRule(score="sigmoid", normalise=True, choice_bias=True),
    defaults={"head_dim": 128, "rope_theta": 5_000_000.0, "rms_norm_eps": 1e-6},
    names=LLAMA_NAMES | QK_NORM_NAMES | SPARSE_MOE_NAMES | {
        "model.layers.{}.block_sparse_moe.e_score_correction_bias": "layers.{}.mlp.router.e_score_correction_bias",
    },
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)
