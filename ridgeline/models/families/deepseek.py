"""The experts of DeepSeek-V2 and of V3 and R1: shared experts beside the chosen ones, plain MLPs in the first layers. V3 chooses
by sigmoid scores with a bias, among the best groups."""

from ridgeline.models.family import EXPERT_NAMES, ExpertRule

DEEPSEEK_V2_EXPERTS = ExpertRule(groups=True, scaled=True)
DEEPSEEK_V3_EXPERTS = ExpertRule(score="sigmoid", choice_bias=True, groups=True, group_score="best two", scaled=True)

# Beside LLAMA_NAMES, which name the plain MLPs of the first layers.
DEEPSEEK_EXPERT_NAMES = EXPERT_NAMES | {
    "model.layers.{}.mlp.shared_experts.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_experts.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_experts.down_proj": "layers.{}.mlp.shared.down",
}
