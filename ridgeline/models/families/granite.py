"""Granite 3 and 4 (dense and mixtures): Llama with multipliers of embeddings, scores, logits, and of what each half of a layer
adds."""

from ridgeline.models.family import LLAMA_NAMES, ExpertRule, Family, FusedExperts

GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    multipliers=True,
)

GRANITE_MOE = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    multipliers=True,
    experts=ExpertRule(normalise=True),
    fused_experts=(
        FusedExperts(r"(model\.layers\.\d+\.block_sparse_moe)\.(input_linear|output_linear)\.weight", r"\1.experts.{}.\2.weight"),
    ),
    names=LLAMA_NAMES | {
        "model.layers.{}.block_sparse_moe.router.layer": "layers.{}.mlp.router",
        "model.layers.{}.block_sparse_moe.experts.{}.input_linear": "layers.{}.mlp.experts.{}.gate_up:gate+up",
        "model.layers.{}.block_sparse_moe.experts.{}.output_linear": "layers.{}.mlp.experts.{}.down",
    },
)
